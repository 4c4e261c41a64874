"""The manifest: what a checkpoint consists of. Read with suspicion: it may come from anywhere."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from weft.errors import CheckpointError, message

__all__ = ["FORMAT", "NAME", "FileEntry", "Manifest", "Piece", "TensorEntry", "read_manifest"]

FORMAT = "weft checkpoint 1"
NAME = "manifest.json"
_MAX_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A block of a tensor in a file.

    Attributes:
        file: Name of the file, in the folder of the manifest.
        offsets: Where the block begins in the tensor.
        shape: Its size.
    """

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor.

    Attributes:
        dtype: As in "float32".
        shape: Of the whole tensor.
        pieces: Blocks that cover it without overlap.
        same_as: The tensor that is the very same, for tied weights; it has no pieces of its own then.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] = ()
    same_as: str | None = None


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file: its size and SHA-256, as hexadecimal digits."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint.

    Attributes:
        step: Number given to `save`.
        world_size: Ranks that saved.
        tensors: By name.
        values: Plain values of all ranks together, by name.
        ranks: Plain values of each rank.
        files: By file name.
        format: Version of the format.
    """

    step: int
    world_size: int
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]
    ranks: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, FileEntry] = field(default_factory=dict)
    format: str = FORMAT

    def text(self) -> str:
        """The manifest as JSON."""
        return json.dumps(asdict(self), indent=1, allow_nan=True)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        CheckpointError: It is missing, or is not one; the text names the place.
    """
    path = folder / NAME
    try:
        if path.is_symlink() or not path.is_file():
            _refuse(folder, "no manifest", f"no file {NAME}")
        if path.stat().st_size > _MAX_BYTES:
            _refuse(folder, "a manifest that is too large", f"{path.stat().st_size} bytes")
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        _refuse(folder, "a manifest that cannot be read", f"{type(error).__name__}: {error}", error)
    try:
        manifest = _parsed(data)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        _refuse(folder, "a manifest that is not one", f"{type(error).__name__}: {error}", error)
    _check(folder, manifest)
    return manifest


def _refuse(folder: Path, problem: str, found: str, cause: BaseException | None = None) -> None:
    raise CheckpointError(
        message(
            f"{folder} has {problem}",
            found=found,
            expected=f"a folder that weft.save wrote, with {NAME} of format {FORMAT!r}",
            fix="weft.latest(directory)  # the newest complete checkpoint",
        )
    ) from cause


def _parsed(data: Any) -> Manifest:
    if data["format"] != FORMAT:
        raise ValueError(f"format {data['format']!r}")
    tensors = {
        str(name): TensorEntry(
            dtype=str(entry["dtype"]),
            shape=_sizes(entry["shape"]),
            pieces=tuple(
                Piece(file=str(p["file"]), offsets=_sizes(p["offsets"]), shape=_sizes(p["shape"]))
                for p in entry["pieces"]
            ),
            same_as=None if entry["same_as"] is None else str(entry["same_as"]),
        )
        for name, entry in data["tensors"].items()
    }
    files = {
        str(name): FileEntry(bytes=int(entry["bytes"]), sha256=str(entry["sha256"]))
        for name, entry in data["files"].items()
    }
    return Manifest(
        step=int(data["step"]),
        world_size=int(data["world_size"]),
        tensors=tensors,
        values=dict(data["values"]),
        ranks=[dict(rank) for rank in data["ranks"]],
        files=files,
    )


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(value)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"sizes {value!r}")
    return sizes


def _check(folder: Path, manifest: Manifest) -> None:
    """Refuse names that lead out of the folder, and tensors that their pieces do not cover."""
    wrong = [name for name in manifest.files if Path(name).name != name or name in ("", ".", "..", NAME)]
    for name, entry in manifest.tensors.items():
        if entry.same_as is not None:
            origin = manifest.tensors.get(entry.same_as)
            if origin is None or origin.same_as is not None or entry.pieces:
                wrong.append(f"{name}: the same as {entry.same_as}")
            continue
        covered = 0
        for piece in entry.pieces:
            if not _is_inside(piece, entry.shape) or piece.file not in manifest.files:
                wrong.append(f"{name}: a piece at {piece.offsets} in {piece.file!r}")
            covered += _count(piece.shape)
        if covered != _count(entry.shape):
            wrong.append(f"{name}: {covered} of {_count(entry.shape)} elements")
    if wrong:
        _refuse(folder, "a manifest that contradicts itself", "; ".join(wrong[:5]))


def _is_inside(piece: Piece, whole: tuple[int, ...]) -> bool:
    if not len(piece.offsets) == len(piece.shape) == len(whole):
        return False
    return all(at + size <= most for at, size, most in zip(piece.offsets, piece.shape, whole, strict=True))


def _count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
