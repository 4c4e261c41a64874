"""Walk nested values: batches, model outputs, metrics.

A nested value is a tensor, or a mapping, dataclass, named tuple, list or tuple of nested values;
anything else is a leaf that passes through untouched. The container types are kept, subclasses
included (`UserDict`, `ModelOutput`, ...). Used by collectives, device moves and precision casts,
so that all of them understand the same structures.

[Note: rows] A batch is a nested value with one row per sample: the first dimension of its tensors and arrays, the
entries of its lists. Objects that have rows themselves are leaves that are asked to cut or to move themselves: those
with a `batch_size` (TensorDict), and those with a `to` method. What is counted, cut and emptied here is what is split
and moved elsewhere.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime as dt
import enum
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any, TypeVar, cast

import numpy as np
import torch

from weft.errors import type_error

T = TypeVar("T")
Path = tuple[str, ...]
Whole = Callable[[Any], bool] | None
_DATES = (dt.date, dt.time, dt.timedelta)
# What has no rows, whatever its value.
_PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    enum.Enum,
    PurePath,
    *_DATES,
    np.generic,
    torch.dtype,
    torch.device,
)


def map_leaves(fn: Callable[[Path, Any], Any], value: T, path: Path = (), *, whole: Whole = None) -> T:
    """Rebuild `value` with every leaf replaced by `fn(path, leaf)`; containers keep their type.

    A container none of whose leaves changed identity is returned as it is, not copied. One for which `whole` is
    true is a leaf.

    Example:
        >>> map_leaves(lambda path, leaf: leaf + 1, {"a": [1, 2]})
        {'a': [2, 3]}
    """
    return cast("T", _map(fn, value, path, whole))


def _map(fn: Callable[[Path, Any], Any], value: Any, path: Path, whole: Whole) -> Any:
    parts = _parts(value, whole)
    if parts is None:
        return fn(path, value)
    items = [_map(fn, item, (*path, str(key)), whole) for key, item in parts]
    if all(new is old for new, (_, old) in zip(items, parts, strict=True)):
        return value
    if isinstance(value, Mapping):
        return _rebuild_mapping(value, {key: item for (key, _), item in zip(parts, items, strict=True)})
    if isinstance(value, (list, tuple)):
        return _rebuild_sequence(value, items)
    new = copy.copy(value)  # fields with init=False and attributes set later survive
    for (name, _), item in zip(parts, items, strict=True):
        object.__setattr__(new, name, item)  # frozen dataclasses too
    return new


def _parts(value: Any, whole: Whole) -> list[tuple[Any, Any]] | None:
    """What a container holds, each with its key, index or field; None for a leaf."""
    if isinstance(value, torch.Tensor) or (whole is not None and whole(value)):
        return None
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _rebuild_mapping(old: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(old) is dict:
        return items
    if not hasattr(old, "__setitem__"):  # a mapping that cannot be changed takes its items at once
        return cast("Any", type(old))(items)
    # A shallow copy keeps what a subclass carries besides its items (default factories, flags).
    new: Any = copy.copy(old)
    for name, held in [*getattr(new, "__dict__", {}).items()]:
        if isinstance(held, dict) and held is vars(old).get(name):
            new.__dict__[name] = copy.copy(held)  # the items may be in it, and the old ones stay
    for key, item in items.items():
        new[key] = item
    return new


def with_items(old: Mapping[Any, Any], more: Mapping[Any, Any]) -> Any:
    """A mapping of the same type with more items.

    Example:
        >>> with_items({"a": 1}, {"b": 2})
        {'a': 1, 'b': 2}
    """
    return _rebuild_mapping(old, {**dict(old.items()), **more}) if more else old


def _rebuild_sequence(old: list[Any] | tuple[Any, ...], items: list[Any]) -> Any:
    if isinstance(old, tuple):
        if hasattr(old, "_fields"):  # a named tuple takes its fields one by one
            return type(old)(*items)
        return tuple(items) if type(old) is tuple else type(old)(items)
    if type(old) is list:
        return items
    new = copy.copy(old)
    new[:] = items
    return new


def map_tensors(fn: Callable[[torch.Tensor], Any], value: T) -> T:
    """Rebuild `value` with every tensor replaced; all other leaves are the same objects."""
    return map_leaves(lambda _, leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def leaves(value: object, path: Path = (), *, whole: Whole = None) -> Iterator[tuple[Path, Any]]:
    """Yield `(path, leaf)` for every leaf, in the order `map_leaves` visits them."""
    parts = _parts(value, whole)
    if parts is None:
        yield path, value
    for key, item in parts or ():
        yield from leaves(item, (*path, str(key)), whole=whole)


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield every tensor of a nested value.

    Example:
        >>> sum(t.numel() for t in tensors({"a": torch.ones(2), "b": [torch.ones(3), "text"]}))
        5
    """
    if isinstance(value, torch.Tensor):
        yield value
        return
    for _, leaf in leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf


# -- rows; see [Note: rows] --------------------------------------------------------------------------


def moves_itself(value: object) -> bool:
    """Whether an object brings itself to a device; it may be a container that is more than its items."""
    return not isinstance(value, (torch.Tensor, type)) and callable(getattr(value, "to", None))


def cuts_itself(value: object) -> bool:
    """Whether an object has rows and is cut like a tensor: it says so by a `batch_size` of torch's kind."""
    size = None if isinstance(value, torch.Tensor) else getattr(value, "batch_size", None)
    return isinstance(size, torch.Size) and len(size) > 0


def _shape_of(leaf: object) -> tuple[int, ...] | None:
    """The shape of what has rows in its first dimension; None for anything else."""
    return tuple(leaf.shape) if isinstance(leaf, (torch.Tensor, np.ndarray)) else getattr(leaf, "batch_size", None)


def rows_of(batch: object) -> int | None:
    """How many samples a batch holds; one if it has no tensors. None if its parts do not agree, or cannot be looked at.

    Example:
        >>> rows_of({"name": ["a", "b"], "x": torch.ones(2, 3)})
        2
    """
    found: set[int]
    if isinstance(batch, (tuple, list)) and batch and all(type(item) is torch.Tensor and item.ndim for item in batch):
        found = {item.shape[0] for item in batch}  # most batches: a short way to the same answer
        return found.pop() if len(found) == 1 else None
    found = set()
    opaque = False
    for _, leaf in leaves(batch, whole=cuts_itself):
        shape = _shape_of(leaf)
        found |= {int(shape[0])} if shape else set()
        opaque |= shape is None and not isinstance(leaf, _PLAIN)
    return None if len(found) > 1 or (opaque and not found) else next(iter(found), 1)


def without_rows(batch: T, rows: int) -> T:
    """The same batch with no row in it: tensors [0, ...], and lists of one entry per row empty.

    Numbers, strings and the like stay as they are.

    Args:
        batch: Any.
        rows: How many it has.

    Raises:
        TypeError: Something in it has rows that cannot be taken out.

    Example:
        >>> without_rows({"name": ["a", "b"], "x": torch.ones(2, 3), "width": 3}, 2)
        {'name': [], 'x': tensor([], size=(0, 3)), 'width': 3}
    """

    def is_leaf(item: Any) -> bool:
        packed = isinstance(item, (torch.nn.utils.rnn.PackedSequence, torch.Size))
        return packed or cuts_itself(item) or _lists_rows(item, rows, top=item is batch)

    return map_leaves(lambda path, leaf: _emptied(path, leaf, rows), batch, whole=is_leaf)


def _lists_rows(item: Any, rows: int, *, top: bool) -> bool:
    """Whether this is a list with an entry for each sample, and not of columns, each of all samples."""
    if not isinstance(item, (list, tuple)) or hasattr(item, "_fields") or len(item) != rows:
        return False
    if all(isinstance(one, (list, tuple)) and len(one) == rows and len({*map(type, one)}) == 1 for one in item):
        return False
    shapes = [shape for _, leaf in leaves(list(item), whole=cuts_itself) if (shape := _shape_of(leaf)) is not None]
    if not shapes or any(len(shape) == 0 or shape[0] != rows for shape in shapes):
        return True
    # Of one sample both look alike. Torch's own collate function makes a list of one column of samples (x,).
    return rows == 1 and not (top and _shape_of(item[0]) is not None)


def _emptied(path: Path, leaf: Any, rows: int) -> Any:
    if isinstance(leaf, (*_PLAIN, torch.Size)) or (isinstance(leaf, (torch.Tensor, np.ndarray)) and not leaf.ndim):
        return leaf
    if isinstance(leaf, (list, tuple)) and not isinstance(leaf, torch.nn.utils.rnn.PackedSequence):
        return type(leaf)()
    cause: Exception | None = None
    try:
        part = leaf[:0]
        if isinstance(part, type(leaf)) and len(part) == 0:
            return part
    except Exception as error:  # noqa: BLE001  (whatever a foreign class raises: it cannot be cut)
        cause = error
    raise type_error(
        f"a batch without rows cannot be made: {'.'.join(path) or 'the batch'} has rows that cannot be taken out",
        found=type(leaf).__name__,
        expected="tensors, arrays and lists with one row per sample, or an object with `len()` and a `[:0]` without",
        fix='loader, ctx = weft.shard_data(loader, ctx, uneven="pad", with_ids=True)  # rows of ids.valid count',
    ) from cause
