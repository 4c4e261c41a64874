"""Iterable datasets: which samples of a stream a rank, and a worker of it, gets in which step.

[Note: streams] A stream is read by every rank (and every worker) from its beginning, and each keeps its
pieces, so that order and union are those of one process; what that costs is `DataPlan.reads`. The
stream is read with random states of its own, a function of (seed, epoch), and sees no worker: ranks and
workers would disagree about what it holds otherwise. A stream that can begin anywhere (`iter_from`) and
knows its length is read only where this rank's pieces are.

[Note: what was read] What is read more than once, on several ranks or again by a resumed run, has to be the same each
time. A digest tells: it comes with the steps, is compared by the ranks, and is a part of the position.
"""

from __future__ import annotations

import copy
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info

from weft import torch_internals
from weft.context import DistContext
from weft.contract import Stateful
from weft.data import datasets_internals
from weft.data.order.compare_order import compare_order
from weft.data.order.epoch_order import generators_of
from weft.data.order.sample_digest import ReadDigest, is_compared, next_looked_at
from weft.data.order.stream_state import StreamState
from weft.data.order.tell_epoch import tell_epoch
from weft.data.split.map_samples import BatchInfo, FetchedSamples, StreamMark, WorkerStart, at_sample, seed_worker
from weft.data.split.real_batches import CountedCollate, OddBatch
from weft.data.split.split_plan import UNKNOWN, Span, SplitPlan, warn_of_no_step
from weft.errors import ContractError, value_error
from weft.peers.world import World
from weft.rng import mix, seeded
from weft.tensors.rng_state import RngState

_SAME = (
    "rng = random.Random(torch.initial_seed())  # draw from random, numpy.random, torch or a `generator` attribute, "
    "which weft seeds by (seed, epoch); sort listings and sets"
)
_READ_AHEAD_S = 1e-3  # changing random states costs some 15 us; cheap samples share them


@runtime_checkable
class SeekableStream(Protocol):
    """An iterable dataset that can begin anywhere, at no cost: to resume in the middle takes no reading.

    With `__len__` as well, or with `endless = True`, each rank reads its own samples only.
    """

    def iter_from(self, start: int) -> Iterator[Any]:
        """Yield the samples from number `start` on, those that `__iter__` yields after `start` others."""
        ...


class StreamStep(NamedTuple):
    """One step as it comes from a worker: the samples, later the batch, of each rank it is read for."""

    parts: list[Any]
    given: list[BatchInfo]


class CollateSteps:
    """Makes batches of the samples of a step, with the user's function."""

    def __init__(self, collate: Callable[[Any], Any], *, single: bool, names: bool) -> None:
        self.collate: Callable[[Any], Any] = collate if single else CountedCollate(collate, names=names)
        self.single = single

    def __call__(self, step: StreamStep) -> StreamStep:
        """The same step with batches in it."""
        if self.single:
            return StreamStep([self.collate(part[0]) for part in step.parts], step.given)
        parts = [self.collate(FetchedSamples(part, len(part), None)) for part in step.parts]
        odd = [place for place, part in enumerate(parts) if type(part) is OddBatch]
        for place in odd:
            parts[place], step.given[place] = parts[place].batch, parts[place].of(step.given[place])
        return StreamStep(parts, step.given)


