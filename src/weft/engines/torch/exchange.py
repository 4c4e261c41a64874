"""Sum a small buffer over the ranks of a gloo group by exchanges between pairs.

gloo's all-reduce sends a buffer in many pieces; for some kilobytes they cost more than the numbers.
Here each message is whole. Recursive doubling: in round k each rank swaps its partial sum with the
rank whose number differs in bit k, as an all-to-all in which all other pieces are empty (cheaper than
a send and a receive, which gloo handles apart). Both add the same two numbers, so all ranks end with
the same bits.

Source: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005, section 4.4.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["SmallSum", "as_real"]

_MAX_BYTES = 2**20


def as_real(buffer: torch.Tensor) -> torch.Tensor:
    """The same memory as real numbers, [2 * n] for n complex ones: gloo and 16-bit dtypes know no others."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


class SmallSum:
    """Sums buffers of one size over a group in place; by an all-reduce where exchanges do not pay."""

    def __init__(self, group: dist.ProcessGroup, like: torch.Tensor) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        size = dist.get_world_size(group)
        small = like.numel() * like.element_size() <= _MAX_BYTES
        pairs = size & (size - 1) == 0
        self._exchanges = small and pairs and like.device.type == "cpu" and dist.get_backend(group).endswith("gloo")
        peers = [self._rank ^ 1 << bit for bit in range(size.bit_length() - 1)]
        self._splits = [[like.numel() if rank == peer else 0 for rank in range(size)] for peer in peers]
        self._received = torch.empty_like(like) if self._exchanges else like

    def __call__(self, buffer: torch.Tensor) -> None:
        """Replace `buffer` by the sum over the ranks."""
        if not self._exchanges:
            self._group.allreduce([buffer]).wait()
            return
        for splits in self._splits:
            self._group.alltoall_base(self._received, buffer, splits, splits).wait()
            buffer.add_(self._received)
