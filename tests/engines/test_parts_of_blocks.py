"""tensor_parallel of blocks with more than columns and rows: tables per head, patches, parts with whole sequences."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (as everywhere)
from torch.utils.data import DataLoader

import weft
from weft.testing import largest_difference, run_ranks

WIDTH, HEADS, PLACES, ROWS = 16, 4, 8, 4


class Attention(nn.Module):
    """With a table of relative positions, as T5 has it."""

    def __init__(self, stepwise):
        super().__init__()
        self.stepwise, self.n_heads = stepwise, HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.table = nn.Embedding(2 * PLACES, HEADS)

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for one in (self.q, self.k, self.v))
        places = torch.arange(k.shape[2])
        bias = self.table(places - places[:, None] + PLACES).permute(2, 0, 1)[None]
        if self.stepwise:
            found = F.dropout((q @ k.transpose(-1, -2) + bias).softmax(-1), 0.1, self.training) @ v
        else:
            found = F.scaled_dot_product_attention(q, k, v, bias, dropout_p=0.1 if self.training else 0.0)
        return self.o(found.transpose(1, 2).flatten(2))


class Neighbors(nn.Module):
    """Each place and those beside it."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return F.dropout(self.mix(x.transpose(1, 2)).transpose(1, 2), 0.1, self.training)


class Block(nn.Module):
    def __init__(self, stepwise):
        super().__init__()
        self.norm, self.attention, self.near = nn.LayerNorm(WIDTH), Attention(stepwise), Neighbors()
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm(x)))
        return x + self.near(x)


class Patched(nn.Module):
    """Of images, whose shape does not say how many places there are."""

    def __init__(self, stepwise):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, (1, 2), stride=(1, 2))
        self.blocks = nn.ModuleList(Block(stepwise) for _ in range(2))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return x.square().mean((1, 2))


def _images():
    return list(torch.randn(ROWS, 1, 2, PLACES, generator=torch.Generator().manual_seed(0)).double())


def _gradients(ctx, stepwise, sequence):
    torch.manual_seed(0)
    model = Patched(stepwise).double()
    loader, ctx = weft.shard_data(DataLoader(_images(), batch_size=ROWS), ctx)
    model, loader, ctx = weft.keyed_dropout(model, loader, ctx)
    if ctx.world_size > 1:
        model, ctx = weft.tensor_parallel(model, ctx, sequence=sequence)
    for x in loader:
        model(x).mean().backward()
    return list(weft.full_grads(model, ctx).values())


def test_the_plan_names_every_part_of_the_blocks():
    plan = weft.tensor_plan(Patched(False))
    assert plan["blocks.*.attention.v"] == "column" and plan["blocks.*.attention.o"] == "row"
    assert plan["blocks.*.norm"] == "sequence" and plan["blocks.*.near"] == "whole"


@pytest.mark.parametrize(
    ("stepwise", "sequence"),
    [(False, True), *(pytest.param(*each, marks=pytest.mark.variant) for each in [(True, True), (False, False)])],
)
def test_gradients_are_those_of_one_process(stepwise, sequence):
    expected = _gradients(weft.local(), stepwise, sequence)
    for found in run_ranks(_gradients, 2, stepwise, sequence, mesh={"tensor": 2}):
        assert largest_difference(expected, found) < 1e-12
