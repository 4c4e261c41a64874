"""Which block of a tensor a rank holds, and which rank writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from weft.engines.torch.shards import is_sharded

__all__ = ["Block", "block_of", "local_part", "overlap", "writers"]


class Block(NamedTuple):
    """A block of a tensor: where it begins and how large it is."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        total = 1
        for size in self.shape:
            total *= size
        return total


def block_of(tensor: torch.Tensor) -> tuple[Block, bool]:
    """The block of a tensor that this rank holds, and whether this rank is the one to write it.

    Of blocks that several ranks hold alike, the first along each axis of the mesh is written. A
    tensor that is not cut is held by all; who writes it is decided by `writers`.
    """
    if not is_sharded(tensor):
        return Block((0,) * tensor.dim(), tuple(tensor.shape)), True
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

    cut: Any = tensor
    shape, offsets = compute_local_shape_and_global_offset(cut.shape, cut.device_mesh, cut.placements)
    copies = [index for index, placement in enumerate(cut.placements) if placement.is_replicate()]
    place = cut.device_mesh.get_coordinate()
    return Block(tuple(offsets), tuple(shape)), all(place[index] == 0 for index in copies)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's block itself, in the same memory."""
    cut: Any = tensor.detach()
    part: torch.Tensor = cut.to_local() if is_sharded(tensor) else cut
    return part


def writers(whole: Mapping[str, torch.Tensor], world_size: int) -> dict[str, int]:
    """Share out the tensors that every rank holds whole: the largest first, to who has least to write."""
    load = [0] * world_size
    chosen: dict[str, int] = {}
    for name, tensor in sorted(whole.items(), key=lambda item: (-item[1].numel() * item[1].element_size(), item[0])):
        rank = load.index(min(load))
        chosen[name] = rank
        load[rank] += tensor.numel() * tensor.element_size()
    return chosen


def overlap(one: Block, two: Block) -> Block | None:
    """The block that two blocks of one tensor share; None if there is none."""
    starts = tuple(max(a, b) for a, b in zip(one.offsets, two.offsets, strict=True))
    ends = tuple(min(a + m, b + n) for a, m, b, n in zip(one.offsets, one.shape, two.offsets, two.shape, strict=True))
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return None if any(size <= 0 for size in shape) else Block(starts, shape)
