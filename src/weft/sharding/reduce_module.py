"""Averaging the gradients of a module: checks, agreement of the ranks, then the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from weft.context import DistContext
from weft.context.placement import apply_layout, place_module
from weft.contract import agree_on_parameters
from weft.engines.options import ReduceOptions
from weft.engines.torch.reducing.trained import check_hooks
from weft.peers.ledger import Ledger
from weft.sharding.layouts_over_axes import Layouts, broadcast_state, facts_of, reductions


def reduce_module(
    module: nn.Module,
    found: Layouts,
    ctx: DistContext,
    names: Sequence[str],
    options: ReduceOptions,
    facts: Mapping[str, object],
    *,
    cut: str = "no",
) -> Any:
    """Check, agree with the other ranks, then let backward average the gradients of `module`.

    Changes: `module`, as `replicate` says. Collectives: as it says.

    Args:
        module: Of which each rank has a copy.
        found: Where its parameters lie.
        ctx: The current context.
        names: The axes over which gradients are averaged.
        options: What the user asked for.
        facts: What the ranks have to agree on besides.
        cut: What is divided among the devices of one rank, see `apply_layout`.

    Returns:
        What the engine offers to later transforms; None with one rank and one device.

    Raises:
        ContextError: The ranks pass different models or options.
        ContractError: Parameters have hooks that would see gradients of one rank.
        ValueError: The module lies on another device.
    """
    what = options.strategy
    sub = ctx.on(names)
    if sub.world_size == 1:
        place_module(what, module, ctx)
        return apply_layout(module, ctx, [name for name, _ in sub.axes], cut)
    ctx.require_collective(what)
    check_hooks(what, type(module).__name__, module.named_parameters())
    agree_on_parameters(what, module, ctx, {**options.facts(), **facts, **facts_of(found, ctx, names)})
    place_module(what, module, ctx)
    assert sub.group is not None
    broadcast_state(module, found, ctx, names)
    options = replace(options, apart=reductions(found, ctx, names))
    return ctx.engine.reduce_gradients(module, sub.group, options, Ledger(sub.world, what))
