"""The torch engine, in one process: devices, precision, streamed parts, averages, local steps, steps in backward."""

from dataclasses import replace
from functools import partial

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear

import weft
from tests.fix_lines.told import told
from weft.transforms.local_steps import averaged
from weft.weights import on_meta, plan_placement

BUDGETS = {"cpu": 220, "disk": None}  # one layer of `_net`, and a slot for the others
OUTER = partial(torch.optim.SGD, lr=0.7)
X = torch.linspace(-1, 1, 8).view(2, 4)


def _net(cls=nn.Sequential):
    torch.manual_seed(0)
    return cls(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4))


def _sgd(model):
    return torch.optim.SGD(model.parameters(), 0.1)


def test_devices():
    with told("engines/torch/device/devices.py", "device = {request!r} is not available") as it:
        weft.start(device="xpu")
    it.run()
    with told("engines/torch/device/devices.py", "is not a device") as it:
        weft.start(device="gpu")
    it.run()


# -- parts that are streamed ---------------------------------------------------------------------------


class _Reads(nn.Sequential):
    """Computes with the weight of its first part, without calling it."""

    def forward(self, x):
        return super().forward(linear(x, self[0].weight))


def _streamed(tmp_path, cls=_Reads):
    """A model in memory, and one that is placed; the context of this, and the file."""
    plain, path = _net(cls), tmp_path / "w.safetensors"
    save_file(plain.state_dict(), path)
    model, ctx = weft.place(_meta(cls), weft.local(), BUDGETS, weights=path)
    return plain, model, ctx, path


def _meta(cls):
    with on_meta():
        return _net(cls)


@torch.no_grad()
def test_a_part_that_is_streamed_is_read(tmp_path):
    plain, model, ctx, path = _streamed(tmp_path)
    with told("engines/torch/streaming/placeholder.py", "is read while") as it:
        model(X)
    assert 'plan_placement(..., keep="0"); or weft.undo(model, ctx)  # and weft.load_weights' in it.fix
    plan = plan_placement(_meta(_Reads), BUDGETS, keep="0")
    kept, _ = weft.place(_meta(_Reads), weft.local(), plan, weights=path)
    model, ctx = weft.undo(model, ctx)
    weft.load_weights(model, path, ctx)
    assert torch.equal(kept(X), plain(X)) and torch.equal(model(X), plain(X))


class _Outer(nn.Sequential):
    """Its first part calls the last one."""

    def __init__(self, *parts):
        super().__init__(nn.Sequential(parts[0]), *parts[1:])
        self[0].forward = lambda x: self[0][0](self[2](x))


@torch.no_grad()
def test_a_part_that_is_streamed_is_called_inside_another(tmp_path):
    plain = _net(_Outer)
    save_file(plain.state_dict(), tmp_path / "w.safetensors")
    plan = plan_placement(plain, BUDGETS, units=["0", "2", "3"])
    model, _ = weft.place(_meta(_Outer), weft.local(), plan, weights=tmp_path / "w.safetensors")
    with told("engines/torch/streaming/stream.py", "is called while") as it:
        model(X)
    plan = eval(it.fix, {"weft": weft, "model": plain, "budgets": BUDGETS})
    model, _ = weft.place(_meta(_Outer), weft.local(), plan, weights=tmp_path / "w.safetensors")
    assert torch.equal(model(X), plain(X))


def test_a_streamed_part_is_trained_or_exported(tmp_path):
    plain, model, ctx, path = _streamed(tmp_path, nn.Sequential)
    with told("engines/torch/streaming/stream.py", "part of a backward pass") as it:
        model(X)
    assert it.fix.startswith("with torch.no_grad(): ...")
    with torch.no_grad():
        assert torch.equal(model(X), plain(X))
        with told("engines/torch/streaming/stream.py", "cannot be exported") as it:
            torch.export.export(model, (X,))
    model, ctx = (names := it.run(model=model, ctx=ctx))["model"], names["ctx"]
    assert "weft.load_weights(model, path, ctx)" in it.fix
    weft.load_weights(model, path, ctx)
    torch.testing.assert_close(torch.export.export(model, (X,)).module()(X), plain(X))


def test_a_plan_for_a_device_that_is_not_there(tmp_path):
    plain, _, _, path = _streamed(tmp_path, nn.Sequential)
    with told("engines/torch/device/devices.py", "{wrong[0]} is not available") as it:
        weft.place(_meta(nn.Sequential), weft.local(), {"cuda:7": None}, weights=path)
    plan = eval(it.fix, {"weft": weft, "model": plain})
    model, _ = weft.place(_meta(nn.Sequential), weft.local(), plan, weights=path)
    assert torch.equal(model(X), plain(X))


# -- fp16 ----------------------------------------------------------------------------------------------


def _penalty(model):
    return model[0].weight.square().sum()


