"""Your own training step, unit-tested on one rank and on two: the same numbers, in milliseconds.

pytest examples/test_my_step.py
"""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.testing import assert_equivalent, run_ranks


def train(ctx: weft.DistContext, epochs: int) -> list[float]:
    """The loss of every step, for a global batch of 8."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(40, 4), torch.randint(0, 3, (40,)))
    loader, ctx = weft.shard_data(DataLoader(data, batch_size=8, shuffle=True), ctx, mode="split")
    model, ctx = weft.replicate(nn.Linear(4, 3), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            loss = cross_entropy(model(x), y) * loader.share
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(weft.reduce(loss.detach(), ctx, "mean").item())
    return losses


def test_loss_curve_is_the_same_at_every_world_size() -> None:
    assert_equivalent(train, worlds=(1, 2, 4), epochs=2)


def test_loss_goes_down() -> None:
    first, *_, last = run_ranks(train, 2, epochs=10)[0]
    assert last < first
