"""The torch engine on two ranks: what strategies that keep whole parameters, and their optimizers, say to a program."""

import gc
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import weft
from tests.fix_lines.told import told
from weft.testing import run_ranks
from weft.version import TESTED_TORCH

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_ranks")]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))

    def encode(self, x):
        return self.body(x)


def x_of(ctx, step=0):
    """A batch of this rank."""
    return torch.linspace(-1, 1, 8).view(2, 4) + ctx.rank + 2 * step


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def zero(model, ctx, stage=1):
    return weft.zero_partition(model, sgd(model), ctx, stage=stage)


def under(strategy, ctx, model=None):
    """A model under a strategy, an optimizer, and the context."""
    model, *optimizer, ctx = strategy(model or Net(), ctx)
    return (model, *(optimizer or [sgd(model)]), ctx)


def train(model, optimizer, ctx, steps=2, kind=torch.float32):
    """Steps, after which the ranks have the same parameters."""
    for step in range(steps):
        model(x_of(ctx, step).to(kind)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for p in model.parameters():
        if not hasattr(p, "full_tensor"):
            assert torch.equal(*weft.gather(p.detach()[None], ctx))


def each(ctx, *programs):
    """Run programs of which each makes its mistakes; what one leaves behind is nothing to the next."""
    for program in programs:
        program(ctx)
        gc.collect()


# -- backward passes, and what they reach ------------------------------------------------------------------


def _gradients_of_gradients(ctx):
    model, optimizer, _ = under(weft.replicate, ctx)
    with told("engines/torch/reducing/reducer.py", "create_graph=True through") as it:
        model(x_of(ctx)).square().mean().backward(create_graph=True)
    assert 'gradient = weft.reduce(gradient, ctx, "mean", grad=True)' in it.fix
    whole = weft.gather(x_of(ctx), ctx)
    weights = []
    for here, x in ((None, whole), (ctx, x_of(ctx))):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model = model if here is None else weft.replicate(model, ctx)[0]
        for of in ("inputs", "parameters"):
            loss = model(x.requires_grad_()).square().mean()
            slopes = torch.autograd.grad(loss, [x] if of == "inputs" else list(model.parameters()), create_graph=True)
            if here is not None and of == "parameters":
                slopes = [weft.reduce(gradient, ctx, "mean", grad=True) for gradient in slopes]
            penalty = sum(one.square().sum() for one in slopes) * (len(x) if of == "inputs" else 1)
            (loss + penalty).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.allclose(*weights, atol=1e-6)


def _two_backward_passes(ctx):
    model, _ = weft.replicate(Net(), ctx, unused="zero")
    one, two = model(x_of(ctx)).sum(0)
    with told("engines/torch/reducing/transport.py", "a second backward") as it:
        one.backward(retain_graph=True)
        two.backward()
    assert it.fix == "add the losses up and call backward once"
    model, _ = weft.replicate(Net(), ctx, unused="zero")
    one, two = model(x_of(ctx)).sum(0)
    (one + two).backward()


def _after_the_end(ctx):
    inner = weft.adopt()
    model, inner = weft.replicate(Net(), inner)
    inner.close()
    with told("engines/torch/reducing/transport.py", "after its context was closed") as it:
        model(x_of(ctx)).sum().backward()
    inner = weft.adopt()
    model, inner = weft.replicate(Net(), inner)
    model = it.run(model=model, ctx=inner)["model"]
    inner.close()
    model(x_of(ctx)).sum().backward()


def _past_forward(ctx):
    model, _, _ = under(weft.replicate, ctx)
    with told("engines/torch/hooks/bypassed_forward.py", "past forward") as it:
        model.encode(x_of(ctx)).sum().backward()
    model = Net()
    listed, instead = it.fix.split("; or ")
    model, _ = eval(listed, {"weft": weft, "model": model, "ctx": ctx})
    (model.encode(x_of(ctx)).sum() + model(x_of(ctx)).sum()).backward()
    assert instead == "model(...)  # in place of model.body(...)"
    model.zero_grad()
    model(x_of(ctx)).sum().backward()

    model, _, _ = under(zero, ctx)
    with told("engines/torch/hooks/bypassed_forward.py", "past forward") as it:
        model.encode(x_of(ctx)).sum().backward()
    assert it.fix.startswith("weft.zero_partition(..., methods=('encode',)); or model(...)")
    model = Net()
    model, _, _ = weft.zero_partition(model, sgd(model), ctx, stage=1, methods=("encode",))
    (model.encode(x_of(ctx)).sum() + model(x_of(ctx)).sum()).backward()

    model, _, _ = under(weft.replicate, ctx, nn.Sequential(nn.Linear(4, 4)))
    with told("engines/torch/hooks/bypassed_forward.py", "past forward") as it:
        model[0](x_of(ctx)).sum().backward()
    assert it.fix == "model(...)  # in place of model[0](...)"
    model(x_of(ctx)).sum().backward()


def _hooks(ctx):
    model, optimizer, _ = under(weft.replicate, ctx)
    hooks = [p.register_post_accumulate_grad_hook(lambda p: p.data.sub_(p.grad)) for p in model.parameters()]
    with told("engines/torch/reducing/trained.py", "hooks on parameters of") as it:
        model(x_of(ctx)).sum().backward()
    for hook in hooks:
        hook.remove()
    seen = []
    model.head.bias.register_hook(seen.append)
    it.run(loss=model(x_of(ctx)).sum(), optimizer=optimizer)
    assert len(seen) == 1


def _limits_in_hooks(ctx):
    model, _, _ = under(weft.replicate, ctx)
    p = model.head.weight
    handle = p.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with told("engines/torch/probes/gradient_hooks.py", "change the gradients of one rank") as it:
        model(x_of(ctx)).sum().backward()
    handle.remove()
    p.grad = None
    exec(it.fix, {"loss": model(x_of(ctx)).sum() * 9, "p": p})
    assert p.grad.abs().max() == 1


def _step_in_a_hook(ctx):
    model, optimizer, _ = under(weft.replicate, ctx)
    hook = model.head.bias.register_hook(lambda _: optimizer.step())
    with told("engines/torch/reducing/reducer.py", "were updated inside a backward pass") as it:
        model(x_of(ctx)).sum().backward()
    hook.remove()
    it.run(loss=model(x_of(ctx)).sum(), optimizer=optimizer)


def _backward_passes(ctx):
    each(
        ctx,
        _gradients_of_gradients,
        _two_backward_passes,
        _after_the_end,
        _past_forward,
        _hooks,
        _limits_in_hooks,
        _step_in_a_hook,
    )


def test_backward_passes():
    run_ranks(_backward_passes, 2)


# -- parameters -----------------------------------------------------------------------------------------


def _moved(ctx):
    model, optimizer, here = under(weft.replicate, ctx)
    model.double()
    with told("engines/torch/reducing/trained.py", "was moved or converted") as it:
        model(x_of(ctx).double())
    assert it.fix == "model.to(...); model, ctx = weft.replicate(model, ctx)  # in this order; or weft.undo before it"
    model, optimizer, _ = under(weft.replicate, ctx, Net().to(torch.float64))
    train(model, optimizer, ctx, kind=torch.float64)
    model, optimizer, here = under(weft.replicate, ctx)
    model, here = weft.undo(model, here)
    model, optimizer, _ = under(weft.replicate, here, model.to(torch.float64))
    train(model, optimizer, ctx, kind=torch.float64)

    model, optimizer, here = under(zero, ctx)
    model.double()
    with told("engines/torch/reducing/trained.py", "was moved or converted") as it:
        model(x_of(ctx).double())
    assert it.fix.startswith("model.to(...); model, optimizer, ctx = weft.zero_partition(...)")
    model, optimizer, _ = under(zero, ctx, Net().to(torch.float64))
    train(model, optimizer, ctx, kind=torch.float64)


class Adapted(nn.Module):
    """Computes with twice the weights of a model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return functional_call(self.model, {name: 2 * p for name, p in self.model.named_parameters()}, (x,))


def _given(ctx):
    model, _, _ = under(weft.replicate, ctx)
    with told("engines/torch/hooks/parameter_watch.py", "is called with other parameters") as it:
        functional_call(model, {name: 2 * p for name, p in model.named_parameters()}, (x_of(ctx),))
    names = {"weft": weft, "Adapted": Adapted, "model": Net(), "ctx": ctx}
    model, _ = eval(it.fix.replace("...", "ctx"), names)
    train(model, sgd(model), ctx)


def _added(ctx):
    for strategy in (weft.replicate, zero, weft.fully_shard):
        model, optimizer, _ = under(strategy, ctx)
        model.head = nn.Linear(4, 3)
        with told("engines/torch/hooks/parameter_watch.py", "that it did not have when") as it:
            model(x_of(ctx))
        assert it.fix.startswith("model.head = ...; model, ")
        model = Net()
        model.head = nn.Linear(4, 3)
        model, optimizer, _ = under(strategy, ctx, model)
        train(model, optimizer, ctx)
        assert it.fix.endswith("  # in this order")

    model, _, _ = under(weft.replicate, ctx, nn.Sequential(nn.Linear(4, 4)))
    model[0] = nn.Linear(4, 4)
    with told("engines/torch/hooks/parameter_watch.py", "that it did not have when") as it:
        model(x_of(ctx))
    assert it.fix.startswith("model[0] = ...; model, ctx = weft.replicate(model, ctx)")


def _parameters(ctx):
    each(ctx, _moved, _given, _added)


def test_parameters():
    run_ranks(_parameters, 2)


def windows_in_part(strategy, ctx, *, breaks):
    """Train on windows of three micro-batches, of which some are left out; gradients are clipped."""
    model, optimizer, here = under(strategy, ctx)
    model, windows, here = weft.accumulate_grads(model, list(range(9)), here, steps=3)
    for window in windows:
        for step in window:
            if step in (1, 5):
                if breaks:
                    break
                continue
            (model(x_of(ctx, step)).sum() * window.share).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


# -- optimizers -----------------------------------------------------------------------------------------


class Mine(torch.optim.SGD):
    """An optimizer that is not of torch."""


def _flat(ctx, make=sgd, **options):
    """A model whose parameters lie in one buffer, the optimizer that steps on it, and the context."""
    model, ctx = weft.replicate(Net(), ctx, flat=True, **options)
    optimizer, ctx = weft.fuse_step(make(model), ctx)
    return model, optimizer, ctx


def _adam(model):
    return torch.optim.Adam(model.parameters())


def _flat_buffers(ctx):
    model, _ = weft.replicate(Net(), ctx, flat=True)
    model.double()
    with told("engines/torch/reducing/flat_buffer.py", "moved out of the flat buffer") as it:
        model(x_of(ctx).double())
    assert it.fix == "move or cast the model before weft.replicate"
    model, _ = weft.replicate(Net().double(), ctx, flat=True)
    train(model, sgd(model), ctx, kind=torch.float64)

    with told("engines/torch/reducing/flat_step.py", "may be without gradient") as it:
        _flat(ctx, unused="zero")
    model, here = eval(it.fix, {"weft": weft, "model": Net(), "ctx": ctx})
    optimizer, _ = weft.fuse_step(sgd(model), here)
    train(model, optimizer, ctx)

    model, here = weft.replicate(Net(), ctx)
    with told("engines/torch/reducing/flat_step.py", "are not in a flat buffer") as it:
        weft.fuse_step(sgd(model), here)
    names = it.run(model=Net(), ctx=ctx)
    optimizer, _ = weft.fuse_step(sgd(names["model"]), names["ctx"])
    train(names["model"], optimizer, ctx)


def _states(ctx):
    model, optimizer, _ = _flat(ctx, _adam)
    train(model, optimizer, ctx, steps=1)
    state = optimizer.state_dict()
    state["state"][0]["step"] += 1
    with told("engines/torch/reducing/flat_step.py", "differs between parameters") as it:
        optimizer.load_state_dict(state)
    assert it.fix == "load the state before weft.fuse_step, or continue without it"
    model, here = weft.replicate(Net(), ctx, flat=True)
    optimizer = _adam(model)
    optimizer.load_state_dict(state)
    train(model, optimizer, ctx)
    optimizer, _ = weft.fuse_step(optimizer, here)
    train(model, optimizer, ctx)


def _groups(ctx):
    def added(make):
        model, optimizer, _ = make(ctx, lambda model: sgd(model.head))
        optimizer.add_param_group({"params": list(model.body.parameters())})
        model(x_of(ctx)).sum().backward()
        return optimizer

    optimizer = added(_flat)
    with told("engines/torch/reducing/flat_step.py", "the parameter groups of the optimizer changed") as it:
        optimizer.step()
    model, here = weft.replicate(Net(), ctx, flat=True)
    optimizer = sgd(model.head)
    optimizer.add_param_group({"params": list(model.body.parameters())})
    assert it.fix.startswith("add all groups first: ")
    optimizer, _ = weft.fuse_step(optimizer, here)
    train(model, optimizer, ctx)

    model = Net()
    model.body.requires_grad_(False)
    model, optimizer, _ = weft.zero_partition(model, sgd(model.head), ctx, stage=1)
    model.body.requires_grad_(True)
    optimizer.add_param_group({"params": list(model.body.parameters())})
    with told("engines/torch/sharded_step/shards.py", "got other parameters") as it:
        model(x_of(ctx)).sum().backward()
        optimizer.step()
    model = Net()
    optimizer = sgd(model.head)
    optimizer.add_param_group({"params": list(model.body.parameters())})
    assert it.fix == "optimizer.add_param_group(...); model, optimizer, ctx = weft.zero_partition(...)"
    model, optimizer, _ = weft.zero_partition(model, optimizer, ctx, stage=1)
    train(model, optimizer, ctx)

    def owned(add):
        model, here = weft.replicate(Net(), ctx)
        optimizer = torch.optim.Adafactor(model.head.parameters())
        if add == "before":
            optimizer.add_param_group({"params": list(model.body.parameters())})
        optimizer, _ = weft.gather_step(optimizer, here, by="owner")
        if add == "after":
            optimizer.add_param_group({"params": list(model.body.parameters())})
        return model, optimizer

    model, optimizer = owned("after")
    with told("engines/torch/sharded_step/by_owner.py", "got other parameters") as it:
        train(model, optimizer, ctx)
    assert it.fix == 'optimizer.add_param_group(...); optimizer, ctx = weft.gather_step(optimizer, ctx, by="owner")'
    train(*owned("before"), ctx)


def _steps(ctx):
    model, optimizer, _ = _flat(ctx)
    model(x_of(ctx)).sum().backward()
    with told("engines/torch/steps/swapped.py", "step() was called with a closure") as it:
        optimizer.step(lambda: model(x_of(ctx)).sum())

    def closure():
        optimizer.zero_grad()
        loss = model(x_of(ctx)).sum()
        loss.backward()
        return loss

    it.run(closure=closure, optimizer=optimizer)

    optimizer.zero_grad()
    model(x_of(ctx)).sum().backward()
    model.head.bias.grad = None
    with told("engines/torch/reducing/flat_step.py", "have no gradient") as it:
        optimizer.step()
    assert it.fix == "optimizer.zero_grad() for all, or continue without weft.fuse_step"
    optimizer.zero_grad()
    train(model, optimizer, ctx)
    plain = sgd(model)
    model(x_of(ctx)).sum().backward()
    model.head.bias.grad = None
    plain.step()


def _optimizer_of_another_model(ctx):
    for kind in (torch.optim.SGD, Mine):
        optimizer = kind(Net().parameters(), lr=0.1)
        model, _ = weft.replicate(Net(), ctx)
        with told("engines/torch/steps/watch.py", "updates none of the parameters") as it:
            train(model, optimizer, ctx)
        model.zero_grad()
        train(model, it.run(torch=torch, Mine=Mine, model=model)["optimizer"], ctx)


def _gradients_by_hand(ctx):
    model, optimizer, _ = under(weft.replicate, ctx)
    parameters = list(model.parameters())

    def gradients():
        return zip(parameters, torch.autograd.grad(model(x_of(ctx)).sum(), parameters), strict=True)

    with told("engines/torch/steps/watch.py", "that were not averaged over the ranks") as it:
        for p, gradient in gradients():
            p.grad = gradient
        optimizer.step()
    optimizer.zero_grad()
    it.run(loss=model(x_of(ctx)).sum())
    optimizer.step()
    assert "# or p.grad = weft.reduce(gradient, ctx, 'mean'); in a window, continue in place of break" in it.fix
    for p, gradient in gradients():
        p.grad = weft.reduce(gradient, ctx, "mean")
    optimizer.step()
    optimizer.zero_grad()
    train(model, optimizer, ctx)

    with told("engines/torch/steps/watch.py", "that were not averaged over the ranks"):
        windows_in_part(weft.replicate, ctx, breaks=True)
    windows_in_part(weft.replicate, ctx, breaks=False)


def _second_optimizer(ctx):
    model = Net()
    model, _, here = weft.local_steps(model, sgd(model), ctx, every=1)
    optimizer = sgd(model)
    model(x_of(ctx)).square().mean().backward()
    with told("engines/torch/steps/local.py", "a step of another") as it:
        optimizer.step()
    it.run(model=model, optimizer=optimizer, ctx=here)
    train(model, optimizer, ctx)


def _optimizers(ctx):
    each(ctx, _flat_buffers, _states, _groups, _steps, _optimizer_of_another_model, _gradients_by_hand)
    _second_optimizer(ctx)


def test_optimizers():
    run_ranks(_optimizers, 2)


# -- what is wrong from the first steps on ---------------------------------------------------------------


def _ddp_around(ctx):
    model, optimizer, _ = under(weft.replicate, ctx)
    with told("engines/torch/hooks/first_steps.py", "DistributedDataParallel") as it:
        DistributedDataParallel(model)(x_of(ctx))
    assert it.fix == "leave the line with DistributedDataParallel(model) out"
    model, optimizer, _ = under(weft.replicate, ctx)
    train(model, optimizer, ctx)


def _same_batches(ctx):
    loader = DataLoader(torch.arange(16.0).view(4, 4), batch_size=1)

    def epoch(loader):
        model, optimizer, _ = under(weft.replicate, ctx)
        for x in loader:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with told("engines/torch/hooks/first_steps.py", "ranks compute the same batches") as it:
        epoch(loader)
    loader = it.run(loader=loader, ctx=ctx)["loader"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        epoch(loader)
        rows, (line, cut) = torch.arange(16.0).view(4, 4), it.fix.split("  # without a loader: ")
        names = {"weft": weft, "rows": rows, "ctx": ctx}
        exec(cut, names)
        epoch(names["rows"].split(1))
        assert torch.equal(weft.gather(names["rows"], ctx), rows) and line.startswith("loader, ctx")


class _Sums(nn.Module):
    """Sums and means of rows in buffers."""

    def __init__(self, change=None):
        super().__init__()
        self.layer, self.change = nn.Linear(4, 4), change or (lambda **values: values)
        self.register_buffer("sums", torch.zeros(4))
        self.register_buffer("means", torch.zeros(4))
        self.register_buffer("last", torch.zeros(2, 4))

    def forward(self, x):
        given = self.change(rows=x.detach().clone(), sums=x.detach().sum(0), mean=x.detach().mean(0))
        self.sums += given["sums"]
        self.means.lerp_(given["mean"], 0.1)
        self.last = given["rows"]
        return self.layer(x)


def _buffers_of_own_rows(ctx):
    batches = torch.arange(16.0).view(4, 4).split(2)

    def buffers(change=None):
        model, _ = weft.replicate(_Sums(change), ctx)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for x in batches:
            model(x.chunk(ctx.world_size)[ctx.rank]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.buffers())

    def change(**values):
        names = {"weft": weft, "ctx": ctx, **values}
        exec(it.fix.replace("  # in forward, before the update", ""), names)
        return names

    with told("engines/torch/hooks/first_steps.py", "forward gives buffers of") as it:
        buffers()
    expected = _Sums()
    for x in batches:
        expected(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(buffers(change), list(expected.buffers()))


def _batch_norms(ctx):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def trained(model, lines=""):
        names = {"weft": weft, "ctx": ctx, "model": model}
        exec(lines, names)
        model, optimizer = names["model"], torch.optim.SGD(names["model"].parameters(), 0.1)
        for rows in x.chunk(2):
            model(rows.chunk(ctx.world_size)[ctx.rank]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    with told("engines/torch/hooks/first_steps.py", "normalize over the rows of each rank") as it:
        trained(nn.Sequential(nn.BatchNorm1d(4)), "model, ctx = weft.replicate(model, ctx)")
    expected = nn.Sequential(nn.BatchNorm1d(4))
    for rows in x.chunk(2):
        expected(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = trained(nn.Sequential(nn.BatchNorm1d(4)), it.fix)
        torch.testing.assert_close(found[0].running_mean, expected[0].running_mean)
        warnings.filterwarnings("ignore", "replicate: batch norms")  # as the message has it
        trained(nn.Sequential(nn.BatchNorm1d(4)), "model, ctx = weft.replicate(model, ctx)")


def _other_weights(ctx):
    for strategy in (weft.replicate, zero):
        model, optimizer, _ = under(strategy, ctx)
        weights = {name: p + ctx.rank for name, p in Net().state_dict().items()}
        model.load_state_dict(weights)
        with told("engines/torch/hooks/first_steps.py", "before the first step") as it:
            train(model, optimizer, ctx)
        model = Net()
        model.load_state_dict(weights)
        model, optimizer, _ = under(strategy, ctx, model)
        train(model, optimizer, ctx)
        assert it.fix.startswith("model.load_state_dict(...); model, ") and it.fix.endswith("  # in this order")


def _not_cleared(ctx):
    for strategy in (weft.replicate, weft.fully_shard):
        model, optimizer, _ = under(strategy, ctx)
        with told("engines/torch/hooks/first_steps.py", "that were stepped on") as it:
            for step in range(3):
                model(x_of(ctx, step)).sum().backward()
                optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(3):
                model(x_of(ctx, step)).sum().backward()
                it.run(optimizer=optimizer)


def window_loop(ctx, inside=None, skips=False, after=None):
    """A loop with a window of two, with something done after each micro-batch, or after all of them."""
    model, optimizer, here = under(weft.replicate, ctx)
    model, windows, here = weft.accumulate_grads(model, list(range(8)), here, steps=2)
    with warnings.catch_warnings():
        if inside is None and not skips:
            warnings.simplefilter("error")
        for window in windows:
            for step in window:
                loss = model(x_of(ctx, step)).sum() * window.share
                if not (skips and ctx.rank):
                    loss.backward()
                if inside is not None:
                    inside(model, optimizer)
            if after is not None:
                after(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()


def _clip(model, _):
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def _windows(ctx):
    with told("engines/torch/hooks/first_steps.py", "were cleared in the middle of a window") as it:
        window_loop(ctx, lambda _, optimizer: optimizer.zero_grad())
    assert it.fix.endswith("then optimizer.step() and optimizer.zero_grad(), after the inner loop")
    window_loop(ctx)
    with told("engines/torch/hooks/first_steps.py", "were changed in the middle of a window") as it:
        window_loop(ctx, _clip)
    assert it.fix.endswith("then clip_grad_norm_ and optimizer.step(), after the inner loop")
    window_loop(ctx, after=_clip)


def _in_bfloat16(ctx):
    model, here = weft.with_precision(Net(), ctx, weft.Precision(reduce=torch.bfloat16))
    return under(weft.replicate, here, model)


def _not_called(ctx):
    with mock.patch("weft.torch_internals.register_comm_hook"):
        model, optimizer, _ = _in_bfloat16(ctx)
        with told("engines/torch/hooks/first_steps.py", "has not averaged the gradients") as it:
            train(model, optimizer, ctx)
    assert it.fix == f"pip install 'torch=={TESTED_TORCH[-1]}'"
    model, optimizer, _ = _in_bfloat16(ctx)
    train(model, optimizer, ctx)
    model = Net()
    model, optimizer, _ = weft.zero_partition(model, torch.optim.Adam(model.parameters()), ctx, stage=1)
    optimizer.step = lambda: torch.optim.Adam.step.__wrapped__(optimizer)
    with told("engines/torch/steps/watch.py", "steps on whole parameters") as it:
        train(model, optimizer, ctx)
    assert it.fix.startswith("optimizer.step()  # of Adam itself; or pip install")
    model = Net()
    train(*weft.zero_partition(model, torch.optim.Adam(model.parameters()), ctx, stage=1)[:2], ctx)


def _first_steps(ctx):
    each(
        ctx,
        _ddp_around,
        _same_batches,
        _buffers_of_own_rows,
        _batch_norms,
        _other_weights,
        _not_cleared,
        _windows,
        _not_called,
    )


def test_first_steps():
    run_ranks(_first_steps, 2)