class _WithPenalty(nn.Sequential):
    def forward(self, x):
        return super().forward(x), self[0].weight.square().sum()


def test_the_optimizer_cannot_skip_steps():
    model, ctx = weft.with_precision(_net(), weft.local(), "fp16")
    optimizer = _sgd(model)
    with told("engines/torch/amp/loss_scale.py", "cannot skip steps") as it:
        for _ in range(2):
            model(X).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    it.run(optimizer=optimizer, ctx=ctx)
    for _ in range(3):
        model(X).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_loss_uses_parameters_beside_forward():
    plain = _net()
    (plain(X).mean() + _penalty(plain)).backward()
    model, _ = weft.with_precision(_net(), weft.local(), "fp16")
    with told("engines/torch/amp/loss_scale.py", "outside its forward pass") as it:
        (model(X).mean() + _penalty(model)).backward()
    assert it.fix.startswith(
        "compute this part of the loss inside forward, call backward for it alone, or use the policy"
    )
    inside, _ = weft.with_precision(_net(_WithPenalty), weft.local(), "fp16")
    sum(one.mean() for one in inside(X)).backward()
    model, _ = weft.with_precision(_net(), weft.local(), "fp16")
    model(X).mean().backward()
    _penalty(model).backward()
    other, _ = weft.with_precision(_net(), weft.local(), "bf16")
    (other(X).mean() + _penalty(other)).backward()
    for one in (inside, model, other):
        torch.testing.assert_close(one[0].weight.grad, plain[0].weight.grad, rtol=0.05, atol=0.05)


def test_gradients_inside_are_asked_for():
    plain = _net()
    plain(X).mean().backward()
    model, _ = weft.with_precision(_net(), weft.local(), "fp16")
    with told("engines/torch/amp/loss_scale.py", "torch.autograd.grad for tensors inside") as it:
        torch.autograd.grad(model(X).mean(), model[0].weight)
    it.run(loss=model(X).mean())
    torch.testing.assert_close(model[0].weight.grad, plain[0].weight.grad, rtol=0.05, atol=0.05)
    assert it.fix.endswith('or the policy "bf16", if it is no parameter')
    other, _ = weft.with_precision(_net(), weft.local(), "bf16")
    hidden = []
    other[0].register_forward_hook(lambda *given: hidden.append(given[-1]))
    (found,) = torch.autograd.grad(other(X).mean(), hidden)
    assert found.any()


def test_a_float16_parameter_is_unfrozen():
    model = _net()
    model[0].half().requires_grad_(False)
    model, ctx = weft.with_precision(model, weft.local(), "fp16")
    optimizer, ctx = weft.skip_nonfinite(_sgd(model), ctx)
    model[0].requires_grad_(True)
    with told("engines/torch/amp/loss_scale.py", "are trained since it was applied") as it:
        model(X).mean().backward()
    for parameter in model[0].parameters():
        it.run(parameter=parameter)
    for _ in range(2):
        model(X).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model[0].weight.dtype == torch.float32


# -- averages of weights -------------------------------------------------------------------------------


def test_averages():
    model, ctx = weft.average_weights(_net(), weft.local())
    averages = weft.averages(model)
    averages.update()
    other = nn.Linear(2, 2)
    with told("engines/torch/compute/ema.py", "has different weights than") as it:
        averages.copy_to(other)
    it.run(averages=averages, model=model)
    with averages.swapped():
        model.state_dict()
    with told("engines/torch/compute/ema.py", "these are not averages of this") as it:
        averages.load_state_dict(weft.averages(weft.average_weights(other, ctx)[0]).state_dict())
    it.run(averages=averages, saved=averages.state_dict())

    held = weft.averages(weft.average_weights(_net(), ctx)[0])
    with told("engines/torch/compute/ema.py", "is gone") as it:
        held.update()
    assert it.fix == "keep the model in a variable"
    model, ctx = weft.average_weights(_net(), weft.local())
    averages = weft.averages(model)
    averages.update()


def test_other_parameters_are_trained_than_are_averaged():
    def begin():
        model = _net()
        model[0].requires_grad_(False)
        return model

    model, ctx = weft.average_weights(begin(), weft.local())
    model[0].requires_grad_(True)
    with told("engines/torch/compute/ema.py", "are trained now") as it:
        weft.averages(model).update()
    averages = weft.averages(it.run(model=model, ctx=weft.undo(model, ctx)[1])["model"])
    averages.update()
    assert "as the last transform of the model; or weft.undo before it" in it.fix
    model = begin()
    model[0].requires_grad_(True)
    weft.averages(it.run(model=model, ctx=weft.local())["model"]).update()


# -- local steps ---------------------------------------------------------------------------------------


def _local(**options):
    model = _net()
    return weft.local_steps(model, _sgd(model), weft.local(), **{"every": 1, "outer": OUTER, **options})


