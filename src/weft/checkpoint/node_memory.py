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

from weft.checkpoint.blocks import BLOCK
from weft.checkpoint.memory import memory_of
from weft.checkpoint.passing import PLACES, Link, Passing
from weft.checkpoint.ranks import gathered
from weft.context import DistContext

__all__ = ["NodeMemory", "Offer"]

_LEAST = 2**20  # bytes; less is not worth a meeting
_HEAD = 4096  # bytes before the memory itself: whose it is
_TOKEN = 16  # bytes
_MOST = 8  # ranks of a node with pipes between any two


class Offer:
    """What a rank tells the others of its node: what it wants to read, a file in memory for it, and pipes.

    Args:
        wants: Alike on ranks that want the same in memory that they share.
        nbytes: How much that is.
        rest: Alike on ranks that want the same, each in memory of its own.
        rest_nbytes: How much that is.
    """

    def __init__(self, wants: str, nbytes: int, rest: str, rest_nbytes: int) -> None:
        self.nbytes = nbytes
        self.kept: dict[int, tuple[int, int]] = {}  # ends of pipes, by local rank: where to tell, and to hear "done"
        self._wants = wants
        self._rest = rest
        self._is_enough = max(nbytes, rest_nbytes) >= _LEAST
        self._handles = contextlib.ExitStack()
        self.close = weakref.finalize(self, self._handles.close)  # the memory lives as long as somebody has it

    def told(self, ctx: DistContext) -> dict[str, Any] | None:
        """As JSON; None if there is nothing to share."""
        if ctx.local_world_size == 1 or not self._is_enough or not hasattr(os, "memfd_create"):
            return None
        token = secrets.token_bytes(_TOKEN)
        given: dict[str, tuple[str, str]] = {}
        try:
            handle = os.memfd_create("weft-restore")
            self._handles.callback(os.close, handle)
            for local_rank in range(ctx.local_world_size) if ctx.local_world_size <= _MOST else ():
                if local_rank != ctx.local_rank:
                    (hear, tell), (hear_done, tell_done) = self._new_pipe(), self._new_pipe()
                    self.kept[local_rank] = tell, hear_done
                    given[str(local_rank)] = _place(hear), _place(tell_done)
            os.pwrite(handle, token, 0)
        except OSError:  # forbidden here, or too much
            return None
        kind = [ctx.node_rank, self._wants, self.nbytes]
        return {
            "kind": kind if self.nbytes >= _LEAST else [*kind, self._rest],
            "rest": self._rest,
            "local_rank": ctx.local_rank,
            "memory": _place(handle),
            "token": token.hex(),
            "pipes": given,
        }

    def _new_pipe(self) -> tuple[int, int]:
        ends = os.pipe()
        for end in ends:
            self._handles.callback(os.close, end)
        return ends


