"""Memory that the ranks of a node read into together: what all of them want is read once, and kept once.

[Note: once per node] A replicated state would else lie in main memory once per rank while it is loaded, beside the
tensors it is for, and every rank would read every file. Each rank offers a file in memory that has no name (memfd of
Linux), and tells of it at a meeting; those of one node that want the same open that of the first of them. One that
cannot (another container, another system) says so at the next meeting, and its node reads rank by rank.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.ranks import gathered
from weft.context import DistContext

__all__ = ["NodeMemory", "Offer"]

_LEAST = 2**20  # bytes; less is not worth a meeting
_HEAD = 4096  # bytes before the memory itself: whose it is
_TOKEN = 16  # bytes


class Offer:
    """What a rank tells the others of its node: what it wants to read, and a file in memory for it.

    Args:
        wants: Alike on ranks that want the same.
        nbytes: How much that is.
    """

    def __init__(self, wants: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self._wants = wants
        self._handles = contextlib.ExitStack()
        self.close = weakref.finalize(self, self._handles.close)  # the memory lives as long as somebody has it

    def told(self, ctx: DistContext) -> list[Any] | None:
        """As JSON; None if there is nothing to share."""
        if ctx.local_world_size == 1 or self.nbytes < _LEAST or not hasattr(os, "memfd_create"):
            return None
        try:
            handle = os.memfd_create("weft-restore")
        except OSError:  # forbidden here
            return None
        self._handles.callback(os.close, handle)
        token = secrets.token_bytes(_TOKEN)
        os.pwrite(handle, token, 0)
        return [[ctx.node_rank, self._wants, self.nbytes], f"/proc/{os.getpid()}/fd/{handle}", token.hex()]


class NodeMemory:
    """Memory that several ranks have.

    Args:
        place: Where the file in memory is to be opened.
        token: What it begins with.
        nbytes: Its size.
        ranks: Who has it.

    Attributes:
        memory: Of dtype uint8, on the CPU.

    Raises:
        OSError: It cannot be opened from here, there is another file in its place, or there is no memory.
    """

    def __init__(self, place: str, token: str, nbytes: int, ranks: list[int]) -> None:
        if not str(Path(place).readlink()).startswith("/memfd:weft-restore"):  # a process of another container
            raise FileNotFoundError(place)
        handle = os.open(place, os.O_RDWR | os.O_CLOEXEC)
        self._close = weakref.finalize(self, _close_behind, handle)
        self._close.atexit = False
        if os.pread(handle, _TOKEN, 0).hex() != token:
            raise FileNotFoundError(place)
        os.ftruncate(handle, _HEAD + nbytes)  # all to the same size: nothing is lost
        self.memory = torch.frombuffer(mmap.mmap(handle, _HEAD + nbytes), dtype=torch.uint8, offset=_HEAD)
        self._ranks = ranks

    def drop(self) -> None:
        """Give it back; nobody on this rank may have a part of it. It is freed in the background."""
        self.memory = torch.empty(0, dtype=torch.uint8)
        self._close()

    def reader_of(self, number: int, checker: int) -> int:
        """Which rank reads a file into it: the one that checks it, or one in turn.

        Args:
            number: Of the file.
            checker: The rank that compares it with its hash.
        """
        return checker if checker in self._ranks else self._ranks[number % len(self._ranks)]

    @classmethod
    def of(cls, what: str, ctx: DistContext, offer: Offer, told: list[Any]) -> NodeMemory | None:
        """The memory this rank has with others; None if it has to read for itself.

        A collective: a meeting through the store, if any two ranks want the same.

        Args:
            what: Who asks, for the texts of errors.
            ctx: Whose ranks.
            offer: What this rank told.
            told: What each rank told.
        """
        kinds = [None if one is None else tuple(one[0]) for one in told]
        if all(count == 1 for kind, count in Counter(kinds).items() if kind is not None):
            return None
        ranks = [rank for rank, kind in enumerate(kinds) if kind == kinds[ctx.rank]]
        opened: list[NodeMemory] = []

        def has_opened() -> bool:
            if kinds[ctx.rank] is not None and len(ranks) > 1:
                with contextlib.suppress(OSError, ValueError, OverflowError):
                    opened.append(cls(told[ranks[0]][1], told[ranks[0]][2], offer.nbytes, ranks))
            return bool(opened)

        everywhere = gathered(what, ctx, has_opened)
        return opened[0] if opened and all(everywhere[rank] for rank in ranks) else None


def _close_behind(handle: int) -> None:
    """Close a file without waiting: whoever is the last to have it frees its memory, which takes a while."""
    threading.Thread(target=os.close, args=(handle,), name="weft-free", daemon=True).start()
