"""Blocks of files that one rank of a node reads, passed on to the others, which want them too.

[Note: passing on] Each rank has a few places for blocks in memory that all ranks of its node share. It copies a block
that it has read into one of them, and tells the others through pipes; when all have told that they are done with it,
the place is used again. A rank takes what others pass on while it reads itself, in threads that do nothing else, so
nobody waits in a circle. A pipe ends with either of its ranks. Who gets nothing for a while reads the file itself, and
who is not heard of is told no more.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from weft.checkpoint.blocks import BLOCK, Block, Places

__all__ = ["PLACES", "Link", "Passing"]

PLACES = 3  # for blocks, per rank
_PATIENCE = 10_000  # milliseconds without a word
_WORD = struct.Struct("<QQQ")  # number of the file, first byte and bytes of the block


class Link(NamedTuple):
    """The pipes of a rank with another one, one for each direction of passing on.

    Attributes:
        tell: Where it tells of a block.
        hear_done: Where it hears that the other is done with one.
        hear: Where it hears of a block.
        tell_done: Where it tells that it is done with one.
        memory: Where the blocks of the other lie.
    """

    tell: int
    hear_done: int
    hear: int
    tell_done: int
    memory: memoryview


class Passing:
    """What a rank passes on to others, and takes from them. To be closed.

    Args:
        memory: For the blocks of this rank, of `PLACES` times `BLOCK` bytes.
        links: With each other rank; are closed.
    """

    def __init__(self, memory: memoryview, links: Mapping[int, Link]) -> None:
        self._memory = memory
        self._links = dict(links)
        self._listeners = {rank: _Listener(link) for rank, link in links.items()}
        self._takers: list[_Taker] = []
        self._count = 0

    def take(self, wanted: Mapping[int, Mapping[int, Places]]) -> None:
        """Begin to take, in the background, what is wanted from each rank: by number of the file."""
        for rank, files in wanted.items():
            self._takers.append(_Taker(self._links[rank], files))
            self._takers[-1].start()

    def taken(self) -> set[int]:
        """Wait until nothing comes any more; gives the numbers of the files of which all has come."""
        for taker in self._takers:
            taker.join()
        return {number for taker in self._takers for number in taker.done}

    def give(self, number: int, block: Block) -> None:
        """Pass a block of a file on. Waits until all are done with the one whose place it takes."""
        place = self._count % PLACES * BLOCK
        self._count += 1
        self._tell(_WORD.pack(number, block.start, len(block.memory)), place, block)

    def all_given(self, number: int) -> None:
        """Tell that there is no more of a file."""
        self._tell(_WORD.pack(number, 0, 0), 0, None)

    def end(self) -> None:
        """Pass nothing more on. Waits until all are done with what they were told of."""
        for listener in self._listeners.values():
            listener.end()

    def close(self) -> None:
        """Neither pass on nor take anything more."""
        self.end()
        self.taken()
        for link in self._links.values():
            os.close(link.hear)
            os.close(link.tell_done)
        self._links.clear()
        self._takers.clear()
        self._memory = memoryview(b"")

    def _tell(self, word: bytes, place: int, block: Block | None) -> None:
        listeners = [listener for listener in self._listeners.values() if listener.is_ready(block is not None)]
        if block is not None and listeners:
            there = self._memory[place : place + len(block.memory)]
            np.copyto(np.frombuffer(there, np.uint8), np.frombuffer(block.memory, np.uint8))
        for listener in listeners:
            listener.tell(word)


class _Listener:
    """A rank that is told of blocks."""

    def __init__(self, link: Link) -> None:
        self._link: Link | None = link
        self._busy = 0  # places it is not done with

    def is_ready(self, for_block: bool) -> bool:
        """Wait until it has a place for another block; whether it is to be told."""
        if for_block:
            self._wait(PLACES - 1)
            self._busy += 1
        return self._link is not None

    def tell(self, word: bytes) -> None:
        if self._link is not None:
            try:
                os.write(self._link.tell, word)  # as few as they are, the pipe has room for all
            except BrokenPipeError:
                self._close()

    def end(self) -> None:
        self._wait(0)
        self._close()

    def _wait(self, busy: int) -> None:
        while self._link is not None and self._busy > busy:
            done = _heard(self._link.hear_done, PLACES)
            self._busy -= len(done)
            if not done:
                self._close()

    def _close(self) -> None:
        """Now its places may be used again: it finds that nobody hears that it is done with one."""
        if self._link is not None:
            os.close(self._link.hear_done)
            os.close(self._link.tell)
            self._link = None


class _Taker(threading.Thread):
    """Takes what one rank passes on.

    Attributes:
        done: Numbers of files of which all has come.
    """

    def __init__(self, link: Link, files: Mapping[int, Places]) -> None:
        super().__init__(name="weft-take", daemon=True)
        self.done: set[int] = set()
        self._link = link
        self._files = files

    def run(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # what was told of last may be something else by now
            self._take_all()

    def _take_all(self) -> None:
        count = 0
        while word := _heard(self._link.hear, _WORD.size):
            number, start, size = _WORD.unpack(word)
            if not size:
                self.done.add(number)
                continue
            place = count % PLACES * BLOCK
            count += 1
            if number in self._files:
                self._files[number].put(Block(start, self._link.memory[place : place + size]))
            os.write(self._link.tell_done, b".")


def _heard(handle: int, most: int) -> bytes:
    """What comes through a pipe; nothing if it has ended, or for too long."""
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return os.read(handle, most) if waiting.poll(_PATIENCE) else b""
