"""Cutting a module: checks, agreement of the ranks, then the engine; and what hung on the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from weft.context import DistContext
from weft.context.placement import place_module
from weft.contract import ReducesIn, agree_on_parameters, check_data_axes, offered
from weft.engines.options import ShardOptions
from weft.errors import ContextError, listed
from weft.peers.agreement import exchange
from weft.peers.ledger import Ledger
from weft.sharding.meta import Source, is_meta, place_real
from weft.sharding.request import Request
from weft.sharding.shard_checks import (
    check_module,
    check_optimizers,
    check_options,
    check_parameters,
    layouts,
    reshard_of,
)
from weft.sharding.units import ignored_in, units_of

__all__ = ["exchange_parameters", "shard_module", "sharding_axes"]


def shard_module(what: str, module: nn.Module, ctx: DistContext, axes: tuple[str, ...], request: Request) -> Any:
    """Check everything, agree with the other ranks, then cut `module`.

    Changes: `module` and the optimizers, as `fully_shard` says. Collectives: as it says.

    Args:
        what: Name of the transform, for errors.
        module: To be cut.
        ctx: Where we run.
        axes: From `sharding_axes`.
        request: What the user asked for.

    Returns:
        What the engine offers to later transforms; None with one rank and one device.

    Raises:
        AlreadyApplied: A part is sharded or replicated already.
        OrderError: A living optimizer holds parameters and is not in `request.rebind`.
        TypeError: Not a module.
        ValueError: An option is out of range.
    """
    check_module(what, module, ctx)
    line = ctx.on(axes)
    check_options(what, module, ctx, request)
    reshard = reshard_of(what, ctx, axes, request.reshard_after_forward)
    groups = units_of(what, module, request.units)
    ignored = ignored_in(what, module, request.ignored)
    if line.world_size > 1:
        check_parameters(what, module, ctx, groups, ignored)
    check_optimizers(what, module, ctx, request.rebind)
    names = {id(part): name for name, part in module.named_modules()}
    facts: dict[str, object] = {
        "axes": list(axes),
        "units": [[names[id(part)] for part in group] for group in groups],
        "reshard_after_forward": reshard,
        "rebind": layouts(module, request.rebind),
        "ignored": list(ignored),
        "unused": request.unused,
        "buffers": request.buffers,
        "methods": list(request.methods),
        "offload": request.offload,
    }
    later = request.weights == "later"
    on_meta = is_meta(module)
    facts["later"] = [name for name, t in module.state_dict(keep_vars=True).items() if t.is_meta] if later else False
    if line.world_size > 1:
        world = ctx.require_collective(what)
        agree_on_parameters(what, module, ctx, facts)
        # The first rank may bring a real module, and the others one on meta.
        on_meta = any(entry["meta"] for entry in exchange(world, f"{what}: meta", {"meta": on_meta}))
    source = Source(what, module, ctx, line, request.weights) if on_meta and not later else None
    old = dict(module.named_parameters())
    if source is None:
        if later:
            place_real(module, ctx)
        else:
            place_module(what, module, ctx)
        if line.group is not None:
            ctx.engine.broadcast_state(module, line.group)
    sharded: Any = None
    if line.world_size > 1:
        assert line.group is not None
        assert ctx.mesh is not None
        dtypes = [offer.reduce_dtype for offer in offered(module, ReducesIn)]
        options = ShardOptions(
            units=groups,
            reshard_after_forward=reshard,
            dtype=dtypes[-1] if dtypes else None,
            ignored=ignored,
            unused=request.unused,
            buffers=request.buffers,
            methods=tuple(request.methods),
            offload=request.offload,
            make_real=None if source is None else source.make_real,
            strategy=what,
        )
        sharded = ctx.engine.shard(module, ctx.mesh[axes], line.group, options, Ledger(line.world, what))
    else:
        if source is not None:
            source.make_real(module)
            source.forget()
            place_module(what, module, ctx)
        sharded = ctx.engine.lay_out(module, axes, "all")
    exchange_parameters(module, ctx, old, request.rebind)
    return sharded


def exchange_parameters(
    module: nn.Module,
    ctx: DistContext,
    old: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
) -> None:
    """Carry over what hung on the parameters a module had, to those it has now.

    Changes: attributes of the new parameters; optimizers, which go on with them. Collectives: where
    shards were made whole, one all-gather per tensor of state.
    """
    new = {name: p for name, p in module.named_parameters() if p is not old[name]}
    for name, parameter in new.items():
        for key, value in vars(old[name]).items():
            if key not in vars(parameter):
                setattr(parameter, key, value)
    ctx.engine.rebind(optimizers, {old[name]: parameter for name, parameter in new.items()})


def sharding_axes(what: str, ctx: DistContext, axis: str | Sequence[str] | None) -> tuple[str, ...]:
    """The mesh axes to shard over: one, or (replica, shard).

    Raises:
        ContextError: There is no such axis, there are more than two, or a data axis is left out.
    """
    if axis is None:
        names = tuple(ctx.data_axes)
        if len(names) > 2:
            names = tuple(name for name in names if ctx.axis_size(name) > 1) or names[:1]
    else:
        names = (axis,) if isinstance(axis, str) else tuple(axis)
    for name in names:
        ctx.axis_size(name)
    if not 1 <= len(names) <= 2 or len(set(names)) != len(names):
        raise ContextError(
            f"{what}: axis = {names} cannot be sharded over",
            found=f"{len(names)} axes: {listed(names) or 'none'}",
            expected='one axis, or two: ("replica", "shard")',
            fix=f'weft.{what}(..., axis="{ctx.axes[-1][0]}")',
        )
    check_data_axes(what, ctx, names)
    return names
