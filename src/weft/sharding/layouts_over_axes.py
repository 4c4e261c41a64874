"""Parameters that lie along other axes than the others of a strategy, or whose gradients are summed over others.

Such are DTensors that tensor or expert parallelism has cut, by weft's transforms, by torch's `parallelize_module` or
by another library, on a mesh of ours or of its own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft import torch_internals
from weft.context import DistContext
from weft.context.sub_contexts import mesh_along, mesh_view
from weft.contract import Layout
from weft.engines.options import Reduction, StepMeshes
from weft.tensors.blocks import as_dtensor
from weft.tensors.dtensor import replace_parameters
from weft.tensors.remote_parameter import is_elsewhere

Layouts = Mapping[str, Layout]  # of a module: `layouts(module, ctx)`, which a transform asks once
Dims = tuple[tuple[str, ...], ...]  # the axes of each dimension of a mesh to shard over


def facts_of(found: Layouts, ctx: DistContext, names: Sequence[str]) -> dict[str, object]:
    """What the ranks have to agree on about parameters that lie otherwise than along these axes, as JSON values."""
    usual = _wide(ctx, names)
    others = {name: one for name, one in found.items() if one.cut or _wide(ctx, one.reduce_over) != usual}
    return {"layouts": {name: [list(one.cut), list(one.reduce_over)] for name, one in others.items()}}


def broadcast_state(module: nn.Module, found: Layouts, ctx: DistContext, names: Sequence[str]) -> None:
    """Give parameters and buffers the values of the first of the ranks that hold copies, along some axes.

    Collectives: one broadcast per set of axes.
    """
    together: dict[tuple[str, ...], list[torch.Tensor]] = {}
    for name, parameter in module.named_parameters():
        alone = {*found[name].cut, *(axis for axis, _ in found[name].owner)}
        axes = tuple(axis for axis in names if axis not in alone)
        together.setdefault(axes, []).append(parameter)
    together.setdefault(tuple(names), []).extend(module.buffers())
    for axes, tensors in together.items():
        group = ctx.on(axes).group if _size(ctx, axes) > 1 else None
        if group is not None:
            ctx.engine.broadcast_state(tensors, group)


def reductions(
    found: Layouts, ctx: DistContext, names: Sequence[str], also: Collection[str] = ()
) -> dict[str, Reduction]:
    """How gradients are reduced that are not reduced with the others: of DTensors, and over other axes.

    Args:
        found: Where the parameters lie.
        ctx: The current context.
        names: The axes of the strategy.
        also: Names of further parameters that are reduced apart.

    Returns:
        Reductions by name. Collectives: as `ctx.on` says.
    """
    usual = _wide(ctx, names)
    apart: dict[str, Reduction] = {}
    for name, layout in found.items():
        axes = _wide(ctx, layout.reduce_over)
        if not layout.mesh and axes == usual and name not in also:
            continue
        # Along these ranks hold copies of a DTensor, so that gradients may be partial sums.
        copies = {axis for along in layout.mesh for axis in along if axis not in layout.cut}
        everyone = tuple(axis for axis, _ in ctx.axes if axis in axes or axis in copies)
        apart[name] = Reduction(
            group=ctx.on(everyone).group if everyone else None,
            divide=_size(ctx, axes),
            first=all(ctx.coordinates[axis] == 0 for axis in copies if axis not in axes),
            scale=_size(ctx, axes) / _size(ctx, usual),
        )
    return apart


def dims_of(layout: Layout, ctx: DistContext, dims: Dims) -> Dims:
    """The axes over which one parameter is sharded, if the others are over `dims`: those of its gradient.

    None if those are not among the last dimension, along which parameters are cut.
    """
    own = [_wide(ctx, [axis for axis in axes if axis in layout.reduce_over]) for axes in dims]
    return tuple(axes for axes in own if axes) if own and own[-1] else ()


def other_dims(found: Layouts, ctx: DistContext, dims: Dims) -> dict[str, Dims]:
    """The axes of the parameters that are sharded over other ones than those of `dims`, by name; () if over none."""
    usual = dims_of(Layout(reduce_over=tuple(axis for axes in dims for axis in axes)), ctx, dims)
    flat = {axis for axes in dims for axis in axes}
    every = {
        # What is summed over further axes is not FSDP2's to reduce.
        name: dims_of(layout, ctx, dims) if flat.issuperset(_wide(ctx, layout.reduce_over)) else ()
        for name, layout in found.items()
    }
    return {name: own for name, own in every.items() if own != usual}


def put_on_our_mesh(
    module: nn.Module, found: Layouts, ctx: DistContext, dims: Dims, besides: Collection[str]
) -> dict[str, object]:
    """Exchange DTensors for ones on a part of the mesh of which that along `dims` is another part, in the same memory.

    Args:
        module: Whose.
        found: Where its parameters lie.
        ctx: The current context.
        dims: Over which the others are sharded.
        besides: Names of parameters that stay.

    Returns:
        Mesh and placements that each has had, by name.
    """
    specs: dict[str, object] = {}
    new: dict[Any, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        if not found[name].mesh or is_elsewhere(parameter) or name in besides:
            continue
        placed: Any = parameter
        own = dims_of(found[name], ctx, dims)
        mesh = _part_of_view(ctx, found[name], own, placed.device_mesh)
        made = as_dtensor(placed.detach().to_local(), mesh, placed.placements, placed.shape, placed.stride())
        new[parameter] = nn.Parameter(made, requires_grad=parameter.requires_grad)
        specs[name] = torch_internals.DTENSOR_SPEC.of(placed)
    replace_parameters(module, new)
    return specs


def step_meshes(module: nn.Module, found: Layouts, ctx: DistContext, dims: Dims) -> StepMeshes:
    """Where the state of parameters lies that are not like the others, if that of the others is cut along `dims`."""
    meshes: dict[nn.Parameter, tuple[DeviceMesh | None, DeviceMesh | None]] = {}
    others = other_dims(found, ctx, dims)
    for name, parameter in module.named_parameters():
        placed: Any = parameter
        if name in others or found[name].mesh:
            own = dims_of(found[name], ctx, dims)
            cut = _part_of_view(ctx, found[name], own, placed.device_mesh) if found[name].mesh else None
            meshes[parameter] = (mesh_along(ctx, own) if own else None, cut)
    return meshes


def _part_of_view(ctx: DistContext, layout: Layout, dims: Dims, mesh: DeviceMesh) -> DeviceMesh:
    """The part of our mesh with the ranks of the mesh of a DTensor, beside the part along `dims`."""
    own = [
        axes or ((mesh.mesh_dim_names or ())[number : number + 1] or (ctx.axes[0][0],))
        for number, axes in enumerate(layout.mesh)
    ]
    view = mesh_view(ctx, [*dims, *(axes for axes in own if len(axes) > 1)])
    return view[tuple("+".join(axes) for axes in own)]


def _wide(ctx: DistContext, names: Sequence[str]) -> tuple[str, ...]:
    """Those of some axes that have several ranks, in the order of the mesh."""
    return tuple(axis for axis, size in ctx.axes if axis in names and size > 1)


def _size(ctx: DistContext, names: Sequence[str]) -> int:
    return math.prod(map(ctx.axis_size, names))
