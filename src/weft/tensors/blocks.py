"""Which block of a tensor lies on this rank: asked once, and carried from there.

Nothing else in weft calls `DTensor.from_local`: who makes a DTensor of what a rank holds comes here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from weft import torch_internals
from weft.tensors.dtensor import is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


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


def hold(name: str, tensor: torch.Tensor) -> Held:
    """What this rank holds of a tensor."""
    if not is_sharded(tensor):
        return Held(name, tensor, is_sharded=False, block=whole(tensor.shape), local=tensor.detach())
    cut: Any = tensor.detach()
    block = block_of(cut.shape, cut.device_mesh, cut.placements)
    return Held(name, tensor, is_sharded=True, block=block, local=cut.to_local())


def whole(shape: Iterable[int]) -> Block:
    """The block that is all of a tensor."""
    sizes = tuple(shape)
    return Block((0,) * len(sizes), sizes)


def block_of(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> Block:
    """The block that this rank holds of a tensor of this shape that lies so on a mesh."""
    size, offsets = torch_internals.block_of(torch.Size(shape), mesh, tuple(placements))
    return Block(tuple(offsets), tuple(size))


def block_at(
    shape: Sequence[int], sizes: Sequence[int] = (), place: Sequence[int] = (), placements: Sequence[Any] = ()
) -> Block:
    """The block at any place of a mesh: of the rank with these coordinates, by chunks as `torch.chunk` makes them.

    Args:
        shape: Of the tensor.
        sizes: Of the mesh, dim by dim.
        place: The coordinates of the rank on it.
        placements: Of the tensor on it.
    """
    offsets, lengths = [0] * len(shape), list(shape)
    # What FSDP2 has cut is a part of what the other axes had left, though it comes first.
    for dim in sorted(range(len(placements)), key=lambda one: torch_internals.strided_shard.holds(placements[one])):
        if not placements[dim].is_replicate():
            cut = placements[dim].dim
            start, lengths[cut] = chunk(lengths[cut], sizes[dim], place[dim])
            offsets[cut] += start
    return Block(tuple(offsets), tuple(lengths))


def chunk(length: int, pieces: int, place: int) -> tuple[int, int]:
    """Where one of the pieces begins in which `torch.chunk` and FSDP2 cut a length, and how long it is."""
    per_piece = -(-length // pieces)
    start = min(place * per_piece, length)
    return start, min(start + per_piece, length) - start


def flat_index(place: Sequence[int], shape: Sequence[int]) -> int:
    """How many places of a shape lie before one, in the order of memory.

    Example:
        >>> flat_index((1, 2), (4, 3))
        5
    """
    index = 0
    for at, size in zip(place, shape, strict=True):
        index = index * size + at
    return index


def overlap(one: Block, two: Block) -> Block | None:
    """The block that two blocks of one tensor share; None if there is none."""
    starts = tuple(max(a, b) for a, b in zip(one.offsets, two.offsets, strict=True))
    ends = tuple(min(a + m, b + n) for a, m, b, n in zip(one.offsets, one.shape, two.offsets, two.shape, strict=True))
    shape = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return None if any(size <= 0 for size in shape) else Block(starts, shape)


def as_dtensor(
    part: torch.Tensor, mesh: Any, placements: Sequence[Any], shape: Any = None, stride: Any = None
) -> DTensor:
    """What this rank holds of a tensor, as a DTensor in the same memory; nothing is checked or sent.

    Args:
        part: Its block; also on the CPU, between steps of a device.
        mesh: The ranks that hold the blocks.
        placements: How they are made of the whole.
        shape: Of the whole; default: all ranks hold as much as this one.
        stride: Of the whole, with `shape`.
    """
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  (half a second of imports in torch)

    elsewhere = part.device.type not in (mesh.device_type, "meta")  # torch would copy it to the device
    given = part.detach().to("meta") if elsewhere else part
    made: DTensor = DTensor.from_local(given, mesh, tuple(placements), run_check=False, shape=shape, stride=stride)
    if elsewhere:
        spec = torch_internals.DTENSOR_SPEC.of(made)
        made = cast("Any", DTensor)(part.view_as(part), spec, requires_grad=part.requires_grad)
    return made


def sharded_as(part: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, as a DTensor where `other` is one, which has the shape and is cut alike."""
    if not is_sharded(other):
        return part
    return as_dtensor(part, other.device_mesh, other.placements, other.shape, other.stride())


