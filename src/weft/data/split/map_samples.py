"""What a loader's own machinery reads from: map-style datasets, and what is put around any dataset.

The `DataLoader` of torch does the work: workers, collating, pinning. It is handed a view of the user's
loader in which dataset and sampler are those of this file or of streams.py. What was asked for is noted
in a queue (`BatchInfo`), so that it is known which samples each batch holds.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, Sampler, get_worker_info

from weft.data.order.epoch_order import EpochOrder, tell_epoch
from weft.data.split.split_plan import Plan, Span
from weft.environments import end_with_parent
from weft.errors import listed
from weft.rng import mix, seeded, seeds_for

__all__ = ["BatchInfo", "Epoch", "Samples", "StepIndices", "WorkerStart", "at_sample", "name_samples"]


class BatchInfo(NamedTuple):
    """What is known of one batch besides its values.

    Attributes:
        epoch: Whose order it is a part of.
        ids: Of its samples: indices into the dataset, or numbers in the stream.
        valid: How many of them, from the first on, are no repetition.
        empty: One sample was read although this rank gets none: no row of it counts.
        last: Of a stream: nothing comes after it.
        state: Of a stream: its own state after the samples of this step.
        everyone: Samples that all ranks are given in this step; None where the plan says so, or nobody knows.
    """

    epoch: int
    ids: Sequence[Any]
    valid: int
    empty: bool = False
    last: bool = False
    state: Any = None
    everyone: int | None = None


class Epoch:
    """The number of the epoch, also in workers that outlive one; `start` is where a stream begins."""

    def __init__(self, *, shared: bool) -> None:
        self._now = torch.zeros(2, dtype=torch.int64)
        if shared:  # persistent workers are not sent a new dataset: they look there
            self._now.share_memory_()

    def set(self, number: int, start: int = 0) -> None:
        """Go to an epoch."""
        self._now[0], self._now[1] = number, start

    def get(self) -> tuple[int, int]:
        """The epoch, and where to start in it."""
        number, start = self._now.tolist()
        return number, start


class Samples(Dataset[Any]):
    """A map-style dataset, with the name of the sample in each error and, if asked for, keyed randomness."""

    def __init__(self, dataset: Any, rank: int, epoch: Epoch, seed: int | None, *, announces: bool) -> None:
        self.dataset = dataset
        self.rank = rank
        self.epoch = epoch
        self.seed = seed  # of keyed randomness
        self.announced = -1 if announces else None  # the epoch that `set_epoch` was called with in this process
        self.fetch = getattr(dataset, "__getitems__", None)

    def __getitems__(self, indices: Sequence[Any]) -> Sequence[Any]:
        if self.fetch is None or self.seed is not None:
            return self._one_by_one(indices)
        self._follow()
        try:
            found: Sequence[Any] = self.fetch(indices)
        except Exception as error:
            at_sample(error, listed(indices), self.rank)
            raise
        return found

    def __getitem__(self, index: Any) -> Any:
        return self._one_by_one([index])[0]

    def _one_by_one(self, indices: Sequence[Any]) -> list[Any]:
        self._follow()
        dataset, keyed, rest = self.dataset, self.seed is not None, iter(indices)
        try:
            return [self._keyed(index) if keyed else dataset[index] for index in rest]
        except Exception as error:
            at_sample(error, indices[len(indices) - len(list(rest)) - 1], self.rank)
            raise

    def _keyed(self, index: Any) -> Any:
        with seeded(mix(self.seed, self.epoch.get()[0], index, "sample")):
            return self.dataset[index]

    def _follow(self) -> None:
        """Tell the dataset of an epoch that began since this worker did; or, here, that another loader has changed."""
        if self.announced is None:
            return
        number, _ = self.epoch.get()
        known = getattr(self.dataset, "epoch", number) if get_worker_info() is None else self.announced
        if known != number:
            tell_epoch(self.dataset, number)
            self.announced = number

    def __len__(self) -> int:
        return len(self.dataset)


def at_sample(error: BaseException, sample: object, rank: int) -> None:
    """Add to an error which sample was read; once."""
    if not any(" was read on rank " in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"while sample {sample} was read on rank {rank}")


class WorkerStart:
    """What a worker process does first: seeds of its own, then the user's `worker_init_fn`."""

    def __init__(
        self, user: Callable[[int], None] | None, seed: int, epoch: int, rank: int, *, elastic: bool = False
    ) -> None:
        self.user = user
        self.parent = os.getpid() if elastic else 0
        self.seed = seed
        self.epoch = epoch
        self.rank = rank

    def __call__(self, worker: int) -> None:
        """Seed, and call the user's function."""
        if os.getppid() == self.parent:  # it holds the connections of a replica, whose peers see its end by theirs
            end_with_parent(self.parent)
        seeds = seeds_for(self.seed, self.epoch, self.rank, worker)
        seeds.apply()
        info = get_worker_info()
        if info is not None:  # the user's dataset, and not what is put around it
            object.__setattr__(info, "seed", seeds.torch)
            object.__setattr__(info, "dataset", getattr(info.dataset, "dataset", info.dataset))
        if self.user is not None:
            self.user(worker)


class StepIndices(Sampler[Any]):
    """Yields the indices of one rank (or, for dispatch, of all in turn), in the order of the epochs.

    Attributes:
        reading: What an iterator that is made now yields.
        given: Where it notes what it asked for.
    """

    def __init__(self, units: EpochOrder, plans: Sequence[Plan], *, whole: bool, single: bool) -> None:
        self.units = units
        self.plans = tuple(plans)
        self.whole = whole
        self.single = single  # batch_size=None: a unit is read alone
        self.seed = 0
        self.reading: Sequence[Span] = ()
        self.given: deque[BatchInfo] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self._indices(self.reading, self.given)  # of now, not of the moment when the first is asked for

    def _indices(self, spans: Sequence[Span], given: deque[BatchInfo]) -> Iterator[Any]:
        for span in spans:
            order = self.units.order(self.seed, span.epoch)
            if len(self.plans) == 1 and not self.whole and not self.single:
                yield from self._plain(order, span, given)
                continue
            pieces = [plan.pieces(order, span.start, span.stop) for plan in self.plans]
            for step in zip(*pieces, strict=True):
                everyone = sum(self._samples(piece) for piece, _ in step) if len(step) == self.plans[0].size else None
                for piece, valid in step:
                    # A rank without a sample reads one, of which no row is used: collating needs something.
                    units = piece if len(piece) else [order[span.start]]
                    if self.whole:
                        ids: Sequence[Any] = [index for batch in units for index in batch]
                        kept = sum(map(len, units[:valid]))
                    else:
                        ids, kept = list(units), valid
                    given.append(BatchInfo(span.epoch, ids, kept, empty=not len(piece), everyone=everyone))
                    yield units[0] if self.single else ids

    def _samples(self, units: Sequence[Any]) -> int:
        return sum(map(len, units)) if self.whole else len(units)

    def _plain(self, order: Sequence[Any], span: Span, given: deque[BatchInfo]) -> Iterator[Any]:
        """Fast path for the common case."""
        note, epoch, instead = given.append, span.epoch, [order[span.start]] if span.start < len(order) else []
        for piece, valid in self.plans[0].pieces(order, span.start, span.stop):
            if len(piece):
                note(BatchInfo(epoch, piece, valid))
                yield piece
            else:
                note(BatchInfo(epoch, instead, 0, empty=True))
                yield instead


def name_samples(error: Exception, given: deque[BatchInfo], rank: int) -> None:
    """Add to an error of the loader what was being read: a worker that dies cannot say it."""
    if given and "while sample" not in str(error):
        # A worker may have died over any batch that it was asked for, also one ahead of its turn.
        asked = given if "exited unexpectedly" in str(error) else [given[0]]
        at_sample(error, ", ".join(str(one) for batch in asked for one in batch.ids), rank)
