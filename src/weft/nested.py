"""Walk nested values: batches, model outputs, metrics.

A nested value is a tensor, or a mapping, dataclass, named tuple, list or tuple of nested values;
anything else is a leaf that passes through untouched. The container types are kept, subclasses
included (`UserDict`, `ModelOutput`, ...). Used by collectives, device moves and precision casts,
so that all of them understand the same structures.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar, cast

import torch

__all__ = ["Path", "leaves", "map_leaves", "map_tensors", "tensors"]

T = TypeVar("T")
Path = tuple[str, ...]


def map_leaves(fn: Callable[[Path, Any], Any], value: T, path: Path = ()) -> T:
    """Rebuild `value` with every leaf replaced by `fn(path, leaf)`; containers keep their type.

    A container none of whose leaves changed identity is returned as it is, not copied.

    Example:
        >>> map_leaves(lambda path, leaf: leaf + 1, {"a": [1, 2]})
        {'a': [2, 3]}
    """
    return cast("T", _map(fn, value, path))


def _map(fn: Callable[[Path, Any], Any], value: Any, path: Path) -> Any:
    if isinstance(value, torch.Tensor):
        return fn(path, value)
    if isinstance(value, Mapping):
        changed = {key: _map(fn, item, (*path, str(key))) for key, item in value.items()}
        if all(changed[key] is item for key, item in value.items()):
            return value
        return _rebuild_mapping(value, changed)
    if isinstance(value, (list, tuple)):
        items = [_map(fn, item, (*path, str(index))) for index, item in enumerate(value)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return _rebuild_sequence(value, items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value)]
        new = {name: _map(fn, getattr(value, name), (*path, name)) for name in fields}
        if all(new[name] is getattr(value, name) for name in fields):
            return value
        return _rebuild_dataclass(value, new)
    return fn(path, value)


def _rebuild_mapping(old: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    if type(old) is dict:
        return items
    # A shallow copy keeps what a subclass carries besides its items (default factories, flags).
    new = copy.copy(old)
    for key, item in items.items():
        new[key] = item  # type: ignore[index]
    return new


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


def _rebuild_dataclass(old: Any, fields: dict[str, Any]) -> Any:
    new = copy.copy(old)  # fields with init=False and attributes set later survive
    for name, item in fields.items():
        object.__setattr__(new, name, item)  # frozen dataclasses too
    return new


def map_tensors(fn: Callable[[torch.Tensor], Any], value: T) -> T:
    """Rebuild `value` with every tensor replaced; all other leaves are the same objects."""
    return map_leaves(lambda _, leaf: fn(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)


def leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield `(path, leaf)` for every leaf, in the order `map_leaves` visits them."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, str(index)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name), (*path, field.name))
    else:
        yield path, value


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
