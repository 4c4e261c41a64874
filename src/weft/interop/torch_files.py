"""What `torch.save` and torch.distributed.checkpoint (DCP) wrote, read as values: nothing in the files is executed.

Files of `torch.save` are read by torch's loader with `weights_only=True`, which knows tensors and plain values; states
of numpy are added to these. Two things of DCP cannot be read that way: its `.metadata` is a bare pickle, for which an
unpickler here knows the few names that torch writes, none of them a class of torch: each stands for its fields alone.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from typing_extensions import override

from weft.checkpoint.format.manifest import DTYPES
from weft.checkpoint.format.plain_files import open_plain, raise_if_unreadable, read_into
from weft.errors import CheckpointError
from weft.tensors.blocks import Block

METADATA = ".metadata"  # DCP writes it last
_ERRORS = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, EOFError, ImportError, OSError)


class DeferredTensors:
    """Tensors that are read when they are written, each known by a tensor of its shape and dtype on meta."""

    def __init__(self) -> None:
        self._reads: dict[int, tuple[torch.Tensor, Callable[[], Iterable[torch.Tensor]]]] = {}

    def add(self, shape: Sequence[int], dtype: torch.dtype, read: Callable[[], Iterable[torch.Tensor]]) -> torch.Tensor:
        """A tensor on meta; `read` gives its values in parts, in the order of its memory."""
        known = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._reads[id(known)] = known, read
        return known

    def parts(self, tensor: torch.Tensor) -> Iterable[torch.Tensor]:
        """The values of a tensor, in parts that are contiguous."""
        found = self._reads.get(id(tensor))
        return (part.contiguous() for part in ((tensor,) if found is None else found[1]()))


# -- files of torch.save ---------------------------------------------------------------------------------


def load(what: str, path: Path) -> Any:
    """The values in a file of `torch.save`; tensors are mapped, and their bytes are read when they are needed.

    Raises:
        CheckpointError: It holds more than values, or is not whole.
        OSError: It cannot be read.
    """

    def read() -> Any:
        with path.open("rb") as file:
            begins_as_zip = file.read(2) == b"PK"
        is_zip = zipfile.is_zipfile(path)
        expect(is_zip or not begins_as_zip, "its end is missing")
        return torch.load(path, "cpu", weights_only=True, mmap=is_zip)

    return _values(what, path, read)


def _values(what: str, path: Path, read: Callable[[], Any]) -> Any:
    try:
        with torch.serialization.safe_globals(_of_numpy()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forms of pickles
            return read()
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        found = f"a pickle that calls {name[1]}" if name else f"{error}".partition("\n")[0]
        raise CheckpointError(
            f"{what}: {path} holds more than tensors and plain values, and was not opened any further",
            found=f"{found:.200}",
            expected="a file that torch.load(path, weights_only=True) reads: anything else may run any code",
            fix=f'weft.interop.{what}(folder, out, skip=["{_object_of(path)}"])  # without what is in this file',
        ) from error
    except _ERRORS as error:
        raise damaged(what, path, error) from error


def _object_of(path: Path) -> str:
    """The name of the object in a file, as `skip` takes it."""
    is_random = path.stem.startswith(("random_states", "rng_state"))
    part = path.parent.name if path.suffix == ".distcp" or path.name == METADATA else path.stem
    return "rng" if is_random else re.sub(r"^pytorch_model(_fsdp)?", "model", part).removesuffix("_0")


def damaged(what: str, path: Path, error: Exception) -> CheckpointError:
    """The error for a file that is missing, shorter than it was, or something else.

    Raises:
        OSError: It cannot be read at this moment.
    """
    raise_if_unreadable(error)
    return CheckpointError(
        f"{what}: {path} cannot be read",
        found=f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.200}",
        expected="a whole file, as it was saved",
        fix="copy the folder anew, or import an older checkpoint of the run",
    )


def expect(holds: bool, otherwise: str) -> None:
    """Raise if something does not hold.

    Raises:
        ValueError: It does not.
    """
    if not holds:
        raise ValueError(otherwise)


def _of_numpy() -> list[Any]:
    """What an array of numbers of numpy consists of, under its names in numpy 1 and 2."""
    found: list[Any] = [np.ndarray, np.dtype, *(type(np.dtype(one)) for one in ("u4", "i8", "f8", "f4", "?"))]
    for module in ("numpy._core.multiarray", "numpy.core.multiarray"):
        with contextlib.suppress(ImportError):
            there: Any = importlib.import_module("numpy._core.multiarray")
            found += [(getattr(there, name), f"{module}.{name}") for name in ("_reconstruct", "scalar")]
    return found


# -- folders of DCP --------------------------------------------------------------------------------------


class _Fields:
    """Stands for an object in a pickle, of any class: what it was called with, and its fields."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


_KNOWN: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "torch": {"Size": tuple, **{name: getattr(torch, name) for name in DTYPES}},
    "torch.serialization": {"_get_layout": str},
    "collections": {"OrderedDict": dict},
    "pathlib": {"PosixPath": _Fields, "WindowsPath": _Fields},
    "pathlib._local": {"PosixPath": _Fields, "WindowsPath": _Fields},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo": _Fields},
    "torch.distributed.checkpoint.metadata": dict.fromkeys(
        ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
         "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"), _Fields,
    ),
})  # fmt: skip


