"""Tensors that only some ranks have, as those of the stages of a pipeline: the others learn what there is.

A module has the parameters of other stages on meta, under their names, and optimizers have no state for them. What the
ranks bring to a checkpoint has to be alike, but for the blocks that they write.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from weft.checkpoint.state.collect import Checkpoint, Content
from weft.context import DistContext
from weft.peers.agreement import exchange
from weft.tensors.blocks import Held, whole


def add_other_ranks(content: Content, state: Checkpoint, ctx: DistContext) -> dict[str, frozenset[int]]:
    """Add what other ranks have to what this one has, without values.

    Collectives: a meeting through the store, if ranks have different tensors or the mesh has several axes.

    Returns:
        The ranks that have a tensor, by name, for those that not all have.
    """
    is_divided = content.is_divided
    if not is_divided and len(ctx.axes) == 1:
        return {}
    # Replicas along each axis have found out by themselves in which order they sum, see `KeepsOrder`.
    modules = [key for key, obj in state.objects.items() if isinstance(obj, nn.Module)]
    optimizers = [key for key, obj in state.objects.items() if isinstance(obj, torch.optim.Optimizer) and is_divided]
    mine: dict[str, Any] = {
        "here": {
            name: [held.dtype, held.shape, held.is_sharded]
            for name, held in content.tensors.items()
            if is_divided and not held.tensor.is_meta
        },
        "states": {key: content.values[key]["state"] for key in optimizers},
        "orders": {key: content.values[key].get("orders", {}) for key in modules},
    }
    what = "tensors of other ranks" if is_divided else "orders of sums"
    told = exchange(ctx.require_collective("save"), f"save: {what}", mine)
    for key in modules:  # all ranks get the orders of all, each of them once
        orders: dict[str, list[Any]] = {}
        for name, found in (item for one in told for item in one["orders"][key].items()):
            known = orders.setdefault(name, [])
            known += [order for order in found if order not in known]
        if orders:
            content.values[key]["orders"] = orders
    if not is_divided:
        return {}
    for key in optimizers:
        states = {name: entry for one in told for name, entry in one["states"][key].items()}
        names = [name for group in content.values[key]["groups"] for name in group["params"]]
        content.values[key]["state"] = {name: states[name] for name in names if name in states}
    there = {name: entry for one in told for name, entry in one["here"].items()}
    for name, (dtype, shape, is_sharded) in there.items():
        if name not in mine["here"]:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            content.tensors[name] = Held(name, tensor, is_sharded=is_sharded, block=whole(shape), local=tensor)
    for name in sorted(content.tensors):  # in the same order on all ranks
        content.tensors[name] = content.tensors.pop(name)
    having = {name: frozenset(rank for rank, one in enumerate(told) if name in one["here"]) for name in there}
    return {name: ranks for name, ranks in having.items() if len(ranks) < ctx.world_size}
