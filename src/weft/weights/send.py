"""Tensors from the rank that has one to the ranks that shall have it too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from weft.collectives.primitives import finish, peers_named
from weft.context import World

__all__ = ["Route", "send"]

Route: TypeAlias = tuple[Any, int]  # a process group, and which of its ranks has the tensor
_IN_FLIGHT = 4  # messages; more bring nothing, and each keeps a tensor


def send(what: str, tensors: Sequence[tuple[torch.Tensor, Sequence[Route]]], world: World) -> None:
    """Send tensors along their routes: first all along the first of theirs, then all along the second.

    Raises:
        PeerError: A peer failed or died.
    """
    with peers_named(what, world):
        for turn in range(max((len(routes) for _, routes in tensors), default=0)):
            waiting: list[Callable[[], None]] = []
            for tensor, routes in tensors:
                if turn < len(routes) and tensor.numel():
                    waiting.append(_sending(tensor, *routes[turn], world))
                    if len(waiting) == _IN_FLIGHT:
                        waiting.pop(0)()
            for wait in waiting:
                wait()


def _sending(tensor: torch.Tensor, group: Any, first: int, world: World) -> Callable[[], None]:
    """Begin to send a tensor, as bytes, which every backend knows; returns what waits for its end."""
    dense = tensor.detach().contiguous().resolve_conj().resolve_neg()
    work = dist.broadcast(dense.reshape(-1).view(torch.uint8), group=group, group_src=first, async_op=True)

    def wait() -> None:
        finish(work, world)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(dense)

    return wait
