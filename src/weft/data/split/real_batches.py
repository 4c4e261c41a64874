"""What a batch really holds, measured where it is made, against what was asked for.

[Note: counting] Nothing says which part of a batch counts its samples: a list of two tensors is two samples, or two
columns. So it is measured: a `collate_fn` is called with one sample, with another one, and with both; what is twice as
long then counts samples. Batches that can be read in one way only need no measurement, and neither do those of torch's
own `collate_fn`, which leaves nothing out.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import default_collate, default_convert

from weft.data.split.map_samples import AS_PLANNED, BatchInfo, FetchedSamples
from weft.errors import ContractError
from weft.rng import restored
from weft.tensors.nested import leaves, rows_of

_Path = tuple[tuple[bool, Any], ...]  # a way into a batch: attributes (True) and keys
_PROBES, _TRIED, _PAIRS, _DEEP, _SHALLOW, _WIDE = 4, 6, 3, 4, 2, 64
_CHANGED = frozenset({dict, list})
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)  # noqa: S311  (no secrets)


def keeps_all(collate: object) -> bool:
    """Whether a `collate_fn` is one of torch's own, which make a batch of all samples or raise."""
    return collate is default_collate or collate is default_convert


class OddBatch(NamedTuple):
    """A batch that does not hold what was asked for, on its way from where it was made.

    Attributes:
        batch: As it was made.
        held: Samples in it; None: they cannot be counted.
        kept: Places of its samples among those asked for; None: unknown.
    """

    batch: Any
    held: int | None
    kept: Sequence[int] | None

    def of(self, given: BatchInfo) -> BatchInfo:
        """What is known of the batch, corrected."""
        if self.kept is None:
            return given._replace(held=self.held)
        valid = sum(place < given.valid for place in self.kept)
        ids = [given.ids[place] for place in self.kept]
        return given._replace(held=self.held, ids=ids, valid=valid, left_out=len(given.ids) - len(ids))


class CountedCollate:
    """A user's `collate_fn`, and a count of the samples in each batch that it makes.

    Args:
        collate: The user's.
        names: Whether it is asked which samples were left out.
    """

    def __init__(self, collate: Callable[[Any], Any], *, names: bool) -> None:
        self.collate = collate
        self.names = names
        self.trusted = keeps_all(collate)
        self.scales: dict[_Path, int] | None = None  # see [Note: counting]: what has a size, and that for one sample
        self.probes = 0

    def __call__(self, read: FetchedSamples) -> Any:
        """The batch as the user's function makes it; in an `OddBatch`, if it is another one than was asked for."""
        samples, asked, present = read
        if self.trusted:
            batch, spare = self.collate(samples), samples
            held = len(samples) if hasattr(samples, "__len__") else None
        else:
            spare = _copied_samples(samples) if isinstance(samples, (list, tuple)) else []
            batch = self.collate(samples)
            if not spare and isinstance(batch, (Mapping, torch.Tensor)):  # the dataset makes batches itself
                held = rows_of(batch)
            else:
                held = asked if _is_square(batch, asked) else self._count(batch, spare)
        if held == asked and not (self.names and any(sample is None for sample in spare)):
            return batch
        kept = None
        if self.names and (present is not None or len(spare) == asked):
            kept = [place if present is None else present[place] for place in self._kept(spare, held, batch)]
        return OddBatch(batch, AS_PLANNED if held == asked else held, kept)

    def _count(self, batch: Any, samples: Sequence[Any]) -> int | None:
        held = self._counted(batch)
        if held is None and _is_empty(batch):
            return 0
        if held is None and self.probes < _PROBES:
            self.probes += 1
            if found := self._measured(samples):
                known = found if self.scales is None else self.scales
                self.scales = {place: scale for place, scale in known.items() if found.get(place) == scale}
            held = self._counted(batch)
        return held

    def _counted(self, batch: Any) -> int | None:
        counts = {_size_at(batch, place) / scale for place, scale in (self.scales or {}).items()}
        held = counts.pop() if len(counts) == 1 else -1.0
        return int(held) if held.is_integer() and held >= 0 else None

    def _measured(self, samples: Sequence[Any]) -> dict[_Path, int]:
        """What has a size that grows with the number of samples, and the size for one; alike for several samples."""
        found: dict[_Path, int] | None = None
        with _undisturbed(self.collate) as collate:
            alone: list[tuple[Any, dict[_Path, int]]] = []
            for sample in [one for one in samples if one is not None][:_TRIED]:
                batch = _made(collate, sample)
                alone += [] if _is_empty(batch) else [(sample, dict(_sizes(batch)))]
            for (one, first), (other, second) in itertools.islice(zip(alone, alone[1:] or alone, strict=False), _PAIRS):
                both = dict(_sizes(_made(collate, one, other)))
                scales = {p: n for p, n in first.items() if n and second.get(p) == n and both.get(p) == 2 * n}
                if scales:  # nothing grows where one of them is left out
                    found = scales if found is None else {p: n for p, n in found.items() if scales.get(p) == n}
        return found or {}

    def _kept(self, samples: Sequence[Any], held: int | None, batch: Any) -> list[int]:
        """Places of the samples in a batch that holds so many; of all that may be in it, if they cannot be told."""
        there = [place for place, sample in enumerate(samples) if sample is not None]
        if held is None or held >= len(there) or self.trusted:
            return there
        with _undisturbed(self.collate) as collate:
            places = [place for place in there if not _is_empty(_made(collate, samples[place]))]
            # Others are in it if samples are left out for another reason, or at random.
            is_sure = len(places) == held and _is_equal(_made(collate, *(samples[place] for place in places)), batch)
        return places if is_sure else there


@contextlib.contextmanager
def _undisturbed(collate: Any) -> Iterator[Any]:
    """The user's function for calls that leave no trace: random states, and attributes of the function, stay."""
    with restored():
        yield _twin(collate)


def _twin(collate: Any) -> Any:
    try:
        twin = copy.copy(collate)
    except Exception:  # noqa: BLE001  (whatever a foreign class raises: it cannot be copied)
        return collate
    for name, value in getattr(twin, "__dict__", {}).items() if twin is not collate else ():
        if isinstance(value, (*_GENERATORS, list, dict)):
            twin.__dict__[name] = copy.copy(value) if isinstance(value, (list, dict)) else copy.deepcopy(value)
    return twin


def _copied_samples(samples: Sequence[Any]) -> list[Any]:
    """Samples for one more call: functions take items out of the dicts and lists that they are given."""
    if _CHANGED.isdisjoint(map(type, samples)):
        return [*samples]
    return [sample.copy() if type(sample) in _CHANGED else sample for sample in samples]


def _made(collate: Any, *samples: Any) -> Any:
    """A batch of one or two samples; None if it cannot be made."""
    try:
        return collate(_copied_samples(samples))
    except Exception:  # noqa: BLE001  (whatever the user's function raises: there is no such batch)
        return None


# -- sizes -------------------------------------------------------------------------------------------


def _length(value: Any) -> int | None:
    if isinstance(value, (str, bytes)):
        return None
    try:
        return len(value)
    except Exception:  # noqa: BLE001  (whatever a foreign class raises: it has no length)
        return None


def _is_empty(batch: Any) -> bool:
    return batch is None or _length(batch) == 0 or rows_of(batch) == 0


def _is_square(batch: Any, count: int) -> bool:
    """Whether a batch holds so many samples in whatever way it is read."""
    if isinstance(batch, torch.Tensor):
        return batch.dim() > 0 and len(batch) == count
    if type(batch) not in (list, tuple) or len(batch) != count:
        return False
    return all((size := _length(value)) is None or size == count for value in batch)


def _inside(value: Any) -> Iterator[tuple[tuple[bool, Any], Any]]:
    """What is in a part of a batch, and how to get there."""
    if isinstance(value, Mapping):
        yield from (((False, key), item) for key, item in value.items())
    elif isinstance(value, (list, tuple)):
        yield from (((False, place), item) for place, item in enumerate(value[:_WIDE]))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from (((True, field.name), getattr(value, field.name)) for field in dataclasses.fields(value))
    elif not isinstance(value, (torch.Tensor, np.ndarray, torch.nn.Module, type)) and not callable(value):
        yield from (((True, name), item) for name, item in getattr(value, "__dict__", {}).items())


def _sizes(batch: Any, place: _Path = (), deep: int = _DEEP) -> Iterator[tuple[_Path, int]]:
    """The lengths of a batch and of what is in it."""
    size = _length(batch)
    if size is not None:
        yield place, size
    for step, item in _inside(batch) if deep else ():
        yield from _sizes(item, (*place, step), deep - 1)


def _size_at(batch: Any, place: _Path) -> float:
    try:
        for is_attribute, name in place:
            batch = getattr(batch, name) if is_attribute else batch[name]
    except Exception:  # noqa: BLE001  (a batch of another structure)
        return -1.0
    size = _length(batch)
    return -1.0 if size is None else size


def _is_equal(one: Any, other: Any) -> bool:
    """Whether two batches are the same, as far as that can be seen."""
    try:
        pairs = zip(leaves(one), leaves(other), strict=True)
        return all(p == q and (a is b or bool(np.all(np.asarray(a == b)))) for (p, a), (q, b) in pairs)
    except Exception:  # noqa: BLE001  (whatever a foreign class raises, or batches of other sizes)
        return False


# -- the process that uses the batches ---------------------------------------------------------------


class Arrivals:
    """The batches of one iteration: those asked for, and those that came, in one order.

    Attributes:
        asked: What is known of batches that are still being read.
        came: The same of batches that were read and not given yet.
        batches: Those batches and their sizes, if the user's class may change them before they are given.
    """

    def __init__(self, loader: str, *, changed: bool) -> None:
        self.asked: deque[BatchInfo] = deque()
        self.came: deque[BatchInfo] = deque()
        self.batches: deque[tuple[Any, dict[_Path, int]]] | None = deque() if changed else None
        self._loader = loader
        self._has_begun = False

    def noting(self) -> Callable[[Any], Any]:
        """What takes each batch of torch's iterator that is made now, and returns it as the user's function made it.

        Raises:
            ContractError: Batches came from another one in this iteration.
        """
        if self._has_begun:
            raise self._others("it begins again in one iteration")
        return functools.partial(self._note, self.asked)

    def _note(self, asked: deque[BatchInfo], batch: Any) -> Any:
        self._has_begun = True
        given = asked.popleft()
        if type(batch) is OddBatch:
            given, batch = batch.of(given), batch.batch
        self.came.append(given)
        if self.batches is not None:
            self.batches.append((batch, dict(_sizes(batch, deep=_SHALLOW))))
        return batch

    def next(self, batch: Any) -> BatchInfo:
        """What is known of a batch that is given now.

        Raises:
            ContractError: It is not the next one that was read in this iteration.
        """
        if not self.came:
            raise self._others("one more batch than were read in this iteration")
        given = self.came.popleft()
        if self.batches is None:
            return given
        read, sizes = self.batches.popleft()
        if _is_empty(batch):
            return given._replace(held=0)
        if batch is not read and any(batch is other for other, _ in self.batches):
            raise self._others("a batch that was read after others that were not given")
        now = dict(_sizes(batch, deep=_SHALLOW))
        columns = {now.get(((False, key),)) for key in batch} if isinstance(batch, Mapping) else set()
        if given.held == AS_PLANNED and (_is_square(batch, given.asked) or columns - {None} == {given.asked}):
            return given
        return given if all(now.get(place) == size for place, size in sizes.items()) else given._replace(held=None)

    def end(self) -> None:
        """The iteration is over.

        Raises:
            ContractError: Batches were read, and not given.
        """
        if self.came:
            raise self._others(f"{len(self.came)} batches fewer than were read in this iteration")

    def _others(self, found: str) -> ContractError:
        return ContractError(
            f"shard_data: {self._loader}.__iter__ does not yield the batches of this iteration, each once",
            found=f"{found}; weft cannot tell which samples a batch holds",
            expected="an __iter__ that calls super().__iter__() once and yields a batch for each of its batches",
            fix="loader = DataLoader(dataset, batch_size=32, num_workers=2, persistent_workers=True)  "
            "# other batches: by a collate_fn or the dataset",
        )


class ShareCheck:
    """Whether `share`, which is computed from planned sizes, holds for the batches that came.

    The sizes of the other ranks' batches are not known without a message. So where one batch of this rank is not as
    planned, no share is returned from then on; and if one was before, the batch is not given.

    Args:
        rank: Of this process.
        elastic: Whether the job is.

    Attributes:
        odd: What was found in the first batch that is not as planned.
        short: Whether its samples could be counted.
    """

    def __init__(self, rank: int, *, elastic: bool) -> None:
        self._rank, self._elastic = rank, elastic
        self.odd = ""
        self.short = False
        self._asked = False

    def note(self, given: BatchInfo) -> None:
        """Look at a batch before it is given.

        Raises:
            ContractError: It makes a share wrong that was returned before.
        """
        if given.held == AS_PLANNED or given.empty:
            return
        if not self.odd or (not self.short and given.held is not None):
            self.short = given.held is not None
            self.odd = (
                f"{given.held} samples in a batch made on rank {self._rank}, for which {given.asked} were read"
                if self.short
                else f"a batch made on rank {self._rank} of {given.asked} samples, which cannot be counted in it"
            )
        if self._asked:
            raise self._wrong()

    def ask(self) -> None:
        """Note that a share is asked for.

        Raises:
            ContractError: A batch was not as planned.
        """
        self._asked = True
        if self.odd:
            raise self._wrong()

    def _wrong(self) -> ContractError:
        fix = (
            'loss = cross_entropy(model(x), y, reduction="sum") / weft.metrics.denominator(len(y), ctx)  # in windows '
            "/ window.denominator(lambda batch: len(batch[1])). Where nothing is left of a batch, return one without "
            "rows from collate_fn, such as torch.empty(0, 3), not None: every rank takes part in every step"
        )
        return ContractError(
            "share: batches do not hold the samples that were read for them",
            found=self.odd,
            expected="a batch of all samples that were read for it, on every rank: the sizes of the batches of other "
            "ranks are known by plan only",
            fix="dataset = torch.utils.data.Subset(dataset, good)  # before shard_data; in an elastic job, counts "
            "cannot be added up with weft.metrics.denominator"
            if self._elastic
            else fix,
        )
