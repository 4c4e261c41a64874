"""What `torch.save` and torch.distributed.checkpoint (DCP) wrote, read as values: nothing in the files is executed.

Files of `torch.save` are read by torch's loader with `weights_only=True`, which knows tensors and plain values; arrays
of numpy are added to these. It cannot read the `.metadata` of DCP, which is a bare pickle: an unpickler here knows the
few names that torch writes into it, and makes of each object its fields alone, whatever its class.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from typing_extensions import override

from weft import torch_internals
from weft.checkpoint.format.manifest import DTYPES
from weft.checkpoint.format.plain_files import raise_if_unreadable
from weft.errors import CheckpointError
from weft.tensors.blocks import Block

METADATA = ".metadata"  # DCP writes it last
_READ = "_weft_read"  # on a tensor: what reads it
Read: TypeAlias = Callable[[], Iterable[torch.Tensor]]


def deferred(shape: Sequence[int], dtype: torch.dtype, read: Read) -> torch.Tensor:
    """A tensor that is read when it is written: on meta until then; `read` gives its parts in the order of memory."""
    known = torch.empty(tuple(shape), dtype=dtype, device="meta")
    setattr(known, _READ, read)
    return known


def parts_of(tensor: torch.Tensor) -> Iterable[torch.Tensor]:
    """The values of a tensor, deferred or not, in parts that are contiguous."""
    read: Read | None = getattr(tensor, _READ, None)
    return (part.contiguous() for part in ((tensor,) if read is None else read()))


# -- files of torch.save ---------------------------------------------------------------------------------


def load(what: str, path: Path, place: tuple[int, int] | None = None, device: str = "cpu") -> Any:
    """The values in a file of `torch.save`; tensors are mapped, and their bytes are read when they are needed.

    Args:
        what: The caller's name.
        path: The file.
        place: The first byte and the number of bytes of the part to read, if it is not all; nothing is mapped then.
        device: Where tensors are; on "meta" their numbers are not read.

    Raises:
        CheckpointError: It holds more than values, or is not whole.
        OSError: It cannot be read.
    """
    with values_alone(what, path), path.open("rb") as file, torch.serialization.safe_globals(_of_numpy()):
        if place is not None:
            start, size = place
            expect(start + size <= path.stat().st_size, f"{path.stat().st_size} bytes of {start + size}")
            return torch.load(torch_internals.file_view(file, start, size), device, weights_only=True)
        is_zip = zipfile.is_zipfile(path)
        expect(is_zip or file.read(2) != b"PK", "its end is missing")
        return torch.load(path, device, weights_only=True, mmap=is_zip)


@contextlib.contextmanager
def values_alone(what: str, path: Path) -> Iterator[None]:
    """Around what reads a file, and uses what it has read: errors name the file.

    Raises:
        CheckpointError: It holds more than values, or is not what it should be.
        OSError: It cannot be read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forms of pickles
            yield
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        found = f"a pickle that calls {name[1]}" if name else f"{error}".partition("\n")[0]
        raise CheckpointError(
            f"{what}: {path} holds more than tensors and plain values, and was not opened any further",
            found=f"{found:.200}",
            expected="a file that torch.load(path, weights_only=True) reads: anything else may run any code",
            fix=f'weft.interop.{what}(folder, out, skip=["{_object_in(path)}"])  # without what is in this file'
            if _object_in(path)
            else "ask who wrote it for a file of values alone",
        ) from error
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, EOFError, OSError) as error:
        raise_if_unreadable(error)
        raise CheckpointError(
            f"{what}: {path} cannot be read",
            found=f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}",
            expected="a whole file, as it was saved",
            fix="copy the folder anew, or import an older checkpoint of the run",
        ) from error


def expect(holds: bool, otherwise: str) -> None:
    """Raise if something does not hold.

    Raises:
        ValueError: It does not.
    """
    if not holds:
        raise ValueError(otherwise)


def _object_in(path: Path) -> str:
    """The name of the object in a file, if `skip` may leave it out."""
    name = "rng" if path.stem.startswith(("random_states", "rng_state")) else path.stem
    return "" if path.suffix == ".distcp" or name == METADATA or name.startswith("pytorch_model") else name


def _of_numpy() -> list[Any]:
    """What an array of numbers of numpy consists of, under its names in numpy 1 and 2."""
    made: Any = (np.zeros(1).__reduce__()[0], np.float64(0).__reduce__()[0])
    places = ("numpy._core.multiarray", "numpy.core.multiarray")
    named = [(one, f"{place}.{one.__name__}") for one in made for place in places]
    return [np.ndarray, np.dtype, *(type(np.dtype(one)) for one in ("u4", "i8", "f8", "f4", "?")), *named]


