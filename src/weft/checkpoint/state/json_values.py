"""Nested values as JSON: what a checkpoint keeps besides tensors; see [Note: values as JSON]."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from weft.checkpoint.format.tensor_blocks import hold_savable
from weft.collectives import encoding
from weft.collectives.encoding import MOST_NESTED, Encoder
from weft.errors import type_error
from weft.tensors.blocks import Held
from weft.tensors.nested import Path

_KEPT_AS: Mapping[type[Any], Callable[[Any], Any]] = MappingProxyType(
    {list: list, tuple: tuple, Counter: Counter, OrderedDict: OrderedDict, Mapping: dict}
)
# What marks an array of numpy, with the tensor of its values inside; a deque, with its limit; and sets.
_ARRAY, _DEQUE, _SETS = "array", "deque", MappingProxyType({"set": set, "frozenset": frozenset})
_MOST_BITS = 10_000  # of a whole number; Python reads 4300 digits


def encode(path: str, value: Any, tensors: dict[str, Held]) -> Any:
    """A nested value as JSON; its tensors go into `tensors`, under the path they stand at.

    Raises:
        TypeError: A leaf is something else, or a tensor of a kind that is not supported; the text names its path.
    """
    return _StateEncoder(tensors).encode(value, (path,))


def decode(value: Any, tensors: Callable[[Any], torch.Tensor]) -> Any:
    """The nested value; `tensors` gives those by name. Arrays have the memory of theirs, which are on the CPU.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: `encode` has not made it.
    """

    def more(kind: str, items: Any, inner: Callable[[Any], Any]) -> Any:
        if kind == _ARRAY:
            return inner(items).numpy()
        if kind == _DEQUE:
            limit, values = items
            return deque(inner(values), limit)
        if kind in _SETS:
            return _SETS[kind](inner(items))
        raise ValueError(f"a value marked {kind!r}")

    return encoding.decode(value, tensors, more)


class _StateEncoder(Encoder):
    def __init__(self, tensors: dict[str, Held]) -> None:
        self._tensors = tensors

    @override
    def plain(self, item: Any, path: Path) -> Any:
        if isinstance(item, torch.Tensor):
            return item
        if isinstance(item, np.generic):
            item = item.item()
        name, keys = "/".join(path), list(item) if isinstance(item, Mapping) else []
        if len(path) - 1 > MOST_NESTED:
            raise _refusal(f"{name:.60}...", f"values in each other, more than {MOST_NESTED} deep")
        for one in (item, *keys):  # could JSON hold it, and give it back?
            if isinstance(one, int) and one.bit_length() > _MOST_BITS:
                raise _refusal(name, f"a whole number of {one.bit_length()} bits")
            if isinstance(one, str) and not one.isascii():
                try:
                    one.encode()
                except UnicodeEncodeError as error:  # half of a surrogate pair has no bytes
                    readable = name.encode(errors="replace").decode()
                    raise _refusal(readable, f"{one!a:.60}, no text of Unicode") from error
        if not all(isinstance(key, (str, int, float, bool)) for key in keys):
            return self.other(item, path)
        return next((made(item) for kind, made in _KEPT_AS.items() if isinstance(item, kind)), item)

    @override
    def name(self, tensor: torch.Tensor, path: Path) -> str:
        name = "/".join(path)
        while name in self._tensors:  # {"a/b": x, "a": {"b": y}}
            name += "'"
        self._tensors[name] = hold_savable(name, tensor)
        return name

    @override
    def other(self, item: Any, path: Path) -> Any:
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if type(item) in (np.ndarray, np.memmap):  # others, as masked ones, are more than their values
            try:
                values = torch.from_numpy(np.require(item, requirements=["C", "W"]))
            except (TypeError, ValueError) as error:  # torch has no such dtype
                raise _refusal("/".join(path), f"an array of {item.dtype}", item) from error
            return {"$": _ARRAY, "items": self.encode(values, path)}
        if type(item) is deque:
            return {"$": _DEQUE, "items": [item.maxlen, self.encode(list(item), path)]}
        if type(item) in _SETS.values() and not any(isinstance(one, torch.Tensor) for one in item):
            # Text comes out of a set in another order in each process.
            return {"$": type(item).__name__, "items": sorted((self.encode(one, path) for one in item), key=json.dumps)}
        raise _refusal("/".join(path), f"{type(item).__name__} {item!r:.60}", item)


def _refusal(path: str, found: str, value: object = None) -> TypeError:
    instead = "leave it out of state_dict(), or turn it into these"
    if hasattr(value, "load_state_dict"):
        instead = f'weft.checkpointable({{..., "{path.replace("/", "_")}": it}}, ctx)  # a name of its own'
    if isinstance(value, np.ndarray):
        instead = "array.tolist()"
    return type_error(
        f"save: {path} cannot be saved",
        found=found,
        expected="tensors, arrays of numbers, numbers, strings, None; lists, tuples, dicts, sets and deques of them",
        fix=instead,
    )