def cut_as(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """This rank's block of a plain tensor, in memory of its own, as a DTensor that is cut as `other`."""
    placed: Any = other
    block = block_of(placed.shape, placed.device_mesh, placed.placements)
    part = value.detach()[block.slices].clone(memory_format=torch.contiguous_format)
    return sharded_as(part, other)


def divided_as(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A gradient, divided as its parameter is: one that was assigned may be whole, and another one a sum to be.

    Collectives: those of a change of placements.
    """
    if not is_sharded(parameter):
        return gradient
    if not is_sharded(gradient):
        return cut_as(gradient, parameter)
    alike = gradient.placements == parameter.placements
    return gradient if alike else gradient.redistribute(placements=parameter.placements)


def redistributed_as(value: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A tensor in any layout, cut as `other` is, or whole if that is or has another shape.

    Collectives: one all-gather per axis that cuts `value`.
    """
    full = full_tensor(value)
    return cut_as(full, other) if is_sharded(other) and full.shape == other.shape else full


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor. Collectives: one all-gather per axis of its mesh that cuts it."""
    if not is_sharded(tensor):
        return tensor
    cut: Any = tensor
    strided = [dim for dim, placement in enumerate(cut.placements) if torch_internals.strided_shard.holds(placement)]
    if strided:  # what FSDP2 has cut comes first: torch would send everything twice
        cut = whole_along(cut, strided[-1] + 1)
    found: torch.Tensor = cut.full_tensor()
    return found


def whole_along(tensor: torch.Tensor, count: int, mesh: Any = None) -> Any:
    """A DTensor made whole along the first axes of its mesh. Collectives: one all-gather per axis that cuts it.

    Args:
        tensor: Cut along them by chunks of what the other axes have left, as FSDP2 cuts.
        count: How many axes.
        mesh: With the other axes; default: that part of its own.

    Returns:
        A DTensor over the other axes; a plain tensor if there are none.
    """
    cut: Any = tensor.detach()
    own, placements = cut.device_mesh, cut.placements
    part: torch.Tensor = cut.to_local()
    rest = own[own.mesh_dim_names[count:]] if mesh is None and count < own.ndim else mesh
    shape = cut.shape if rest is None else block_of(cut.shape, rest, placements[count:]).shape
    for dim, placement in enumerate(placements[:count]):
        part = part if placement.is_replicate() else _gathered(part, own, dim, placement.dim, shape)
    return part if rest is None else as_dtensor(part, rest, placements[count:], cut.shape, cut.stride())


def unsharded_parameter(parameter: Any, spec: Any) -> nn.Parameter:
    """A parameter with the values and the gradient of a sharded one. Collectives: all-gathers.

    Args:
        parameter: As FSDP2 has sharded it.
        spec: Mesh and placements of the parameter before that; None: it was a plain one.
    """
    mesh = None if spec is None else spec.mesh
    count = parameter.device_mesh.ndim - (0 if mesh is None else mesh.ndim)
    whole = nn.Parameter(whole_along(parameter, count, mesh), requires_grad=parameter.requires_grad)
    if is_sharded(parameter.grad):
        whole.grad = whole_along(parameter.grad, count, mesh)
    return whole


def _gathered(part: torch.Tensor, mesh: Any, dim: int, cut: int, shape: Sequence[int]) -> torch.Tensor:
    """The chunks of a tensor of this shape from all ranks along one axis of a mesh, put together."""
    ranks, total = mesh.size(dim), shape[cut]
    if ranks == 1:
        return part
    per_rank = -(-total // ranks)
    sent = part.movedim(cut, 0)
    padded = sent.new_zeros((per_rank, *sent.shape[1:]))
    padded[: len(sent)] = sent
    pieces = [torch.empty_like(padded) for _ in range(ranks)]
    torch.distributed.all_gather(pieces, padded, group=mesh.get_group(dim))
    return torch.cat(pieces)[:total].movedim(0, cut).contiguous()


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to be read and written."""
    flat = tensor.detach().reshape(-1)
    found: Any = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(bytearray())
    return found  # type: ignore[no-any-return]
