"""Host memory that tensors are copied into, in the layout of the file they become.

The memory is kept from one save to the next: taking fresh memory costs twice a copy. It is private to
the process, so nothing of it is left behind, whatever ends the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from weft.checkpoint.format.safetensors_write import file_header

_BLOCK_BYTES = 64 * 2**20  # torch rounds pinned memory up to a power of two; blocks of one waste nothing
_PART_BYTES = 4 * 2**20
_PIECE_BYTES = 16 * 2**20


class Staging:
    """The memory for one save at a time: blocks of one size."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []
        self._pinned = False

    def copy(self, tensors: Mapping[str, torch.Tensor], device: torch.device, *, num_threads: int = 1) -> Iterator[Any]:
        """Copy tensors; when it returns they may change. What was copied before is overwritten.

        Args:
            tensors: By name, on any device.
            device: Whose memory is copied to pinned memory, if it is not the CPU.
            num_threads: That copy, if it is the CPU: fresh memory takes one core three times as long as a copy.

        Returns:
            A safetensors file of the copies, part by part, for `write_parts`.
        """
        head, order = file_header(tensors)
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        self._take(total, device)
        parts = list(_parts(tensors[name] for name in order))
        if device.type == "cpu" and total >= _PIECE_BYTES and num_threads > 1:
            with ThreadPoolExecutor(num_threads, thread_name_prefix="weft-copy") as threads:
                list(threads.map(self._put, *zip(*parts, strict=True)))
        else:
            for place, part in parts:
                self._put(place, part)
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)
        starts = range(0, total, self._blocks[0].numel())
        return file_parts(head, [block[: total - start] for start, block in zip(starts, self._blocks, strict=False)])

    def _take(self, total: int, device: torch.device) -> None:
        """Have memory of at least so many bytes, and not much more."""
        pinned, number = device.type != "cpu", max(-(-total // _BLOCK_BYTES), 1)
        if not number <= len(self._blocks) <= 2 * number or self._pinned != pinned:
            self._blocks.clear()  # before there is new memory
            self._pinned = pinned
            self._blocks += [torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=pinned) for _ in range(number)]

    def _put(self, place: int, part: torch.Tensor) -> None:
        """Copy bytes to a place, counted over all blocks."""
        data, size = _flat(part), self._blocks[0].numel()
        while data.numel():
            block, start = self._blocks[place // size], place % size
            count = min(data.numel(), size - start)
            _copy(data[:count], block[start : start + count])
            place, data = place + count, data[count:]


def file_parts(head: bytes, blocks: Sequence[torch.Tensor]) -> Iterator[Any]:
    """The parts of a file: its head, and the bytes in blocks of memory."""
    yield head
    for block in blocks:
        data = block.numpy().data
        for start in range(0, len(data), _PART_BYTES):
            yield data[start : start + _PART_BYTES]


def _parts(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Tensors one after the other, in parts that threads share out, and the place of each."""
    place = 0
    for tensor in tensors:
        for part in _flat(tensor).split(_PIECE_BYTES) if tensor.is_contiguous() else (tensor,):
            yield place, part
            place += part.numel() * part.element_size()


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.device.type == "cpu":
        # The system's memcpy: of tensors that do not begin at a cache line torch's own is 15 % slower.
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source, non_blocking=True)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor; without a copy if it lies in one piece."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
