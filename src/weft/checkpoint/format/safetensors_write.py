"""Safetensors files with hashes, brought to the disk for certain."""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.checkpoint.format.hashes import HASHES, best_hash, new_hash
from weft.checkpoint.format.manifest import DTYPES, Damage, FileEntry, Manifest, raise_if_unreadable
from weft.checkpoint.format.tensor_blocks import memory_of

__all__ = [
    "check_file",
    "digest_of",
    "file_head",
    "sync_folder",
    "write_parts",
    "write_tensors",
    "write_text",
]

_BLOCK = 2**20  # bytes; fits into the caches of a core


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileEntry:
    """Write a safetensors file, one tensor after the other, and wait until it is on the disk.

    A tensor may change meanwhile: each block is copied first, so that the hash is that of the bytes in the file.
    """
    # Not by `safetensors.serialize_file`: it has no place for a hash (reading the file back adds 1.1 s to 4.3 s for
    # 1 GB, and would compare what is read with itself), wants all tensors in host memory at once, and tells of a full
    # disk by an error without errno.
    head, order = file_head(tensors)
    parts = (memory_of(tensors[name].detach().cpu().contiguous()) for name in order)
    return write_parts(path, itertools.chain([head], _blocks(parts)))


def file_head(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, list[str]]:
    """How a safetensors file of these tensors begins, and the order in which their bytes follow.

    It is eight bytes of length and a header in JSON.
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
    return len(text).to_bytes(8, "little") + text, order


def _blocks(parts: Iterable[Any]) -> Iterator[memoryview]:
    """Copies of bytes, block by block; each is overwritten by the next one."""
    memory = memoryview(bytearray(_BLOCK))
    for part in parts:
        for start in range(0, len(part), _BLOCK):
            block = memory[: min(_BLOCK, len(part) - start)]
            np.copyto(np.frombuffer(block, np.uint8), np.frombuffer(part[start : start + _BLOCK], np.uint8))
            yield block


def write_text(path: Path, text: str) -> FileEntry:
    """Write a text file and wait until it is on the disk."""
    return write_parts(path, [text.encode()])


def write_parts(path: Path, parts: Iterable[Any]) -> FileEntry:
    """Write bytes, part by part, and wait until they are on the disk.

    Writing, hashing and waiting let other threads run; a thread that does it holds up nobody.
    """
    kind = best_hash()
    digest = new_hash(kind)
    try:
        with path.open("xb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
            file.flush()
            os.fsync(file.fileno())
            return FileEntry(bytes=file.tell(), hash=kind, digest=digest.hexdigest())
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk says "No space left on device", and not which one
        raise


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_file(folder: Path, name: str, manifest: Manifest, *, content: bool = True) -> None:
    """Compare a file with the manifest; without `content`, only that it is there and its size.

    Raises:
        Damage: It is missing, is no plain file, or differs; names a tensor it holds.
        OSError: It cannot be read.
        MissingExtra: Its hash is one of the package xxhash, which is not installed.
    """
    path, entry = folder / name, manifest.files[name]
    found = None
    try:
        state = path.lstat()
        if not stat.S_ISREG(state.st_mode):
            found = "a symbolic link" if stat.S_ISLNK(state.st_mode) else "something that is no file"
        elif state.st_size != entry.bytes:
            found = f"{state.st_size} bytes"
        elif content and digest_of(path, entry.hash) != entry.digest:
            found = f"other bytes than were written ({HASHES[entry.hash][0]} differs)"
    except OSError as error:
        raise_if_unreadable(error)
        found = "no such file"
    if found is not None:
        held = [tensor for tensor, value in manifest.tensors.items() if any(p.file == name for p in value.pieces)]
        raise Damage(
            f"{path} is damaged",
            found=f"{found}; it holds {', '.join(held[:3]) or 'no tensors'}{', ...' if len(held) > 3 else ''}",
            expected=f"the file that was saved: {entry.bytes} bytes, {HASHES[entry.hash][0]} {entry.digest[:12]}...",
            fix="restore an older checkpoint: weft.restore(state, directory, ctx) takes the newest that is complete",
        )


def digest_of(path: Path, kind: str) -> str:
    """The hash of a file."""
    digest, buffer = new_hash(kind), bytearray(_BLOCK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
    return digest.hexdigest()
