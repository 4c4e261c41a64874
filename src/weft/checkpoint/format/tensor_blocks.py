"""Whether a tensor can be saved or sent, who holds the same block of it, and which rank writes it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from weft.checkpoint.format.manifest import DTYPES
from weft.context import DistContext
from weft.engines.torch.device.emptied import has_memory
from weft.errors import ContextError, ContractError, listed, type_error
from weft.tensors.blocks import Held, hold
from weft.tensors.quantized import is_wrapped


def hold_savable(name: str, tensor: torch.Tensor, *, in_place: bool = False, what: str = "save") -> Held:
    """What this rank holds of a tensor that is to be written into a file, or sent as if it came from one.

    Args:
        name: In the state.
        tensor: Which.
        in_place: Whether restoring writes into its memory.
        what: The function that asks, for errors.

    Raises:
        TypeError: Its dtype or layout has no place in the format, or its memory takes no values; the text names it.
        ContractError: It is without memory, inside `offloaded`.
    """
    problem = f"{what}: {name} cannot be {'saved' if what == 'save' else 'read'}"
    dtype, lazy = str(tensor.dtype).removeprefix("torch."), is_lazy(tensor)
    if lazy or dtype not in DTYPES or tensor.layout is not torch.strided:
        found = f"a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}"
        raise type_error(
            problem,
            found="a parameter without a shape" if lazy else found,
            expected=f"a dense tensor with values, of {', '.join(DTYPES)}",
            fix="model(example_batch)  # a lazy module gets its parameters by the first call"
            if lazy
            else "leave it out of state_dict(), or convert it there",
        )
    if in_place:
        check_memory(what, name, tensor)
    held = hold(name, tensor)
    if is_wrapped(held.local):
        raise type_error(
            problem,
            found=f"{type(held.local).__name__} of torchao, whose numbers are in several tensors",
            expected="plain tensors; those of bitsandbytes are saved with their scales",
            fix='weft.quantized(model, ctx, "nf4")  # of the plain model; or "int8", engine="bitsandbytes"',
        )
    if not has_memory(held.local):
        raise ContractError(
            f"{what}: {name} has no values now",
            found="a tensor without memory, as inside weft.offloaded",
            expected="values, as before and after it",
            fix="with weft.offloaded(model, optimizer, ctx): ...  # something else; weft.save(...) and such after it",
        )
    return held


def check_memory(what: str, name: str, tensor: torch.Tensor) -> None:
    """Raise if values could not be put into a tensor, as with those of `expand`.

    Raises:
        TypeError: Several of its elements are one place in memory; the text names it.
    """
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise type_error(
            f"{what}: {name} could not be restored",
            found=f"shape {tuple(tensor.shape)} with strides {tensor.stride()}: elements that share memory",
            expected="memory of its own for each element",
            fix='self.register_buffer("name", value.expand(shape).clone())',
        )


def check_mesh_ranks(what: str, name: str, mesh: Any, ctx: DistContext, *, fix: str) -> None:
    """Raise if a tensor is cut over ranks of which some take no part.

    Raises:
        ContextError: The text names the tensor and the ranks.
    """
    outside = set(mesh.mesh.flatten().tolist()) - set(ctx.ranks)
    if outside and mesh.size() > 1:
        raise ContextError(
            f"{what}: {name} is sharded over ranks that the context does not have",
            found=f"global ranks {listed(sorted(outside))} besides {listed(ctx.ranks)}",
            expected="the context the module was sharded with",
            fix=fix,
        )


def ranks_with_same_blocks(tensors: Iterable[Held], ctx: DistContext) -> dict[str, tuple[int, ...]]:
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


def share_out_writes(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
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
