"""Parts that are frozen and unfrozen at any point of a step train as on one process, under every strategy."""

import functools
import random

import pytest
import torch
from torch import nn

import weft
from weft.testing import run_ranks

pytestmark = pytest.mark.usefixtures("warm_ranks")

SEEDS = range(6)
STRATEGIES = ("replicate", "flat", "fully_shard", "units", "zero 1", "zero 2", "zero 3")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.c(self.b(self.a(x).tanh()).tanh())


def _under(how, model, make, ctx):
    if how.startswith("zero"):
        return weft.zero_partition(model, make(model.parameters()), ctx, stage=int(how[-1]))
    if how in ("fully_shard", "units"):
        model, ctx = weft.fully_shard(model, ctx, units=[nn.Linear] if how == "units" else None)
    elif how:
        model, ctx = weft.replicate(model, ctx, flat=how == "flat")
    return model, make(model.parameters()), ctx


def _train(ctx, how, seed):
    """Losses, which parameters have a gradient, and which are trained, while parts are frozen and unfrozen."""
    torch.manual_seed(0)
    drawn = random.Random(seed)
    sgd = functools.partial(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    model, optimizer, ctx = _under(how, Net().double(), sgd, ctx)
    found = []

    def change():
        if drawn.random() < 0.4:
            part, trains = drawn.choice("abc"), drawn.random() < 0.6
            for name, p in model.named_parameters():
                if name.startswith(part):
                    p.requires_grad_(trains)

    for step in range(8):
        change()
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = model(x.chunk(ctx.world_size)[ctx.rank].requires_grad_()).square().mean()
        change()
        if drawn.random() < 0.8:
            loss.backward()
            change()
            found += [p.grad is None for p in model.parameters()]
            optimizer.step()
            change()
            optimizer.zero_grad()
        found.append(weft.reduce(loss.detach(), ctx, "mean").item())
    with torch.no_grad():
        model(torch.ones(2, 4, dtype=torch.float64))  # what was gathered is freed
    return found, [p.requires_grad for p in model.parameters()]


def _all(ctx, how):
    return [_train(ctx, how, seed) for seed in SEEDS]


@pytest.mark.parametrize("how", STRATEGIES)
def test_parts_are_frozen_at_any_point_of_a_step(how):
    for found in run_ranks(_all, 2, how):
        for seed, (numbers, trained) in zip(SEEDS, found, strict=True):
            expected, left = _train(weft.local(), "", seed)
            assert numbers == pytest.approx(expected, abs=1e-9), seed
            assert trained == left


def _critic_frozen_in_forward(ctx, how):
    """An actor trained through a critic that is unfrozen again before backward."""
    torch.manual_seed(0)
    adamw = functools.partial(torch.optim.AdamW, lr=1e-2)
    actor, of_actor, ctx = _under(how, nn.Linear(4, 4).double(), adamw, ctx)
    critic, of_critic, ctx = _under(how, Net().double(), adamw, ctx)
    losses = []
    for step in range(3):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        x = x.chunk(ctx.world_size)[ctx.rank]
        for optimizer in (of_actor, of_critic):
            critic.requires_grad_(optimizer is of_critic)
            loss = critic(actor(x) if optimizer is of_actor else x).square().mean()
            critic.requires_grad_(True)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(weft.reduce(loss.detach(), ctx, "mean").item())
    return losses


@pytest.mark.parametrize("how", ["replicate", "fully_shard"])
def test_a_critic_may_be_unfrozen_before_backward(how):
    expected = _critic_frozen_in_forward(weft.local(), "")
    for found in run_ranks(_critic_frozen_in_forward, 2, how):
        assert found == pytest.approx(expected, rel=1e-5)
