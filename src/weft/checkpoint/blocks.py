"""Files that are read from the beginning to the end, block by block.

[Note: past the page cache] A file that the system does not have in memory is read past its page cache (O_DIRECT), into
a few blocks that are used again and again: the disk writes into them by itself, and no memory is taken for pages that
nobody asks for a second time. Such blocks are in large pages where there are any, as a disk takes one request for
what lies in one piece. What is in the cache comes from there; so does all of a file that others read as well.
"""

from __future__ import annotations

import bisect
import contextlib
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Executor, Future, wait
from typing import NamedTuple

import numpy as np

from weft.checkpoint.memory import in_large_pages, memory_of, taken_up
from weft.checkpoint.reading import Stretch, expect, read_into

__all__ = ["BLOCK", "Block", "Blocks", "Places"]

BLOCK = 2**21  # bytes
_AHEAD = 64 * 2**20  # bytes that the system may read into its cache before they are asked for
_LEAST = 8 * 2**20  # bytes; a smaller file is not worth the trouble
_PROBES = 8
_PAGE = 4096  # bytes; what is read past the cache begins and ends at a multiple


class Block(NamedTuple):
    """A part of a file that was read.

    Attributes:
        start: Of the first byte in the file.
        memory: Its bytes; used again for another block when the next one is asked for.
    """

    start: int
    memory: memoryview


class Places:
    """Where bytes of a file go.

    Args:
        stretches: In the order of the file; no two have a byte of it in common.
    """

    def __init__(self, stretches: list[Stretch]) -> None:
        self._stretches = stretches
        self._ends = [stretch.start + len(stretch.memory) for stretch in stretches]

    def parts(self, block: Block) -> Iterator[tuple[memoryview, memoryview]]:
        """The parts of a block that go somewhere.

        Yields:
            Where the part goes, and its bytes.
        """
        end = block.start + len(block.memory)
        for number in range(bisect.bisect_right(self._ends, block.start), len(self._stretches)):
            stretch = self._stretches[number]
            if stretch.start >= end:
                break
            first, last = max(stretch.start, block.start), min(self._ends[number], end)
            yield (
                stretch.memory[first - stretch.start : last - stretch.start],
                block.memory[first - block.start : last - block.start],
            )

    def put(self, block: Block) -> None:
        """Copy what of a block goes somewhere."""
        for there, here in self.parts(block):
            np.copyto(taken_up(there), np.frombuffer(here, np.uint8))  # other threads go on


class Blocks:
    """Memory for the blocks of files that are read one after the other.

    Args:
        count: How many are read ahead, by as many threads as `threads` has.
        threads: That read.
    """

    def __init__(self, count: int, threads: Executor) -> None:
        self._count = count
        self._threads = threads
        self._memory = memory_of(in_large_pages((count + 1) * BLOCK))

    def of(self, handle: int, size: int, *, alone: bool, places: Places | None = None) -> Iterator[Block]:
        """Read a file.

        Args:
            handle: Of the file, opened for reading.
            size: Its bytes.
            alone: Nobody else on this machine reads it now: what is not in the page cache is read past it.
            places: What of it goes where; copied by the threads that read, before the block is given.

        Yields:
            Its blocks, in order.

        Raises:
            ValueError: The file ends before.
            OSError: It cannot be read.
        """
        is_worth_it = alone and size >= _LEAST and not _is_cached(handle, size)
        ahead: deque[Future[Block]] = deque()
        slots, asked = self._slots(), 0
        with contextlib.ExitStack() as closing:
            past = _opened_past_cache(handle, closing) if is_worth_it else None
            closing.callback(wait, ahead)  # or a thread reads from a file that is closed
            for start in range(0, size, BLOCK):
                if len(ahead) == self._count:
                    yield ahead.popleft().result()
                while past is None and asked < min(start + _AHEAD, size):
                    expect(handle, asked, BLOCK)
                    asked += BLOCK
                ahead.append(self._threads.submit(_read, handle, past, next(slots), start, size, places))
            while ahead:
                yield ahead.popleft().result()

    def _slots(self) -> Iterator[memoryview]:
        while True:
            for start in range(0, len(self._memory), BLOCK):
                yield self._memory[start : start + BLOCK]


def _read(handle: int, past: int | None, slot: memoryview, start: int, size: int, places: Places | None) -> Block:
    memory = slot[: min(BLOCK, size - start)]
    count = 0
    if past is not None:
        with contextlib.suppress(OSError):  # not every file system can; if the disk cannot, the next line tells
            count = os.preadv(past, [slot], start)
    if count < len(memory):
        read_into(handle, [memory[count:]], start + count)
    block = Block(start, memory)
    if places is not None:
        places.put(block)
    return block


def _opened_past_cache(handle: int, closing: contextlib.ExitStack) -> int | None:
    """The same file, to be read past the cache of the system; None where that is not possible."""
    try:
        past = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except (OSError, AttributeError):  # the file system, or a system that is not Linux
        return None
    closing.callback(os.close, past)
    return past


def _is_cached(handle: int, size: int) -> bool:
    """Whether most of a file is in the page cache, as far as the system tells."""
    try:
        probe = os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    page, there = memoryview(bytearray(_PAGE)), 0
    try:
        os.posix_fadvise(probe, 0, 0, os.POSIX_FADV_RANDOM)  # what is not there is not read with all around it
        for number in range(_PROBES):
            with contextlib.suppress(BlockingIOError):
                there += os.preadv(probe, [page], size * number // _PROBES, os.RWF_NOWAIT) > 0
    except (OSError, AttributeError):  # the system cannot tell
        return True
    finally:
        os.close(probe)
    return 2 * there >= _PROBES
