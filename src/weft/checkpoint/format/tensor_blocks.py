"""Which block of a tensor a rank holds, whether it can be saved, who holds the same, and which rank writes it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from weft.checkpoint.format.manifest import DTYPES
from weft.context import DistContext
from weft.errors import type_error
from weft.tensors.dtensor import block_of, is_sharded
from weft.tensors.quantized import is_wrapped


class Block(NamedTuple):
    """A block of a tensor: where it begins and how large it is."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it lies in the tensor, as an index."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.shape, strict=True))


def whole(shape: Iterable[int]) -> Block:
    """The block that is all of a tensor."""
    sizes = tuple(shape)
    return Block((0,) * len(sizes), sizes)


class Held(NamedTuple):
    """A tensor, and what this rank holds of it; made once, and asked from then on.

    Attributes:
        name: In the state, or in the module.
        tensor: Itself, as its object has it.
        is_sharded: Whether it is a DTensor.
        block: The block of it that this rank holds.
        local: That block, in the same memory.
    """

    name: str
    tensor: torch.Tensor
    is_sharded: bool
    block: Block
    local: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> str:
        """Its dtype, as in "float32"."""
        return str(self.tensor.dtype).removeprefix("torch.")

    def sharded_alike(self, values: torch.Tensor) -> torch.Tensor:
        """Values of this rank's block as a tensor that is sharded as this one."""
        if not self.is_sharded:
            return values
        from torch.distributed.tensor import DTensor  # noqa: PLC0415  (half a second of imports in torch)

        cut: Any = self.tensor
        return DTensor.from_local(
            values, cut.device_mesh, cut.placements, run_check=False, shape=cut.shape, stride=cut.stride()
        )


def hold(name: str, tensor: torch.Tensor) -> Held:
    """What this rank holds of a tensor."""
    if is_sharded(tensor):
        cut: Any = tensor.detach()
        shape, offsets = block_of(cut.shape, cut.device_mesh, cut.placements)
        return Held(name, tensor, is_sharded=True, block=Block(offsets, shape), local=cut.to_local())
    return Held(name, tensor, is_sharded=False, block=whole(tensor.shape), local=tensor.detach())


def hold_savable(name: str, tensor: torch.Tensor) -> Held:
    """What this rank holds of a tensor that is to be written into a file.

    Raises:
        TypeError: Its dtype or layout has no place in the format; the text names it.
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout is not torch.strided or is_lazy(tensor):
        raise type_error(
            f"save: {name} cannot be saved",
            found="a parameter without a shape"
            if is_lazy(tensor)
            else f"a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}",
            expected=f"a dense tensor with values, of {', '.join(DTYPES)}",
            fix="model(example_batch)  # a lazy module gets its parameters by the first call"
            if is_lazy(tensor)
            else "leave it out of state_dict(), or convert it there",
        )
    held = hold(name, tensor)
    if is_wrapped(held.local):
        raise type_error(
            f"save: {name} cannot be saved",
            found=f"{type(held.local).__name__} of torchao, whose numbers are in several tensors",
            expected="plain tensors; those of bitsandbytes are saved with their scales",
            fix='weft.quantized(model, ctx, "nf4")  # of the plain model; or "int8", engine="bitsandbytes"',
        )
    return held


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to be read and written."""
    flat = tensor.detach().reshape(-1)
    found: Any = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(bytearray())
    return found  # type: ignore[no-any-return]


def holders(tensors: Iterable[Held], ctx: DistContext) -> dict[str, tuple[int, ...]]:
    """The ranks of a context that hold the same block of each tensor as this one, in order.

    All of them, if it is not cut. Else those along the axes of its mesh that hold copies, and along the axes of the
    context that its mesh leaves out: those of {"tensor": 2} if it is cut over "data" alone.
    """
    everyone = tuple(range(ctx.world_size))
    known: dict[tuple[Any, ...], tuple[int, ...]] = {}
    found: dict[str, tuple[int, ...]] = {}
    for held in tensors:
        found[held.name] = everyone
        if held.is_sharded:
            cut: Any = held.tensor
            layout = cut.device_mesh, tuple(placement.is_replicate() for placement in cut.placements)
            found[held.name] = known[layout] = known.get(layout) or _holders(*layout, ctx)
    return found


def _holders(mesh: Any, copied: tuple[bool, ...], ctx: DistContext) -> tuple[int, ...]:
    if mesh.get_coordinate() is None:  # a tensor of other ranks
        return ()
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


def writers(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """Share out the tensors that every rank holds whole: the largest first, to who has least to write.

    Args:
        sizes: Bytes of each, by name.
        world_size: Number of ranks.
    """
    load = [0] * world_size
    chosen: dict[str, int] = {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        rank = load.index(min(load))
        chosen[name] = rank
        load[rank] += size
    return chosen


def overlap(one: Block, two: Block) -> Block | None:
    """The block that two blocks of one tensor share; None if there is none."""
    starts = tuple(max(a, b) for a, b in zip(one.offsets, two.offsets, strict=True))
    ends = tuple(min(a + m, b + n) for a, m, b, n in zip(one.offsets, one.shape, two.offsets, two.shape, strict=True))
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return None if any(size <= 0 for size in shape) else Block(starts, shape)
