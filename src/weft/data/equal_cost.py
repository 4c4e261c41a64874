"""Samples shared out so that all ranks have nearly the same costs in each step: the machinery of `balance`."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from weft.errors import listed, type_error, value_error

Cost = Sequence[float] | Callable[[Any], float]
_POOL = 1024  # samples that are sorted together: enough to find equals, few enough to be shuffled well
_GROUP = 4  # alike: more of them mean equal ranks, fewer mean equal steps


class Costs(NamedTuple):
    """What samples cost, by what a sampler yields.

    Attributes:
        given: One number per index, or a function of the index.
    """

    given: Cost

    def of(self, units: Sequence[Any]) -> list[float]:
        """The costs of some samples.

        Raises:
            TypeError: The function does not take an index.
            ValueError: One is no number above 0, or there are too few.
        """
        try:
            ask = self.given if callable(self.given) else self.given.__getitem__
            found = [float(ask(unit)) for unit in units]
        except (TypeError, LookupError, AttributeError) as error:
            raise type_error(
                "shard_data: cost does not return the cost of a sample for its index",
                found=f"{type(error).__name__}: {error}",
                expected="one number per sample of the dataset, or a function of the index of a sample",
                fix='loader, ctx = weft.shard_data(loader, ctx, cost=lengths, balance="tokens")',
            ) from error
        wrong = [f"{cost} for {unit!r}" for unit, cost in zip(units, found, strict=True) if not 0 < cost < math.inf]
        if wrong:
            raise value_error(
                "shard_data: costs cannot be used",
                found=listed(wrong),
                expected="finite numbers above 0",
                fix='loader, ctx = weft.shard_data(loader, ctx, cost=[max(1, n) for n in lengths], balance="tokens")',
            )
        return found

    def digest(self, units: Sequence[Any]) -> str:
        """A text that is equal on ranks with equal costs."""
        return hashlib.sha256(torch.tensor(self.of(units), dtype=torch.float64).numpy().tobytes()).hexdigest()[:16]


def alike_together(units: Sequence[Any], costs: Costs) -> list[Any]:
    """The same samples, in an order in which each one that is dear has equals beside it, which other ranks can take.

    Each pool is sorted by cost and cut into groups. The groups come in bit-reversed order, so that each run of them has
    cheap and dear ones. Nothing depends on batch size or number of ranks.

    Example:
        >>> alike_together(range(8), Costs([10, 20, 30, 40, 11, 21, 31, 41]))
        [0, 4, 1, 5, 2, 6, 3, 7]
    """
    found: list[Any] = []
    for start in range(0, len(units), _POOL):
        pool = units[start : start + _POOL]
        cost = costs.of(pool)
        by_cost = [pool[place] for place in sorted(range(len(pool)), key=cost.__getitem__)]
        groups = [by_cost[at : at + _GROUP] for at in range(0, len(by_cost), _GROUP)]
        bits = max(1, (len(groups) - 1).bit_length())
        places = (int(f"{place:0{bits}b}"[::-1], 2) for place in range(1 << bits))
        found += [unit for place in places if place < len(groups) for unit in groups[place]]
    return found


def equal_shares(costs: Sequence[float], shares: int) -> list[list[int]]:
    """Numbers divided into shares of nearly equal sums, by the differencing method; none is empty if they suffice.

    Source: Karmarkar and Karp, "The differencing method of set partitioning", 1982.

    Returns:
        The positions of the numbers of each share, ascending; the largest sum first.

    Example:
        >>> equal_shares([5, 4, 3, 3, 1], 2)
        [[0, 3], [1, 2, 4]]
    """
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for place, cost in enumerate(costs):
        heapq.heappush(heap, (-cost, place, [(cost, [place]), *((0.0, []) for _ in range(shares - 1))]))
    while len(heap) > 1:  # join the two that are most uneven: the largest of one with the smallest of the other
        _, first, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = [(a + b, x + y) for (a, x), (b, y) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda share: -share[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], first, joined))
    found = [places for _, places in heap[0][2]] if heap else [[] for _ in range(shares)]
    while len(costs) >= shares and not all(found):
        fullest = max(found, key=len)
        found[found.index([])] = [fullest.pop()]
    return [sorted(places) for places in found]