class StreamSteps(IterableDataset[StreamStep]):
    """Yields the steps of one epoch of a stream.

    Attributes:
        dataset: The user's.
        total: Its length; None if it does not tell.
        rank: Of this process.
        number: Of the loader, the same on all ranks.
        seekable: Whether it can begin anywhere.
        plans: Of the ranks that it is read for.
        seed: Of the order.
        resumed: Where an interrupted run continues.
        worker_start: What a worker has done when it began; None without workers.
        visits: How often each epoch was begun.
    """

    plans: Sequence[SplitPlan] = ()
    seed = 0
    resumed: StreamMark | None = None
    worker_start: WorkerStart | None = None

    def __init__(
        self, dataset: Any, total: int | None, rank: int, number: int, *, keyed: bool, workers_stay: bool
    ) -> None:
        self.dataset, self.total, self.rank, self.number, self.keyed = dataset, total, rank, number, keyed
        self.seekable, self.stateful = isinstance(dataset, SeekableStream), has_state(dataset)
        self.begin_state = copy.deepcopy(dataset.state_dict()) if self.stateful else None
        # Who can be put somewhere else knows what has to be put back for that.
        kept = isinstance(dataset, (SeekableStream, Stateful, IterDataPipe))
        self.state = None if kept else StreamState(dataset, generators_of(dataset))
        self.visits: Counter[int] = Counter()
        self._running: Generator[StreamStep] | None = None
        self._stays = False
        self._now = torch.zeros(2, dtype=torch.int64)
        if workers_stay:  # they are not sent a new dataset: they look there
            self._now.share_memory_()

    def begin(self, span: Span) -> None:
        """Let the next iteration, also in workers that outlive one, be over this."""
        self._now[0], self._now[1] = span.epoch, span.start

    @property
    def selective(self) -> bool:
        """Whether each rank reads its own samples only."""
        return self.seekable and (self.total is not None or never_ends(self.dataset))

    def __iter__(self) -> Iterator[StreamStep]:
        worker = get_worker_info()
        place, stride = (0, 1) if worker is None else (worker.id, worker.num_workers)
        number, start = self._now.tolist()
        if worker is not None:
            if self._stays and self.worker_start is not None:  # draws what one would draw that begins now
                seed_worker(self.worker_start.seed, self.worker_start.rank, number, worker.id)
            if self._running is not None:
                self._running.close()
            self._stays = True
            tell_epoch(self.dataset, number)
        if self.selective:
            return self._selected(number, start, place, stride)
        seed = mix(self.seed, number, "order")
        steps = _in_time_slices(_StreamReader(self, number, start).steps(place, stride), seed)
        if self.state is None:
            return steps
        running = self._noted(steps, self.state, seed)
        self._running = None if worker is None else running  # left early, it would end after the next one has begun
        return running

    def _noted(self, steps: Iterator[StreamStep], state: StreamState, seed: int) -> Generator[StreamStep]:
        state.begin(self.dataset, seed)
        try:
            yield from steps
        finally:
            state.end(self.dataset)

    def _selected(self, number: int, start: int, place: int, stride: int) -> Iterator[StreamStep]:
        """The steps of a stream in which one can jump, so that it is read like a map-style dataset."""
        total, samples, at = UNKNOWN if self.total is None else self.total, iter(()), -1
        everyone = self.plans[0].per_step if self.total is None else None  # all steps are full
        last = self.plans[0].num_steps(total - start) - 1
        pieces = zip(*(plan.pieces(range(total), start, total) for plan in self.plans), strict=True)
        for index, step in itertools.islice(enumerate(pieces), place, None, stride):
            parts, given = [], []
            for piece, valid in step:
                ids = piece or range(start, start + 1)
                part: list[Any] = []
                for first, count in _runs(ids):
                    if first != at:
                        samples = iter(self.dataset.iter_from(first))
                    at = first + count
                    part += self.take(samples, first, count, number)
                if len(part) < len(ids):
                    raise _untrue_length(ids[len(part)], total)
                parts.append(part)
                given.append(BatchInfo(number, ids, valid, not piece, everyone, index == last))
            yield StreamStep(parts, given)

    def compare(self, mark: StreamMark, seen: dict[int, str], world: World | None) -> None:
        """Compare what a worker has read with what others have, of this rank and of other ones.

        Args:
            mark: Of the worker.
            seen: Digests of this iteration by sample; those that are new are added.
            world: The ranks that read the same; None if they do not.

        Raises:
            ContractError: A worker of this rank reads something else.
            ContextError: A rank reads something else.
        """
        name = type(self.dataset).__name__
        for sample, digest in mark.new:
            where = f"in epoch {mark.epoch}, up to sample {sample}"
            if seen.setdefault(sample, digest) != digest:
                raise ContractError(
                    f"shard_data: {name} yields other samples in another worker process, {where}",
                    found=f"{seen[sample]} and {digest}",
                    expected="the same samples in the same order in every process",
                    fix=_SAME,
                )
            if world is not None:
                what = f"shard_data: {name} yields other samples on another rank, {where}"
                begun = f"{self.number}/{mark.epoch}/{self.visits[mark.epoch]}/{sample}"
                old = f"{self.number}/{mark.epoch - 2}/1/{sample}"
                compare_order(world, begun, digest, what, _SAME, old=old)

    def take(self, samples: Iterator[Any], first: int, count: int, number: int) -> list[Any]:
        """The next samples of an epoch, from number `first` on; fewer at the end of the stream."""
        found: list[Any] = []
        try:
            if not self.keyed:
                found.extend(itertools.islice(samples, count))
                return found
            for sample in range(first, first + count):
                with seeded(mix(self.seed, number, sample, "sample")):
                    found.extend(itertools.islice(samples, 1))
        except Exception as error:
            at_sample(error, first + len(found), self.rank)
            raise
        return found


def never_ends(dataset: Any) -> bool:
    """Whether a seekable stream says that it has no end."""
    return isinstance(dataset, SeekableStream) and getattr(dataset, "endless", None) is True


