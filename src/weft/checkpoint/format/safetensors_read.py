"""Reading blocks of tensors of safetensors files straight into memory that is there.

The header, which may come from anywhere, is parsed and judged by the safetensors package.
"""

# The bytes are not read by `safe_open`: what it maps counts as memory of the process (1 GB read: VmHWM + 1,020 MB), and
# a disk that dies is then a SIGBUS; with backend="pread" a slice of one row reads the whole tensor, there is no reading
# into a tensor, and errors come without errno, which tells a limit of this moment from damage.

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, TypeAlias

import torch
from safetensors import SafetensorError, safe_open

from weft.checkpoint.format.manifest import DTYPES, MAX_HEADER_BYTES, NamedPiece, Piece, TensorEntry
from weft.checkpoint.format.plain_files import open_plain, raise_if_unreadable, read_into
from weft.errors import CheckpointError
from weft.tensors.blocks import Block, flat_index, memory_of, overlap

_CODES = MappingProxyType({code: dtype for dtype, (code, _) in DTYPES.items()})
_ENTRY = re.compile(rb'"data_offsets"\s*:\s*\[')
Slot: TypeAlias = tuple[str, tuple[int, ...], int]  # dtype, shape, offset of the first byte in the file


class TensorFiles:
    """Safetensors files that are opened when they are needed, and closed with `close` or when they are dropped.

    Several threads may read at once.

    Args:
        what: Who reads, for the texts of errors.
        places: Path of each file by the name it has in pieces.
    """

    def __init__(self, what: str, places: Mapping[str, Path]) -> None:
        self._what = what
        self._places = places
        self._opened: dict[str, tuple[int, dict[str, Slot]]] = {}
        self._opening = threading.Lock()
        self._handles = contextlib.ExitStack()
        self.close = weakref.finalize(self, self._handles.close)

    def slots(self, file: str) -> dict[str, Slot]:
        """What a file holds, by name.

        Raises:
            CheckpointError: There is none, or it is no safetensors file, or not a whole one.
            OSError: It cannot be read.
        """
        try:
            return self._open(file)[1]
        except (OSError, ValueError) as error:
            raise_if_unreadable(error)
            raise CheckpointError(
                f"{self._what}: {self._places[file]} cannot be read",
                found=f"{type(error).__name__}: {error}",
                expected="a whole safetensors file",
                fix="get the file anew, or compare it with its source",
            ) from error

    def check(self, name: str, entry: TensorEntry, block: Block) -> None:
        """Open the files that a block lies in, and look whether they hold it.

        Raises:
            CheckpointError: A file is missing, or does not hold what the entry says.
            OSError: It cannot be read.
        """
        for piece, _, _ in _overlapping_pieces(entry, block):
            self._place(name, entry.dtype, piece)

    def read(self, name: str, entry: TensorEntry, block: Block, out: torch.Tensor) -> None:
        """Read a block of a tensor into `out`: on the CPU, contiguous, of the stored dtype.

        Raises:
            CheckpointError: A file is missing, or does not hold what the entry says.
            OSError: It cannot be read.
        """
        memory, width = memory_of(out), DTYPES[entry.dtype][1]
        for piece, common, source in _overlapping_pieces(entry, block):
            handle, start = self._place(name, entry.dtype, piece)
            try:
                for there, here, length in _runs(common, source, block):
                    read_into(handle, memory[here * width : (here + length) * width], start + there * width)
            except (OSError, ValueError) as error:
                self._refuse(name, entry.dtype, piece, error)

    def _open(self, file: str) -> tuple[int, dict[str, Slot]]:
        with self._opening:
            if file not in self._opened:
                self._opened[file] = open_tensors(self._places[file])
                self._handles.callback(os.close, self._opened[file][0])
            return self._opened[file]

    def _place(self, name: str, dtype: str, piece: Piece) -> tuple[int, int]:
        """The file a piece lies in, and where."""
        name, size = _stored_as(name, piece)
        try:
            handle, slots = self._open(piece.file)
            if name not in slots:
                raise ValueError(f"{len(slots)} other tensors")
            found, shape, start = slots[name]
            if (found, shape) != (dtype, size):
                raise ValueError(f"{found} of shape {shape}")
        except (OSError, ValueError) as error:
            self._refuse(name, dtype, piece, error)
        return handle, start

    def _refuse(self, name: str, dtype: str, piece: Piece, error: Exception) -> NoReturn:
        """Raise what names both, the file and the tensor."""
        raise_if_unreadable(error)
        name, size = _stored_as(name, piece)
        raise CheckpointError(
            f"{self._what}: {name} cannot be read from {self._places[piece.file]}",
            found=f"{type(error).__name__}: {error}",
            expected=f"{dtype} of shape {size}",
            fix="an older checkpoint, or a whole copy of the file",
        ) from error


