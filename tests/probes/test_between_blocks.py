"""tensor_parallel: positions that are mixed between blocks that have parts of a sequence; parts outside of units."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import weft
from tests.fix_lines.told import told
from tests.variants import one_in
from weft.testing import run_ranks

from .attempts import STEPS, attempt, check_exact, check_refused, fit

ROWS, WIDTH, HIDDEN = 4, 6, 8
SPLIT = {"blocks.*.up": "column", "blocks.*.down": "row", "blocks.*.norm": "sequence"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Layers(nn.Module):
    """Blocks with something between them."""

    def __init__(self, between=lambda x: x):
        super().__init__()
        self.first, self.last = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks, self.between = nn.ModuleList([Block(), Block()]), between

    def forward(self, x):
        return self.last(self.blocks[1](self.between(self.blocks[0](self.first(x)))))


def hooked(at, of):
    """Layers with a hook on a block that changes what comes in, or what goes out."""

    def make():
        model = Layers()
        if at == 0:
            model.blocks[0].register_forward_hook(lambda block, args, output: of(output))
        else:
            model.blocks[1].register_forward_pre_hook(lambda block, args: (of(args[0]),))
        return model

    return make


def of_positions(x):
    return x + torch.arange(x.shape[1], dtype=x.dtype)[:, None].sin()


BETWEEN = {
    "mean": (lambda x: x - x.mean(1, keepdim=True), lambda x: x - x.mean(2, keepdim=True)),
    "cumsum": (lambda x: x.cumsum(1), lambda x: x.cumsum(0)),
    "shift": (lambda x: x + F.pad(x[:, :-1], (0, 0, 1, 0)), lambda x: x + F.pad(x[..., :-1], (1, 0))),
    "positions": (of_positions, lambda x: x + torch.arange(x.shape[2], dtype=x.dtype).sin()),
    "as many rows": (
        lambda x: x.view(ROWS, -1, WIDTH).softmax(1),
        lambda x: x.view(ROWS, -1, WIDTH).softmax(0),
    ),
}
SPLIT_PAIRS = {name: tuple((lambda between=one: Layers(between)) for one in pair) for name, pair in BETWEEN.items()}
SPLIT_PAIRS |= {
    "hook after a block": (hooked(0, of_positions), hooked(0, torch.tanh)),
    "hook before a block": (hooked(1, of_positions), hooked(1, torch.tanh)),
}


def made(make):
    torch.manual_seed(0)
    return make().double()


def loss_of(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def sequences():
    draw = torch.Generator().manual_seed(1)
    return [[torch.randn(ROWS, 4, n, generator=draw, dtype=torch.float64) for n in (5, 3)] for _ in range(STEPS)]


def train_split(ctx, make, watch=None, sequence=True):
    model = made(make)
    if watch is not None:
        watch.begin(model)
    model, ctx = weft.tensor_parallel(model, ctx, plan=SPLIT, sequence=sequence)
    return fit(model, sequences(), loss_of, watch)


def both_split(ctx, name):
    unsound, sound = SPLIT_PAIRS[name]
    return train_split(ctx, sound), attempt(train_split, ctx, unsound), train_split(ctx, unsound, sequence=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(3, SPLIT_PAIRS))
def test_what_mixes_positions_between_blocks_is_refused_where_they_have_parts_of_a_sequence(name):
    mixing, sound = (fit(made(make), sequences(), loss_of) for make in SPLIT_PAIRS[name])
    found = run_ranks(both_split, 2, name, mesh={"tensor": 2})
    check_exact([one for one, _, _ in found], sound)
    check_refused([one for _, one, _ in found])
    check_exact([one for _, _, one in found], mixing)


def staged(ctx, make, watch=None):
    model, ctx = weft.tensor_parallel(made(make), ctx, plan=SPLIT, sequence=True)
    stages = [["first", "blocks.0"], ["blocks.1", "last"]]
    model, _ = weft.pipeline(model, ctx, loss=F.mse_loss, micro_batches=2, stages=stages)
    return fit(model, sequences(), lambda model, batch: model(*batch), watch)


def both_staged(ctx, name):
    unsound, sound = SPLIT_PAIRS[name]
    return staged(ctx, sound), attempt(staged, ctx, unsound)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mean", pytest.param("positions", marks=pytest.mark.variant)])
def test_what_mixes_positions_between_blocks_is_refused_in_a_pipeline(name):
    sound = fit(made(SPLIT_PAIRS[name][1]), sequences(), loss_of)
    found = run_ranks(both_staged, 4, name, mesh={"pipeline": 2, "tensor": 2})
    check_exact([one for one, _ in found], sound)
    check_refused([one for _, one in found])


# -- "replicate" is for what sees the heads of one rank: all else stays whole by itself --------------------

PARTS = {"blocks.*.up": "column", "blocks.*.down": "row"}


def planned_too_much(ctx, name):
    model, _ = weft.tensor_parallel(made(Layers), ctx, plan={**PARTS, name: "replicate"})
    with told("engines/torch/probes/runner.py", "at most {limit}") as it:
        model(sequences()[0][0])
    assert it.fix == f'leave "{name}" out of the plan: it stays whole on every rank'
    model, _ = weft.tensor_parallel(made(Layers), ctx, plan=PARTS)
    return fit(model, sequences(), loss_of)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(3, ["first", "last", "blocks.0.norm"]))
def test_a_part_that_sees_whole_features_is_not_added_up(name):
    expected = fit(made(Layers), sequences(), loss_of)
    check_exact(run_ranks(planned_too_much, 2, name, mesh={"tensor": 2}), expected)
