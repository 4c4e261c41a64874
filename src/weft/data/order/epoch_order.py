"""The order of an epoch as a pure function of (seed, epoch), whatever sampler the user brought."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from weft.data.equal_cost import Costs, alike_together
from weft.errors import ContractError
from weft.rng import mix, seeded

__all__ = ["EpochOrder", "epoch_order", "generators_of", "tell_epoch"]

_DEEPEST, _MOST_PARTS, _FEW = 8, 10_000, 16  # of what is looked at for a `set_epoch`
_VALUES = (str, bytes, int, float, type(None), torch.Tensor, np.ndarray, np.generic)
_NO_PARTS = (*_VALUES, type, FunctionType, ModuleType, torch.nn.Module, DataLoader)
_DATA = ("data_source", "dataset")  # of a sampler


class EpochOrder:
    """The order of each epoch of a map-style dataset: of samples, or of whole batches.

    Attributes:
        source: The user's sampler or batch sampler.
        known: How many units it says there are; None if it does not tell.
        costs: What samples cost, if ranks are to have equal costs.
    """

    def __init__(self, source: Any, known: int | None, costs: Costs | None = None) -> None:
        self.source = source
        self.known = known
        self.costs = costs
        self._last: tuple[tuple[int, int], Sequence[Any]] | None = None

    def order(self, seed: int, epoch: int) -> Sequence[Any]:
        """All units of an epoch.

        Raises:
            ContractError: They are not as many as the sampler says.
        """
        if self._last is not None and self._last[0] == (seed, epoch):
            return self._last[1]
        order = epoch_order(self.source, seed, epoch)
        if self.known is not None and len(order) != self.known:
            raise ContractError(
                "shard_data: the sampler does not yield what its length says",
                found=f"{len(order)} in epoch {epoch}, {self.known} at set-up",
                expected="the same number in every epoch",
                fix="give the sampler a __len__ that is true, or none",
            )
        if self.costs is not None:
            order = alike_together(order, self.costs)
        self._last = ((seed, epoch), order)
        return order

    def total(self, seed: int, epoch: int) -> int:
        """Number of units of an epoch."""
        return len(self.order(seed, epoch)) if self.known is None else self.known


def epoch_order(sampler: Iterable[Any], seed: int, epoch: int) -> Sequence[Any]:
    """Run a sampler with all random sources set to a function of (seed, epoch), and restored after.

    Args:
        sampler: Any sampler or batch sampler. If it has `set_epoch`, it is called with the epoch; if it
            has a `generator`, that is seeded too.
        seed: Any integer.
        epoch: Number of the epoch.

    Returns:
        All that the sampler yields in this epoch.
    """
    if type(sampler) is SequentialSampler:
        return range(len(sampler))
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(sampler.data_source):
        return _permutation(len(sampler.data_source), sampler.generator, mix(seed, epoch, "order"))
    tell_epoch(sampler, epoch, of_data=False)
    with seeded(mix(seed, epoch, "order"), generators_of(sampler)):
        return list(sampler)


def _permutation(count: int, own: torch.Generator | None, seed: int) -> Sequence[int]:
    """What a `RandomSampler` yields whose random source was seeded, without one call per sample."""
    if own is None:
        source = torch.Generator().manual_seed(seed)
        seed = int(torch.empty((), dtype=torch.int64).random_(generator=source).item())
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    return order


def tell_epoch(obj: object, epoch: int, *, of_data: bool = True) -> None:
    """Call `set_epoch(epoch)` of an object, or else of those inside it that have such a method.

    One that has it is in charge of what is inside it. Inside are attributes, and entries of lists, tuples and dicts,
    that is datasets in datasets and samplers in samplers, however they were wrapped.

    Args:
        obj: A dataset, sampler or batch sampler.
        epoch: Number of the epoch.
        of_data: Whether it is data; the data that a sampler holds are not told by it.
    """
    method = getattr(obj, "set_epoch", None)
    if callable(method):
        method(epoch)
        return
    seen, level = {id(obj)}, [obj]
    for _ in range(_DEEPEST):
        found = itertools.chain.from_iterable(_parts(each, of_data=of_data) for each in level)
        level = []
        for part in [*itertools.islice(found, _MOST_PARTS)]:
            if isinstance(part, _NO_PARTS) or id(part) in seen:
                continue
            seen.add(id(part))
            inner: Any = part
            if callable(getattr(type(inner), "set_epoch", None)):
                inner.set_epoch(epoch)
            else:
                level.append(inner)


def _parts(obj: object, *, of_data: bool) -> Iterable[object]:
    """What is directly inside an object."""
    if isinstance(obj, dict):
        return () if _is_plain(obj.values()) else obj.values()
    if isinstance(obj, (list, tuple)):
        return () if _is_plain(obj) else obj
    found: dict[str, object] = getattr(obj, "__dict__", None) or {}
    if of_data:
        return found.values()
    return [part for name, part in found.items() if name not in _DATA and not isinstance(part, Dataset)]


def _is_plain(entries: Collection[object]) -> bool:
    """Whether entries are values, or rows of values, that have nothing inside; of many, by the first few."""
    few = [*itertools.islice(entries, _FEW)]
    rows = [part for one in few if isinstance(one, (list, tuple)) for part in one[:_FEW]]
    return all(isinstance(one, (*_NO_PARTS, list, tuple)) for one in few) and all(
        isinstance(p, _NO_PARTS) for p in rows
    )


def generators_of(source: Any) -> list[torch.Generator]:
    """The generators of a sampler or stream, and of the sampler it draws from (a `BatchSampler` has one inside)."""
    found = [getattr(source, "generator", None), getattr(getattr(source, "sampler", None), "generator", None)]
    return [generator for generator in found if isinstance(generator, torch.Generator)]
