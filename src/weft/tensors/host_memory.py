"""Fresh memory of this process, and the bytes of tensors."""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import Any

import torch

__all__ = ["fresh_bytes", "memory_of"]

_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of Linux, which Python has no name for


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


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, to be read and written."""
    flat = tensor.detach().reshape(-1)
    found: Any = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(bytearray())
    return found  # type: ignore[no-any-return]
