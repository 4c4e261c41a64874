"""What reading a stream changes in it: put back, so that an epoch does not depend on what was read before.

A worker that begins in an epoch has a stream as it was at set-up; one that stays, or this process, has one that was
read. All have to yield the same. So each epoch begins with generators that are seeded, and with numbers, texts and
lists as they were when the last one began, unless somebody else has changed them since.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from weft.rng import mix

__all__ = ["StreamState"]

_DEPTH = 6  # of objects in each other
_NESTED = 64  # entries of a list in which generators are looked for
_ENTRIES = 2**16  # of a list that is copied
_PLAIN = (bool, int, float, str, type(None))
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)  # noqa: S311  (no secrets)


class _Place(NamedTuple):
    """A generator or plain value, and what sets the value."""

    value: Any
    put: Callable[[Any], object] | None


class StreamState:
    """The generators of a stream, nested too, and the numbers, texts and lists of it and of datasets in it.

    What belongs to another package is left alone, as others may use it as well.

    Args:
        stream: As it is at set-up.
        seeded: Generators that are seeded by their name.
    """

    def __init__(self, stream: object, seeded: Sequence[torch.Generator]) -> None:
        # Generators that the program has seeded otherwise draw otherwise.
        names = {id(generator) for generator in seeded}
        places = {path: place.value for path, place in _places(stream).items() if id(place.value) not in names}
        self._first = {path: _digest(value) for path, value in places.items() if isinstance(value, _GENERATORS)}
        self._begun: dict[str, Any] = {}
        self._left: dict[str, Any] = {}

    def begin(self, stream: object, seed: int) -> None:
        """Make the stream one that was not read, for an epoch with this seed."""
        for path, (value, put) in _places(stream).items():
            if path in self._first:
                _seed(value, mix(seed, path, self._first[path]))
            elif put is not None and path in self._begun and _same(value, self._left.get(path, _Place)):
                put(self._begun[path])
        self._begun, self._left = _plain(stream), {}

    def end(self, stream: object) -> None:
        """Note what reading has left."""
        self._left = _plain(stream)


def _plain(stream: object) -> dict[str, Any]:
    places = {path: place.value for path, place in _places(stream).items() if place.put is not None}
    return {path: list(value) if isinstance(value, list) else value for path, value in places.items()}


def _places(stream: object) -> dict[str, _Place]:
    """Generators and plain values by path."""
    package = type(stream).__module__.partition(".")[0]
    found: dict[str, _Place] = {}
    seen: set[int] = set()
    todo: list[tuple[str, Any, int]] = [("", stream, 0)]
    for path, holder, depth in todo:  # which grows meanwhile
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for name, value in _entries(holder):
            where = f"{path}.{name}"
            if isinstance(value, _GENERATORS):
                found[where] = _Place(value, None)
            elif isinstance(holder, Dataset) and isinstance(value, _PLAIN):
                found[where] = _Place(value, _setter(holder, name))
            elif isinstance(holder, Dataset) and type(value) is list and len(value) <= _ENTRIES:
                found[where] = _Place(value, _filler(value))
            own = type(value).__module__.partition(".")[0] == package and hasattr(value, "__dict__")
            if depth < _DEPTH and (own or (isinstance(value, (list, tuple, dict)) and len(value) <= _NESTED)):
                todo.append((where, value, depth + 1))
    return found


def _entries(holder: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(holder, (list, tuple)):
        return ((str(at), value) for at, value in enumerate(holder))
    names: dict[Any, Any] = holder if isinstance(holder, dict) else vars(holder)
    return ((str(name), value) for name, value in list(names.items()))


def _setter(holder: Any, name: str) -> Callable[[Any], object]:
    return lambda value: vars(holder).__setitem__(name, value)


def _filler(entries: list[Any]) -> Callable[[Any], object]:
    return lambda value: entries.__setitem__(slice(None), value)


def _same(value: Any, left: Any) -> bool:
    if isinstance(value, list) and isinstance(left, list):
        return len(value) == len(left) and all(map(lambda one, other: one is other, value, left))
    return value is left


def _digest(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        state: Any = generator.get_state().tolist()
    elif isinstance(generator, np.random.Generator):
        state = generator.bit_generator.state
    elif isinstance(generator, np.random.RandomState):
        state = generator.get_state(legacy=False)
    else:
        state = None if isinstance(generator, random.SystemRandom) else generator.getstate()
    with np.printoptions(threshold=2**20):
        return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits: Any = generator.bit_generator
        bits.state = type(bits)(seed).state
    else:
        generator.seed(seed % 2**32)
