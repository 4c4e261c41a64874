"""The manifest: what a checkpoint consists of. Read with suspicion: it may come from anywhere.

Its first line holds the SHA-256 of all that follows, so that a flipped bit in a number is noticed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

from weft.checkpoint.format.hashes import HASHES
from weft.checkpoint.format.plain_files import parse_json, raise_if_unreadable, read_plain
from weft.errors import CheckpointError, listed

# Its number grows with whatever an older weft would not understand. 2: counters, ordered dicts and orders of sums among
# the values, which 0.2.0 wrote as 1; scores.
_FORMATS = "weft checkpoint "
FORMAT = f"{_FORMATS}2"
_READABLE = (f"{_FORMATS}1", FORMAT)
NAME = "manifest.json"
STEP = re.compile(r"step-(\d{1,18})")  # folders of checkpoints
MAX_STEP = 10**18 - 1
_MAX_CUTS = 5  # dimensions along which a tensor may be cut: a piece has two to the power of it corners
T = TypeVar("T")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.safetensors")
# What is written has to be read again: both sides have the same limits.
MAX_BYTES = 2**30  # of a manifest
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as the package has it
_MAX_DIMS = 64
_SEAL = re.compile(rb'\{"sha256": "([0-9a-f]{64})",\n')

# Of torch, and what safetensors calls them, with their size.
DTYPES = MappingProxyType({
    "float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e5m2": ("F8_E5M2", 1), "complex64": ("C64", 8),
    "int64": ("I64", 8), "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1), "bool": ("BOOL", 1),
    "uint64": ("U64", 8), "uint32": ("U32", 4), "uint16": ("U16", 2), "uint8": ("U8", 1),
})  # fmt: skip


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
class NamedPiece(Piece):
    """A block that is a tensor of its own in a file that weft has not written; it is in no manifest.

    Attributes:
        name: Its name there.
        stored: Its shape there, of as many elements in the same order.
    """

    name: str
    stored: tuple[int, ...]


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

    def text(self) -> str:
        """This entry as JSON."""
        return json.dumps({**vars(self), "pieces": [vars(piece) for piece in self.pieces]})


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file.

    Attributes:
        bytes: Its size.
        hash: Which hash; one of `HASHES`.
        digest: The hash, as hexadecimal digits.
    """

    bytes: int
    hash: str
    digest: str


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
        run: Name of the run that saved it; of one that was imported or saved by an older weft, None.
        score: Given to `save`; None if it was not, or not a finite number.
        format: Version of the format.
    """

    step: int
    world_size: int
    tensors: dict[str, TensorEntry]
    values: dict[str, Any]
    ranks: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, FileEntry] = field(default_factory=dict)
    run: str | None = None
    score: float | None = None
    format: str = FORMAT

    def text(self) -> bytes:
        """The manifest as JSON, with its own hash in the first line, and a line for each tensor.

        Not by `asdict` and `indent`, which take ten times as long, in Python, while a program trains.
        """
        head = {key: value for key, value in vars(self).items() if key not in ("tensors", "files")}
        head["files"] = {name: {"bytes": f.bytes, f.hash: f.digest} for name, f in self.files.items()}
        lines = [f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in head.items()]
        tensors = ",\n".join(f"{json.dumps(name)}: {entry.text()}" for name, entry in self.tensors.items())
        rest = f'{"".join(lines)}"tensors": {{\n{tensors}\n}}}}\n'.encode()
        return b'{"sha256": "%s",\n%s' % (hashlib.sha256(rest).hexdigest().encode(), rest)


def step_of(name: str) -> int:
    """The step in the name of a checkpoint; -1 if it has another name."""
    match = STEP.fullmatch(name)
    return int(match[1]) if match else -1


class Damage(CheckpointError):
    """What was read is not what was saved. What could not be read is no damage: that raises `OSError`."""


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises:
        Damage: It is missing, or is not one; the text names the place.
        CheckpointError: It is of another version of the format.
        OSError: It cannot be read.
    """
    try:
        if STEP.fullmatch(folder.name) and folder.is_symlink():  # one that the user has renamed may be a link
            _refuse(folder, "no place of its own", f"a symbolic link to {folder.readlink()}")
        text = read_plain(folder / NAME, most=MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise_if_unreadable(error)
        _refuse(folder, "no manifest", f"no plain file {NAME}: {error}", error)
    return parse_manifest(text, folder)


def parse_manifest(text: bytes, folder: Path) -> Manifest:
    """Check the text of a manifest; `folder` is where it was found, for the texts of errors.

    Raises:
        Damage: It is not one; the text names the place.
        CheckpointError: It is of another version of the format.
    """
    if len(text) > MAX_BYTES:
        _refuse(folder, "a manifest that is too large", f"{NAME} of {len(text)} bytes")
    seal = _SEAL.match(text)
    if seal is None or hashlib.sha256(memoryview(text)[seal.end() :]).hexdigest().encode() != seal[1]:
        _refuse(folder, "a damaged manifest", f"{NAME}: its SHA-256 differs from the one in its first line")
    try:
        data = parse_json(text)
    except ValueError as error:
        _refuse(folder, "a manifest that cannot be read", f"{NAME}: {type(error).__name__}: {error}", error)
    try:
        written = data["format"]
        if isinstance(written, str) and written.startswith(_FORMATS) and written not in _READABLE:
            raise CheckpointError(
                f"{folder} was written by another version of weft",
                found=f"format {written!r:.60}",
                expected=f"format {' or '.join(map(repr, _READABLE))}",
                fix="install the version of weft that wrote it; nothing was changed, and no older checkpoint was taken",
            )
        manifest = _parsed(data)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        _refuse(folder, "a manifest that is not one", f"{NAME}: {type(error).__name__}: {error}", error)
    wrong = check(manifest)
    if wrong:
        _refuse(folder, "a manifest that contradicts itself", listed(wrong))
    return manifest


def check_place(folder: Path, manifest: Manifest) -> None:
    """Raise if a checkpoint has the name of another step; any other name is the user's own.

    Raises:
        Damage: It was copied or renamed.
    """
    match = STEP.fullmatch(folder.name)
    if match and int(match[1]) != manifest.step:
        _refuse(folder, "the manifest of another checkpoint", f"{NAME} of step {manifest.step}")


def _refuse(folder: Path, problem: str, found: str, cause: BaseException | None = None) -> NoReturn:
    raise Damage(
        f"{folder} has {problem}",
        found=f"{found:.500}",
        expected=f"a folder that weft.save wrote, with {NAME} of format {FORMAT!r}",
        fix="weft.restore(state, directory, ctx)  # takes the newest checkpoint that is complete",
    ) from cause


def _parsed(data: Any) -> Manifest:
    if data["format"] not in _READABLE:
        raise ValueError(f"format {data['format']!r:.60}")
    tensors = {
        _is(str, name): TensorEntry(
            dtype=_dtype(entry["dtype"]),
            shape=sizes_of(entry["shape"]),
            pieces=tuple(
                Piece(file=_is(str, p["file"]), offsets=sizes_of(p["offsets"]), shape=sizes_of(p["shape"]))
                for p in _is(list, entry["pieces"])
            ),
            same_as=None if entry["same_as"] is None else _is(str, entry["same_as"]),
        )
        for name, entry in _is(dict, data["tensors"]).items()
    }
    files = {name: _file(_is(dict, entry)) for name, entry in _is(dict, data["files"]).items()}
    return Manifest(
        step=_size(data["step"]),
        world_size=_size(data["world_size"]),
        tensors=tensors,
        values=_is(dict, data["values"]),
        ranks=[_is(dict, rank) for rank in _is(list, data["ranks"])],
        files=files,
        run=None if data.get("run") is None else _is(str, data["run"]),
        score=None if data.get("score") is None else _score(data["score"]),
        format=data["format"],
    )


def _file(entry: dict[str, Any]) -> FileEntry:
    size = _size(entry.pop("bytes"))
    ((kind, digest),) = entry.items()
    if not re.fullmatch(f"[0-9a-f]{{{HASHES[kind][1]}}}", _is(str, digest)):
        raise ValueError(f"{digest!r:.60} as a hash {kind}")
    return FileEntry(bytes=size, hash=kind, digest=digest)


def _score(value: Any) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise ValueError(f"the score {value!r:.20}")
    return value


def _is(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise ValueError(f"{value!r:.60} where a {kind.__name__} should be")
    return value


def _size(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"the number {value!r:.20}")
    return value


def sizes_of(value: Any) -> tuple[int, ...]:
    """The shape of a tensor, or where one begins in another, as a text has it.

    Raises:
        ValueError: No tensor has it.
    """
    found = tuple(map(_size, _is(list, value)))
    # Also a tensor without elements, as of [2**40, 0, 2**40], has strides.
    if len(found) > _MAX_DIMS or math.prod(filter(None, found)) >= 2**59:
        raise ValueError(f"the sizes {value!r:.80}")
    return found


def _dtype(value: Any) -> str:
    if value not in DTYPES:
        raise ValueError(f"dtype {value!r:.60}")
    return str(value)


def check(manifest: Manifest) -> list[str]:
    """What contradicts itself: names that lead out of the folder, tensors that their pieces do not cover."""
    wrong = [f"{name!r:.120}" for name in manifest.files if not _FILE.fullmatch(name)]
    if manifest.step > MAX_STEP:
        wrong.append(f"step {manifest.step}")
    claimed = dict.fromkeys(manifest.files, 0)
    for name, entry in manifest.tensors.items():
        if entry.same_as is not None:
            origin = manifest.tensors.get(entry.same_as)
            is_alike = origin is not None and (origin.shape, origin.dtype) == (entry.shape, entry.dtype)
            if not is_alike or origin is None or origin.same_as is not None or entry.pieces:
                wrong.append(f"{name}: the same as {entry.same_as}")
            continue
        strange = [p for p in entry.pieces if not _is_inside(p, entry.shape) or p.file not in manifest.files]
        wrong += [f"{name}: a piece at {piece.offsets} in {piece.file!r}" for piece in strange]
        if not strange and not _is_covered(entry):
            covered = sum(math.prod(piece.shape) for piece in entry.pieces)
            wrong.append(f"{name}: {covered} of {math.prod(entry.shape)} elements, or pieces that overlap")
        for piece in entry.pieces:
            if piece.file in claimed:
                claimed[piece.file] += math.prod(piece.shape) * DTYPES[entry.dtype][1]
    wrong += [
        f"{name!r}: {claimed[name]} bytes of tensors in {entry.bytes}"
        for name, entry in manifest.files.items()
        if claimed[name] > entry.bytes
    ]
    if len(manifest.ranks) != manifest.world_size:
        wrong.append(f"{len(manifest.ranks)} of {manifest.world_size} ranks")
    return wrong


def _is_inside(piece: Piece, whole: tuple[int, ...]) -> bool:
    if not len(piece.offsets) == len(piece.shape) == len(whole):
        return False
    return all(at + size <= most for at, size, most in zip(piece.offsets, piece.shape, whole, strict=True))


def _is_covered(entry: TensorEntry) -> bool:
    """Whether pieces that lie inside a tensor hold each element of it exactly once.

    They do if their corners are those of the tensor, once all corners that meet have cancelled: each corner counts
    as 1 or -1, by how many of its coordinates are ends. That takes time in proportion to the number of pieces.
    """
    whole = ((0,) * len(entry.shape), entry.shape)
    pieces = [(piece.offsets, piece.shape) for piece in entry.pieces]
    if pieces == [whole]:
        return True
    cut = [dim for dim in range(len(entry.shape)) if any(size[dim] != entry.shape[dim] for _, size in pieces)]
    if len(cut) > _MAX_CUTS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, (at, size) in ((1, whole), *((-1, piece) for piece in pieces)):
        if 0 not in size:
            for corner, is_odd in _corners([(at[dim], at[dim] + size[dim]) for dim in cut]):
                corners[corner] += -sign if is_odd else sign
    return not any(corners.values())


def _corners(sides: list[tuple[int, int]]) -> Iterator[tuple[tuple[int, ...], bool]]:
    """The corners of a block, each with whether it has an odd number of ends."""
    for ends in itertools.product((0, 1), repeat=len(sides)):
        yield tuple(side[end] for side, end in zip(sides, ends, strict=True)), sum(ends) % 2 == 1
