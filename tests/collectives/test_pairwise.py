"""Exchanges between pairs of ranks give what the collectives of torch give, for every size of a message."""

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

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


class _Gathers(TorchDispatchMode):
    """How many buffers each all-gather is of."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith(("c10d::allgather", "c10d::_allgather")):
            self.found.append(len(args[0]) if "coalesced" in name else 1)
        return func(*args, **(kwargs or {}))


def _counted(ctx):
    # The blocks of the last one are more than one all-gather is to be of.
    kinds = [(70_000, torch.float32)] * 3 + [(9, torch.float64)] * 2 + [(9, torch.float32), (2_400_000, torch.float32)]
    buffers = [torch.full((ctx.world_size, size), ctx.rank, dtype=dtype) for size, dtype in kinds]
    with _Gathers() as counted:
        PairGather.run([PairGather(dist.group.WORLD, buffer.view(-1)) for buffer in buffers])
    assert all(torch.equal(buffer[:, 0], torch.arange(ctx.world_size).to(buffer.dtype)) for buffer in buffers)
    return counted.found


def test_where_there_are_no_pairs_one_all_gather_is_of_several_buffers_up_to_a_size():
    assert run_ranks(_counted, 3) == [[4, 1, 2]] * 3
    assert run_ranks(_counted, 2) == [[]] * 2


def _sums(ctx):
    for size in (1, 300, 300_000):  # the last one is an all-reduce
        values = _block(ctx.rank, size, torch.float64)
        SmallSum(dist.group.WORLD, values)(values)
        assert torch.equal(values, sum(_block(rank, size, torch.float64) for rank in range(ctx.world_size))), size


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sums_are_those_of_an_all_reduce(ranks):
    run_ranks(_sums, ranks)
