"""An order that does not end, or not before very many samples: drawn block by block as it is read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from weft.data.split.split_plan import UNKNOWN, Span
from weft.tensors.rng_state import RngState

_BLOCK = 1024  # units that share what changing random states costs, some 15 us


class EndlessOrder(Sequence[Any]):
    """The order of an epoch in which one can only go forward.

    Args:
        units: What was drawn already.
        iterator: What yields the rest.
        inside: The random states after those.
        generators: Further ones that the sampler draws from; between draws they are as somebody else left them.
    """

    def __init__(
        self, units: list[Any], iterator: Iterator[Any], inside: RngState, generators: Sequence[torch.Generator]
    ) -> None:
        self._units, self._first, self._total = units, 0, UNKNOWN
        self._iterator, self._inside, self._generators = iterator, inside, generators

    def __len__(self) -> int:
        return self._total

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            stop = self.known_until(at.stop)
            return self._units[at.start - self._first : stop - self._first]
        self.known_until(at + 1)
        return self._units[at - self._first]

    @property
    def is_begun(self) -> bool:
        """Whether units at its beginning are gone."""
        return self._first > 0

    def known_until(self, stop: int) -> int:
        """Draw units up to this number; returns the number of units there are, at most so many."""
        missing = stop - self._first - len(self._units)
        if missing > 0 and self._total == UNKNOWN:
            outside = RngState.capture(generators=self._generators)
            self._inside.apply(generators=self._generators)
            try:
                self._units += itertools.islice(self._iterator, max(missing, _BLOCK))
            finally:
                self._inside = RngState.capture(generators=self._generators)
                outside.apply(generators=self._generators)
            if self._first + len(self._units) < stop:
                self._total = self._first + len(self._units)
        return min(stop, self._first + len(self._units))

    def forget_before(self, unit: int) -> None:
        """Let go of the units before this one."""
        self.known_until(unit)
        del self._units[: unit - self._first]
        self._first = unit


def parts_of(order: Sequence[Any], span: Span, per_step: int) -> Iterator[Span]:
    """A span in parts of whole steps, so that of each the end is known; all of it where it is known already."""
    if not isinstance(order, EndlessOrder):
        yield span
        return
    at, size = span.start, per_step * max(1, _BLOCK // per_step)
    while True:
        order.forget_before(at)
        stop = order.known_until(at + size + 1)  # one more shows whether this is the end
        if stop > at:
            yield span._replace(start=at, stop=min(stop, at + size))
        if stop <= at + size:
            return
        at += size
