"""Tensors that only some ranks have, as those of the stages of a pipeline: the others learn what there is.

A module has the parameters of other stages on meta, under their names, and optimizers have no state for them. What the
ranks bring to a checkpoint has to be alike, but for the blocks that they write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from weft.checkpoint.state.collect import Checkpoint, Content, has_owners
from weft.context import DistContext
from weft.peers.agreement import exchange
from weft.tensors.blocks import Held, whole


def add_elsewhere(content: Content, state: Checkpoint, ctx: DistContext) -> dict[str, frozenset[int]]:
    """Add what other ranks have to what this one has, without values.

    Collectives: a meeting through the store, if ranks have different tensors or the mesh has several axes.

    Returns:
        The ranks that have a tensor, by name, for those that not all have.
    """
    if not has_owners(state):
        if len(ctx.axes) > 1:  # replicas along each axis have found out theirs by themselves
            _bring_orders(
                content, exchange(ctx.require_collective("save"), "save: orders of sums", _orders(content, state))
            )
        return {}
    optimizers = [key for key, obj in state.objects.items() if isinstance(obj, torch.optim.Optimizer)]
    mine: dict[str, Any] = {
        "here": {
            name: [held.dtype, held.shape, held.is_sharded]
            for name, held in content.tensors.items()
            if not held.tensor.is_meta
        },
        "states": {key: content.values[key]["state"] for key in optimizers},
        "orders": _orders(content, state),
    }
    told = exchange(ctx.require_collective("save"), "save: tensors of other ranks", mine)
    for key in optimizers:
        found = {name: entry for one in told for name, entry in one["states"][key].items()}
        order = [name for group in content.values[key]["groups"] for name in group["params"]]
        content.values[key]["state"] = {name: found[name] for name in order if name in found}
    _bring_orders(content, [one["orders"] for one in told])
    there = {name: entry for one in told for name, entry in one["here"].items()}
    content.tensors.update(
        {name: _elsewhere(name, *entry) for name, entry in there.items() if name not in mine["here"]}
    )
    for name in sorted(content.tensors):  # in the same order on all ranks
        content.tensors[name] = content.tensors.pop(name)
    having = {name: frozenset(rank for rank, one in enumerate(told) if name in one["here"]) for name in there}
    return {name: ranks for name, ranks in having.items() if len(ranks) < ctx.world_size}


def _orders(content: Content, state: Checkpoint) -> dict[str, dict[str, list[Any]]]:
    """See `KeepsOrder`; of each module, those of its transforms."""
    modules = [key for key, obj in state.objects.items() if isinstance(obj, nn.Module)]
    return {key: content.values[key].get("orders", {}) for key in modules}


def _bring_orders(content: Content, told: Sequence[dict[str, dict[str, list[Any]]]]) -> None:
    """Give all ranks the orders of all, each of them once."""
    for key in told[0]:
        of_all: dict[str, list[Any]] = {}
        for name, orders in (found for one in told for found in one[key].items()):
            known = of_all.setdefault(name, [])
            known += [order for order in orders if order not in known]
        if of_all:
            content.values[key]["orders"] = of_all


def _elsewhere(name: str, dtype: str, shape: list[int], is_sharded: bool) -> Held:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return Held(name, tensor, is_sharded=is_sharded, block=whole(shape), local=tensor)
