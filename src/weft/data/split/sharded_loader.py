"""The loader that comes back: a copy of the user's that reads this rank's part and knows its position."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from weft import torch_internals
from weft.context import DistContext
from weft.data.loader_copy import Extension, Size, extended_copy, is_torch_iterator, torch_iterator
from weft.data.lock_step import LockStep, lock_step
from weft.data.order.loader_place import LoaderPlace
from weft.data.order.tell_epoch import tell_epoch
from weft.data.split.dispatch import scatter_batches
from weft.data.split.map_samples import AS_PLANNED, BatchInfo, StreamMark, as_index, name_samples, row_keys
from weft.data.split.position import Cursor, LoaderPass, checked_position, position
from weft.data.split.read_plan import ReadPlan
from weft.data.split.real_batches import Arrivals, keeps_all
from weft.data.split.split_plan import UNKNOWN, Span
from weft.data.split.torch_view import StreamIterator, torch_view
from weft.errors import ContractError, listed, type_error, warn
from weft.metrics import SampleIds, samples_of_all
from weft.tensors.nested import rows_of, without_rows

T = TypeVar("T")
_TORCHS = DataLoader.__mro__


class ShardedLoader(Extension[T]):
    """What `shard_data` returns: a copy of the user's loader, an instance of its class, with what this class has."""

    weft_reading: ReadPlan
    weft_cursor: Cursor
    weft_ctx: DistContext
    weft_lock_step: LockStep | None

    def __len__(self) -> int:
        """Batches of an epoch, whether some of it are read already or not; see `remaining`."""
        reading = self.weft_reading
        if self.__dict__.get("weft_inside"):  # the user's `__iter__` asks how many batches it yields
            now = self.weft_cursor.now
            if now.total is not None:
                return now.total - now.left_out
        span = reading.measured((reading.epoch(self._current().epoch),))[0]
        if span.stop == UNKNOWN:  # a sampler that never ends may have a length: it is what torch calls an epoch
            known = None if reading.units is None else reading.units.known
            if known is None:
                raise _no_length(self.dataset)
            span = span._replace(stop=known)
        return reading.steps_in((span,))

    @property
    def remaining(self) -> int:
        """Batches that are left of the running epoch, or of the one that the next iteration reads."""
        left, _ = self.weft_lengths()
        if left is None:
            raise _no_length(self.dataset)
        return left

    @property
    def epoch(self) -> int:
        """Number of the running epoch, or of the next one.

        A loader over the same dataset object as one that was read before continues to count where that one stands.
        """
        cursor, epoch = self.weft_cursor, self._current().epoch
        if cursor.told is False:
            cursor.told = True
            warn(
                "shard_data: a loader continues the epochs of another one over the same dataset",
                found=f"epoch {epoch}, before this loader was read",
                expected="epochs that count on where a loader is built anew in each one, or a number set by hand",
                fix="loader.set_epoch(0)  # to begin anew",
            )
        return epoch

    @property
    def share(self) -> float:
        """What to multiply the mean loss of the running batch by, so that its gradient is exact over all ranks.

        The samples of this batch times the number of ranks, over the samples of the step on all ranks: 1 if all
        ranks have equally many, 0 for a batch without rows. Gradients are averaged over the ranks, so the mean
        over the samples of a batch times its share has the gradient of the mean over the samples of all ranks.
        In windows use `window.share`; for means over tokens `weft.metrics.denominator`.

            for x, y in loader:
                (cross_entropy(model(x), y) * loader.share).backward()

        Collectives: none where weft splits the data, for all sizes are known then. For data that was split
        already, and with `batch_size=None`, one all-reduce of one number over the data axes per step: ask on
        all ranks alike.

        Raises:
            ContractError: No batch is being processed. Or, on several ranks, a batch that this rank was given does
                not hold the samples that were read for it, or its samples cannot be counted, because `collate_fn` or
                the dataset left some out; such a batch raises when it is next if a share was asked for before it.
            PeerError: A peer failed.
        """
        cursor, ctx, reading = self.weft_cursor, self.weft_ctx, self.weft_reading
        if cursor.last is None:
            raise ContractError(
                "share: there is no current batch",
                found="no iteration over the loader is running",
                expected="loader.share inside the loop over the loader",
                fix="for x, y in loader:\n    loss = cross_entropy(model(x), y) * loader.share",
            )
        own, everyone = self.weft_size()
        cursor.weighed = True
        if reading.lone:
            return float(own != 0)
        self._note(cursor.last)
        reading.shares.ask()
        if everyone is None:
            everyone = samples_of_all([own], ctx)
        return own * ctx.data_size * ctx.num_replicas / everyone if own else 0.0

    # -- one iteration ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        now = self._begin()  # not only at the first batch: which epoch it is does not depend on that
        watch, reader = self.weft_lock_step, self._iteration(now)
        reader = reader if watch is None else watch.batches(reader)
        now.reader = weakref.ref(reader)
        return reader

    def _begin(self) -> LoaderPass:
        reading, cursor = self.weft_reading, self.weft_cursor
        if not cursor.fresh and cursor.now.is_complete and not cursor.open - {cursor.now}:
            self._ended(cursor.now)
        elif not cursor.fresh:  # the last iteration was left early, or runs
            self._go_to(cursor.latest + 1)
        now = cursor.now
        cursor.iterations += 1
        now.todo = reading.begin(now.todo, cursor.iterations, self.weft_ctx)
        now.total = None if now.endless else reading.steps_in(now.todo)
        cursor.begin()
        if reading.readers:
            tell_epoch(self.dataset, now.epoch)
        return now

    def _iteration(self, now: LoaderPass) -> Iterator[Any]:
        reading, cursor, ctx = self.weft_reading, self.weft_cursor, self.weft_ctx
        plan, todo = reading.plan, now.todo
        if now.left_out and now.carries:
            todo = plan.split(todo, plan.steps_in(todo) - now.left_out)[0]
        read = self._batches(todo)
        if now.left_out and not now.carries and now.total is not None:
            read = itertools.islice(read, now.total - now.left_out)
        # Counted when they are given, not when they are read: on an accelerator one is read ahead.
        ahead = read if ctx.device.type == "cpu" else _on_device(read, ctx)
        cursor.open.add(now)
        cursor.place.readers += 1
        try:
            for value, given in ahead:
                cursor.gave(now, given)
                if reading.single:
                    cursor.rows = 0 if given.empty else rows_of(value[0] if reading.with_ids else value)
                if given.mark is not None:
                    reading.marks.append(given.mark)
                if cursor.noted is not None:
                    cursor.noted(value[0] if reading.with_ids and not given.empty else value, given)
                if cursor.keyed is not None:
                    rank = 0 if reading.split_for is None else ctx.data_rank
                    cursor.keyed.gave(value, row_keys(given, cursor.rows if reading.single else None, rank))
                yield value
        finally:
            cursor.open.discard(now)
            cursor.place.readers -= 1
        if not now.has_ended:
            self._ended(now)

    def _current(self) -> LoaderPass:
        """The iteration that runs, or else the one that comes next."""
        cursor = self.weft_cursor
        if cursor.fresh or not cursor.now.is_over:
            return cursor.now
        if cursor.now.is_complete:  # the loop was left when it had everything, without asking whether there is more
            self._ended(cursor.now)
            return cursor.now
        following = (self.weft_reading.epoch(cursor.latest + 1),)
        return LoaderPass(cursor.latest + 1, following, following)

    def _ended(self, now: LoaderPass) -> None:
        """Let the next iteration read what this one has left out, and the next epoch."""
        reading, plan = self.weft_reading, self.weft_reading.plan
        later: tuple[Span, ...] = ()
        if now.left_out and now.carries:
            later = plan.split(now.todo, plan.steps_in(now.todo) - now.left_out)[1]
        self.weft_cursor.ended(now, (*later, reading.epoch(self.weft_cursor.latest + 1)))

    def _batches(self, spans: tuple[Span, ...]) -> Iterator[tuple[Any, BatchInfo]]:
        """What the user gets, each with what is known of it: a batch, or a batch and its ids."""
        reading, ctx = self.weft_reading, self.weft_ctx
        read: Iterator[tuple[Any, BatchInfo]] = self._own(spans) if reading.readers else iter(())
        if reading.scattered:
            last = None if spans[-1].stop == UNKNOWN else reading.steps_in(spans)
            read = scatter_batches(read, ctx, reading.plan.size, last, reading.with_orders)
        elif reading.uneven_ranks is not None:
            read = reading.uneven_ranks.batches(read, spans[-1], ctx)
        elif not (reading.with_ids or reading.plan.allows_empty):
            return read
        return self._completed(read)

    def _completed(self, read: Iterator[tuple[Any, BatchInfo]]) -> Iterator[tuple[Any, BatchInfo]]:
        single, with_ids = self.weft_reading.single, self.weft_reading.with_ids
        for batch, given in read:
            if given.empty:
                try:
                    batch = without_rows(batch, rows_of(batch) or 1 if single else len(given.ids))  # noqa: PLW2901
                except TypeError as error:
                    if self.weft_lock_step is None:
                        raise
                    yield error, given  # raised if this rank has to make the step
                    continue
            yield (batch, _sample_ids(given)) if with_ids else batch, given

    def _own(self, spans: tuple[Span, ...]) -> Iterator[tuple[Any, BatchInfo]]:
        reading = self.weft_reading
        apart = len(spans) > 1 and reading.stream is not None  # which has one epoch at a time
        left = tuple(span for span in spans if span.start < span.stop)
        for group in [(span,) for span in left] if apart else [left] if left else []:
            if apart:
                tell_epoch(self.dataset, group[-1].epoch)
            if reading.stream is not None:
                reading.stream.begin(group[-1])
            arrivals = Arrivals(type(self).__name__, changed=_iterates_itself(type(self)))
            try:
                for batch in self._torch_batches(group, arrivals):
                    given = arrivals.next(batch)
                    if reading.single and (batch is None or (isinstance(batch, (list, tuple, dict)) and not batch)):
                        given = given._replace(held=0)
                    if given.held != AS_PLANNED:
                        self._note(given)
                    yield batch, given
                arrivals.end()
            except ContractError:
                raise
            except Exception as error:
                if isinstance(error.__cause__, StopIteration):  # of an iterator that was kept, in a generator
                    arrivals.next(None)
                name_samples(error, arrivals.asked, self.weft_ctx.rank)
                raise

    def _note(self, given: BatchInfo) -> None:
        reading = self.weft_reading
        if not reading.lone or keeps_all(self.collate_fn):  # otherwise nothing comes from the plan
            reading.shares.note(given)

    def _torch_batches(self, spans: tuple[Span, ...], arrivals: Arrivals) -> Iterator[Any]:
        """Torch's own iterator, or that of the user's class."""
        self.__dict__["weft_now"] = (spans, arrivals)
        indices = self.__dict__.get("weft_indices")
        if indices is not None:  # workers that stay keep reading it
            indices.spans, indices.given = spans, arrivals.asked
            indices.iteration += 1
        torch_internals.LOADER_ITERATES.check()  # it calls ours
        if _has_own_state(type(self)):
            return iter(DataLoader.__iter__(self))  # its `__iter__` belongs to its `state_dict`, which is ours
        torchs = torch_internals.LOADER_ITERATOR.name
        kept = [key for key, value in self.__dict__.items() if key != torchs and _is_iterator(value)]
        if kept := [*kept, *self.__dict__.pop("weft_kept", ())]:  # a class that keeps its iterator for all epochs
            self.__dict__.update(dict.fromkeys(kept, DataLoader.__iter__(self)))
        found: Any = super().__iter__()
        found = _by_next(self) if found is self else iter(found)
        return self._inside(found) if _iterates_itself(type(self)) else found

    def _inside(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of the user's own `__iter__`, for which `len` is that of the iteration."""
        while True:
            self.__dict__["weft_inside"] = True
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self.__dict__["weft_inside"] = False
            yield batch

    def _get_iterator(self) -> Any:
        if self.weft_reading.stream is None:
            return torch_iterator(torch_view(self)[0], self.weft_noting())
        return StreamIterator(self)

    def weft_noting(self) -> Callable[[Any], Any]:
        """What torch's iterator hands its batches to; see `Arrivals`."""
        noting: Callable[[Any], Any] = self.__dict__["weft_now"][1].noting()
        return noting

    # -- the position ----------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its beginning.

        If it is the one that comes next already, nothing changes: after `load_state_dict` it begins at the position,
        and what was carried over from the epoch before is read first.
        """
        cursor = self.weft_cursor
        cursor.told = None
        if not cursor.fresh and cursor.now.is_complete and not cursor.open - {cursor.now}:
            self._ended(cursor.now)
        cursor.open.clear()  # one that was interrupted may be kept by its traceback
        if not cursor.fresh or epoch != cursor.now.epoch:
            self._go_to(epoch)

    def _go_to(self, epoch: int) -> None:
        self.weft_reading.marks.clear()
        self.weft_cursor.go_to(epoch, (self.weft_reading.epoch(epoch),))

    def state_dict(self) -> dict[str, Any]:
        """The position: seed, epoch, and samples used by all ranks together. Free of world size.

        After the last batch of an epoch it is the beginning of the next. In the middle of one, the length of
        the dataset belongs to it. A batch sampler adds the number of batches used. If batches were carried
        over from earlier epochs and are not used yet, it has their samples too, as `[epoch, start, stop]`. A
        stream with a state of its own adds it as "source"; data that was split already adds "ranks". "order" and
        "read" are digests by which it is known on resuming that the samples are the same, and "sampler" what random
        generators and counters of the sampler were at the beginning of the epoch.

        Raises:
            ContractError: The loader is read twice at once, or a loop over it was interrupted and another one runs; or
                it has windows by a schedule, whose number belongs to the position.
        """
        if self.weft_cursor.has_schedule:
            raise ContractError(
                "state_dict: this loader does not know how many windows were read",
                found="a loader that accumulate_grads was given, with a function as steps",
                expected="the position of the windows, which the function depends on",
                fix='weft.checkpointable({"loader": windows}, ctx)  # that accumulate_grads returned',
            )
        return self.weft_position(0)

    def weft_position(self, back: int) -> dict[str, Any]:
        """The position as it was so many batches ago, in the running iteration."""
        return position(self.weft_reading, self.weft_cursor, back)

    def weft_leave_out(self, count: int, *, carry: bool) -> bool:
        """Do not read the last batches of the iteration that was just begun; `carry` lets the next one begin with them.

        Returns False, and changes nothing, if it cannot.
        """
        reading = self.weft_reading
        if carry and (reading.uneven_ranks is not None or reading.scattered or reading.units is None):
            return False  # which of them are this rank's is not for it alone to say, or they would be read twice
        self.weft_cursor.now.left_out, self.weft_cursor.now.carries = count, carry
        return True

    def weft_lengths(self) -> tuple[int | None, int | None]:
        """Batches that are left of the running or next iteration, and of its whole epoch with what it began with.

        None where that is unknown.
        """
        reading, now = self.weft_reading, self._current()
        todo, whole = reading.measured(now.todo), reading.measured(now.whole)
        if todo[-1].stop == UNKNOWN:
            return None, None
        return reading.steps_in(todo) - now.left_out - now.steps, reading.steps_in(whole)

    def weft_planned(self) -> Callable[[int], Size] | None:
        """The size of a batch of the iteration that was just begun, by its number; None: known when it is read."""
        if self.weft_reading.lone and not keeps_all(self.collate_fn):
            return None  # on one rank, what batches hold is counted when they are read
        return self.weft_reading.planned(self.weft_cursor.now.todo)

    def weft_size(self) -> Size:
        """The size of the batch that was given last."""
        return self.weft_cursor.last_size(self.weft_reading)

    def weft_divide(self, index: int, count: int) -> None:
        """Divide the samples of each step among so many replicas, of which this is one; from the next iteration on."""
        reading, ctx = self.weft_reading, self.weft_ctx
        reading.plan = reading.plan._replace(rank=index * ctx.data_size + ctx.data_rank, size=count * ctx.data_size)
        self.__dict__[torch_internals.LOADER_ITERATOR.name] = None  # workers that stay have the plan of before

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position saved at any world size; the next iteration resumes there.

        Raises:
            ValueError: The state is not one of this loader's dataset, or of one of another length, or of
                another mixture, or of data that somebody else split among another number of ranks.
        """
        reading = self.weft_reading
        state, now = checked_position(state, reading)
        reading.seed = state["seed"]
        reading.marks.clear()
        read = tuple(state["read"]) if "read" in state else None
        reading.marks.append(StreamMark(now.todo[0].epoch, now.todo[0].start, copy.deepcopy(state.get("source")), read))
        if reading.stream is not None:
            self.__dict__[torch_internals.LOADER_ITERATOR.name] = None  # workers that stay cannot be sent it
        self.weft_cursor.go_to(now.epoch, now.todo, now.whole)
        orders: dict[str, Any] = {name: value for name, value in state.items() if name in ("order", "sampler")}
        self.weft_cursor.orders = (now.epoch, (orders, {})) if reading.scattered else None
        self.weft_cursor.told = None
        self.weft_cursor.open.clear()


def _no_length(dataset: object) -> TypeError:
    return type_error(
        "len: a loader over a stream of unknown length has none",
        found=f"{type(dataset).__name__} without __len__",
        expected="a dataset that knows its length",
        fix="for batch in loader: ...  # without len(loader)",
    )


def _on_device(read: Iterator[tuple[Any, BatchInfo]], ctx: DistContext) -> Iterator[tuple[Any, BatchInfo]]:
    notes: deque[BatchInfo] = deque()

    def values() -> Iterator[Any]:
        for value, given in read:
            notes.append(given)
            yield value

    for value in ctx.engine.prefetch(values(), ctx.device):
        yield value, notes.popleft()


def _sample_ids(given: BatchInfo) -> SampleIds:
    ids = [] if given.empty else [as_index(one) for one in given.ids]
    numbers = [isinstance(one, int) for one in ids]
    if any(numbers) and not all(numbers):
        raise ContractError(
            "shard_data: with_ids=True, and some indices of a batch are numbers and others are not",
            found=listed(repr(one) for one in given.ids),
            expected="indices of one kind: whole numbers, which sort the samples, or keys, which cannot",
            fix="loader, ctx = weft.shard_data(loader, ctx)  # without with_ids; or whole numbers as indices",
        )
    valid = torch.zeros(len(ids), dtype=torch.bool)
    valid[: given.valid] = True
    return SampleIds(
        ids=torch.tensor(ids if all(numbers) else [-1] * len(ids), dtype=torch.int64), valid=valid, epoch=given.epoch
    )


def _by_next(loader: Any) -> Iterator[Any]:
    """The batches of a loader that is its own iterator."""
    while True:
        try:
            batch = loader.__next__()
        except StopIteration:
            return
        yield batch


def _is_iterator(value: object) -> bool:
    return is_torch_iterator(value) or type(value) is StreamIterator


def _iterates_itself(cls: type[Any]) -> bool:
    """Whether the user's class may change the batches that torch's iterator yields."""
    return any(
        "__iter__" in vars(base) for base in cls.__mro__ if not issubclass(base, Extension) and base not in _TORCHS
    )


def _has_own_state(cls: type[Any]) -> bool:
    """Whether the user's class of loader had a state before weft gave it one (torchdata's has)."""
    return any("load_state_dict" in vars(base) for base in cls.__mro__ if not issubclass(base, Extension))


def sharded_copy(loader: DataLoader[T], reading: ReadPlan, place: LoaderPlace, ctx: DistContext) -> ShardedLoader[T]:
    """A copy of `loader` that reads as `reading` says; the original is left alone."""
    begin = (reading.epoch(place.epoch),)
    cursor = Cursor(LoaderPass(place.epoch, begin, begin), place, told=False if place.epoch else None)
    parts = {"weft_reading": reading, "weft_cursor": cursor, "weft_ctx": ctx}
    new: ShardedLoader[T] = extended_copy(
        loader, ShardedLoader, **parts, weft_lock_step=lock_step(reading, cursor, ctx)
    )
    return new