# -- folders of DCP --------------------------------------------------------------------------------------


class _Fields:
    """Stands for an object in a pickle, of any class: its fields."""

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


_KNOWN: Mapping[tuple[str, str], Any] = MappingProxyType({
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): getattr(torch, name) for name in DTYPES},
})  # fmt: skip
_DCP = "torch.distributed.checkpoint"
_OBJECTS = (f"{_DCP}.metadata", f"{_DCP}.filesystem", "torch.serialization", "pathlib", "pathlib._local")


class _MetadataUnpickler(pickle.Unpickler):  # noqa: S301  (finds no names but those above)
    @override
    def find_class(self, module: str, name: str, /) -> Any:
        if module in _OBJECTS:
            return _Fields
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return _KNOWN[module, name]


class _Chunk(NamedTuple):
    """A part of a tensor, and where it lies: the file, the first byte in it, and how many."""

    block: Block
    path: Path
    place: tuple[int, int]


def read_dcp(what: str, folder: Path) -> dict[Any, Any]:
    """The state that DCP saved into a folder, nested as it was; what has one element or none is read at once.

    All pickles in it are looked through before anything is returned, and all files are there, and long enough.

    Raises:
        CheckpointError: A file is missing, not whole, or holds more than values.
        OSError: One cannot be read.
    """
    with values_alone(what, folder / METADATA):
        with (folder / METADATA).open("rb") as file:
            found = _MetadataUnpickler(file).load()
        places: dict[tuple[str, Any], tuple[Path, tuple[int, int]]] = {}
        for key, info in found.storage_data.items():
            name = str(info.relative_path)
            is_plain = Path(name).name == name and not getattr(info, "transform_descriptors", None)
            expect(is_plain, f"{name:.100} outside of the folder, or compressed")
            places[key.fqn, getattr(key, "offset", None)] = folder / name, (int(info.offset), int(info.length))
        values: dict[str, Any] = {}
        for name, entry in found.state_dict_metadata.items():
            if hasattr(entry, "chunks"):
                like = torch.empty(entry.size, dtype=entry.properties.state[0], device="meta")
                chunks = [_Chunk(Block(one.offsets, one.sizes), *places[name, one.offsets]) for one in entry.chunks]
                values[name] = _tensor(what, name, like, chunks)
            else:
                values[name] = load(what, *places[name, None])
        paths = getattr(found, "planner_data", None) or {}
        return _nested({tuple(paths.get(name, (name,))): value for name, value in values.items()})


def _tensor(what: str, name: str, like: torch.Tensor, chunks: Sequence[_Chunk]) -> torch.Tensor:
    """A tensor in chunks, which is put together when it is read."""
    sides = [side for chunk in chunks for side in zip(*chunk.block, like.shape, strict=True)]
    is_inside = all(at >= 0 and size >= 0 and at + size <= whole for at, size, whole in sides)
    is_whole = is_inside and sum(chunk.block.size for chunk in chunks) == like.numel()
    expect(is_whole, f"{name}: chunks that are not the tensor of shape {tuple(like.shape)}")
    for chunk in chunks:
        there = load(what, chunk.path, chunk.place, "meta")
        fits = isinstance(there, torch.Tensor) and (there.dtype, tuple(there.shape)) == (like.dtype, chunk.block.shape)
        expect(fits, f"{name}: no tensor of {like.dtype} and shape {chunk.block.shape} in {chunk.path.name}")

    def read() -> Iterable[torch.Tensor]:
        whole = torch.empty_like(like, device="cpu")
        for chunk in chunks:
            whole[chunk.block.slices] = load(what, chunk.path, chunk.place)
        yield whole

    return deferred(like.shape, like.dtype, read) if like.numel() > 1 else next(iter(read()))


def _nested(values: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """A tree of dicts and lists, of its leaves by path: whole numbers are places in lists, as DCP makes keys text."""
    parts: dict[Any, dict[tuple[Any, ...], Any]] = {}
    for (key, *rest), value in values.items():
        parts.setdefault(key, {})[tuple(rest)] = value
    found = {key: part[()] if () in part else _nested(part) for key, part in parts.items()}
    return {key: _list(value) if () not in parts[key] else value for key, value in found.items()}


def _list(node: dict[Any, Any]) -> Any:
    return [node[index] for index in sorted(node)] if all(type(key) is int for key in node) else node
