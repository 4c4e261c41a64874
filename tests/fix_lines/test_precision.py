"""Policies, and what is computed by them: `weft.precision`."""

import torch
from torch import nn
from torch.nn.functional import mse_loss

import weft
from tests.fix_lines.told import told


def _value(it):
    """What the line makes, which is an expression."""
    return eval(it.fix, {"weft": weft, "torch": torch})


def _steps(policy):
    """A step of a model with this policy changes it."""
    model, ctx = weft.with_precision(nn.Linear(16, 16), weft.local(), policy)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    before = model.weight.detach().clone()
    model(torch.ones(16, 16)).mean().backward()
    optimizer.step()
    return not torch.equal(model.weight, before)


def test_policies():
    with told("precision/policies.py", "LossScaling: {listed(wrong)}") as it:
        weft.precision.LossScaling(init=1000.0)
    assert _value(it).init == 2.0**16
    with told("precision/policies.py", "scaling is no LossScaling") as it:
        weft.Precision(compute=torch.float16, scaling=2.0**16)
    assert _value(it).scaling and _steps(_value(it))
    with told("precision/policies.py", "Precision: {listed(wrong)}") as it:
        weft.Precision(compute=torch.int8)
    assert _steps(_value(it))
    with told("precision/policies.py", "Precision: matmul") as it:
        weft.Precision(compute=torch.bfloat16, matmul=torch.float8_e5m2)
    assert _value(it).matmul is torch.float8_e4m3fn
    with told("precision/policies.py", "weights cannot be stored") as it:
        weft.Precision(storage=torch.float8_e4m3fn)
    assert _value(it).storage is torch.float8_e4m3fn
    with told("precision/policies.py", "gathered in another dtype") as it:
        weft.Precision(compute=torch.bfloat16, gather=torch.float16)
    assert _steps(_value(it))
    with told("precision/policies.py", "a loss scale has no effect") as it:
        weft.Precision(compute=torch.bfloat16, scaling=weft.precision.LossScaling())
    assert _steps(_value(it))
    with told("precision/power_sgd.py", "PowerSGD") as it:
        weft.precision.PowerSGD(rank=0)
    assert _value(it).rank == 2


class _WithLoss(nn.Linear):
    def loss(self, x, y):
        return mse_loss(self(x), y)


def test_a_policy_is_named():
    model, ctx = _WithLoss(4, 4), weft.local()
    with told("precision/policies.py", "policy!r} is unknown") as it:
        weft.with_precision(model, ctx, "bfloat16")
    model = it.run(model=model, ctx=ctx)["model"]
    assert model(torch.ones(1, 4)).dtype == torch.float32

    model, ctx = weft.with_precision(_WithLoss(4, 4), weft.local(), "fp16")
    out = model(torch.ones(2, 4))
    with told("precision/scopes.py", "autocast") as it, weft.precision.autocast("fp16", ctx):
        mse_loss(out, torch.zeros(2, 4))
    model = it.run(model=_WithLoss(4, 4), ctx=weft.local())["model"]
    model.loss(torch.ones(2, 4), torch.zeros(2, 4)).backward()
    assert model.weight.grad.abs().sum() > 0
