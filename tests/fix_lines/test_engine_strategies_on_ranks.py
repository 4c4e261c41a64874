"""The torch engine on two ranks: what strategies that keep whole parameters, and their optimizers, say to a program."""

import gc

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.parallel import DistributedDataParallel

import weft
from tests.fix_lines.told import told
from weft.testing import largest_difference, run_ranks

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
    with told("engines/torch/ddp/reducer.py", "create_graph=True through") as it:
        model(x_of(ctx)).square().mean().backward(create_graph=True)
    assert it.fix == "torch.autograd.grad(..., create_graph=True)  # for a penalty; then loss.backward()"
    model, optimizer, _ = under(weft.replicate, ctx)
    for inputs in ([x := x_of(ctx).requires_grad_()], list(model.parameters())):
        loss = model(x).square().mean()
        slopes = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + sum(one.square().sum() for one in slopes)).backward()
        optimizer.step()
        optimizer.zero_grad()
    train(model, optimizer, ctx)


def _two_backward_passes(ctx):
    model, here = weft.replicate(Net(), ctx, unused="zero")
    one, two = model(x_of(ctx)).sum(0)
    with told("engines/torch/ddp/transport.py", "a second backward") as it:
        one.backward(retain_graph=True)
        two.backward()
    assert it.fix == "add the losses up and call backward once"
    model, here = weft.replicate(Net(), ctx, unused="zero")
    one, two = model(x_of(ctx)).sum(0)
    (one + two).backward()


def _after_the_end(ctx):
    inner = weft.adopt()
    model, inner = weft.replicate(Net(), inner)
    inner.close()
    with told("engines/torch/ddp/transport.py", "after its context was closed") as it:
        model(x_of(ctx)).sum().backward()
    inner = weft.adopt()
    model, inner = weft.replicate(Net(), inner)
    model = it.run(model=model, ctx=inner)["model"]
    inner.close()
    model(x_of(ctx)).sum().backward()


def _past_forward(ctx):
    model, optimizer, _ = under(weft.replicate, ctx)
    with told("engines/torch/hooks/past_forward.py", "past forward") as it:
        model.encode(x_of(ctx)).sum().backward()
    model = Net()
    listed, instead = it.fix.split("; or ")
    model, _ = eval(listed, {"weft": weft, "model": model, "ctx": ctx})
    (model.encode(x_of(ctx)).sum() + model(x_of(ctx)).sum()).backward()
    assert instead == "model(...)  # in place of model.body(...)"
    model.zero_grad()
    model(x_of(ctx)).sum().backward()

    model, optimizer, _ = under(zero, ctx)
    with told("engines/torch/hooks/past_forward.py", "past forward") as it:
        model.encode(x_of(ctx)).sum().backward()
    assert it.fix.startswith("weft.zero_partition(..., methods=('encode',)); or model(...)")
    model = Net()
    model, optimizer, _ = weft.zero_partition(model, sgd(model), ctx, stage=1, methods=("encode",))
    (model.encode(x_of(ctx)).sum() + model(x_of(ctx)).sum()).backward()

    model, optimizer, _ = under(weft.replicate, ctx, nn.Sequential(nn.Linear(4, 4)))
    with told("engines/torch/hooks/past_forward.py", "past forward") as it:
        model[0](x_of(ctx)).sum().backward()
    assert it.fix == "model(...)  # in place of model[0](...)"
    model(x_of(ctx)).sum().backward()


def _hooks(ctx):
    model, optimizer, _ = under(weft.replicate, ctx)
    hooks = [p.register_post_accumulate_grad_hook(lambda p: p.data.sub_(p.grad)) for p in model.parameters()]
    with told("engines/torch/ddp/trained.py", "hooks on parameters of") as it:
        model(x_of(ctx)).sum().backward()
    for hook in hooks:
        hook.remove()
    seen = []
    model.head.bias.register_hook(seen.append)
    it.run(loss=model(x_of(ctx)).sum(), optimizer=optimizer)
    assert len(seen) == 1


def _step_in_a_hook(ctx):
    model, optimizer, _ = under(weft.replicate, ctx)
    hook = model.head.bias.register_hook(lambda _: optimizer.step())
    with told("engines/torch/optim/step_watch.py", "were updated inside a backward pass") as it:
        model(x_of(ctx)).sum().backward()
    hook.remove()
    it.run(loss=model(x_of(ctx)).sum(), optimizer=optimizer)


def _backward_passes(ctx):
    each(ctx, _gradients_of_gradients, _two_backward_passes, _after_the_end, _past_forward, _hooks, _step_in_a_hook)


def test_backward_passes():
    run_ranks(_backward_passes, 2)


# -- parameters -----------------------------------------------------------------------------------------


def _moved(ctx):
    model, optimizer, here = under(weft.replicate, ctx)
    model.double()
    with told("engines/torch/ddp/trained.py", "was moved or converted") as it:
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
    with told("engines/torch/ddp/trained.py", "was moved or converted") as it:
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
    model, _, here = under(weft.replicate, ctx)
    with told("engines/torch/hooks/parameter_watch.py", "is called with other parameters") as it:
        functional_call(model, {name: 2 * p for name, p in model.named_parameters()}, (x_of(ctx),))
    names = {"weft": weft, "Adapted": Adapted, "model": Net(), "ctx": ctx}
    model, _ = eval(it.fix.replace("...", "ctx"), names)
    train(model, sgd(model), ctx)


def _added(ctx):
    for strategy in (weft.replicate, zero, weft.fully_shard):
        model, optimizer, here = under(strategy, ctx)
        model.head = nn.Linear(4, 3)
        with told("engines/torch/hooks/parameter_watch.py", "that it did not have when") as it:
            model(x_of(ctx))
        assert it.fix.startswith("model.head = ...; model, ")
        model = Net()
        model.head = nn.Linear(4, 3)
        model, optimizer, here = under(strategy, ctx, model)
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
