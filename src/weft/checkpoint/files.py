"""Safetensors files with hashes, brought to the disk for certain."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.manifest import FileEntry, Manifest
from weft.errors import CheckpointError, MissingExtra, message

__all__ = ["check_file", "open_tensors", "sync_folder", "write_tensors", "write_text"]


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileEntry:
    """Write a safetensors file, wait until it is on the disk, and tell its size and hash."""
    _safetensors().torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return _settled(path)


def write_text(path: Path, text: str) -> FileEntry:
    """Write a text file and wait until it is on the disk."""
    path.write_text(text, encoding="utf-8")
    return _settled(path)


def _settled(path: Path) -> FileEntry:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileEntry(bytes=file.tell(), sha256=digest)


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def check_file(folder: Path, name: str, manifest: Manifest) -> None:
    """Compare a file with the manifest.

    Raises:
        CheckpointError: It is missing, is no plain file, or differs; names a tensor it holds.
    """
    path, entry = folder / name, manifest.files[name]
    found = None
    if path.is_symlink() or not path.is_file():
        found = "no such file" if not path.is_symlink() else "a symbolic link"
    elif path.stat().st_size != entry.bytes:
        found = f"{path.stat().st_size} bytes, not {entry.bytes}"
    else:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != entry.sha256:
                found = "other bytes than were written (SHA-256 differs)"
    if found is not None:
        held = [tensor for tensor, value in manifest.tensors.items() if any(p.file == name for p in value.pieces)]
        raise CheckpointError(
            message(
                f"{path} is damaged",
                found=f"{found}; it holds {', '.join(held[:3])}{', ...' if len(held) > 3 else ''}",
                expected=f"the file that was saved: {entry.bytes} bytes, SHA-256 {entry.sha256[:12]}...",
                fix="restore an older checkpoint: weft.restore(state, directory, ctx) takes the newest that is whole",
            )
        )


def open_tensors(path: Path) -> Any:
    """A safetensors file, to read slices from."""
    return _safetensors().safe_open(path, framework="pt")


def _safetensors() -> Any:
    try:
        import safetensors.torch  # noqa: PLC0415  (an extra)
    except ImportError as error:
        raise MissingExtra(
            message(
                "checkpoints are written with safetensors, which is not installed",
                found=str(error),
                expected="the package safetensors",
                fix="pip install 'weft[checkpoint]'",
            )
        ) from error
    return safetensors