def _stored_as(name: str, piece: Piece) -> tuple[str, tuple[int, ...]]:
    """The name and shape that a piece has in its file."""
    return (piece.name, piece.stored) if isinstance(piece, NamedPiece) else (name, piece.shape)


# -- blocks ------------------------------------------------------------------------------------------


def _overlapping_pieces(entry: TensorEntry, block: Block) -> Iterator[tuple[Piece, Block, Block]]:
    """The pieces that a block has a part of: each with that part, and as a block itself."""
    for piece in entry.pieces if block.size else ():
        source = Block(piece.offsets, piece.shape)
        common = block if source == block else overlap(block, source)
        if common is not None:
            yield piece, common, source


def contiguous_blocks(shape: tuple[int, ...], most: int) -> Iterator[Block]:
    """Cut a tensor into blocks of at most `most` elements, each contiguous, in the order of its memory.

    Yields:
        The blocks.

    Example:
        >>> [block.shape for block in contiguous_blocks((3, 4), 8)]
        [(2, 4), (1, 4)]
        >>> [block.offsets for block in contiguous_blocks((2, 3), 2)]
        [(0, 0), (0, 2), (1, 0), (1, 2)]
    """
    if not shape:
        yield Block((), ())
        return
    dim = next(dim for dim in range(len(shape)) if math.prod(shape[dim + 1 :]) <= most or dim == len(shape) - 1)
    rest = shape[dim + 1 :]
    step = max(most // max(math.prod(rest), 1), 1)
    for lead in itertools.product(*map(range, shape[:dim])):
        for start in range(0, shape[dim] if 0 not in rest else 0, step):
            size = min(step, shape[dim] - start)
            yield Block((*lead, start, *(0,) * len(rest)), (*(1,) * dim, size, *rest))


def _runs(common: Block, source: Block, target: Block) -> Iterator[tuple[int, int, int]]:
    """Stretches of `common` that are contiguous in both blocks around it: where in each, and elements."""
    if common == source == target:
        yield 0, 0, common.size
        return
    dim = max(len(common.shape) - 1, 0)
    while dim > 0 and common.shape[dim] == source.shape[dim] == target.shape[dim]:
        dim -= 1
    length = math.prod(common.shape[dim:])
    for lead in itertools.product(*map(range, common.shape[:dim])):
        at = tuple(zero + more for zero, more in itertools.zip_longest(common.offsets, lead, fillvalue=0))
        yield _flat_offset(at, source), _flat_offset(at, target), length


def _flat_offset(at: tuple[int, ...], block: Block) -> int:
    """How many elements of a block lie before a place in it."""
    return flat_index([place - zero for place, zero in zip(at, block.offsets, strict=True)], block.shape)


# -- headers -----------------------------------------------------------------------------------------


def open_tensors(path: Path) -> tuple[int, dict[str, Slot]]:
    """Open a safetensors file and read what it holds; symbolic links are refused.

    Raises:
        ValueError: It is no safetensors file, or not a whole one.
        OSError: It cannot be read.
    """
    handle, size = open_plain(path)
    try:
        return handle, _slots(handle, size)
    except BaseException:
        os.close(handle)
        raise


def _slots(handle: int, file_bytes: int) -> dict[str, Slot]:
    head = bytearray(min(8, file_bytes))
    read_into(handle, memoryview(head), 0)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - 8):
        pickled = bytes(head[:2]) in (b"PK", b"\x80\x02", b"\x80\x04", b"\x80\x05")
        raise ValueError("a file of torch.save" if pickled else f"{file_bytes} bytes, too few for its header")
    text = bytearray(length)
    read_into(handle, memoryview(text), 8)
    found: dict[str, Slot] = {}
    end = 8 + length
    try:
        with safe_open(f"/dev/fd/{handle}", "pt", backend="pread") as file:  # the open file, whatever has its name now
            for name in file.offset_keys():  # a file has no gaps: one tensor begins where the one before ends
                part = file.get_slice(name)
                code, shape = part.get_dtype(), tuple(part.get_shape())
                if code not in _CODES:
                    raise ValueError(f"dtype {code!r:.20}, which weft does not know")
                dtype = _CODES[code]
                found[name] = dtype, shape, end
                end += math.prod(shape) * DTYPES[dtype][1]
    except SafetensorError as error:
        raise ValueError(str(error)) from error
    if len(_ENTRY.findall(text)) != len(found):  # of two entries, the package takes the last
        raise ValueError("a name that comes twice in the header")
    return found
