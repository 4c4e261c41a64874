"""Fresh memory of this process, and the bytes of tensors."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import sys
from typing import Any

import numpy as np
import torch

__all__ = ["fresh_bytes", "in_large_pages", "memory_of", "taken_up"]

_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of Linux, which Python has no name for
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux
_FEW = 16  # pages
_LARGE_PAGE = 2**21  # bytes; where it is another size, nothing is lost


def fresh_bytes(size: int) -> torch.Tensor:
    """Memory of this process alone: one that is forked sees zeros. On the CPU, dtype uint8, at least one byte.

    A worker of a loader that is forked would keep the old pages else, and every write of this process copy one.

    Not in large pages, which are quicker to come by as long as there are any: where files fill the
    memory of the machine, the system first moves pages about, for seconds.
    """
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # an old kernel
            memory.madvise(_WIPE_ON_FORK)
    return torch.frombuffer(memory, dtype=torch.uint8)


def in_large_pages(size: int) -> torch.Tensor:
    """A little memory in large pages, where the system has any. On the CPU, dtype uint8.

    A process that is forked has it not: a disk may write into it at that moment.
    """
    memory = mmap.mmap(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
        with contextlib.suppress(OSError, AttributeError):  # a system without
            memory.madvise(getattr(mmap, advice))
    found = torch.frombuffer(memory, dtype=torch.uint8)
    start = -found.data_ptr() % _LARGE_PAGE
    return found[start : start + size]


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to be read and written."""
    flat = tensor.detach().reshape(-1)
    found: Any = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(bytearray())
    return found  # type: ignore[no-any-return]


def taken_up(memory: memoryview) -> Any:
    """Memory as an array of bytes; what of it is fresh gets its pages now, all at once, and not at the first write.

    That takes two thirds of the time. A system that does not know how leaves it as it is.
    """
    found = np.frombuffer(memory, np.uint8)
    if sys.platform == "linux" and len(found) >= _FEW * mmap.PAGESIZE:
        address = found.__array_interface__["data"][0]
        start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        _madvise()(start, (address + len(found) - start) // mmap.PAGESIZE * mmap.PAGESIZE, _POPULATE_WRITE)
    return found


@functools.cache
def _madvise() -> Any:
    """That of the C library; `mmap.madvise` of Python is for its own maps only."""
    found = ctypes.CDLL(None).madvise
    found.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return found
