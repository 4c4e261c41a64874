"""How tensors travel between ranks: on which device numbers that the host needs, and many tensors as one message."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from weft import torch_internals
from weft.tensors.dtensor import local

T = TypeVar("T")
K = TypeVar("K")


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
    real = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors)
    for alike in grouped(real, lambda tensor: tensor.dtype).values():
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.all_reduce(flat, group=group)
        if mean:
            flat /= dist.get_world_size(group)
        for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
            tensor.copy_(part.view_as(tensor))


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Those of the same key together, as they go into one message or one kernel; in their order."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def in_buckets(items: Iterable[T], size_of: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Cut items into lists, in their order: each of at most that much, or of one item that is more."""
    bucket: list[T] = []
    filled = 0
    for item in items:
        size = size_of(item)
        if bucket and filled + size > most:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += size
    if bucket:
        yield bucket


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """What each rank of the group has, of one shape. Collectives: one all-gather."""
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, tensor, group=group)
    return everyone


def as_sent(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, in a dtype that every backend knows: 8-bit floating-point numbers as bytes."""
    return tensor.view(torch.uint8) if tensor.is_floating_point() and tensor.dtype.itemsize == 1 else tensor
