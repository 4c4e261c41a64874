"""Which block of a tensor a rank holds, who holds the same, and which rank writes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from weft.context import DistContext
from weft.tensors.dtensor import is_sharded

__all__ = ["Block", "block_of", "holders", "local_part", "overlap", "writers"]


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


def block_of(tensor: torch.Tensor) -> Block:
    """The block of a tensor that this rank holds."""
    if not is_sharded(tensor):
        return Block((0,) * tensor.dim(), tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415

    cut: Any = tensor
    shape, offsets = compute_local_shape_and_global_offset(cut.shape, cut.device_mesh, cut.placements)
    return Block(tuple(offsets), tuple(shape))


def holders(tensors: Mapping[str, torch.Tensor], ctx: DistContext) -> dict[str, tuple[int, ...]]:
    """The ranks of a context that hold the same block of each tensor as this one, in order.

    All of them, if it is not cut. Else those along the axes of its mesh that hold copies, and along the axes of the
    context that its mesh leaves out: those of {"tensor": 2} if it is cut over "data" alone.
    """
    everyone = tuple(range(ctx.world_size))
    known: dict[tuple[Any, ...], tuple[int, ...]] = {}
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        found[name] = everyone
        if is_sharded(tensor):
            cut: Any = tensor
            layout = cut.device_mesh, tuple(placement.is_replicate() for placement in cut.placements)
            found[name] = known[layout] = known.get(layout) or _holders(*layout, ctx)
    return found


def _holders(mesh: Any, copied: tuple[bool, ...], ctx: DistContext) -> tuple[int, ...]:
    members = set(mesh.mesh.flatten().tolist())
    place = zip(copied, mesh.get_coordinate(), strict=True)
    alike = mesh.mesh[tuple(slice(None) if is_copied else at for is_copied, at in place)].flatten().tolist()
    grid: Any = torch.tensor(ctx.ranks).view([size for _, size in ctx.axes])
    here = tuple(ctx.coordinates.values())
    lines = [grid[(*here[:dim], slice(None), *here[dim + 1 :])].tolist() for dim in range(grid.dim())]
    is_left_out = [len(members.intersection(line)) == 1 for line in lines]
    found: set[int] = set()
    for rank in (ctx.ranks.index(one) for one in alike if one in ctx.ranks):
        there = zip(is_left_out, ctx.coordinates_of(rank).values(), strict=True)
        near = grid[tuple(slice(None) if out else slice(at, at + 1) for out, at in there)]
        found |= {ctx.ranks.index(one) for one in near.flatten().tolist()}
    return tuple(sorted(found))


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
