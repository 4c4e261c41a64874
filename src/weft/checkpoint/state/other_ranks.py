"""Tensors that only some ranks have, as those of the stages of a pipeline: the others learn what there is.

A module has the parameters of other stages on meta, under their names, and optimizers have no state for them. What the
ranks bring to a checkpoint has to be alike, but for the blocks that they write.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.checkpoint.format.tensor_blocks import Held, whole
from weft.checkpoint.state.collect import Checkpoint, Content, has_owners
from weft.context import DistContext
from weft.peers.agreement import exchange

__all__ = ["add_elsewhere"]


def add_elsewhere(content: Content, state: Checkpoint, ctx: DistContext) -> dict[str, frozenset[int]]:
    """Add what other ranks have to what this one has, without values; a meeting through the store, if there is any.

    Returns:
        The ranks that have a tensor, by name, for those that not all have.
    """
    if not has_owners(state):
        return {}
    optimizers = [key for key, obj in state.objects.items() if isinstance(obj, torch.optim.Optimizer)]
    mine: dict[str, Any] = {
        "here": {
            name: [held.dtype, held.shape, held.is_sharded]
            for name, held in content.tensors.items()
            if not held.tensor.is_meta
        },
        "states": {key: content.values[key]["state"] for key in optimizers},
    }
    told = exchange(ctx.require_collective("save"), "save: tensors of other ranks", mine)
    for key in optimizers:
        found = {name: entry for one in told for name, entry in one["states"][key].items()}
        order = [name for group in content.values[key]["groups"] for name in group["params"]]
        content.values[key]["state"] = {name: found[name] for name in order if name in found}
    there = {name: entry for one in told for name, entry in one["here"].items()}
    content.tensors.update(
        {name: _elsewhere(name, *entry) for name, entry in there.items() if name not in mine["here"]}
    )
    for name in sorted(content.tensors):  # in the same order on all ranks
        content.tensors[name] = content.tensors.pop(name)
    having = {name: frozenset(rank for rank, one in enumerate(told) if name in one["here"]) for name in there}
    return {name: ranks for name, ranks in having.items() if len(ranks) < ctx.world_size}


def _elsewhere(name: str, dtype: str, shape: list[int], is_sharded: bool) -> Held:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    return Held(name, tensor, is_sharded=is_sharded, block=whole(shape), local=tensor)