def has_state(dataset: Any) -> bool:
    """Whether a stream can be put back to where it was by a state of its own, without losing a sample."""
    if isinstance(dataset, SeekableStream) or not isinstance(dataset, Stateful):
        return False
    # A shuffle buffer of `datasets` is no part of its state: what is in it would be lost, so it is read again.
    is_stream = datasets_internals.stream.holds(dataset)
    parts = [datasets_internals.STREAM_SOURCE.of(dataset)] if is_stream else []
    while parts:
        part = parts.pop()
        if "BufferShuffled" in type(part).__name__:
            return False
        inner = [getattr(part, "ex_iterable", None), *getattr(part, "ex_iterables", ())]
        parts += [each for each in inner if each is not None]
    return True


def opened(dataset: Any, start: int, begin: Any, state: Any = None) -> Iterator[Any]:
    """The samples of a stream.

    Args:
        dataset: The stream.
        start: The sample to begin with, of one that can go there.
        begin: The state of one that has a state, at its beginning; else None.
        state: A later one, to begin with.
    """
    if isinstance(dataset, SeekableStream):
        return iter(dataset.iter_from(start))
    if begin is not None:
        dataset.load_state_dict(copy.deepcopy(begin if state is None else state))
    return iter(dataset)


def shards_of(dataset: Any) -> int | None:
    """The number of parts a stream can be split into by itself; None if it cannot."""
    number = getattr(dataset, "num_shards", None)
    return number if type(number) is int and callable(getattr(dataset, "shard", None)) else None


def with_own_shards(loader: DataLoader[Any], ctx: DistContext) -> DataLoader[Any]:
    """A copy of a loader over a stream that reads the shards of this rank only.

    Raises:
        ValueError: There are fewer shards than ranks.
    """
    dataset: Any = loader.dataset
    number = shards_of(dataset)
    if number is None or number < ctx.data_size:
        raise value_error(
            "shard_data: the stream has fewer shards than there are ranks",
            found=f"{number} shards, {ctx.data_size} ranks",
            expected="at least one shard for each rank",
            fix='loader, ctx = weft.shard_data(loader, ctx, mode="batches", uneven="empty")  # or mode="dispatch"',
        )
    new = copy.copy(loader)
    new.__dict__["dataset"] = dataset.shard(num_shards=ctx.data_size, index=ctx.data_rank)
    return new


