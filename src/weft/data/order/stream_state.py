"""What reading a stream changes in it: put back, so that an epoch does not depend on what was read before.

A worker that begins in an epoch has a stream as it was at set-up; one that stays, or this process, has one that was
read. All have to yield the same. So each epoch begins with generators that are seeded, and with numbers, texts and
lists as they were when the last one began, unless somebody else has changed them since.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from weft.errors import listed, warn
from weft.rng import mix
from weft.tensors.rng_state import Generator, generator_state, is_generator, seeding

_DEPTH = 6  # of objects in each other
_NESTED = 64  # entries of a list in which generators are looked for
_ENTRIES = 2**16  # of a list that is copied
_PLAIN = (bool, int, float, str, type(None))


class _StreamContents(NamedTuple):
    """What is in a stream.

    Attributes:
        generators: By path.
        values: Numbers, texts and lists that are attributes, with what holds them, by its id and their name.
        lists: Those and lists in them, each with a copy, by id.
    """

    generators: dict[str, Any]
    values: dict[tuple[int, str], tuple[dict[str, Any], Any]]
    lists: dict[int, tuple[list[Any], list[Any]]]


class StreamState:
    """The generators of a stream, nested too, and the numbers, texts and lists of it and of datasets in it.

    What belongs to another package is left alone, as others may use it as well.

    Args:
        stream: As it is at set-up.
        seeded: Generators that are seeded by their name.
    """

    def __init__(self, stream: object, seeded: Sequence[torch.Generator]) -> None:
        # Generators that the program has seeded otherwise draw otherwise.
        names, found = {id(generator) for generator in seeded}, _look(stream).generators
        self._first = {path: _digest(value) for path, value in found.items() if id(value) not in names}
        self._begun: _StreamContents | None = None
        self._left: _StreamContents | None = None
        self._has_warned = False

    def begin(self, stream: object, seed: int) -> None:
        """Make the stream one that was not read, for an epoch with this seed."""
        if self._begun is not None and self._left is not None:
            changed = _put_back(self._begun, self._left, _look(stream))
            if changed and not self._has_warned:
                self._has_warned = True
                warn(
                    f"shard_data: {type(stream).__name__} changes while it is read, and begins each epoch as it was",
                    found=f"{listed(changed)}, put back: workers that are new in an epoch do not know it",
                    expected="an order that depends on the epoch by `set_epoch`, and counts of what was read elsewhere",
                    fix="def set_epoch(self, epoch): self.epoch = epoch  # instead of counting; called in workers too",
                )
        self._begun, self._left = _look(stream), None
        for path, generator in self._begun.generators.items():
            if path in self._first:
                seeding(generator, mix(seed, path, self._first[path]))()

    def end(self, stream: object) -> None:
        """Note what reading has left."""
        self._left = _look(stream)
        if self._begun is not None:  # also lists that it has replaced
            lists = {number: (entries, list(entries)) for number, (entries, _) in self._begun.lists.items()}
            self._left.lists.update(lists)


def _put_back(begun: _StreamContents, left: _StreamContents, now: _StreamContents) -> list[str]:
    """Set what reading has changed, and nothing else since, to what it was; returns which numbers and texts."""
    changed: list[str] = []
    for key, (holder, before) in begun.values.items():
        if key in left.values and key in now.values and now.values[key][1] is left.values[key][1]:
            after = holder.get(key[1], before)
            if isinstance(after, _PLAIN) and after != before:
                changed.append(f"{key[1]} from {before!r:.40} to {after!r:.40}")
            if key[1] in holder:
                holder[key[1]] = before
    for number, (entries, before) in begun.lists.items():
        after = left.lists.get(number, (entries, []))[1]
        if len(entries) == len(after) and all(map(operator.is_, entries, after)):
            entries[:] = before
    return changed


def _look(stream: object) -> _StreamContents:
    package = type(stream).__module__.partition(".")[0]
    found = _StreamContents({}, {}, {})
    seen: set[int] = set()
    todo: list[tuple[str, Any, int, bool]] = [("", stream, 0, True)]
    for path, holder, depth, mine in todo:  # which grows meanwhile
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        if mine and isinstance(holder, Dataset):  # `self.epoch += 1` begins with the value of the class
            shared = {n: v for one in type(holder).__mro__[::-1] for n, v in vars(one).items() if isinstance(v, _PLAIN)}
            found.values.update({(id(holder), n): (vars(holder), v) for n, v in shared.items() if n[:2] != "__"})
        for name, value in _entries(holder):
            where = f"{path}.{name}"
            if is_generator(value):
                found.generators[where] = value
            elif mine and isinstance(holder, Dataset) and isinstance(value, (list, *_PLAIN)):
                found.values[id(holder), name] = vars(holder), value
            if mine and isinstance(value, list) and len(value) <= _ENTRIES:
                entries: list[Any] = value
                found.lists[id(entries)] = entries, list(entries)
            own = type(value).__module__.partition(".")[0] == package and hasattr(value, "__dict__")
            inside = isinstance(value, (list, tuple, dict)) and len(value) <= _NESTED
            if depth < _DEPTH and (own or inside):
                todo.append((where, value, depth + 1, isinstance(value, Dataset) or (mine and inside)))
    return found


def _entries(holder: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(holder, (list, tuple)):
        return ((str(at), value) for at, value in enumerate(holder))
    names: dict[Any, Any] = holder if isinstance(holder, dict) else vars(holder)
    return ((str(name), value) for name, value in list(names.items()))


def _digest(generator: Generator) -> str:
    return hashlib.blake2b(json.dumps(generator_state(generator)).encode(), digest_size=8).hexdigest()