def _step(model, optimizer):
    model(X).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_options_of_local_steps():
    lines = []
    with told("engines/torch/steps/local.py", "'every'") as it:
        _local(every=0)
    lines.append(it)
    with told("engines/torch/steps/local.py", "'fragments'") as it:
        _local(fragments=3)
    lines.append(it)
    with told("engines/torch/steps/local.py", "cannot be used") as it:
        _local(outer="nesterov")
    for one in (*lines, it):
        model = _net()
        optimizer = _sgd(model)
        one.run(torch=torch, model=model, optimizer=optimizer, ctx=weft.local())
        _step(model, optimizer)


def test_what_outer_makes():
    model, optimizer, _ = _local(outer=len)
    with told("engines/torch/steps/local.py", "check_optimizer") as first:
        _step(model, optimizer)
    model, optimizer, _ = _local(outer=lambda p: torch.optim.SGD(p[1:], lr=0.7))
    with told("engines/torch/steps/local.py", "over other parameters") as second:
        _step(model, optimizer)
    for it in (first, second):
        model, optimizer, _ = _local(**eval(f"dict({it.fix})", {"torch": torch}))
        _step(model, optimizer)


def test_local_steps(tmp_path):
    model, optimizer, ctx = _local()
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    _step(model, optimizer)
    names = {"averaged": averaged, "model": model, "optimizer": optimizer, "ctx": ctx, "evaluate": lambda m: m(X)}
    with averaged(model, ctx), told("engines/torch/steps/local.py", "a step while the module") as it:
        optimizer.step()
    it.run(**names)
    with averaged(model, ctx), told("engines/torch/steps/local.py", "save: the module") as it:
        weft.save(state, tmp_path, 1, ctx)
    it.run(**names, state=state, directory=tmp_path, step=1)

    model = _net()
    with told("engines/torch/steps/local.py", "does not hold exactly") as it:
        weft.local_steps(model, _sgd(model[0]), weft.local(), every=2)
    optimizer = it.run(torch=torch, model=model)["optimizer"]
    model, optimizer, ctx = weft.local_steps(model, optimizer, weft.local(), every=1, outer=OUTER)
    _step(model, optimizer)
    model[0].requires_grad_(False)
    with told("engines/torch/steps/local.py", "differ from those of the first step") as it:
        _step(model, optimizer)
    it.run(model=model, optimizer=optimizer, ctx=ctx)
    _step(model, optimizer)


# -- steps in backward, and on flat buffers --------------------------------------------------------------


def test_optimizers_that_look_at_whole_tensors():
    model = _net()
    optimizer = torch.optim.Adafactor(model.parameters())
    with told("engines/torch/steps/swapped.py", "leave weft.") as it:
        weft.step_in_backward(optimizer, weft.local())
    assert it.fix == "leave weft.step_in_backward out"
    _step(model, optimizer)


def test_steps_in_backward():
    model = _net()
    optimizer, ctx = weft.step_in_backward(_sgd(model), weft.local())
    with told("engines/torch/steps/in_backward.py", "a second gradient of one parameter") as it:
        for _ in range(2):
            model(X).sum().backward()
    optimizer.step()
    for _ in range(2):
        it.run(loss=model(X).sum(), optimizer=optimizer)

    with told("engines/torch/steps/in_backward.py", "needs the gradients of all parameters") as it:
        weft.clip_grads(model, ctx, max_norm=1.0)
    assert it.fix == "leave step_in_backward out, or clip_grads"  # without clip_grads it is the loop above
    model = _net()
    model(X).sum().backward()
    weft.clip_grads(model, weft.local(), max_norm=1.0)
    _sgd(model).step()


# -- replicas of an elastic job --------------------------------------------------------------------------


class _Replicas:
    """Two, of which the other one brings zeros."""

    size, index = 2, 0

    def add_up(self, tensors, *, room=False):
        return len(list(tensors)) > 0


class _TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x):
        return self.used(x)


def test_unused_parameters_in_an_elastic_job():
    ctx = replace(weft.local(), replicas=_Replicas())
    first, _ = weft.replicate(_TwoHeads(), ctx)
    with told("engines/torch/reducing/strategy.py", "got no gradient") as it:
        first(X).sum().backward()
    assert it.fix.startswith('weft.replicate(..., unused="zero"), or requires_grad_(False) on them; on all of _Two')
    zero, _ = weft.replicate(_TwoHeads(), ctx, unused="zero")
    first.unused.requires_grad_(False)
    for model in (zero, first):
        model(X).sum().backward()
        assert model.unused.weight.grad is None and model.used.weight.grad is not None

    critic, _ = weft.replicate(nn.Sequential(_TwoHeads(), nn.Linear(1, 1)), ctx)
    actor = nn.Linear(4, 4)
    critic.requires_grad_(False)
    critic(actor(X)).sum().backward()
    assert actor.weight.grad is not None
    critic.requires_grad_(True)
