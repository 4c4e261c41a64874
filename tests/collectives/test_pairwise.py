"""Exchanges between pairs of ranks give what the collectives of torch give, for every size of a message."""

import pytest
import torch
import torch.distributed as dist

from weft.tensors.pairwise import PairGather, SmallSum, as_real
from weft.testing import run_ranks

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
# Elements of a block: messages of all ranks, of pairs, and of both kinds in one call.
SIZES = {"small": (1, 300), "large": (70_000,), "both": (5, 70_000, 7)}


def _block(rank, size, dtype):
    return (torch.arange(size) % 97 + 100 * rank).to(dtype)


def _gathers(ctx, sizes):
    group = dist.group.WORLD
    for dtype in DTYPES:
        buffers = [torch.zeros(ctx.world_size, size, dtype=dtype) for size in sizes]
        for buffer, size in zip(buffers, sizes, strict=True):
            buffer[ctx.rank] = _block(ctx.rank, size, dtype)
        PairGather.run([PairGather(group, as_real(buffer.view(-1))) for buffer in buffers])
        for buffer, size in zip(buffers, sizes, strict=True):
            for rank in range(ctx.world_size):
                assert torch.equal(buffer[rank], _block(rank, size, dtype)), (dtype, size, rank)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("kind", SIZES)
def test_each_rank_has_the_blocks_of_all(ranks, kind):
    run_ranks(_gathers, ranks, SIZES[kind])


def _sums(ctx):
    for size in (1, 300, 300_000):  # the last one is an all-reduce
        values = _block(ctx.rank, size, torch.float64)
        SmallSum(dist.group.WORLD, values)(values)
        assert torch.equal(values, sum(_block(rank, size, torch.float64) for rank in range(ctx.world_size))), size


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_those_of_an_all_reduce(ranks):
    run_ranks(_sums, ranks)
