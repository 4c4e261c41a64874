"""Hooks on parameters that change gradients: right if they are affine, and an error if not."""

import pytest
import torch
from torch import nn

import weft
from weft.errors import ContractError
from weft.testing import RanksFailed, run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")

AFFINE = {
    "a factor": lambda g: g * 0.5,
    "the mean of rows": lambda g: g - g.mean(0, keepdim=True),
    "a constant": lambda g: g + 0.1,
    "numbers in 16 bits": lambda g: g.bfloat16().to(g.dtype),
    "nothing": lambda _: None,
    "an error for gradients that never come": lambda g: g if g.abs().max() < 100 else 1 / 0,
}
OTHERS = {
    "a limit that is not met yet": lambda g: g.clamp(-50, 50),
    "a norm": lambda g: g / g.norm(),
    "a limit of the norm": lambda g: g * min(1.0, 50 / float(g.norm())),
    "the sign": torch.sign,
    "the largest": lambda g: g * (g.abs() >= g.abs().median()),
}


def _train(ctx, hook, hook_at=0, overflow_at=-1):
    """Weights after three steps, and how often the hook was called."""
    torch.manual_seed(0)
    model, ctx = weft.replicate(nn.Linear(4, 3, dtype=torch.float64), ctx)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls = []

    def counted(gradient):
        calls.append(gradient)
        return hook(gradient)

    handles = []
    for step in range(3):
        if step == hook_at:
            handles = [p.register_hook(counted) for p in model.parameters()]
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = model(x.chunk(ctx.world_size)[ctx.rank]).square().mean()
        (loss * float("inf") if step == overflow_at else loss).backward()
        if step != overflow_at:
            optimizer.step()
        optimizer.zero_grad()
    for p, handle in zip(model.parameters(), handles, strict=True):
        assert list(p._backward_hooks.values()) == [counted]
        handle.remove()
        assert not p._backward_hooks
    return [p.detach() for p in model.parameters()], len(calls)


def _all(ctx, names):
    return {name: _train(ctx, AFFINE[name]) for name in names}


def test_affine_hooks_give_what_one_process_computes():
    expected = _all(weft.local(), AFFINE)
    for found in run_ranks(_all, 2, list(AFFINE)):
        for name, (weights, calls) in found.items():
            tolerance = 1e-2 if "16 bits" in name else 1e-12  # each rank rounds its own gradient
            torch.testing.assert_close(weights, expected[name][0], rtol=tolerance, atol=tolerance)
            assert (calls == expected[name][1]) == (name == "nothing")  # which changes nothing, and is not asked again


def _refused(ctx):
    for hook in OTHERS.values():
        for options in ({}, {"hook_at": 1}, {"overflow_at": 0}):
            with pytest.raises(ContractError, match="change the gradients of one rank"):
                _train(ctx, hook, **options)


def test_other_hooks_raise_before_the_step():
    run_ranks(_refused, 2)


def _on_one_rank(ctx):
    model, ctx = weft.replicate(nn.Linear(4, 3), ctx)
    if ctx.rank == 1:
        model.weight.register_hook(torch.sign)
    for _ in range(2):
        model(torch.ones(2, 4) + ctx.rank).sum().backward()


def test_a_hook_on_one_rank_does_not_leave_the_other_one_waiting():
    with pytest.raises(RanksFailed, match="rank 1 failed first"):
        run_ranks(_on_one_rank, 2, timeout_s=30)
