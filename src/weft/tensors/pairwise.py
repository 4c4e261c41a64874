"""Sum or gather buffers over the ranks of a gloo group by exchanges between pairs.

gloo's own collectives send a buffer in many pieces; for some kilobytes they cost more than the numbers.
Here each message is whole. Recursive doubling: in round k each rank swaps its partial sum, or all that
it gathered so far, with the rank whose number differs in bit k. That is an all-to-all in which all other
pieces are empty (for small ones cheaper than a send and a receive, which gloo handles apart). Both ranks add the same
two numbers, so all end with the same bits.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005, section 4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.tensors.messages import grouped, in_buckets

_SWAP_TAG = 0x5E7F  # of messages that two ranks swap; a program that sends over the same group uses others
_MAX_BYTES = 2**20  # of a sum; what is gathered may be of any size
_TOGETHER_BYTES = 25 * 2**20  # of all buffers that one all-gather is of
_SMALL_BYTES = 2**16  # of one block that is gathered; from there on a send and a receive cost less


def as_real(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory as real numbers, [2 * n] for n complex ones: gloo and 16-bit dtypes know no others."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


class SmallSum:
    """Sums buffers of one size over a group in place; by an all-reduce where exchanges do not pay.

    `wait` waits for each operation.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | dist.ProcessGroupGloo,
        like: torch.Tensor,
        wait: Callable[[dist.Work], object] = dist.Work.wait,
    ) -> None:
        self._group: Any = group
        self._wait = wait
        rank, size = group.rank(), group.size()
        self._exchanges = like.numel() * like.element_size() <= _MAX_BYTES and in_pairs(group, like, size)
        peers = [rank ^ 1 << bit for bit in range(size.bit_length() - 1)]
        self._splits = [[like.numel() if rank == peer else 0 for rank in range(size)] for peer in peers]
        self._received = torch.empty_like(like) if self._exchanges else like

    def __call__(self, buffer: torch.Tensor) -> None:
        """Replace `buffer` by the sum over the ranks."""
        if not self._exchanges:
            self._wait(self._group.allreduce([buffer]))
            return
        for splits in self._splits:
            self._wait(self._group.alltoall_base(self._received, buffer, splits, splits))
            buffer.add_(self._received)


class PairGather:
    """Gathers the ranks' blocks of one buffer, in place; by an all-gather where pairs cannot be formed.

    One all-gather is of several buffers, of `_TOGETHER_BYTES` or of one larger buffer. gloo takes that much memory for
    it, NCCL none.
    """

    def __init__(self, group: dist.ProcessGroup, everyone: torch.Tensor) -> None:
        self._group: Any = group
        self._everyone = everyone
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        blocks = everyone.view(size, -1)
        self.mine = blocks[rank]
        self._rounds = list(pair_rounds(blocks, rank)) if in_pairs(group, everyone, size) else []

    @staticmethod
    def run(gathers: Sequence[PairGather]) -> None:
        """Fill the other ranks' blocks of all these buffers, which belong to one group."""
        for together in _one_gather([one for one in gathers if not one._rounds]):
            group, everyone = together[0]._group, [one._everyone for one in together]
            # torch 2.13 gave both new names and deprecated the old ones.
            if len(together) == 1:
                gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                gather(everyone[0], together[0].mine, group=group)
            else:
                gather = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
                gather(everyone, [one.mine for one in together]).wait()
        for exchanges in zip(*(one._rounds for one in gathers), strict=True):
            group, works = gathers[0]._group, []
            for theirs, ours, peer in exchanges:
                if ours.nbytes < _SMALL_BYTES:
                    splits = [len(ours) if rank == peer else 0 for rank in range(group.size())]
                    works.append(group.alltoall_base(theirs, ours, splits, splits))
                else:
                    works += [group.send([ours], peer, _SWAP_TAG), group.recv([theirs], peer, _SWAP_TAG)]
            for work in works:
                work.wait()


def _one_gather(gathers: Sequence[PairGather]) -> list[list[PairGather]]:
    """Those that one all-gather does: of one dtype, and up to a size."""

    def size(one: PairGather) -> int:
        alone = one._everyone.device.type != "cpu" and _is_gloo(one._group)  # gloo packs on the CPU only
        return _TOGETHER_BYTES + 1 if alone else one._everyone.nbytes

    alike = grouped(gathers, lambda one: one._everyone.dtype).values()
    return [bucket for same in alike for bucket in in_buckets(same, size, _TOGETHER_BYTES)]


def pair_rounds(blocks: torch.Tensor, rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """The exchanges that fill the blocks [ranks, n] of the other ranks.

    Yields:
        What is received, what is sent, and the rank with which; to be done one after the other.
    """
    size = len(blocks)
    for bit in range(size.bit_length() - 1):
        width, peer = 1 << bit, rank ^ 1 << bit
        held, wanted = rank >> bit << bit, peer >> bit << bit
        yield blocks[wanted : wanted + width].view(-1), blocks[held : held + width].view(-1), peer


def in_pairs(group: Any, buffer: torch.Tensor, size: int) -> bool:
    """Whether messages between pairs of ranks can be sent, and cost less than gloo's collectives."""
    return size & (size - 1) == 0 and buffer.device.type == "cpu" and _is_gloo(group)


def _is_gloo(group: Any) -> bool:
    # Groups that were made past torch's list of groups, as those of replicas, are backends themselves.
    return (dist.get_backend(group) if isinstance(group, dist.ProcessGroup) else group.name()).endswith("gloo")
