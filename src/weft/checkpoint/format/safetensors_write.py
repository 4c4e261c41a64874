"""Safetensors files with hashes, brought to the disk for certain."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from weft.checkpoint.format.hashes import best_hash, new_hash
from weft.checkpoint.format.manifest import DTYPES, MAX_HEADER_BYTES, FileEntry
from weft.checkpoint.format.plain_files import closing
from weft.errors import CheckpointError
from weft.tensors.blocks import memory_of

_BLOCK = 2**20  # bytes; fits into the caches of a core
_AHEAD = 2**23  # bytes that are written to the file until the disk is asked to begin with them


def tensor_parts(tensors: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    """A safetensors file of tensors, part by part, for `write_parts`.

    A tensor may change meanwhile: each block is copied first, so that the hash is that of the bytes in the file.

    Yields:
        Bytes; each block is overwritten by the next one.

    Raises:
        CheckpointError: They have too many names, or too long ones, for a header that is read again.
    """
    # Not by `safetensors.serialize_file`: it has no place for a hash (reading the file back adds 1.1 s to 4.3 s for
    # 1 GB, and would compare what is read with itself), wants all tensors in host memory at once, and tells of a full
    # disk by an error without errno.
    head, order = file_header(tensors)
    yield head
    memory = memoryview(bytearray(_BLOCK))
    for name in order:
        data = memory_of(tensors[name].detach().cpu().contiguous())
        for start in range(0, len(data), _BLOCK):
            block = memory[: min(_BLOCK, len(data) - start)]
            np.copyto(np.frombuffer(block, np.uint8), np.frombuffer(data[start : start + _BLOCK], np.uint8))
            yield block


def file_header(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """How a safetensors file of these tensors begins, and the order in which their bytes follow.

    It is eight bytes of length and a header in JSON.

    Raises:
        CheckpointError: The header could not be read again.
    """
    # Wide dtypes first, so that each tensor is aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")][0]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            "the names of these tensors are too long for a safetensors file",
            found=f"{len(order)} tensors with a header of {len(text)} bytes; {max(order, key=len):.60}...",
            expected=f"at most {MAX_HEADER_BYTES} bytes, or no one could read it",
            fix="shorter keys in state_dict(), or fewer tensors: torch.cat(tensors)",
        )
    return len(text).to_bytes(8, "little") + text, order


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with new_file(path) as file:
        file.write(data)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which is on the disk afterwards.

    Yields:
        The file.

    Raises:
        OSError: It is there already, or cannot be written; names the file.
    """
    try:
        with path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk says "No space left on device", and not which one
        raise


def write_parts(file: IO[bytes], parts: Iterable[Any]) -> FileEntry:
    """Write bytes, part by part.

    Writing, hashing and waiting release the GIL: other threads run meanwhile.
    """
    kind, size, begun = best_hash(), 0, 0
    digest = new_hash(kind)
    for part in parts:
        file.write(part)
        digest.update(part)
        size += len(part)
        if size - begun >= _AHEAD:
            _begin_writing_back(file, begun, size - begun)
            begun = size
    return FileEntry(bytes=size, hash=kind, digest=digest.hexdigest())


def _begin_writing_back(file: IO[bytes], start: int, length: int) -> None:
    """Let the disk write while later parts are made; `fsync` alone would begin at the end, and take half as long again.

    The system does so for pages that are said to be needed no more. It drops those that are on the disk already, which
    these are not yet.
    """
    if hasattr(os, "posix_fadvise") and isinstance(file, io.BufferedWriter):
        os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_DONTNEED)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    with closing(os.open(folder, os.O_RDONLY)) as handle:
        os.fsync(handle)


def take_name(hidden: Path, final: Path, old: Path | None) -> None:
    """Rename a folder; what has the name gets the name `old` first, and its own back if that fails.

    Raises:
        OSError: It could not be renamed.
    """
    if old is not None:
        final.rename(old)
    try:
        hidden.rename(final)
    except OSError:
        if hidden.is_dir():  # else it has succeeded, and a network file system has asked twice
            if old is not None:
                old.rename(final)
            raise
