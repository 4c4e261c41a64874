"""The layout of Hugging Face: which tensors, under which names, in which of several files."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from weft.checkpoint.format.safetensors_read import TensorFiles
from weft.checkpoint.format.safetensors_write import file_header, new_file, write_bytes, write_parts
from weft.checkpoint.format.transfer import Stored, read_in_parts
from weft.contract.select_modules import Names, fits_pattern
from weft.errors import CheckpointError, listed, value_error
from weft.tensors.blocks import memory_of, whole
from weft.weights.sources import MAX_INDEX_BYTES, WeightFiles

_UNITS = MappingProxyType({"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
          "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40})  # fmt: skip


def num_bytes(size: int | str) -> int:
    """A size such as "5GB" in bytes.

    Raises:
        ValueError: It is none.

    Example:
        >>> num_bytes("100B"), num_bytes("1.5KB"), num_bytes("2 MiB"), num_bytes(7)
        (100, 1500, 2097152, 7)
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([KMGT]i?B|B)", size) if isinstance(size, str) else None
    value = int(float(found[1]) * _UNITS[found[2]]) if found else size
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise value_error(
            f"export: max_shard_size = {size!r} is not a size",
            found=repr(size),
            expected=f"a whole number of bytes > 0, or a number and one of {', '.join(_UNITS)}",
            fix='weft.export(path, out, max_shard_size="5GB")',
        )
    return value


class Tensor(NamedTuple):
    """One to be written."""

    stored: Stored
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.stored.entry.shape) * self.dtype.itemsize

    def on_meta(self) -> torch.Tensor:
        """A tensor of its shape and dtype."""
        return torch.empty(self.stored.entry.shape, dtype=self.dtype, device="meta")


class HFLayout:
    """Which tensors are written into which file."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str, *, limit: int) -> None:
        self._tensors = tensors
        shards = _shards(tensors, limit)
        many = len(shards)
        self._names = {f"{name}-{number:05d}-of-{many:05d}.safetensors": one for number, one in enumerate(shards, 1)}
        if many == 1:
            self._names = {f"{name}.safetensors": shards[0]}
        self._index = [f"{name}.safetensors.index.json"] if many > 1 else []

    def files(self) -> list[str]:
        """Names of the files, the index last."""
        return [*self._names, *self._index]

    def write(self, folder: Path, source: TensorFiles) -> None:
        """Write everything, and wait until it is on the disk.

        Raises:
            CheckpointError: The index, or a header, could not be read again.
            OSError: Writing or reading failed.
        """
        places = {name: shard for shard, names in self._names.items() for name in names}
        size = sum(one.size for one in self._tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(places.items()))}
        text = (json.dumps(index, indent=2) + "\n").encode()
        if self._index and len(text) > MAX_INDEX_BYTES:
            raise CheckpointError(
                "export: the index would be too large",
                found=f"{len(text)} bytes for {len(places)} tensors",
                expected=f"at most {MAX_INDEX_BYTES} bytes, or it could not be read again",
                fix='weft.export(path, out, max_shard_size="10TB")  # one file, which has no index',
            )
        for file, names in self._names.items():
            head, order = file_header({name: self._tensors[name].on_meta() for name in names}, {"format": "pt"})
            with new_file(folder / file) as opened:
                write_parts(opened, self._bytes(head, order, source))
        for file in self._index:
            write_bytes(folder / file, text)

    def _bytes(self, head: bytes, order: list[str], source: TensorFiles) -> Iterator[Any]:
        yield head
        for name in order:
            stored, dtype = self._tensors[name]
            for _, values in read_in_parts(source, stored, whole(stored.entry.shape), dtype):
                yield memory_of(values)


def check_names(name: object, rename: object) -> None:
    """Raise unless files can be called so, and tensors be renamed by this.

    Raises:
        ValueError: They cannot.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}", name):
        raise value_error(
            f"export: name = {name!r} cannot be used",
            found=repr(name),
            expected="a prefix of file names",
            fix='weft.export(path, out, name="model")',
        )
    if rename is not None and not callable(rename):
        raise value_error(
            f"export: rename = {rename!r:.80} cannot be used",
            found=type(rename).__name__,
            expected="a function from the name in the module to one in the files",
            fix='rename=lambda name: "model." + name',
        )


def chosen_tensors(what: str, source: WeightFiles, filter: Names | None, *, option: str) -> dict[str, Stored]:
    """The tensors that the user wants, tied ones once.

    Args:
        what: The function that asks, for the texts of errors.
        source: Where they are.
        filter: A pattern, several, or a function of the name; None for all.
        option: The name of that argument.

    Raises:
        CheckpointError: None is left.
        ValueError: `filter` is something else.
    """
    if filter is None:
        names = list(source.tensors)
    elif callable(filter):
        names = [name for name in source.tensors if filter(name)]
    else:
        patterns = [filter] if isinstance(filter, str) else list(filter) if isinstance(filter, Iterable) else [filter]
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise value_error(
                f"{what}: {option} = {filter!r:.80} cannot be used",
                found=listed(sorted({type(one).__name__ for one in patterns if not isinstance(one, str)})),
                expected="a pattern, several patterns, or a function of the name",
                fix=f'{option}="**.weight"  # or lambda name: "lora_" in name',
            )
        names = [name for name in source.tensors if any(fits_pattern(name, pattern) for pattern in patterns)]
        idle = [one for one in patterns if not any(fits_pattern(name, one) for name in names)]
        names = [] if idle else names
    if not names:
        raise CheckpointError(
            f"{what}: no tensors remain",
            found=f"{len(source.tensors)} tensors: {listed(source.tensors) or 'none'}",
            expected="tensors, with at least one match for each pattern",
            fix=f"{option}={next(iter(source.tensors))!r}" if source.tensors else "path or object= with tensors in it",
        )
    first: dict[str, str] = {}
    for name in names:
        first.setdefault(source.tensors[name].key, name)
    return {name: source.tensors[name] for name in first.values()}


def renamed_tensors(
    tensors: Mapping[str, Stored], dtype: torch.dtype | None, rename: Callable[[str], str] | None
) -> dict[str, Tensor]:
    """Tensors in the dtype, and under the name, that they have in the files.

    Raises:
        ValueError: Two would have one name.
    """
    found: dict[str, Tensor] = {}
    for name, stored in tensors.items():
        new = name if rename is None else rename(name)
        if not isinstance(new, str) or new in found or new == "__metadata__":
            raise value_error(
                f"export: {name} cannot be called {new!r}",
                found="a name that is taken" if new in found else repr(new),
                expected="from rename, a name of its own for each tensor",
                fix='rename=lambda name: "model." + name',
            )
        found[new] = Tensor(stored, dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype)
    return found


def _shards(tensors: Mapping[str, Tensor], limit: int) -> list[list[str]]:
    """Fill files in the order of the module; what is larger than one gets its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += tensor.size
    return shards
