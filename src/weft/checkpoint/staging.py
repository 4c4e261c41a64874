"""Host memory that tensors are copied into, in the layout of the file they become.

The memory is kept from one save to the next: taking fresh memory costs twice a copy. It is private to
the process, so nothing of it is left behind, whatever ends the process.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from weft.checkpoint.files import file_head, write_parts
from weft.checkpoint.manifest import FileEntry

__all__ = ["Staged", "Staging"]

_PINNED_BYTES = 64 * 2**20  # torch rounds pinned memory up to a power of two; blocks of one waste nothing
_PART_BYTES = 4 * 2**20
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK of Linux, which Python has no name for


class Staged:
    """Copies of tensors, as the parts of a file."""

    def __init__(self, head: bytes, blocks: Sequence[torch.Tensor]) -> None:
        self._head = head
        self._blocks = blocks

    def write(self, path: Path) -> FileEntry:
        """Write the file and wait until it is on the disk."""
        return write_parts(path, self._parts())

    def _parts(self) -> Iterator[bytes | memoryview]:
        yield self._head
        for block in self._blocks:
            data = block.numpy().data
            for start in range(0, len(data), _PART_BYTES):
                yield data[start : start + _PART_BYTES]


class Staging:
    """The memory for one save at a time: blocks of one size."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._pinned = False

    def copy(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> Staged:
        """Copy tensors; when it returns they may change. What was copied before is overwritten.

        Args:
            tensors: By name, on any device.
            device: Whose memory is copied to pinned memory, if it is not the CPU.
        """
        head, order = file_head(tensors)
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self._take(total, device)
        place = 0
        for name in order:
            place = self._put(place, _flat(tensors[name]))
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        starts = range(0, total, self._blocks[0].numel())
        return Staged(head, [block[: total - start] for start, block in zip(starts, self._blocks, strict=False)])

    def _take(self, total: int, device: torch.device) -> None:
        """Have memory of at least so many bytes, and not much more."""
        pinned = device.type != "cpu"
        held = sum(block.numel() for block in self._blocks)
        if not self._blocks or not total <= held <= 2 * total + _PINNED_BYTES or self._pinned != pinned:
            self._blocks.clear()  # before there is new memory
            self._pinned = pinned
            self._blocks += _pinned_blocks(total) if pinned else [_block(total)]

    def _put(self, place: int, data: torch.Tensor) -> int:
        """Copy bytes to a place, counted over all blocks; gives the place after them."""
        size, end = self._blocks[0].numel(), place + data.numel()
        while place < end:
            block, start = self._blocks[place // size], place % size
            count = min(end - place, size - start)
            _copy(data if count == data.numel() else data[:count], block, start)
            place, data = place + count, data[count:] if place + count < end else data
        return end


def _copy(source: torch.Tensor, block: torch.Tensor, start: int) -> None:
    end = start + source.numel()
    if source.device.type == "cpu":
        # The system's memcpy: of tensors that do not begin at a cache line torch's own is 15 % slower.
        np.copyto(block.numpy()[start:end], source.numpy())
    else:
        block[start:end].copy_(source, non_blocking=True)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor; without a copy if it lies in one piece."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _block(size: int) -> torch.Tensor:
    """Fresh memory of this process alone, in large pages if there are any: they are quicker to come by."""
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A worker of a loader that is forked later would keep the old pages, and every write copy one.
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _WIPE_ON_FORK if sys.platform == "linux" else None):
        if advice is not None:
            with contextlib.suppress(OSError):  # a system without it
                memory.madvise(advice)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _pinned_blocks(size: int) -> list[torch.Tensor]:
    """Memory that a device copies into at full speed."""
    number = max(-(-size // _PINNED_BYTES), 1)
    return [torch.empty(_PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(number)]
