"""Safetensors files with hashes, brought to the disk for certain."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.manifest import DTYPES, FileEntry, Manifest
from weft.errors import CheckpointError, MissingExtra, message

__all__ = ["check_file", "open_tensors", "require_safetensors", "sync_folder", "write_tensors", "write_text"]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileEntry:
    """Write a safetensors file, one tensor after the other, and wait until it is on the disk.

    Not by `safetensors.torch.save_file`: that copies all tensors first, and tells of a full disk by an
    error of its own. The format is eight bytes of length, a header in JSON, and the bytes themselves.
    """
    # Wide dtypes first, so that each tensor is aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        dtype = DTYPES[str(tensor.dtype).removeprefix("torch.")][0]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts = (_bytes(tensors[name]) for name in order)
    return _write(path, (part for head in ([len(text).to_bytes(8, "little"), text], parts) for part in head))


def _bytes(tensor: torch.Tensor) -> Any:
    """The bytes of a tensor, without a copy if it lies in one piece in main memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def write_text(path: Path, text: str) -> FileEntry:
    """Write a text file and wait until it is on the disk."""
    return _write(path, [text.encode()])


def _write(path: Path, parts: Iterable[Any]) -> FileEntry:
    digest = hashlib.sha256()
    with path.open("xb") as file:
        for part in parts:
            file.write(part)
            digest.update(part)
        file.flush()
        os.fsync(file.fileno())
        return FileEntry(bytes=file.tell(), sha256=digest.hexdigest())


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
        CheckpointError: It is missing, is no plain file, or differs; names a tensor it holds.
    """
    path, entry = folder / name, manifest.files[name]
    found = None
    try:
        if path.is_symlink() or not path.is_file():
            found = "a symbolic link" if path.is_symlink() else "no such file"
        elif path.stat().st_size != entry.bytes:
            found = f"{path.stat().st_size} bytes"
        elif content:
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                    found = "other bytes than were written (SHA-256 differs)"
    except OSError as error:
        found = f"{type(error).__name__}: {error}"
    if found is not None:
        held = [tensor for tensor, value in manifest.tensors.items() if any(p.file == name for p in value.pieces)]
        raise CheckpointError(
            message(
                f"{path} is damaged",
                found=f"{found}; it holds {', '.join(held[:3]) or 'no tensors'}{', ...' if len(held) > 3 else ''}",
                expected=f"the file that was saved: {entry.bytes} bytes, SHA-256 {entry.sha256[:12]}...",
                fix="restore an older checkpoint: weft.restore(state, directory, ctx) takes the newest that is whole",
            )
        )


def open_tensors(path: Path) -> Any:
    """A safetensors file, to read slices from."""
    return require_safetensors().safe_open(path, framework="pt")


def require_safetensors() -> Any:
    """The package safetensors.

    Raises:
        MissingExtra: It is not installed.
    """
    try:
        import safetensors  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise MissingExtra(
            message(
                "restore: checkpoints are read with safetensors, which is not installed",
                found=str(error),
                expected="the package safetensors",
                fix="pip install 'weft[checkpoint]'",
            )
        ) from error
    return safetensors
