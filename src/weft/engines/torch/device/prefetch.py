"""Bring batches to the device one ahead of their use."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from weft.tensors.nested import leaves, map_leaves, map_tensors, moves_itself
from weft.tensors.sequence_order import with_note_of

_END = object()


def move(value: Any, device: torch.device, *, non_blocking: bool = False, skip: frozenset[str] = frozenset()) -> Any:
    """Put the tensors of a nested value on `device`.

    Args:
        value: Objects with a `to` method that takes a device are asked to move themselves.
        device: Where to.
        non_blocking: Do not wait for copies from pinned memory.
        skip: Mapping keys (at any depth) whose values stay where they are.

    Returns:
        `value` itself if everything is there already, else a rebuilt one.
    """

    def put(path: tuple[str, ...], leaf: Any) -> Any:
        if skip and any(key in skip for key in path):
            return leaf
        if isinstance(leaf, torch.Tensor):
            return with_note_of(leaf, leaf.to(device, non_blocking=non_blocking))
        return leaf.to(device) if moves_itself(leaf) else leaf

    # With keys to skip, a mapping is walked although it could move itself.
    return map_leaves(put, value, whole=lambda item: moves_itself(item) and not (skip and isinstance(item, Mapping)))


def prefetch(batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield every batch on `device`; the copy of the next one runs while this one is used.

    On a CPU nothing is copied and nothing is read ahead. On an accelerator, copies run on a
    stream of their own, on CUDA from pinned memory; the memory of a batch is not reused before its last
    use, and the source may overwrite a batch when it is asked for the next one.
    """
    if device.type == "cpu":
        yield from batches
        return
    if device.type == "mps":
        yield from (move(batch, device) for batch in batches)
        return
    stream = torch.Stream(device=device)
    ahead: tuple[Any, torch.Event] | None = None
    source = iter(batches)
    while (batch := next(source, _END)) is not _END:
        pinned = map_tensors(_pinned, batch) if device.type == "cuda" else batch
        with stream:
            moved = move(pinned, device, non_blocking=True)
            copied = stream.record_event()
        if ahead is not None:
            yield _claim(*ahead, device)
        ahead = moved, copied
        copied.synchronize()  # a step later: the copy is over, and its source is free
    if ahead is not None:
        yield _claim(*ahead, device)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that the device can read by itself."""
    can_be = tensor.device.type == "cpu" and not tensor.is_pinned()
    return with_note_of(tensor, tensor.pin_memory()) if can_be else tensor


def _claim(batch: Any, copied: torch.Event, device: torch.device) -> Any:
    """Make the current stream wait for the copy, not for the next one, and keep its memory until that is done."""
    current = torch.accelerator.current_stream(device)
    current.wait_event(copied)
    for _, leaf in leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.device != device:
            continue
        if callable(getattr(leaf, "record_stream", None)):  # graphs of other libraries have it, too
            leaf.record_stream(current)
    return batch
