"""Tensors that differ between ranks which would hold copies, as one tensor with a dimension more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft import torch_internals
from weft.context import DistContext
from weft.context.sub_contexts import mesh_along
from weft.contract.layout import axes_of_dims
from weft.tensors.blocks import as_dtensor
from weft.tensors.dtensor import is_sharded, local


def stacked_over(tensor: torch.Tensor, ctx: DistContext, axis: str) -> torch.Tensor:
    """The tensors of the ranks along an axis of the mesh, one after the other in a new first dimension.

    Args:
        tensor: This rank's, plain or a DTensor over other axes.
        ctx: The current context.
        axis: Along which they differ.

    Returns:
        A DTensor [ranks, *shape] of which this rank has its own, in the same memory; with one rank `tensor` itself.
        Collectives: as `ctx.on` says.
    """
    size = ctx.axis_size(axis)
    if size == 1:
        return tensor
    from torch.distributed.tensor import Shard  # noqa: PLC0415  (half a second of imports in torch)

    placed: Any = tensor
    dims: dict[Sequence[str], Any] = {(axis,): Shard(0)}
    if is_sharded(tensor):
        moved = map(_one_dim_later, placed.placements)
        dims |= dict(zip(axes_of_dims(placed.device_mesh, ctx), moved, strict=True))
    order = [name for name, _ in ctx.axes]
    dims = dict(sorted(dims.items(), key=lambda item: order.index(item[0][0])))
    part, mesh = local(tensor.detach()).unsqueeze(0), mesh_along(ctx, tuple(dims))
    shape, stride = torch.Size((size, *tensor.shape)), (tensor.numel(), *tensor.stride())
    stacked: torch.Tensor = as_dtensor(part, mesh, tuple(dims.values()), shape, stride)
    return stacked


def _one_dim_later(placement: Any) -> Any:
    if placement.is_replicate():
        return placement
    factors = {"split_factor": placement.split_factor} if torch_internals.strided_shard.holds(placement) else {}
    return type(placement)(placement.dim + 1, **factors)