def _runs(ids: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Cut indices into runs of consecutive ones: first, and how many."""
    if isinstance(ids, range):
        return ((ids.start, len(ids)),)
    breaks = [index for index in range(1, len(ids)) if ids[index] != ids[index - 1] + 1]
    return [(ids[first], end - first) for first, end in itertools.pairwise([0, *breaks, len(ids)])]


class _StreamReader:
    """Reads all of a stream and keeps the pieces."""

    def __init__(self, owner: StreamSteps, number: int, start: int) -> None:
        self.owner = owner
        self.number = number
        self.start = start
        self.plan = owner.plans[0]
        self.begin: list[Any] = []  # the first samples of the epoch, for uneven="pad"
        self.digest = ReadDigest()
        self.new: list[tuple[int, str]] = []  # what the ranks compare
        self.seen = 0

    def steps(self, place: int, stride: int) -> Iterator[StreamStep]:
        """Every step of the worker number `place` of `stride`."""
        size, position = self.plan.per_step, self.start
        samples = self._samples()
        ahead = self._read(samples, 1, position)
        while ahead:
            chunk = ahead + self._read(samples, size - 1, position + 1)
            mine = (position - self.start) // size % stride == place
            mark = self._mark(position + size) if mine else None
            if self.plan.uneven == "pad" and position == 0:
                self.begin = chunk
            ahead = self._read(samples, 1, position + size) if len(chunk) == size else []
            if not ahead:
                rest = len(chunk) % size
                self.check_end(position + len(chunk), rest)
                if rest and not self.plan.rest_makes_step(rest):
                    break
            if mine:
                yield self._step(chunk, position, mark, last=not ahead)
            position += size

    def check_end(self, total: int, rest: int) -> None:
        """Raise if the stream may not end here."""
        owner = self.owner
        if owner.total is not None and total != owner.total:
            raise _untrue_length(total, owner.total)
        self.plan.check(rest, f"the stream, {total} samples long,")
        if total == rest > 0 and not self.plan.rest_makes_step(rest):
            found = f"{total} samples for {self.plan.size} ranks x {self.plan.per_rank}"
            warn_of_no_step("the stream ended before there was a step", found)

    def _samples(self) -> Iterator[Any]:
        dataset, owner = self.owner.dataset, self.owner
        for generator in generators_of(dataset):
            generator.manual_seed(mix(owner.seed, self.number, "order"))
        here = owner.resumed
        if here is None or here[:2] != (self.number, self.start):  # of a worker that stays: where it began
            here = StreamMark(self.number, self.start)
        samples = opened(dataset, self.start, owner.begin_state, here.state)
        if self.start and not owner.seekable and here.state is None:
            self._read_again(samples, here.read)
        return samples

    def _read_again(self, samples: Iterator[Any], expected: tuple[int, str] | None) -> None:
        """Read what was used before the run was resumed, and drop it."""
        owner = self.owner
        self.begin = self._read(samples, min(self.start, self.plan.per_step), 0)
        read = len(self.begin)
        while read < self.start:
            step = 1 if owner.keyed else max(min(next_looked_at(read), self.start) - read, 1)
            found = len(self._read(samples, 1, read)) if step == 1 else sum(1 for _ in itertools.islice(samples, step))
            read += found
            if found < step:
                break
        self.new = [self.digest.last]
        if read < self.start or (expected is not None and expected != self.digest.last):
            at, before = expected or (self.start, "samples")
            raise ContractError(
                f"shard_data: {type(owner.dataset).__name__} yields other samples when it is read again, to resume "
                f"epoch {self.number} at sample {self.start}",
                found=f"{self.digest.last[1]} up to sample {self.digest.last[0]}, in {read} samples",
                expected=f"{before} up to sample {at}: the same samples whenever it is read",
                fix=f"loader.set_epoch({self.number + 1})  # after load_state_dict; in the stream, draw from random, "
                "numpy.random or torch, which weft seeds by (seed, epoch)",
            )

    def _read(self, samples: Iterator[Any], count: int, position: int) -> list[Any]:
        found = self.owner.take(samples, position, count, self.number)
        if self.digest.next < position + len(found):
            seen = self.digest.see(position, found)
            self.new += [each for index, each in enumerate(seen) if is_compared(each[0]) or (index == self.seen == 0)]
            self.seen += len(seen)
        return found

    def _mark(self, samples: int) -> StreamMark:
        """Of now, when so many samples were read."""
        owner, new, self.new = self.owner, self.new, []
        if owner.stateful:
            return StreamMark(self.number, samples, copy.deepcopy(owner.dataset.state_dict()), None, new)
        return StreamMark(self.number, samples, None, None if owner.seekable else self.digest.last, new)

    def _step(self, chunk: list[Any], position: int, mark: StreamMark | None, *, last: bool) -> StreamStep:
        parts, given, total = [], [], position + len(chunk)
        for plan in self.owner.plans:
            first, valid = plan.share(len(chunk))
            part = chunk[first : first + valid]
            ids: Sequence[int] = range(position + first, position + first + valid)
            if plan.uneven == "pad" and valid < plan.per_rank:  # the first samples of the epoch come again
                ((ids, _),) = plan.pieces(range(total), position, total)
                part = [chunk[i - position] if i >= position else self._beginning(total)[i] for i in ids]
            parts.append(part or chunk[:1])
            everyone = plan.used(len(chunk))
            given.append(BatchInfo(self.number, ids or [position], valid, not part, everyone, last, mark))
        return StreamStep(parts, given)

    def _beginning(self, total: int) -> list[Any]:
        """The first samples of the epoch; read again by a run that resumed in the middle."""
        owner, size = self.owner, self.plan.per_step
        if len(self.begin) < min(total, size):
            with seeded(mix(owner.seed, self.number, "order"), generators_of(owner.dataset)):
                self.begin = list(itertools.islice(opened(owner.dataset, 0, owner.begin_state), size))
        return self.begin


def _untrue_length(found: int, said: int) -> ContractError:
    return ContractError(
        "shard_data: the stream does not yield what its length says",
        found=f"{found} samples, and not {said}",
        expected="a __len__ that is true in every epoch, or none; the same samples when it is read again",
        fix="def __len__(self): return ...  # the true number of samples of this epoch",
    )


def _in_time_slices(steps: Iterator[StreamStep], seed: int) -> Iterator[StreamStep]:
    """Run a reader with the random states of the stream, for about a millisecond, and hand out what came."""
    inside = RngState(
        random.Random(seed).getstate(),  # noqa: S311  (not for secrets)
        np.random.MT19937([seed % 2**32, seed >> 32]).state,
        torch.Generator().manual_seed(seed).get_state(),
    )
    failure: Exception | None = None
    going, worker_info = True, torch_internals.worker_info.home
    while going and failure is None:
        ready: list[StreamStep] = []
        outside, info = RngState.capture(), get_worker_info()
        inside.apply()
        setattr(*worker_info, None)  # a stream that asked which worker reads it would differ between workers
        end = time.perf_counter() + _READ_AHEAD_S
        try:
            while going and time.perf_counter() < end:
                step = next(steps, None)
                ready += [step] if step else []
                going = step is not None
        except Exception as error:  # noqa: BLE001  (raised when its turn comes, after what was read before)
            failure = error
        finally:
            inside = RngState.capture()
            outside.apply()
            setattr(*worker_info, info)
        yield from ready
    if failure is not None:
        raise failure
