"""recompute: blocks that compute something else the second time are refused, before a step."""

import itertools
import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import weft
from tests.variants import one_in
from weft.testing import run_ranks

from .attempts import STEPS, attempt, check_refused, fit

WIDTH = 6
SCALE = {"now": 1.0}


class Block(nn.Module):
    """A layer, whose output is multiplied by what a function of the block returns."""

    def __init__(self, factor=lambda self: 1.0):
        super().__init__()
        self.layer, self.factor, self.calls = nn.Linear(WIDTH, WIDTH), factor, 0
        self.register_buffer("shared", torch.ones(()))

    def forward(self, x):
        return x + self.layer(x) * self.factor(self)


class Net(nn.Module):
    """Two blocks, of which the second one has a factor."""

    def __init__(self, factor):
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block(factor)])
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = block(h)
        return self.last(h)


def counted(*, is_used):
    def factor(self):
        self.calls += 1
        return self.calls if is_used else 2.0

    return factor


def grown(step):
    def factor(self):
        SCALE["now"] += step
        return SCALE["now"]

    return factor


def taken(numbers):
    iterator = itertools.cycle(numbers)
    return lambda self: next(iterator)


def alternating(*, is_used):
    """Every second call takes another way, of as many operations."""

    def factor(self):
        self.calls += 1
        return torch.ones(()) * (-1 if is_used and self.calls % 2 else 1)

    return factor


def drawn_anew(*, is_own):
    """From a generator of the block, which no random state of the program is."""
    own = torch.Generator().manual_seed(0)
    return lambda self: torch.rand((), generator=own if is_own else None)


def changed_buffer(*, is_other):
    """A buffer that is set each time, or one of the same values."""

    def factor(self):
        self.calls += 1
        value = torch.full((), 1.0 + self.calls if is_other else 2.0)
        object.__setattr__(self, "remembered", value)
        return self.remembered

    return factor


def in_place(step):
    def factor(self):
        self.shared += step
        return 1.0

    def same(self):
        return self.shared + step

    return factor if step else same


PAIRS = {
    "random of Python": (lambda: lambda self: random.random(), lambda: lambda self: torch.rand(()).item()),
    "random of numpy": (lambda: lambda self: np.random.rand(), lambda: lambda self: torch.rand(())),
    "counter": (lambda: counted(is_used=True), lambda: counted(is_used=False)),
    "global": (lambda: grown(0.5), lambda: grown(0.0)),
    "iterator": (lambda: taken([1.0, 2.0, 3.0]), lambda: taken([2.0, 2.0])),
    "time": (lambda: lambda self: time.perf_counter(), lambda: lambda self: 1.5),
    "every second call": (lambda: alternating(is_used=True), lambda: alternating(is_used=False)),
    "generator of its own": (lambda: drawn_anew(is_own=True), lambda: drawn_anew(is_own=False)),
    "remembered tensor": (lambda: changed_buffer(is_other=True), lambda: changed_buffer(is_other=False)),
    "buffer in place": (lambda: in_place(1), lambda: in_place(0)),
}


def made(factor):
    torch.manual_seed(0)
    SCALE["now"] = 1.0
    return Net(factor).double()


def batches():
    draw = torch.Generator().manual_seed(1)
    return [[torch.randn(4, n, generator=draw, dtype=torch.float64) for n in (3, 2)] for _ in range(STEPS)]


def loss_of(model, batch):
    x, y = batch
    return F.mse_loss(model(x), y)


def train(ctx, make, watch=None):
    model = made(make())
    if watch is not None:
        watch.begin(model)
    model, ctx = weft.recompute(model, ctx, blocks=Block)
    if ctx.world_size > 1:
        model, ctx = weft.replicate(model, ctx)
    return fit(model, batches(), loss_of, watch)


@pytest.mark.parametrize("name", one_in(4, PAIRS))
def test_a_block_that_computes_something_else_is_refused(name):
    unsound, sound = PAIRS[name]
    check_refused([attempt(train, weft.local(probes="every"), unsound)])
    expected = fit(made(sound()), batches(), loss_of)
    found = train(weft.local(probes="every"), sound)
    assert all(torch.equal(value, expected[key]) for key, value in found.items())


def both(ctx, name):
    unsound, sound = PAIRS[name]
    return train(ctx, sound), attempt(train, ctx, unsound)


@pytest.mark.parametrize("name", ["random of Python", "iterator"])
def test_a_block_that_computes_something_else_is_refused_on_all_ranks(name):
    expected = fit(made(PAIRS[name][1]()), batches(), loss_of)
    found = run_ranks(both, 2, name)
    for own, _ in found:
        assert all(torch.allclose(value, expected[key], rtol=0, atol=1e-12) for key, value in own.items())
    check_refused([refused for _, refused in found])
