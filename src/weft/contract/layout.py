"""`Layout`: where a parameter lies on the mesh, and over which ranks its gradient is summed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from weft.context import DistContext
from weft.context.rank_facts import rank_groups
from weft.contract.marks import known_objects, offered
from weft.contract.protocols import Layout, Placed, ReducesOver, SlicesInside, StepsApart
from weft.errors import ContractError
from weft.tensors.dtensor import is_sharded, resting_parameters

# While all parameters of a module are asked for: `gradient_axes` by the ids of module and context, which do not change.
_walked: ContextVar[dict[tuple[int, int], tuple[str, ...]] | None] = ContextVar("_walked", default=None)


def layouts(module: nn.Module, ctx: DistContext) -> dict[str, Layout]:
    """Tell where each parameter of a module lies.

    Derived from the parameter (a DTensor is cut as its mesh and placements say) and from `ctx` (gradients are
    summed over `gradient_axes`). What transforms offer as `Placed` is added: axes that cut, owners; and of the axes
    over which gradients are summed those that it leaves out are left out, those that it adds are added.

    Changes: nothing. Collectives: none.

    Args:
        module: With or without transforms.
        ctx: The current context.

    Returns:
        A layout per parameter, by name.

    Raises:
        ContractError: A parameter is cut over ranks that are no axis of `ctx`.

    Example:
        >>> import weft
        >>> layouts(nn.Linear(2, 2, bias=False), weft.local())
        {'weight': Layout(cut=(), owner=(), reduce_over=('data',), mesh=())}
    """
    default = gradient_axes(module, ctx)
    given: defaultdict[int, list[Layout]] = defaultdict(list)
    for _, tensor, layout in _offers(module):
        given[id(tensor)].append(layout)
    return {
        name: _layout(resting, ctx, default, given[id(p)])
        for (name, p), resting in zip(module.named_parameters(), resting_parameters(module), strict=True)
    }


def gradient_axes(module: nn.Module, ctx: DistContext) -> tuple[str, ...]:
    """The axes over which a strategy averages gradients: the data axes, and those of `ReducesOver`.

    Without those of `StepsApart`, along which it does not.

    Changes: nothing. Collectives: none.

    Args:
        module: With or without transforms.
        ctx: The current context.

    Returns:
        Names of axes, in the order of the mesh.

    Example:
        >>> import weft
        >>> gradient_axes(nn.Linear(2, 2), weft.testing.fake(0, 4, mesh={"data": 2, "context": 2}))
        ('data',)
    """
    walked, key = _walked.get(), (id(module), id(ctx))
    if walked is not None and key in walked:
        return walked[key]
    apart = apart_axes(module)
    more = {axis for part in module.modules() for offer in offered(part, ReducesOver) for axis in offer.axes}
    found = tuple(name for name, _ in ctx.axes if (name in ctx.data_axes or name in more) and name not in apart)
    if walked is not None:
        walked[key] = found
    return found


def apart_axes(module: nn.Module) -> tuple[str, ...]:
    """The axes whose ranks step on gradients of their own; see `StepsApart`.

    Changes: nothing. Collectives: none.

    Args:
        module: With or without transforms.

    Returns:
        Names of axes.

    Example:
        >>> apart_axes(nn.Linear(2, 2))
        ()
    """
    return tuple(axis for offer in offered(module, StepsApart) for axis in offer.apart_over)


def part_axes(ctx: DistContext) -> tuple[str, ...]:
    """The axes whose ranks see parts of the same batch, as transforms that `ctx` knows have said; see `ReducesOver`.

    Changes: nothing. Collectives: none.

    Args:
        ctx: The current context.

    Returns:
        Names of axes besides the data axes, in the order of the mesh.

    Example:
        >>> import weft
        >>> part_axes(weft.local())
        ()
    """
    found = {axis for one in known_objects(ctx) for offer in offered(one, ReducesOver) for axis in offer.axes}
    return tuple(name for name, _ in ctx.axes if name in found and name not in ctx.data_axes)


def slice_axes(ctx: DistContext) -> tuple[str, ...]:
    """The axes whose ranks have other positions of a sequence inside a module only; see `SlicesInside`.

    Changes: nothing. Collectives: none.

    Args:
        ctx: The current context.

    Returns:
        Names of axes, in the order of the mesh.

    Example:
        >>> import weft
        >>> slice_axes(weft.local())
        ()
    """
    found = {axis for one in known_objects(ctx) for offer in offered(one, SlicesInside) for axis in offer.slice_axes}
    return tuple(name for name, _ in ctx.axes if name in found)


def axes_of_dims(mesh: Any, ctx: DistContext) -> list[tuple[str, ...]]:
    """The axes of a context along which the ranks of each dimension of torch's mesh lie, told by the ranks.

    Raises:
        ContractError: They lie along no axis of the context, or in another order.
    """
    return [_axes_along(ranks, ctx) for ranks in _lines(mesh)]


def _lines(mesh: Any) -> Iterator[list[int]]:
    """The ranks along each dimension of a mesh, on the line through this one."""
    place = mesh.get_coordinate()
    for dim in range(mesh.ndim):
        index = tuple(slice(None) if other == dim else at for other, at in enumerate(place))
        yield mesh.mesh[index].tolist()


def _axes_along(ranks: list[int], ctx: DistContext) -> tuple[str, ...]:
    if all(rank in ctx.ranks for rank in ranks):
        places = [ctx.coordinates_of(ctx.ranks.index(rank)) for rank in ranks]
        names = tuple(name for name, _ in ctx.axes if len({place[name] for place in places}) > 1)
        line = next(group for group in rank_groups(ctx, names) if ctx.rank in group)
        if [ctx.ranks[rank] for rank in line] == ranks:
            return names
    raise ContractError(
        f"a parameter is sharded over ranks {ranks}, which form no axis of the context",
        found=f"a mesh of torch whose ranks are {ranks} here; axes {', '.join(f'{n}={s}' for n, s in ctx.axes)}",
        expected="meshes whose ranks lie along an axis of the context, in its order",
        fix='ctx = weft.start(mesh={"data": -1, "tensor": 2}); parallelize_module(model, ctx.mesh["tensor"], plan)',
    )


def _offers(module: nn.Module) -> list[tuple[str, torch.Tensor, Layout]]:
    """What transforms of the module and of its parts say of parameters and buffers, with the names of these."""
    token = _walked.set({})
    try:
        return [
            (f"{prefix}.{own}" if prefix else own, tensor, layout)
            for prefix, part in module.named_modules()
            for offer in offered(part, Placed)
            for own, tensor in (*part.named_parameters(), *part.named_buffers())
            if (layout := offer.layout(own)) is not None
        ]
    finally:
        _walked.reset(token)


def _layout(parameter: torch.Tensor, ctx: DistContext, default: tuple[str, ...], given: Sequence[Layout]) -> Layout:
    cut = {axis for layout in given for axis in layout.cut}
    mesh: tuple[tuple[str, ...], ...] = ()
    if is_sharded(parameter):
        mesh = tuple(axes_of_dims(parameter.device_mesh, ctx))
        dims = zip(parameter.placements, mesh, strict=True)
        cut |= {axis for placement, axes in dims if not placement.is_replicate() for axis in axes}
    added = {axis for layout in given for axis in layout.reduce_over if axis not in default}
    kept = {axis for axis in default if all(axis in layout.reduce_over for layout in given)}
    return Layout(
        cut=tuple(axis for axis, _ in ctx.axes if axis in cut),
        owner=tuple(dict.fromkeys(owner for layout in given for owner in layout.owner)),
        reduce_over=tuple(axis for axis, _ in ctx.axes if axis in added or axis in kept),
        mesh=mesh,
    )


def owners(module: nn.Module) -> dict[str, tuple[tuple[str, int], ...]]:
    """The `Layout.owner` of the parameters and buffers that not all ranks have, by name.

    Changes: nothing. Collectives: none.

    Args:
        module: With or without transforms.

    Returns:
        `(axis, coordinate)`s of each; nothing if every rank has all of them.

    Example:
        >>> owners(nn.Linear(2, 2))
        {}
    """
    return {name: layout.owner for name, _, layout in _offers(module) if layout.owner}


def is_here(owner: Iterable[tuple[str, int]], ctx: DistContext) -> bool:
    """Whether a rank has a parameter with this `Layout.owner`.

    Changes: nothing. Collectives: none.

    Example:
        >>> import weft
        >>> ctx = weft.testing.fake(1, 2, mesh={"pipeline": 2})
        >>> is_here([("pipeline", 0)], ctx), is_here([("pipeline", 1)], ctx), is_here([], ctx)
        (False, True, True)
    """
    return all(ctx.coordinates.get(axis, coordinate) == coordinate for axis, coordinate in owner)
