"""Which sample of which source comes where in a mixture: computed for any position, without what comes before it.

[Note: mixtures] The positions of an epoch are a line. A source with the share s has its sample number k at a random
place of the k-th of equal intervals of length 1/s, so it is never more than one sample away from s * time. That is
jittered sampling: Cook, "Stochastic sampling in computer graphics", ACM TOG 5, 1986. Megatron-LM blends without chance,
so that ranks can get one source each; `datasets.interleave_datasets` draws each position, so that shares drift with the
square root of the length, and no position is known without all before it.
Shuffling is a Feistel network on the numbers below n, which needs no list of them: Black and Rogaway, "Ciphers with
arbitrary finite domains", CT-RSA 2002.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.errors import message

_BLOCK = 1024  # of time, about as many positions: computed together
_KEPT = 1024  # blocks, about 32 MB
_ROUNDS = 16  # as many as it takes until all orders of five or six samples are equally frequent
Numbers = NDArray[np.int64]
Hashes = NDArray[np.uint64]
Parts = NDArray[Any]  # of float64


class MixedSample(NamedTuple):
    """What comes at a position: the number of the source, and which of its samples it is."""

    source: int
    sample: int


class _OrderBlock(NamedTuple):
    start: int
    sources: Numbers
    samples: Numbers
    begun: list[int]


class MixedOrder:
    """The order of one epoch of a mixture, the same in every process.

    Args:
        rates: Samples of each source among `sum(rates)` positions.
        lengths: Of the sources; 0 where they are unknown.
        shuffle: For each source, whether its samples change their order; another one in each pass.
        keys: Of the sources, integers that all chance is a function of: others in each epoch.
        endless: Whether it goes on after `sum(rates)` positions, with the same rates.
    """

    def __init__(
        self, rates: Sequence[int], lengths: Sequence[int], shuffle: Sequence[bool], keys: list[int], *, endless: bool
    ) -> None:
        self.rates, self.total, self.endless = rates, sum(rates), endless
        self.lengths, self.shuffle = np.array(lengths, np.int64), np.array(shuffle)
        self.keys = np.array(keys, np.uint64)
        self._blocks: dict[int, _OrderBlock] = {}

    def __getitem__(self, position: int) -> MixedSample:
        block = self._block_of(position)
        at = position - block.start
        return MixedSample(int(block.sources[at]), int(block.samples[at]))

    def from_position(self, start: int) -> Iterator[MixedSample]:
        """What comes from a position on."""
        while self.endless or start < self.total:
            block = self._block_of(start)
            rest = (part[start - block.start :].tolist() for part in (block.sources, block.samples))
            yield from map(MixedSample, *rest)
            start = block.start + len(block.sources)

    def before(self, position: int) -> list[int]:
        """How many samples of each source come before a position."""
        if position == self.total and not self.endless:
            return list(self.rates)
        block = self._block_of(position)
        inside = np.bincount(block.sources[: position - block.start], minlength=len(self.rates))
        return [begun + int(more) for begun, more in zip(block.begun, inside, strict=True)]

    def _block_of(self, position: int) -> _OrderBlock:
        if not 0 <= position < (2**62 if self.endless else self.total):
            raise IndexError(
                message(
                    "mix: there is no such position in the mixture",
                    found=str(position),
                    expected="a position >= 0" if self.endless else f"0 to {self.total - 1}",
                    fix="for sample in mixture: ...",
                )
            )
        number = position // _BLOCK  # by less than one sample per source, a block begins elsewhere than at its time
        while (block := self._block(number)).start > position:
            number -= 1
        while block.start + len(block.sources) <= position:
            number += 1
            block = self._block(number)
        return block

    def _block(self, number: int) -> _OrderBlock:
        if number not in self._blocks:
            if len(self._blocks) >= _KEPT:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[number] = self._computed(number * _BLOCK, (number + 1) * _BLOCK)
        return self._blocks[number]

    def _computed(self, begin: int, end: int) -> _OrderBlock:
        """All that comes in a span of time."""
        whole, part = self._shares(begin)
        first, last = (self._count(*self._shares(time)) for time in (begin, end))
        counts = last - first
        sources = np.repeat(np.arange(len(counts)), counts)
        before = np.arange(len(sources)) - np.repeat(counts.cumsum() - counts - first, counts)
        steps = (before - whole[sources]) + self._jitter(sources, before) - part[sources]
        times = steps / np.array([rate / self.total for rate in self.rates])[sources]
        order = np.argsort(times, kind="stable")
        sources, before = sources[order], before[order]
        return _OrderBlock(int(first.sum()), sources, self._samples(sources, before), first.tolist())

    def _shares(self, time: int) -> tuple[Numbers, Parts]:
        """What each source has to have at a time: whole samples, and the part of one."""
        time = time if self.endless else min(time, self.total)
        shares = [divmod(rate * time, self.total) for rate in self.rates]
        return np.array([whole for whole, _ in shares]), np.array([rest / self.total for _, rest in shares])

    def _count(self, whole: Numbers, part: Parts) -> Numbers:
        """What each source has had at that time."""
        return whole + (self._jitter(np.arange(len(whole)), whole) < part)

    def _jitter(self, sources: Numbers, before: Numbers) -> Parts:
        return (hashed(self.keys[sources], before) >> np.uint64(11)) * 2.0**-53

    def _samples(self, sources: Numbers, before: Numbers) -> Numbers:
        """Which sample of its source it is."""
        length = np.maximum(self.lengths[sources], 1)
        passes, place = before // length, before % length
        found = np.where(self.lengths[sources] > 0, place, before)
        some = self.shuffle[sources]
        keys = hashed(self.keys[sources[some]], ~passes[some])
        found[some] = _shuffled(place[some], length[some], keys)
        return found


def _shuffled(places: Numbers, lengths: Numbers, keys: Hashes) -> Numbers:
    """Permute the numbers below each length, by a key; see the note."""
    rows = np.ceil(np.sqrt(lengths)).astype(np.int64)
    columns = -(-lengths // rows)
    found, todo = places.copy(), np.arange(len(places))
    while len(todo):  # rows * columns is a little more than the length: what lands beyond it moves again
        row, column = np.divmod(found[todo], columns[todo])
        for turn in range(_ROUNDS):
            noise = hashed(keys[todo], (row if turn % 2 else column) * _ROUNDS + turn) >> np.uint64(1)
            if turn % 2:
                column = (column + noise.astype(np.int64) % columns[todo]) % columns[todo]
            else:
                row = (row + noise.astype(np.int64) % rows[todo]) % rows[todo]
        found[todo] = row * columns[todo] + column
        todo = todo[found[todo] >= lengths[todo]]
    return found


def hashed(keys: Hashes | np.uint64, numbers: Numbers | Hashes) -> Hashes:
    """Hash numbers with keys, as SplitMix64 does (Steele et al., OOPSLA 2014)."""
    value: Hashes = keys ^ (numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = (value ^ (value >> np.uint64(shift))) * np.uint64(factor)
    return value ^ (value >> np.uint64(31))
