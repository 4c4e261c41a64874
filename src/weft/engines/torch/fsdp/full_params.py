"""Whole parameters for a moment, of a module on which FSDP2 may lie."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from weft.engines.torch.optim.rebind import like
from weft.tensors.dtensor import local, resting_parameters

__all__ = ["gathered"]


@contextlib.contextmanager
def gathered(
    module: nn.Module, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, *, write: bool
) -> Iterator[None]:
    """Whole parameters inside of the body; with `write`, those of the first rank stay, on all ranks.

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
    for unit in units:
        unit.unshard()
    try:
        yield
        if write:
            with torch.no_grad():
                for name, whole_one in module.named_parameters():
                    shard = shards[name]
                    if isinstance(shard, DTensor) and id(shard) in wanted:
                        _spread(whole_one.data, shard)
                        local(shard).copy_(local(like(whole_one.detach(), shard)))
                for p in plain if group is not None else ():
                    dist.broadcast(p.data, group=group, group_src=0)
    finally:
        for unit in units:
            unit.reshard()


def _spread(values: torch.Tensor, shard: DTensor) -> None:
    """Give all ranks of the mesh the values of its first."""
    for axis in range(shard.device_mesh.ndim):
        dist.broadcast(values, group=shard.device_mesh.get_group(axis), group_src=0)
