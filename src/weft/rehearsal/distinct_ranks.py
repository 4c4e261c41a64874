"""Which ranks of a job hold or send something else than others: stages of a pipeline, uneven shards."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable

from weft.rehearsal.memory import KINDS, Memory
from weft.rehearsal.result import Rehearsal


def distinct_ranks(rehearse: Callable[[int], Rehearsal]) -> tuple[Rehearsal, ...]:
    """Rehearse one rank of each kind; `same_as` of each has the others.

    Along each axis, coordinates between two whose ranks are alike are taken to be like them: shards get smaller
    towards the last ranks, and the stages of a pipeline differ at its ends. Axes are looked at one by one.

    Args:
        rehearse: Rehearses a rank.
    """
    of = functools.cache(rehearse)
    sizes = [size for _, size in of(0).mesh]
    strides = [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
    kinds = [_along(size, stride, of) for size, stride in zip(sizes, strides, strict=True)]
    alike: dict[tuple[object, ...], list[int]] = {}
    for choice in itertools.product(*kinds):
        ranks = sorted(map(sum, itertools.product(*choice)))
        alike.setdefault(facts(of(ranks[0])), []).extend(ranks)
    return tuple(dataclasses.replace(of(min(ranks)), same_as=tuple(sorted(ranks))) for ranks in alike.values())


def _along(size: int, stride: int, of: Callable[[int], Rehearsal]) -> list[list[int]]:
    """The ranks of a line of the mesh, those that are alike together."""
    line = range(0, size * stride, stride)
    alike: dict[tuple[object, ...], list[int]] = {}

    def look(first: int, last: int) -> None:
        """Sort in all from `first` on, but for `last`."""
        found = facts(of(line[first]))
        if last - first > 1 and found != facts(of(line[last])):
            middle = (first + last) // 2
            look(first, middle)
            look(middle, last)
        else:
            alike.setdefault(found, []).extend(line[first:last])

    look(0, size - 1)
    alike.setdefault(facts(of(line[-1])), []).append(line[-1])
    return list(alike.values())


def facts(found: Rehearsal) -> tuple[tuple[int, ...], tuple[int, ...], tuple[object, ...]]:
    """What two ranks, or two runs, that are alike have in common: bytes by kind, and messages."""

    def sizes(memory: Memory) -> tuple[int, ...]:
        return tuple(getattr(memory, kind) for kind in KINDS)

    messages = tuple((each.kind, each.axis, each.count, each.bytes) for each in (*found.messages, *found.exchange))
    return sizes(found.at_rest), sizes(found.step_peak), messages
