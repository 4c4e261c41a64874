"""From blocks of files into tensors: one plan for `restore` and `load_weights`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from weft.checkpoint.format.manifest import DTYPES, TensorEntry
from weft.checkpoint.format.safetensors_read import TensorFiles, contiguous_blocks
from weft.errors import value_error
from weft.tensors.blocks import Block, memory_of

_PART = 2**19  # elements of a tensor that is converted, or copied to a device, at a time: at most 4 MiB
_THREAD_BYTES = 8 * 2**20  # that are worth one more thread


class Stored(NamedTuple):
    """A tensor in files: the name it has there, and its dtype, shape and pieces."""

    key: str
    entry: TensorEntry

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype in the files."""
        found: torch.dtype = getattr(torch, self.entry.dtype)
        return found


class Transfer(NamedTuple):
    """A block of a tensor in files, and where it goes: a tensor of its shape, of any dtype, device and layout."""

    stored: Stored
    block: Block
    out: torch.Tensor


def read_blocks(files: TensorFiles, wanted: Iterable[Transfer], *, num_threads: int) -> None:
    """Read all blocks, in the order of the files, by several threads.

    What is for an accelerator passes through a pinned block per thread: one thread's copy runs while others read.

    Raises:
        CheckpointError: A file does not hold what its entry says.
        ValueError: Values do not fit into another dtype.
        OSError: A file cannot be read.
    """
    ordered = sorted(wanted, key=lambda one: (-one.stored.dtype.itemsize, one.stored.key))  # as `file_header` has it
    far = {one.out.device.type for one in ordered} - {"cpu"}
    here = torch.accelerator.current_accelerator() if far and torch.accelerator.is_available() else None
    if far and (here is None or far != {here.type}):
        num_threads = 1  # nothing is known of their streams
    stream = None if here is None else torch.accelerator.current_stream()  # where new memory may still be in use

    def read(one: Transfer) -> None:
        if stream is not None:
            torch.accelerator.set_stream(stream)
        with torch.no_grad():
            _read(files, one)

    number = min(num_threads, 1 + sum(one.out.nbytes for one in ordered) // _THREAD_BYTES)
    if number == 1:
        for one in ordered:
            read(one)
        return
    with ThreadPoolExecutor(number, thread_name_prefix="weft-read") as threads:
        list(threads.map(read, ordered))  # an error cancels what has not begun


def _read(files: TensorFiles, one: Transfer) -> None:
    stored, block, out = one
    if stored.dtype == out.dtype and out.device.type == "cpu" and out.is_contiguous():
        files.read(stored.key, stored.entry, block, out)
        return
    pinned = out.device.type != "cpu" and torch.accelerator.is_available()
    for part, values in read_in_parts(files, stored, block, out.dtype, pinned=pinned):
        out[part.slices].copy_(values)


def read_in_parts(
    files: TensorFiles, stored: Stored, block: Block, dtype: torch.dtype, *, pinned: bool = False
) -> Iterator[tuple[Block, torch.Tensor]]:
    """Read a block in parts, in the order of its memory, a few megabytes at a time.

    Yields:
        Where the part lies in the block, and its values on the CPU, which hold until the next is read.

    Raises:
        CheckpointError: A file does not hold what its entry says.
        ValueError: Values do not fit into `dtype`.
        OSError: A file cannot be read.
    """
    width = DTYPES[stored.entry.dtype][1]
    memory = torch.empty(min(block.size, _PART) * width, dtype=torch.uint8, pin_memory=pinned)
    for part in contiguous_blocks(block.shape, _PART):
        values = memory[: part.size * width].view(stored.dtype).view(part.shape)
        offsets = tuple(a + b for a, b in zip(part.offsets, block.offsets, strict=True))
        files.read(stored.key, stored.entry, Block(offsets, part.shape), values)
        yield part, converted(stored.key, values, dtype)


def equal_bits(files: TensorFiles, one: Stored, other: Stored, block: Block, dtype: torch.dtype) -> bool:
    """Whether two tensors have the same bits in a block, as numbers of a dtype.

    Raises:
        CheckpointError: A file does not hold what its entry says.
        ValueError: Values do not fit into `dtype`.
        OSError: A file cannot be read.
    """
    a, b = (read_in_parts(files, each, block, dtype) for each in (one, other))
    return all(memory_of(x.contiguous()) == memory_of(y.contiguous()) for (_, x), (_, y) in zip(a, b, strict=True))


# -- numbers in another dtype: which conversions keep what they mean ------------------------------------


def same_number_kind(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether both are real numbers, or complex, or booleans, or integers.

    Example:
        >>> same_number_kind(torch.float32, torch.bfloat16), same_number_kind(torch.float32, torch.int64)
        (True, False)
    """
    here, there = ((d.is_floating_point, d.is_complex, d is torch.bool) for d in (one, other))
    return here == there


def is_faithful(values: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether numbers are still numbers in another dtype, and whole ones the same."""
    if not result.is_floating_point():
        return torch.equal(result.to(values.dtype), values)
    if torch.finfo(result.dtype).max >= torch.finfo(values.dtype).max:
        return True
    wide = torch.promote_types(values.dtype, torch.float32)
    # The sum is a number if all are; the other way round it may just be too large.
    return math.isfinite(result.to(wide).sum().item()) or not bool(
        (values.to(wide).isfinite() & ~result.to(wide).isfinite()).any()
    )


def converted(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values in another dtype.

    Raises:
        ValueError: They do not fit into it.
    """
    if values.dtype == dtype:
        return values
    result = values.to(dtype)
    if not is_faithful(values, result):
        raise value_error(
            f"{name} does not fit into {dtype}",
            found=f"{values.dtype} up to {values.abs().max().item():.3g}",
            expected="values that are finite in that dtype too",
            fix="dtype=torch.bfloat16  # has the range of float32",
        )
    return result
