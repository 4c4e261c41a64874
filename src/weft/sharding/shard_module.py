"""Sharding a module: checks, agreement of the ranks, then the engine; and what hung on the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from weft.context import DistContext
from weft.context.placement import apply_layout
from weft.context.sub_contexts import mesh_along
from weft.contract import (
    agree_on_parameters,
    check_data_axes,
    check_methods,
    check_strategy_module,
    gradient_axes,
    reduce_dtype,
)
from weft.contract.select_modules import Selection
from weft.engines.options import OtherMesh, ShardOptions
from weft.errors import ContextError, listed
from weft.peers.ledger import Ledger
from weft.sharding.layouts_over_axes import (
    Dims,
    Layouts,
    broadcast_state,
    facts_of,
    other_dims,
    put_on_our_mesh,
    reductions,
)
from weft.sharding.meta import WeightSource, is_meta, on_meta_anywhere, with_values
from weft.sharding.shard_checks import (
    check_drawn,
    check_optimizers,
    check_parameters,
    check_weights,
    groups_of,
    reshard_of,
)
from weft.sharding.units import UnitChoice, gather_dtypes, plan_units


def shard_module(
    what: str,
    module: nn.Module,
    found: Layouts,
    ctx: DistContext,
    axes: Dims,
    options: ShardOptions,
    *,
    rebind: Sequence[torch.optim.Optimizer] = (),
    units: UnitChoice | None = None,
    ignored: Selection | None = None,
    weights: WeightSource = None,
) -> Any:
    """Check everything, agree with the other ranks, then shard `module`.

    Changes: `module` and the optimizers, as `fully_shard` says. Collectives: as it says.

    Args:
        what: Name of the transform, for errors.
        module: To be sharded.
        found: Where its parameters lie.
        ctx: The current context.
        axes: From `sharding_axes`.
        options: What the user asked for; what the other arguments select is filled in.
        rebind: Optimizers over the module's parameters.
        units: What is gathered together.
        ignored: Parts that stay whole.
        weights: State for a module on meta; "later": it stays there, for `load_weights`.

    Returns:
        What the engine offers to later transforms; None with one rank and one device.

    Raises:
        AlreadyApplied: A part is sharded or replicated already.
        OrderError: A living optimizer holds parameters and is not in `rebind`.
        TypeError: Not a module.
        ValueError: An option is out of range.
    """
    flat = [name for together in axes for name in together]
    check_strategy_module(what, module, found, flat)
    sub = ctx.on(flat)
    later, on_meta = weights == "later", is_meta(module)
    check_weights(what, type(module).__name__, weights, on_meta=on_meta)
    check_methods(what, module, options.methods)
    reshard = reshard_of(what, ctx, axes, options.reshard_after_forward)
    others = other_dims(found, ctx, axes)
    plan = plan_units(what, module, units, ignored, others)
    options = replace(
        options,
        reshard_after_forward=reshard,
        reshard_units={unit: reshard_of(what, ctx, axes, own) for unit, own in plan.reshard.items()},
        units=plan.units,
        ignored=plan.ignored,
        dtype=reduce_dtype(module),
        gather=gather_dtypes(module),
    )
    if sub.world_size > 1:
        check_parameters(what, module, plan)
    check_optimizers(what, module, rebind)
    if sub.world_size > 1:
        facts = options.facts() | {
            "axes": list(map(list, axes)),
            "units": plan.names,
            "rebind": groups_of(module, rebind),
            **facts_of(found, ctx, flat),
            "later": [name for name, t in module.state_dict(keep_vars=True).items() if t.is_meta] if later else False,
        }
        world = ctx.require_collective(what)
        agree_on_parameters(what, module, ctx, facts)
        on_meta = on_meta_anywhere(what, on_meta, world)
    if on_meta and not later:
        check_drawn(what, found)
    old = dict(module.named_parameters())
    source = with_values(what, module, ctx, sub, weights, on_meta=on_meta)
    if source is None and sub.group is not None:
        broadcast_state(module, found, ctx, flat)
    if sub.world_size > 1:
        assert sub.group is not None
        dims = {plan.unit_of[name]: own for name, own in others.items() if own and name in plan.unit_of}
        options = replace(
            options,
            make_real=None if source is None else source.make_real,
            apart=reductions(found, ctx, flat, options.ignored),
            specs=put_on_our_mesh(module, found, ctx, axes, options.ignored),
            other_meshes={unit: OtherMesh(mesh_along(ctx, dims[unit]), sub.world_size) for unit in sorted(dims)},
        )
        peers = Ledger(sub.world, what, copies=ctx.on(axes[0]).world if len(axes) > 1 else None)
        sharded: Any = ctx.engine.shard(module, mesh_along(ctx, axes), sub.group, options, peers)
    else:
        sharded = apply_layout(module, ctx, flat, "all")
    exchange_parameters(module, old, rebind)
    return sharded


def exchange_parameters(
    module: nn.Module, old: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
) -> None:
    """Carry over what hung on the parameters a module had, to those it has now.

    Changes: attributes of the new parameters; optimizers, which continue with them. Collectives: where
    shards were made whole, one all-gather per tensor of state.
    """
    new = {name: p for name, p in module.named_parameters() if p is not old[name]}
    for name, parameter in new.items():
        for key, value in vars(old[name]).items():
            if key not in vars(parameter):
                setattr(parameter, key, value)
    from weft.engines.torch.steps.rebind import rebind  # noqa: PLC0415  (half a second of imports in torch)

    rebind(optimizers, {old[name]: parameter for name, parameter in new.items()})


def sharding_axes(
    what: str, module: nn.Module, found: Layouts, ctx: DistContext, axis: str | Sequence[str] | None
) -> Dims:
    """The mesh axes to shard over: `(shard,)` or `(replica, shard)`, of which each may be several axes together.

    By default the data axes; axes along which a batch is in parts belong to the last one, where their ranks hold
    other parts. None where there is nothing to shard over.

    Raises:
        ContextError: There is no such axis, there are more than two, or one of `gradient_axes` is left out.
    """
    more: tuple[str, ...] = ()
    if axis is None:
        averaged = gradient_axes(module, ctx)
        names = tuple(name for name in ctx.data_axes if name in averaged)
        more = tuple(name for name in averaged if name not in names)
        # Along these some parameters are cut already, so that they cannot be those of copies.
        own = {axis for one in found.values() for axis in names if axis not in one.reduce_over}
        more, names = (*more, *(name for name in names if name in own)), tuple(n for n in names if n not in own)
    else:
        names = (axis,) if isinstance(axis, str) else tuple(axis)
    for name in names:
        ctx.axis_size(name)
    if len(names) > 2 or len(set(names)) != len(names) or (axis is not None and not names):
        raise ContextError(
            f"{what}: axis = {names} cannot be sharded over",
            found=f"{len(names)} axes: {listed(names) or 'none'}",
            expected='one axis, or two: ("replica", "shard")',
            fix=f'ctx = weft.start(mesh={{"replica": {ctx.axis_size(ctx.data_axes[0])}, "shard": -1}})'
            if len(ctx.data_axes) > 2
            else f"weft.{what}(...) without axis: by default over all of them",
        )
    check_data_axes(what, module, ctx, (*names, *more))
    last = tuple(name for name, _ in ctx.axes if name in (*names[-1:], *more))
    return tuple(axes for axes in (*((name,) for name in names[:-1]), last) if axes)
