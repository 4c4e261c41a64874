"""accumulate_grads(reduce="scatter"): gradients are scattered in every backward, and summed over replicas once."""

from functools import partial

import pytest
import torch
from torch import nn

import weft
from weft.testing import largest_difference, run_ranks

MESH = {"replica": 2, "shard": 2}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x, depth=3):
        for block in self.blocks[:depth]:
            x = torch.tanh(block(x))
        return x


def _apply(ctx, strategy, reduce):
    """A model, its optimizer, and windows of 3 micro-batches of 8 samples."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    data = torch.randn(6, 8, 4, dtype=torch.float64)
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, units=nn.Linear, rebind=optimizer, unused="zero")
    elif strategy == "replicate":
        model, ctx = weft.replicate(model, ctx, unused="zero")
    else:
        stage = int(strategy[-1])
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=stage, unused="zero")
    loader = [batch.chunk(ctx.world_size)[ctx.rank] for batch in data]
    model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=3, reduce=reduce)
    return model, optimizer, windows, ctx


def _train(ctx, strategy, reduce, how):
    model, optimizer, windows, ctx = _apply(ctx, strategy, reduce)
    for window in windows:
        for number, x in enumerate(window):
            if how == "skips" and number == 2:
                continue
            # A block that only the first micro-batch uses.
            model(x, 2 if how == "part" and number else 3).square().mean().backward()
            if how == "break" and number == 1:
                break
        optimizer.step()
        optimizer.zero_grad()
    with weft.full_params(model, ctx):
        return [p.detach().clone() for p in model.parameters()]


def _check(strategy, n, mesh, hows):
    for how in hows:
        expected = _train(weft.local(), strategy, "last", how)
        for found in run_ranks(_train, n, strategy, "scatter", how, mesh=mesh):
            assert largest_difference(found, expected) < 1e-12, how


def test_the_numbers_are_those_of_one_process():
    _check("fully_shard", 4, MESH, ["part", "skips"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "n", "mesh"),
    [
        ("fully_shard", 4, MESH),
        ("fully_shard", 2, None),
        ("replicate", 2, None),
        ("zero1", 2, None),
        ("zero2", 4, MESH),
        ("zero3", 4, MESH),
    ],
)
def test_the_numbers_are_those_of_one_process_under_every_strategy(strategy, n, mesh):
    _check(strategy, n, mesh, ["all", "part", "break", "skips"])


def _program(ctx, reduce):
    model, optimizer, windows, _ = _apply(ctx, "fully_shard", reduce)
    windows = iter(windows)

    def step():
        window = next(windows)
        for x in window:
            (model(x).square().mean() * window.share).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.slow
def test_replicas_are_asked_once_per_window_and_shards_in_every_backward():
    size = 3 * (16 + 4) * 8  # bytes of all gradients
    expected = {"last": (1, 1), "scatter": (3, 1), "every": (3, 3)}
    for reduce, (scattered, summed) in expected.items():
        found = weft.rehearse(partial(_program, reduce=reduce), 4, mesh=MESH, steps=2)
        sent = {(one.kind, one.axis): one.bytes for one in found.messages}
        assert sent["reduce_scatter", "shard"] == scattered * size, reduce
        assert sent["all_reduce", "replica"] == summed * size / 2, reduce
