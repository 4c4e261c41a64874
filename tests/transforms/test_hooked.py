"""hooked: functions around the forward of blocks, in order, under every strategy, and gone after `undo`."""

import copy
import pickle

import pytest
import torch
from torch import nn

import weft
from weft.testing import run_ranks


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x, scale=1.0):
        return torch.tanh(self.linear(x)) * scale


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(4, 1)

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x, scale=1.0 + number)
        return self.head(x)


def build():
    torch.manual_seed(0)
    return Net().double()


X = torch.linspace(-1, 1, 32, dtype=torch.float64).reshape(8, 4)


def test_functions_run_in_order_and_may_replace_arguments_and_output():
    def double(block, args, kwargs):
        return (args[0] * 2,), kwargs

    def plain_scale(block, args, kwargs):
        assert torch.equal(args[0], X * 2)  # what the one before returned
        return args, {**kwargs, "scale": 3.0}

    def shift(block, args, kwargs, output):
        assert kwargs == {"scale": 3.0} and torch.equal(args[0], X * 2)  # those that forward was given
        return output + 1

    block = build().blocks[0]
    expected = block(X * 2, scale=3.0) + 1
    calls = []
    hooked, _ = weft.hooked(
        nn.Sequential(block),
        weft.local(),
        blocks=Block,
        before=[double, plain_scale, lambda block, args, kwargs: calls.append(block)],
        after=[shift, lambda block, args, kwargs, output: calls.append(output)],
    )
    assert torch.equal(hooked(X), expected)
    assert calls[0] is block and torch.equal(calls[1], expected)


def test_one_hook_per_side_and_none_after_undo_or_in_a_copy():
    model, ctx = build(), weft.local()
    seen = []
    note = lambda block, args, kwargs: seen.append(block)  # noqa: E731
    model, ctx = weft.hooked(model, ctx, blocks="blocks.*", before=[note, note])
    assert [len(b._forward_pre_hooks) for b in model.blocks] == [1, 1, 1]
    assert [len(b._forward_hooks) for b in model.blocks] == [0, 0, 0]
    model(X)
    assert len(seen) == 6
    copy.deepcopy(model)(X)
    pickle.loads(pickle.dumps(model))(X)
    assert len(seen) == 6
    model, ctx = weft.undo(model, ctx)
    model(X)
    assert len(seen) == 6 and not any(b._forward_pre_hooks for b in model.modules())


def _strategies():
    return {
        "replicate": lambda m, c: weft.replicate(m, c),
        "fully_shard": lambda m, c: weft.fully_shard(m, c, units=[Block]),
        "recompute, fully_shard": lambda m, c: weft.fully_shard(*weft.recompute(m, c, blocks=Block), units=[Block]),
    }


def _whole_parameters(ctx, strategy, first):
    shapes = []

    def look(block, args, kwargs, *output):
        shapes.append((type(block.linear.weight).__name__, tuple(block.linear.weight.shape)))

    model = build()
    if first:
        model, ctx = weft.hooked(model, ctx, blocks=Block, before=look, after=look)
    model, ctx = _strategies()[strategy](model, ctx)
    if not first:
        model, ctx = weft.hooked(model, ctx, blocks=Block, before=look, after=look)
    model(X[ctx.rank * 4 : ctx.rank * 4 + 4]).sum().backward()
    return shapes


@pytest.mark.parametrize("strategy", _strategies())
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_parameters_are_complete_whatever_the_order_of_transforms(strategy, first):
    for shapes in run_ranks(_whole_parameters, 2, strategy, first):
        assert shapes == [("Parameter", (4, 4))] * 6


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({}, ValueError, "no function to call"),
        ({"before": 3}, TypeError, "before is no function"),
        ({"after": [print, None]}, TypeError, "after is no function"),
        ({"before": print, "blocks": "nowhere.*"}, ValueError, "nowhere"),
    ],
)
def test_what_cannot_be_hooked_is_refused(options, error, text):
    model = build()
    with pytest.raises(error, match=text):
        weft.hooked(model, weft.local(), **{"blocks": Block, **options})
    assert not any(b._forward_pre_hooks or b._forward_hooks for b in model.modules())


def test_a_function_that_returns_something_else_than_a_pair_raises():
    model, _ = weft.hooked(build(), weft.local(), blocks=Block, before=lambda block, args, kwargs: args)
    with pytest.raises(TypeError, match="returned tuple for Block"):
        model(X)
    with pytest.raises(weft.errors.AlreadyApplied):
        weft.hooked(model, _, blocks=Block, before=print)
