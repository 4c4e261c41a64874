"""How tensors travel between ranks: on which device numbers that the host needs, and many tensors as one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from weft import torch_internals
from weft.tensors.dtensor import local

T = TypeVar("T")


def grouped(items: Iterable[T], size_of: Callable[[T], int], limit: int) -> list[list[T]]:
    """Items in their order, in groups of at most `limit` together; what is larger is a group of its own.

    Example:
        >>> grouped([3, 1, 2, 9, 1], lambda size: size, 4)
        [[3, 1], [2], [9], [1]]
    """
    groups: list[list[T]] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if not groups or filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size
    return groups


def control_device(group: dist.ProcessGroup | None, device: torch.device) -> torch.device:
    """Of tensors that every rank reads as soon as they have come.

    Args:
        group: Whose ranks exchange them.
        device: Of its ranks.

    Returns:
        The CPU if the group has a backend for it, as one that `weft.start` has made; else `device`.
    """
    if device.type == "cpu" or group is None or "cpu:" not in dist.get_backend_config(group):
        return device
    return torch.device("cpu")


def broadcast(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup, source: int = 0) -> None:
    """Give tensors the values that they have on one rank of the group: of DTensors, its part of them."""
    sent = [as_sent(local(tensor.detach())) for tensor in tensors]
    torch_internals.broadcast_coalesced(group, sent, 250 * 2**20, source)


def add_up(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup, *, mean: bool = False) -> None:
    """Give tensors their sum or mean over the ranks of the group, in place. Collectives: one all-reduce per dtype."""
    together: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        together.setdefault(real.dtype, []).append(real)
    for alike in together.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.all_reduce(flat, group=group)
        if mean:
            flat /= dist.get_world_size(group)
        for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            tensor.copy_(part.view_as(tensor))


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """What each rank of the group has, of one shape. Collectives: one all-gather."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, tensor, group=group)
    return everyone


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, in a dtype that every backend knows: 8-bit floating-point numbers as bytes."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor
