"""What a loader's own machinery reads from: map-style datasets, and what is put around any dataset.

The `DataLoader` of torch does the work: workers, collating, pinning. It is handed a view of the user's
loader (torch_view.py) in which the dataset is that of this file or of stream_samples.py. What was asked for is
noted in a queue (`BatchInfo`), so that it is known which samples each batch holds.
"""

from __future__ import annotations

import operator
import os
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from weft.data.order.tell_epoch import tell_epoch
from weft.environments import end_with_parent
from weft.errors import ContractError, listed
from weft.keyed_random.row_keys import RowKeys
from weft.rng import mix, restored, seeded, seeds_for

AS_PLANNED = -1  # samples in a batch: those that were asked for, as in most


class StreamMark(NamedTuple):
    """A place in a stream, and what is known of what was read up to there.

    Attributes:
        epoch: Number of the epoch.
        samples: How many were read, by all ranks together.
        state: The stream's own; None if it has none.
        read: The last sample that was looked at, and the digest after it; None if a run that is resumed goes there
            without reading.
        new: Those that are compared between ranks and workers, since the last step of this worker.
    """

    epoch: int
    samples: int
    state: Any = None
    read: tuple[int, str] | None = None
    new: Sequence[tuple[int, str]] = ()


class BatchInfo(NamedTuple):
    """What is known of one batch besides its values.

    Attributes:
        epoch: Whose order it is a part of.
        ids: Of its samples: indices into the dataset, or numbers in the stream.
        valid: How many of them, from the first on, are no repetition.
        empty: One sample was read although this rank gets none: no row of it counts.
        everyone: Samples that all ranks are given in this step; None where the plan says so, or nobody knows.
        last: Of a stream: nothing comes after it.
        mark: Of a stream that is read from its beginning: where it stands after the samples of this step.
        held: Samples that are in it; `AS_PLANNED`: as many as were asked for; None: they cannot be counted.
        left_out: Samples that are not in it, and not among `ids`.
        orders: Of data that rank 0 reads for all: what a position says of the order, in this epoch and at the next.
    """

    epoch: int
    ids: Sequence[Any]
    valid: int
    empty: bool = False
    everyone: int | None = None
    last: bool = False
    mark: StreamMark | None = None
    held: int | None = AS_PLANNED
    left_out: int = 0
    orders: Sequence[dict[str, Any]] = ()

    @property
    def asked(self) -> int:
        """Samples that were asked for."""
        return len(self.ids) + self.left_out


def as_index(index: Any) -> Any:
    """An index of any integer type, such as numpy's or a tensor without dimensions, as an int; others as they are."""
    try:
        return operator.index(index)
    except TypeError:
        return index


def row_keys(given: BatchInfo, rows: int | None, rank: int) -> RowKeys:
    """The samples of a batch, as numbers.

    Args:
        given: What is known of it.
        rows: How many rows it has, if a sample is a whole batch.
        rank: Of data that was split already: whose part it is.
    """
    ids = [] if given.empty else [as_index(one) for one in given.ids]
    numbers = [one if isinstance(one, int) else mix(one) >> 24 for one in ids]
    if rows is not None:
        numbers = [(one << 24) + row for one in numbers for row in range(rows)]
    return RowKeys(given.epoch, [(one + (rank << 40)) % 2**63 for one in numbers])


class BatchRequest(NamedTuple):
    """What is read for one batch; it goes to the process that reads it.

    Attributes:
        iteration: Number of the iteration among those of one set of workers, and its epoch.
        epoch: Whose order the batch is a part of: an earlier one for batches that were carried over.
        indices: Of the samples; with `batch_size=None`, the index of the one.
    """

    iteration: tuple[int, int]
    epoch: int
    indices: Any


class FetchedSamples(NamedTuple):
    """What was read for a batch.

    Attributes:
        samples: As the dataset returned them.
        asked: How many were asked for.
        present: Places of the samples among those asked for; None: all, or unknown.
    """

    samples: Any
    asked: int
    present: Sequence[int] | None


class MapSamples(Dataset[Any]):
    """A map-style dataset, with the name of the sample in each error and, if asked for, keyed randomness.

    Where it reads, it tells the dataset the epoch of each batch. A worker that outlives an iteration begins the next
    one like a new worker.
    """

    def __init__(self, dataset: Any, rank: int, seed: int | None, *, epoch: int, worker_seed: tuple[int, int]) -> None:
        self.counts: Literal["no", "yes", "by name"] = "no"  # whether batches are counted, and known by their samples
        self.dataset = dataset
        self.rank = rank
        self.seed = seed  # of keyed randomness
        self.iteration = (0, epoch)
        self.worker_seed = worker_seed  # and the rank, as in `WorkerStart`
        self.told: int | None = None  # the epoch that `set_epoch` was called with, in this process and iteration
        self.says = callable(getattr(dataset, "set_epoch", None)) and hasattr(dataset, "epoch")
        self.fetch = getattr(dataset, "__getitems__", None)

    def __getitems__(self, request: BatchRequest) -> Any:
        indices, present = request.indices, None
        if self.fetch is None or self.seed is not None:
            found: Sequence[Any] = self._one_by_one(request, indices)
        else:
            self._follow(request)
            try:
                found = self.fetch(indices)
            except Exception as error:
                at_sample(error, listed(indices), self.rank)
                raise
            if self.counts == "by name" and isinstance(found, list) and len(found) != len(indices):
                present = self._present(indices, len(found))
        return found if self.counts == "no" else FetchedSamples(found, len(indices), present)

    def _present(self, indices: Sequence[Any], count: int) -> list[int] | None:
        """Places of the samples that the dataset has, of which it returned so many: each is read once more, alone."""
        with restored():
            counts = [len(self.fetch([index])) for index in indices] if self.fetch else []
        places = [place for place, found in enumerate(counts) if found]
        return places if sum(counts) == len(places) == count else None

    def __getitem__(self, request: BatchRequest) -> Any:
        return self._one_by_one(request, [request.indices])[0]

    def _one_by_one(self, request: BatchRequest, indices: Sequence[Any]) -> list[Any]:
        self._follow(request)
        dataset, keyed, rest = self.dataset, self.seed is not None, iter(indices)
        try:
            return [self._keyed(request.epoch, index) if keyed else dataset[index] for index in rest]
        except Exception as error:
            at_sample(error, indices[len(indices) - len(list(rest)) - 1], self.rank)
            raise

    def _keyed(self, epoch: int, index: Any) -> Any:
        with seeded(mix(self.seed, epoch, as_index(index), "sample")):
            return self.dataset[index]

    def _follow(self, request: BatchRequest) -> None:
        """Begin an iteration, or an epoch, that the request is the first of."""
        if request.iteration != self.iteration:
            self.iteration, self.told, worker = request.iteration, None, get_worker_info()
            if worker is not None:
                seed_worker(*self.worker_seed, request.iteration[1], worker.id)
        # Another loader over the same dataset may have told it another one since, if it is one that says so.
        if request.epoch != self.told or (self.says and self.dataset.epoch != request.epoch):
            tell_epoch(self.dataset, request.epoch)
            self.told = request.epoch

    def __len__(self) -> int:
        return len(self.dataset)


class KeyedCollate:
    """A `collate_fn` of samples with keyed randomness; its first batches tell whether it draws numbers itself.

    Args:
        collate: The function.
        own: A generator that the user's function has.
    """

    def __init__(self, collate: Callable[[Any], Any], own: object) -> None:
        self.collate, self.own = collate, own
        self.left = 2

    def __call__(self, samples: Any) -> Any:
        """The batch.

        Raises:
            ContractError: Random states are others afterwards.
        """
        if not self.left:
            return self.collate(samples)
        self.left -= 1
        before = self._states()
        batch = self.collate(samples)
        drawn = [name for name, state in self._states().items() if state != before[name]]
        if drawn:
            raise ContractError(
                "shard_data: collate_fn draws random numbers, which no key makes those of a sample",
                found=f"another random state of {listed(drawn)} after a batch of this rank was collated",
                expected="with keyed=True, numbers that follow from the sample: drawn in dataset[i]",
                fix="draw in dataset[i]; or of the batch, weft.rng.keyed_uniform(rows.ids, seed=0, epoch=rows.epoch)  "
                "# with_ids=True",
            )
        return batch

    def _states(self) -> dict[str, Any]:
        states = {"torch": torch.default_generator.get_state()}
        if isinstance(self.own, torch.Generator):
            states["its generator"] = self.own.get_state()
        words: Any = np.random.get_state()
        return {
            "python": random.getstate(),
            "numpy": [bytes(words[1]), *words[2:]],
            **{name: bytes(state.numpy()) for name, state in states.items()},
        }


def seed_worker(seed: int, rank: int, epoch: int, worker: int) -> None:
    """Seed this worker process for an epoch."""
    seeds = seeds_for(seed, epoch, rank, worker)
    seeds.apply()
    info = get_worker_info()
    if info is not None:
        object.__setattr__(info, "seed", seeds.torch)


def at_sample(error: BaseException, sample: object, rank: int) -> None:
    """Add to an error which sample was read; once."""
    if not any(" was read on rank " in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"while sample {sample} was read on rank {rank}")


@dataclass(frozen=True)
class WorkerStart:
    """What a worker process does first: seeds of its own, then the user's `worker_init_fn`.

    Attributes:
        parent: The process with which it ends, of a replica; 0: none.
    """

    user: Callable[[int], None] | None
    seed: int
    epoch: int
    rank: int
    parent: int

    def __call__(self, worker: int) -> None:
        """Seed, and call the user's function."""
        if os.getppid() == self.parent:  # it holds the connections of a replica, whose peers see its end by theirs
            end_with_parent(self.parent)
        seed_worker(self.seed, self.rank, self.epoch, worker)
        info = get_worker_info()
        if info is not None:  # the user's dataset, and not what is put around it
            object.__setattr__(info, "dataset", getattr(info.dataset, "dataset", info.dataset))
        if self.user is not None:
            self.user(worker)


def name_samples(error: Exception, given: deque[BatchInfo], rank: int) -> None:
    """Add to an error of the loader what was being read: a worker that dies cannot say it."""
    if given and "while sample" not in str(error):
        # A worker may have died over any batch that it was asked for, also one ahead of its turn.
        asked = given if "exited unexpectedly" in str(error) else [given[0]]
        at_sample(error, ", ".join(str(one) for batch in asked for one in batch.ids) or "(none: an empty batch)", rank)
