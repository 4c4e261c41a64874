"""What iterating a sampler changes in it, as JSON, and how it is put back: its random generators and its counters."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from weft.errors import value_error
from weft.tensors.rng_state import generator_state, is_generator, prepare_generator

_DEPTH = 6  # of objects in each other
_ENTRIES = 64  # longer lists are data, and hold no generators
_PLAIN = (int, float, str, type(None), np.generic)
_CLOSED = (type, types.ModuleType, types.FunctionType, types.MethodType, torch.Tensor, np.ndarray, nn.Module, Dataset)
_LIBRARIES = ("builtins", "torch", "numpy", "typing", "abc", "collections", "random")


class _SamplerItem(NamedTuple):
    """A generator or plain value inside a sampler, and what sets the value."""

    value: Any
    put: Callable[[Any], object] | None


class SamplerState:
    """The generators of a sampler, of any library, and its numbers and texts, in any attribute and nested.

    A dataset in it is not looked into.

    Args:
        sampler: Any sampler or batch sampler.
        dataset: What it draws from.
        seeded: Generators that are seeded for every epoch, and so have no state to keep.
    """

    def __init__(self, sampler: object, dataset: object, seeded: Sequence[torch.Generator]) -> None:
        self._sampler = sampler
        self._closed = {id(dataset), *map(id, seeded)}
        self._first = {path: place.value for path, place in self._places().items() if not is_generator(place.value)}

    def capture(self) -> dict[str, Any]:
        """The states of all generators, and what plain values are others now than at first, by path."""
        found: dict[str, Any] = {}
        for path, (value, _) in self._places().items():
            if is_generator(value):
                found[path] = generator_state(value)
            elif path not in self._first or not _same(value, self._first[path]):
                found[path] = value.item() if isinstance(value, np.generic) else value
        return found

    def prepare(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a state without putting it back; call the result to do so.

        Raises:
            ValueError: It is none of this sampler.
        """
        puts: list[Callable[[], object]] = []
        places = self._places()
        try:
            for path, place in places.items():
                if is_generator(place.value):
                    if state.get(path) is not None:  # a generator that was added since stays as it is
                        puts.append(prepare_generator(place.value, state[path]))
                elif place.put is not None and (path in state or path in self._first):
                    puts.append(partial(place.put, _plain(state.get(path, self._first.get(path)))))
            new = sorted(state.keys() - places.keys())  # what the sampler sets in its first epoch
            puts += [self._setter(path, _plain(state[path])) for path in new]
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            raise value_error(
                f"load_state_dict: the state of {type(self._sampler).__name__} in this position cannot be used",
                found=f"{type(error).__name__}: {error}",
                expected="the states of its generators and counters, as this loader saves them",
                fix="loader.load_state_dict(saved_loader.state_dict())",
            ) from error

        def put_back() -> None:
            for put in puts:
                put()

        return put_back

    def _setter(self, path: str, value: Any) -> Callable[[], object]:
        *parents, name = path.split(".")
        holder: Any = self._sampler
        for step in parents:
            holder = {inner: found for inner, found, _ in _entries(holder)}[step]
        if isinstance(holder, dict):
            return partial(holder.__setitem__, name, value)
        return partial(setattr, holder, name, value)

    def _places(self) -> dict[str, _SamplerItem]:
        found: dict[str, _SamplerItem] = {}
        seen = set(self._closed)
        todo: list[tuple[str, Any, int]] = [("", self._sampler, 0)]
        for path, holder, depth in todo:  # which grows meanwhile
            if id(holder) in seen:
                continue
            seen.add(id(holder))
            for name, value, put in _entries(holder):
                where = f"{path}.{name}" if path else name
                if is_generator(value):
                    if id(value) not in seen:
                        seen.add(id(value))
                        found.setdefault(where, _SamplerItem(value, None))
                elif isinstance(value, _PLAIN):
                    found.setdefault(where, _SamplerItem(value, put))
                elif depth < _DEPTH and _may_hold(value):
                    todo.append((where, value, depth + 1))
        return found


def _entries(holder: Any) -> Iterator[tuple[str, Any, Callable[[Any], object] | None]]:
    if isinstance(holder, dict):
        yield from ((str(key), value, partial(holder.__setitem__, key)) for key, value in list(holder.items()))
        return
    if isinstance(holder, (list, tuple)):
        put = holder.__setitem__ if isinstance(holder, list) else None
        yield from ((str(at), value, put and partial(put, at)) for at, value in enumerate(holder))
        return
    own = dict(getattr(holder, "__dict__", {}))
    for cls in type(holder).__mro__:
        if cls.__module__.partition(".")[0] in _LIBRARIES:
            continue
        slots = cls.__dict__.get("__slots__", ())
        own |= {
            name: getattr(holder, name) for name in (slots if isinstance(slots, tuple) else ()) if hasattr(holder, name)
        }
        for name, value in vars(cls).items():  # such as a counter of the class
            if name not in own and not name.startswith("__") and (is_generator(value) or type(value) in (int, float)):
                yield name, value, partial(setattr, cls, name)
    yield from ((name, value, partial(setattr, holder, name)) for name, value in own.items())


def _may_hold(value: Any) -> bool:
    if isinstance(value, (dict, list, tuple)):
        return len(value) <= _ENTRIES
    return not isinstance(value, (*_CLOSED, DataLoader)) and (
        hasattr(value, "__dict__") or hasattr(type(value), "__slots__")
    )


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or (one != one and other != other))


def _plain(value: Any) -> Any:
    if not isinstance(value, (bool, int, float, str, type(None), np.generic)):
        raise TypeError(f"{type(value).__name__} where a number or text should be")
    return value
