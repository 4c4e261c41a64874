"""Blocks that are computed twice or compiled, and options of all engines: `weft.engines`."""

import pytest
import torch
from torch import nn

import weft
from tests.fix_lines.told import told


class Block(nn.Module):
    """A block of the user's."""

    def __init__(self, width=4):
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x):
        return torch.relu(self.inner(x))


class Counting(Block):
    """The result depends on how often it was called."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * self.calls


class Averaging(Block):
    """It has a running mean of its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x - self.mean)


def _filled(it, dots, **names):
    """The line with what the user's program has in place of its dots."""
    it.fix = it.fix.replace("...", dots)
    return it.run(**names)


def _without_the_block(it, kind, x):
    with weft.start(device="cpu") as ctx:
        model = nn.Sequential(Block(), kind(), Block())
        _filled(it, "isinstance(part, Block)", model=model, ctx=ctx, Block=Block)
        model(x).sum().backward()
        assert ["forward" in vars(part) for part in model] == [True, False, True]


def test_blocks_that_are_not_the_same_twice():
    x = torch.ones(2, 4)
    with weft.start(device="cpu") as ctx:
        model, _ = weft.recompute(nn.Sequential(Block(), Counting(), Block()), ctx, blocks=Block)
        with told("engines/torch/compute/activation_checkpoint.py", "returned something else") as it:
            model(x).sum().backward()
        _without_the_block(it, Counting, x)
        model, _ = weft.recompute(nn.Sequential(Block(), Averaging(), Block()), ctx, blocks=Block)
        with told("engines/torch/compute/activation_checkpoint.py", "changes buffers") as it:
            model(x).sum().backward()
        _without_the_block(it, Averaging, x)


def test_operations_whose_results_are_kept():
    with weft.start(device="cpu") as ctx:
        with told("engines/torch/compute/activation_checkpoint.py", "cannot be saved") as it:
            weft.recompute(Block(), ctx, blocks="inner", save=[torch.ops.aten.matmul.default])
        for line in (it, _unknown_operation(ctx), _no_operation(ctx)):
            model = nn.Sequential(Block(), Block())
            _filled(line, "Block", model=model, ctx=ctx, Block=Block, torch=torch)
            model(torch.ones(2, 4)).sum().backward()


def _unknown_operation(ctx):
    with told("engines/torch/compute/activation_checkpoint.py", "is not an operation of torch") as it:
        weft.recompute(Block(), ctx, blocks="inner", save=["matmull"])
    return it


def _no_operation(ctx):
    with told("engines/torch/compute/activation_checkpoint.py", "save = {op!r} is not an operation") as it:
        weft.recompute(Block(), ctx, blocks="inner", save=[torch.matmul])
    return it


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_what_is_compiled():
    with weft.start(device="cpu") as ctx:
        model, inner = weft.recompute(Block(), ctx, blocks="inner", offload=True)
        with told("engines/torch/compute/compile_module.py", "keep their inputs on the CPU") as it:
            weft.compile(model, inner, backend="eager")
    with weft.start(device="cpu") as ctx:
        assert it.fix.endswith(" without offload=True")
        model = Block()
        model, inner = weft.recompute(model, ctx, blocks="inner")
        model, inner = weft.compile(model, inner, backend="eager")
        model(torch.ones(2, 4)).sum().backward()
    with weft.start(device="cpu") as ctx:
        model = Block()
        with told("engines/torch/compute/compile_module.py", "is unknown") as it:
            weft.compile(model, ctx, backend="inducktor")
        it.run(model=model, ctx=ctx)


def test_the_size_of_a_bucket():
    with weft.start(device="cpu") as ctx:
        model = nn.Linear(2, 2)
        with told("engines/options.py", "bucket_bytes") as it:
            weft.replicate(model, ctx, bucket_bytes=0)
        _filled(it, "model, ctx", model=model, ctx=ctx)
