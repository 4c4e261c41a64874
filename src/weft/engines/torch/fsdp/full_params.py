"""Whole parameters for a moment, of a module on which FSDP2 may lie."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft import torch_internals
from weft.engines.torch.parts.left_gathered import drop_gathered
from weft.tensors.blocks import full_tensor, redistributed_as
from weft.tensors.dtensor import local, resting_parameters


@contextlib.contextmanager
def gathered(
    module: nn.Module, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, *, write: bool
) -> Iterator[None]:
    """Whole parameters inside the body; with `write`, those of the first rank stay, on all ranks.

    Args:
        module: Whose.
        parameters: Those of them that are to be sent along `group` when they are not cut.
        group: The ranks that hold copies.
        write: Whether changes stay.
    """
    units = [part for part in module.modules() if isinstance(part, FSDPModule)]
    shards = dict(zip((n for n, _ in module.named_parameters()), resting_parameters(module), strict=True))
    wanted = {id(p) for p in parameters}
    plain = [p for p in parameters if not isinstance(p, DTensor)]
    drop_gathered(module)  # what a forward pass left gathered may be older than the shards
    for unit in units:
        unit.unshard()
    cut, hooks = _put_whole(module, shards), _take_hooks(module)
    try:
        yield
        if write:
            with torch.no_grad():
                for name, whole_one in module.named_parameters():
                    shard = shards[name]
                    if isinstance(shard, DTensor) and id(shard) in wanted:
                        _broadcast_first(whole_one.data, shard, group)
                        local(shard).copy_(local(redistributed_as(whole_one.detach(), shard)))
                for p in plain if group is not None else ():
                    dist.broadcast(p.data, group=group, group_src=0)
    finally:
        for slots, name, parameter in cut:
            slots[name] = parameter
        for registered, key, hook in hooks:
            registered[key] = hook
        for unit in units:
            unit.reshard()


def _put_whole(module: nn.Module, shards: Mapping[str, nn.Parameter]) -> list[tuple[dict[str, Any], str, Any]]:
    """Exchange what FSDP2 does not gather as it is for plain parameters; returns what was where.

    These are DTensors even when FSDP2 has gathered them, and parameters that it gathers in a lower dtype.
    """
    held: list[dict[str, Any]] = [torch_internals.PARAMETERS.of(part) for part in module.modules()]
    lower = {id(p): shards[name] for name, p in module.named_parameters() if p.dtype != shards[name].dtype}
    found = [(slots, name, p) for slots in held for name, p in slots.items() if p is not None]
    cut = [(slots, name, p) for slots, name, p in found if isinstance(p, DTensor) or id(p) in lower]
    whole = {
        id(p): nn.Parameter(full_tensor(lower.get(id(p), p).detach()), requires_grad=p.requires_grad) for _, _, p in cut
    }
    for slots, name, parameter in cut:
        slots[name] = whole[id(parameter)]
    return cut


def _take_hooks(module: nn.Module) -> list[tuple[dict[int, Any], int, Any]]:
    """Take the hooks off by which `state_dict` would shard the parameters of FSDP2 again; returns what was where."""
    found = [
        (hooks, key, hook)
        for hooks in map(torch_internals.STATE_DICT_PRE_HOOKS.of, module.modules())
        for key, hook in hooks.items()
        if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")
    ]
    for registered, key, _ in found:
        del registered[key]
    return found


def _broadcast_first(values: torch.Tensor, shard: DTensor, group: dist.ProcessGroup | None) -> None:
    """Give all ranks the values of the first: those of the group, or where that has fewer, those of the mesh."""
    if group is not None and set(shard.device_mesh.mesh.flatten().tolist()).issubset(
        dist.get_process_group_ranks(group)
    ):
        dist.broadcast(values, group=group, group_src=0)
        return
    for axis in range(shard.device_mesh.ndim):
        dist.broadcast(values, group=shard.device_mesh.get_group(axis), group_src=0)