class NodeMemory:
    """Memory that several ranks have.

    Args:
        place: Where the file in memory is to be opened.
        token: What it begins with.
        nbytes: Its size.
        ranks: Who has it.

    Attributes:
        memory: Of dtype uint8, on the CPU.
        ranks: Who has it.
        passing: Pipes between them, if all want the same of what each has in memory of its own.

    Raises:
        OSError: It cannot be opened from here, there is another file in its place, or there is no memory.
    """

    def __init__(self, place: str, token: str, nbytes: int, ranks: list[int]) -> None:
        handle = _opened_memory(place, token)
        self._close = weakref.finalize(self, _close_behind, handle)
        self._close.atexit = False
        os.ftruncate(handle, _HEAD + nbytes)  # all to the same size: nothing is lost
        self.memory = torch.frombuffer(mmap.mmap(handle, _HEAD + nbytes), dtype=torch.uint8, offset=_HEAD)
        self.ranks = ranks
        self.passing: Passing | None = None

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
        return checker if checker in self.ranks else self.ranks[number % len(self.ranks)]

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
        kinds = [None if one is None else tuple(one["kind"]) for one in told]
        if all(count == 1 for kind, count in Counter(kinds).items() if kind is not None):
            return None
        ranks = [rank for rank, kind in enumerate(kinds) if kind == kinds[ctx.rank]]
        opened: list[NodeMemory] = []

        def open_all() -> list[bool]:
            if kinds[ctx.rank] is not None and len(ranks) > 1:
                first, start = told[ranks[0]], -(-offer.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
                size = len(ranks) * PLACES * BLOCK if _pass_on(told, ranks) else 0
                with contextlib.suppress(OSError, ValueError, OverflowError):
                    opened.append(cls(first["memory"], first["token"], start + size, ranks))
                    if size:
                        opened[0].passing = _passing(ctx, offer, told, ranks, opened[0].memory[start:])
            return [bool(opened), bool(opened) and opened[0].passing is not None]

        everywhere = gathered(what, ctx, open_all)
        found = opened[0] if opened and all(everywhere[rank][0] for rank in ranks) else None
        if opened and opened[0].passing is not None and not (found and all(everywhere[rank][1] for rank in ranks)):
            opened[0].passing.close()
            opened[0].passing = None
        return found


def _pass_on(told: list[Any], ranks: list[int]) -> bool:
    """Whether these ranks pass on to each other what each wants in memory of its own: if it is the same."""
    return all(told[rank]["rest"] == told[ranks[0]]["rest"] and told[rank]["pipes"] for rank in ranks)


def _passing(ctx: DistContext, offer: Offer, told: list[Any], ranks: list[int], memory: torch.Tensor) -> Passing:
    """Pipes between ranks of a node.

    Args:
        ctx: Whose rank this is.
        offer: What it told.
        told: What each rank told.
        ranks: Those that pass on.
        memory: For their blocks.

    Raises:
        OSError: They cannot be opened from here, or there are too many.
    """
    parts = dict(zip(ranks, map(memory_of, memory.chunk(len(ranks))), strict=True))
    links: dict[int, Link] = {}
    with contextlib.ExitStack() as opened:

        def kept(handle: int) -> int:
            opened.callback(os.close, handle)
            return handle

        for rank in parts.keys() - {ctx.rank}:
            other = told[rank]
            os.close(_opened_memory(other["memory"], other["token"]))  # it is that process
            tell, hear_done = (kept(os.dup(end)) for end in offer.kept[other["local_rank"]])
            hear, tell_done = other["pipes"][str(ctx.local_rank)]
            links[rank] = Link(
                tell,
                hear_done,
                kept(_opened(hear, "pipe:", os.O_RDONLY)),
                kept(_opened(tell_done, "pipe:", os.O_WRONLY)),
                parts[rank],
            )
        opened.pop_all()
    return Passing(parts[ctx.rank], links)


def _place(handle: int) -> str:
    """Where other processes can open what this one has open."""
    return f"/proc/{os.getpid()}/fd/{handle}"


def _opened_memory(place: str, token: str) -> int:
    """Open what a rank has offered.

    Raises:
        OSError: It cannot be opened from here.
        FileNotFoundError: There is another file in its place.
    """
    handle = _opened(place, "/memfd:weft-restore", os.O_RDWR)
    if os.pread(handle, _TOKEN, 0).hex() != token:
        os.close(handle)
        raise FileNotFoundError(place)
    return handle


def _opened(place: str, kind: str, how: int) -> int:
    """Open what another process has open.

    Raises:
        OSError: It cannot be opened from here.
        FileNotFoundError: It is something else: that process is one of another container.
    """
    if not str(Path(place).readlink()).startswith(kind):
        raise FileNotFoundError(place)
    return os.open(place, how | os.O_CLOEXEC)


def _close_behind(handle: int) -> None:
    """Close a file without waiting: whoever is the last to have it frees its memory, which takes a while."""
    threading.Thread(target=os.close, args=(handle,), name="weft-free", daemon=True).start()