class _MetadataUnpickler(pickle.Unpickler):  # noqa: S301  (finds no names but those above)
    @override
    def find_class(self, module: str, name: str, /) -> Any:
        if name not in _KNOWN.get(module, {}):
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")
        return _KNOWN[module][name]


class _Slice(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, handle: int, start: int, size: int) -> None:
        super().__init__()
        self._handle, self._start, self._size, self._at = handle, start, size, 0

    @override
    def seekable(self) -> bool:
        return True

    @override
    def readable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._at

    @override
    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        """Fill a buffer as far as the part goes."""
        memory = memoryview(buffer)[: max(0, self._size - self._at)]
        read_into(self._handle, memory, self._start + self._at)
        self._at += len(memory)
        return len(memory)


class _Place(NamedTuple):
    """Where something lies: a file, the first byte in it, and how many."""

    path: Path
    start: int
    size: int

    def load(self, what: str, device: str = "cpu") -> Any:
        """The value there; for the device "meta" without its numbers.

        Raises:
            CheckpointError: It is more than a value, or is not whole.
            OSError: It cannot be read.
        """

        def read() -> Any:
            handle, there = open_plain(self.path)
            try:
                expect(self.start + self.size <= there, f"{there} bytes of {self.start + self.size}")
                part: Any = _Slice(handle, self.start, self.size)
                return torch.load(part, device, weights_only=True)
            finally:
                os.close(handle)

        return _values(what, self.path, read)


def read_dcp(what: str, folder: Path, deferred: DeferredTensors) -> dict[Any, Any]:
    """The state that DCP saved into a folder, nested as it was; what has one element or none is read at once.

    All pickles in it are looked through before anything is returned, and all files are there, and long enough.

    Raises:
        CheckpointError: A file is missing, not whole, or holds more than values.
        OSError: One cannot be read.
    """
    path = folder / METADATA

    def read() -> Any:
        handle, size = open_plain(path)
        try:
            return _MetadataUnpickler(io.BufferedReader(_Slice(handle, 0, size))).load()
        finally:
            os.close(handle)

    found = _values(what, path, read)
    try:
        places: dict[tuple[str, Any], _Place] = {}
        for key, info in found.storage_data.items():
            name = str(info.relative_path)
            is_plain = Path(name).name == name and not getattr(info, "transform_descriptors", None)
            expect(is_plain, f"{name:.100} outside of the folder, or compressed")
            places[key.fqn, getattr(key, "offset", None)] = _Place(folder / name, int(info.offset), int(info.length))
        values: dict[str, Any] = {}
        for name, entry in found.state_dict_metadata.items():
            if not hasattr(entry, "chunks"):
                values[name] = places[name, None].load(what)
                continue
            dtype, shape = entry.properties.state[0], tuple(entry.size)
            chunks = [(Block(one.offsets, one.sizes), places[name, one.offsets]) for one in entry.chunks]
            values[name] = _tensor(what, name, dtype, shape, chunks, deferred)
        nested = getattr(found, "planner_data", None) or {}
        return _nested({tuple(nested.get(name, (name,))): value for name, value in values.items()})
    except _ERRORS as error:
        raise damaged(what, path, error) from error


def _tensor(
    what: str,
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    chunks: Sequence[tuple[Block, _Place]],
    deferred: DeferredTensors,
) -> torch.Tensor:
    """A tensor in chunks, which is put together when it is read."""
    sides = [side for block, _ in chunks for side in zip(*block, shape, strict=True)]
    is_outside = any(at < 0 or size < 0 or at + size > whole for at, size, whole in sides)
    is_whole = not is_outside and sum(block.size for block, _ in chunks) == math.prod(shape)
    expect(is_whole, f"{name}: chunks that are not the tensor of shape {shape}")
    for block, place in chunks:
        there = place.load(what, "meta")
        fits = isinstance(there, torch.Tensor) and (there.dtype, tuple(there.shape)) == (dtype, tuple(block.shape))
        expect(fits, f"{name}: no tensor of {dtype} and shape {tuple(block.shape)} in {place.path.name}")

    def read() -> Iterable[torch.Tensor]:
        whole = chunks[0][1].load(what) if len(chunks) == 1 else torch.empty(shape, dtype=dtype)
        for block, place in chunks if len(chunks) > 1 else ():
            whole[block.slices] = place.load(what)
        yield whole

    if math.prod(shape) > 1 or not chunks:
        return deferred.add(shape, dtype, read)
    return next(iter(read()))


def _nested(values: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """A tree of dicts and lists, of its leaves by path: a whole number is a place in a list."""
    root: dict[Any, Any] = {}
    for path, value in values.items():
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    lists = {path[:end] for path in values for end in range(1, len(path)) if type(path[end]) is int}

    def built(node: Any, path: tuple[Any, ...]) -> Any:
        if not isinstance(node, dict) or path in values:
            return node
        items = {key: built(value, (*path, key)) for key, value in node.items()}
        is_list = path in lists and sorted(items) == list(range(len(items)))
        return [items[index] for index in range(len(items))] if is_list else items

    found: dict[Any, Any] = built(root, ())
    return found
