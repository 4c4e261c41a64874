"""The loader that comes back: a copy of the user's that reads this rank's part and knows its position."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader

from weft.context import DistContext
from weft.data.loader_copy import Extension, Size, extended_copy, torch_iterator
from weft.data.split.dispatch import scattered
from weft.data.split.epoch_order import tell_epoch
from weft.data.split.map_samples import Epoch, Given, Samples, StepIndices, Units, WorkerStart, name_samples
from weft.data.split.split_plan import UNKNOWN, Plan, Stretch
from weft.data.split.stream_samples import CollateSteps, Step, StreamSteps
from weft.data.split.uneven_ranks import Meeting
from weft.errors import ContractError, type_error, value_error
from weft.metrics import SampleIds, samples_of_all
from weft.rng import mix
from weft.tensors.nested import rows_of, without_rows

__all__ = ["DataPlan", "Reading", "ShardedLoader", "is_stock", "length_of", "sharded_copy"]

T = TypeVar("T")
_KEPT_STATES = 4096  # of a stream, one per batch: as far back as a window of accumulate_grads may reach


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """How data is shared out: what `shard_data` decided, as data: `offered(loader, DataPlan)[0]`.

    Attributes:
        source: "samples" or "batches" of a map-style dataset, "stream", "seekable stream", or "split already".
        mode: As given to `shard_data`.
        ranks: Number of ranks that see different batches.
        per_rank: Units (samples, or batches of a batch sampler) per rank and full step.
        per_step: The same of all ranks together.
        uneven: What happens to an incomplete last step.
        steps: Of the first epoch; None if the source does not tell its length.
        reads: How often a sample is read by all ranks and workers together, to be used once.
        resumes: What going on in the middle of an epoch costs: "jumps" (nothing), "state" (the stream
            goes back to a state of its own) or "reads again" (what was used is read and dropped).
        any_ranks: Whether it can go on with another number of ranks.
    """

    source: Literal["samples", "batches", "stream", "seekable stream", "split already"]
    mode: str
    ranks: int
    per_rank: int
    per_step: int
    uneven: str
    steps: int | None
    reads: int
    resumes: Literal["jumps", "state", "reads again"]
    any_ranks: bool


@dataclass
class Cursor:
    """Where the reading stands; with `Reading.seed` the one mutable thing of a sharded loader.

    Attributes:
        epoch: Number of the epoch.
        todo: What the running iteration reads, or the next one: what is left of earlier epochs, then of this.
        steps: Batches of it that were given.
        held: Batches at its end that the iteration leaves for the one after it.
        total: Batches of it altogether; None as long as that is not known.
        fresh: The next iteration reads `todo`, and not the next epoch.
        before: Epoch, `todo` and batches of the iteration that ended last.
        last: What is known of the batch that was given last.
        rows: How many rows it has, if only its reading could tell.
        loaded: The position was loaded, and nothing was read since.
    """

    epoch: int
    todo: tuple[Stretch, ...]
    steps: int = 0
    held: int = 0
    total: int | None = None
    fresh: bool = True
    before: tuple[int, tuple[Stretch, ...], int] | None = None
    last: Given | None = None
    rows: int | None = 0
    loaded: bool = False


@dataclass
class Reading:
    """What is read, and how it is shared out.

    Attributes:
        plan: Of this rank.
        readers: The plans of all ranks this one reads for: its own; with "dispatch" all, or none.
        units: Of a map-style dataset.
        stream: Of an iterable one.
        seed: Of the order.
        single: `batch_size=None`: every unit is a batch.
        with_ids: Whether the user gets `SampleIds` with each batch.
        meeting: How ranks with different numbers of batches come together; None: they have the same.
        epochs: The number of the epoch, for workers.
        split_for: Ranks among which the data was split by somebody else; None: weft does.
        scattered: Rank 0 reads for all ranks, and sends.
        total: Units of an epoch, where that is always the same; None: see `units`, or unknown.
        whole: Units are batches of a batch sampler.
        states: States of a stream by number of batches, in the running iteration.
        keyed: Whether every sample is read with random states of its own.
        resized: What a position in a dataset of another length does.
    """

    plan: Plan
    readers: tuple[Plan, ...]
    units: Units | None
    stream: StreamSteps | None
    seed: int
    single: bool
    with_ids: bool
    keyed: bool
    meeting: Meeting | None
    epochs: Epoch
    split_for: int | None
    scattered: bool = False
    total: int | None = None
    whole: bool = False
    resized: Literal["error", "next_epoch"] = "error"
    states: deque[tuple[int, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT_STATES))

    def epoch(self, number: int) -> Stretch:
        """All of an epoch."""
        if self.total is not None:
            return Stretch(number, 0, self.total)
        if self.units is not None:
            return Stretch(number, 0, self.units.total(self.seed, number))
        return Stretch(number, 0, UNKNOWN)

    @property
    def endless(self) -> bool:
        """Whether nobody knows how many units an epoch has."""
        return self.total is None and self.units is None

    def steps_in(self, stretches: tuple[Stretch, ...]) -> int:
        """Steps in which stretches are used up, by all ranks."""
        own = self.plan.steps_in([each for each in stretches if each.start < each.stop])
        return own if self.meeting is None else self.meeting.steps(own, stretches[-1].start // self.plan.per_step)

    @property
    def length_known(self) -> bool:
        """Whether all ranks know how many units an epoch has."""
        return not self.endless and self.split_for is None and not (self.scattered and self.total is None)

    def length(self, seed: int, epoch: int) -> int:
        """Units of an epoch, if it is known."""
        if self.total is not None:
            return self.total
        assert self.units is not None
        return self.units.total(seed, epoch)

    def used(self, left: Stretch) -> dict[str, int]:
        """How much of an epoch is used, of which this is left."""
        if not self.whole or self.units is None or self.scattered:
            return {"batches" if self.whole else "samples": left.start}
        used = self.units.order(self.seed, left.epoch)[: left.start] if left.start else ()
        return {"samples": sum(map(len, used)), "batches": left.start}

    @property
    def alone(self) -> bool:
        """Whether what other ranks read is not known here."""
        return self.split_for is not None and self.split_for > 1

    def planned(self, todo: tuple[Stretch, ...]) -> Callable[[int], Size] | None:
        """The size of each batch of an iteration before it is read; None where only reading tells, on all ranks."""
        if self.single or (self.scattered and (self.whole or self.total is None)) or self.endless:
            return None
        plan, orders, alone = self.plan, _Orders(self), self.alone

        def size(step: int) -> Size:
            part = plan.step_at(todo, step)
            if part is None:  # others have more
                return 0, None if alone else 0
            units, everyone = part.stop - part.start, plan.used(part.stop - part.start)
            own = plan.per_rank if everyone == plan.per_step else plan.share(units)[1]
            if self.whole:
                order = orders[part.epoch]
                own = sum(sum(map(len, piece)) for piece, _ in plan.pieces(order, part.start, part.stop))
                everyone = sum(len(order[unit % len(order)]) for unit in range(part.start, part.start + everyone))
            return own, None if alone else everyone

        return size


class _Orders(dict[int, Sequence[Any]]):
    """The order of each epoch that an iteration reads a part of, made when it is asked for."""

    def __init__(self, reading: Reading) -> None:
        super().__init__()
        self._reading = reading

    def __missing__(self, epoch: int) -> Sequence[Any]:
        assert self._reading.units is not None
        self[epoch] = order = self._reading.units.order(self._reading.seed, epoch)
        return order


class ShardedLoader(Extension[T]):
    """What `shard_data` returns: a copy of the user's loader, an instance of its class, with what this class has."""

    weft_reading: Reading
    weft_cursor: Cursor
    weft_ctx: DistContext

    def __len__(self) -> int:
        reading, cursor = self.weft_reading, self.weft_cursor
        if reading.endless:
            raise type_error(
                "len: a loader over a stream of unknown length has none",
                found=f"{type(self.dataset).__name__} without __len__",
                expected="a dataset that knows its length",
                fix="for batch in loader: ...  # without len(loader)",
            )
        return reading.steps_in(cursor.todo)

    @property
    def epoch(self) -> int:
        """Number of the running epoch, or of the next one."""
        return self.weft_cursor.epoch

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
            ContractError: No batch is being processed.
            PeerError: A peer failed.
        """
        cursor, ctx = self.weft_cursor, self.weft_ctx
        if cursor.last is None:
            raise ContractError(
                "share: it is that of the batch that is being processed",
                found="no iteration over the loader is running",
                expected="loader.share inside of the loop over the loader",
                fix="for x, y in loader:\n    loss = cross_entropy(model(x), y) * loader.share",
            )
        own, everyone = self.weft_size()
        if everyone is None:
            everyone = samples_of_all([own], ctx)
        return own * ctx.data_size / everyone if own else 0.0

    # -- one iteration ---------------------------------------------------------------------------

    def __iter__(self) -> Iterator[T]:  # type: ignore[override]
        self._begin()  # not only at the first batch: from here on `len` is that of this iteration
        return self._iteration()

    def _begin(self) -> None:
        reading, cursor = self.weft_reading, self.weft_cursor
        used_up = cursor.todo[-1].start > 0 and not reading.endless and len(self) == 0
        if used_up or not cursor.fresh:  # the last iteration was left early
            self.set_epoch(cursor.epoch + 1)
        cursor.steps, cursor.held, cursor.fresh, cursor.loaded = 0, 0, False, False
        cursor.total = None if reading.endless else reading.steps_in(cursor.todo)
        if reading.readers:
            tell_epoch(self.dataset, cursor.epoch)

    def _iteration(self) -> Iterator[Any]:
        reading, cursor, device = self.weft_reading, self.weft_cursor, self.weft_ctx.device
        epoch, todo, held, total = cursor.epoch, cursor.todo, cursor.held, cursor.total
        now, later = reading.plan.split(todo, reading.plan.steps_in(todo) - held) if held else (todo, ())
        steps = 0
        plain = reading.readers and reading.meeting is None and not (reading.scattered or reading.with_ids)
        plain = plain and not reading.plan.allows_empty and device.type == "cpu"
        read: Iterator[Any] = self._own(now) if plain else self._batches(now)
        # Counted when they are given, not when they are read: on an accelerator one is read ahead.
        ahead = read if device.type == "cpu" else self._on_device(read)
        for found in ahead:
            steps += 1
            given: Given = found[-1]
            cursor.epoch, cursor.todo, cursor.steps, cursor.held = epoch, todo, steps, held
            cursor.total, cursor.last = steps if given.last and len(todo) == 1 else total, given
            if reading.single:
                cursor.rows = 0 if given.empty else rows_of(found[0])
            if given.state is not None:
                reading.states.append((steps, given.state))
            yield found[:2] if reading.with_ids else found[0]
        cursor.before = (epoch, todo, steps)
        cursor.epoch, cursor.todo = epoch + 1, (*later, reading.epoch(epoch + 1))
        cursor.steps, cursor.held, cursor.total, cursor.fresh, cursor.last = 0, 0, None, True, None

    def _on_device(self, read: Iterator[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        notes: deque[Given] = deque()

        def values() -> Iterator[tuple[Any, ...]]:
            for *value, given in read:
                notes.append(given)
                yield tuple(value)

        for value in self.weft_ctx.engine.prefetch(values(), self.weft_ctx.device):
            yield (*value, notes.popleft())

    def _batches(self, stretches: tuple[Stretch, ...]) -> Iterator[tuple[Any, ...]]:
        """Batches with what is known of them, the last of each tuple."""
        reading, ctx = self.weft_reading, self.weft_ctx
        read: Iterator[tuple[Any, Given]] = self._own(stretches) if reading.readers else iter(())
        if reading.scattered:
            last = None if reading.endless else reading.steps_in(stretches)
            read = scattered(read, ctx, reading.plan.size, last)
        elif reading.meeting is not None:
            read = reading.meeting.batches(read, stretches[-1], ctx)
        for batch, given in read:
            cut = (
                batch
                if not given.empty
                else without_rows(batch, rows_of(batch) or 1 if reading.single else len(given.ids))
            )
            yield (cut, _rows(given), given) if reading.with_ids else (cut, given)

    def _own(self, stretches: tuple[Stretch, ...]) -> Iterator[tuple[Any, Given]]:
        reading = self.weft_reading
        # A dataset that knows of epochs has to be told before its workers start; a stream has one at a time.
        apart = len(stretches) > 1 and (
            reading.stream is not None or reading.keyed or callable(getattr(self.dataset, "set_epoch", None))
        )
        left = tuple(stretch for stretch in stretches if stretch.start < stretch.stop)
        for group in [(stretch,) for stretch in left] if apart else [left] if left else []:
            if apart:
                tell_epoch(self.dataset, group[-1].epoch)
            given: deque[Given] = deque()
            reading.epochs.set(group[-1].epoch, group[-1].start)
            try:
                for batch in self._torch_batches(group, given):
                    yield batch, given.popleft()
            except Exception as error:
                name_samples(error, given, self.weft_ctx.rank)
                raise

    def _torch_batches(self, stretches: tuple[Stretch, ...], given: deque[Given]) -> Iterator[Any]:
        """Torch's own iterator, or that of the user's class."""
        self.__dict__["weft_now"] = (stretches, given)
        indices = self.__dict__.get("weft_indices")
        if indices is not None:  # workers that stay go on reading it
            indices.seed, indices.reading, indices.given = self.weft_reading.seed, stretches, given
        if _has_own_state(type(self)):
            return iter(DataLoader.__iter__(self))  # its `__iter__` belongs to its `state_dict`, which is ours
        return iter(super().__iter__())

    def _get_iterator(self) -> Any:
        if self.weft_reading.stream is None:
            return torch_iterator(self.weft_view()[0])
        return _Unwrapped(self)

    def weft_view(self) -> tuple[DataLoader[Any], deque[Given]]:
        """The loader as torch is to see it for the iteration that begins, and where notes come in."""
        reading = self.weft_reading
        stretches, given = self.__dict__["weft_now"]
        epoch, start = stretches[-1].epoch, stretches[-1].start
        view: Any = object.__new__(DataLoader)
        fields = dict(self.__dict__)
        seed, rank = self.weft_ctx.seed, self.weft_ctx.data_rank
        # Torch draws the seeds of workers from the loader's generator, or from the global one.
        fields["generator"] = torch.Generator().manual_seed(mix(seed, epoch, rank, "loader"))
        fields["worker_init_fn"] = WorkerStart(self.worker_init_fn, seed, epoch, rank)
        if self.num_workers == 0:
            fields["worker_init_fn"] = self.worker_init_fn
        if reading.stream is not None:
            stream = copy.copy(reading.stream)
            stream.dataset, stream.seed = self.dataset, reading.seed
            kept = [state for steps, state in reading.states if steps == 0]
            stream.start_state = kept[0] if kept and start else None
            fields |= {"dataset": stream, "batch_sampler": None, "drop_last": False}
            fields["collate_fn"] = CollateSteps(self.collate_fn, single=reading.single)
        else:
            assert reading.units is not None
            told = callable(getattr(self.dataset, "set_epoch", None))
            keyed = reading.seed if reading.keyed else None
            fields["dataset"] = Samples(self.dataset, self.weft_ctx.rank, reading.epochs, keyed, told=told)
            indices = StepIndices(reading.units, reading.readers, whole=reading.whole, single=reading.single)
            self.__dict__["weft_indices"] = indices
            indices.seed, indices.reading, indices.given = reading.seed, stretches, given
            fields["sampler" if reading.single else "batch_sampler"] = indices
        view.__dict__.update(fields)
        return view, given

    # -- the position ----------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its beginning.

        Right after `load_state_dict`, the epoch of the position is gone on with: a loop over epochs that calls
        `set_epoch` for each of them resumes in the middle of one.
        """
        if self.weft_cursor.loaded and epoch == self.weft_cursor.epoch:
            return
        self.weft_reading.states.clear()
        self._go_to(epoch, (self.weft_reading.epoch(epoch),))

    def _go_to(self, epoch: int, todo: tuple[Stretch, ...]) -> None:
        cursor = self.weft_cursor
        cursor.epoch, cursor.todo, cursor.steps, cursor.held, cursor.fresh = epoch, todo, 0, 0, True
        cursor.total, cursor.before, cursor.last, cursor.loaded = None, None, None, False

    def state_dict(self) -> dict[str, Any]:
        """The position: seed, epoch, and samples used by all ranks together. Free of world size.

        After the last batch of an epoch it is the beginning of the next. In the middle of one, the length of
        the dataset belongs to it. A batch sampler adds the number of batches used. If batches were carried
        over from earlier epochs and are not used yet, it has their samples too, as `[epoch, start, stop]`. A
        stream with a state of its own adds it as "source"; data that was split already adds "ranks".
        """
        return self.weft_position(0)

    def weft_position(self, back: int) -> dict[str, Any]:
        """The position as it was so many batches ago, in the running iteration; see `Seekable`."""
        reading, cursor = self.weft_reading, self.weft_cursor
        epoch, todo, steps, total = cursor.epoch, cursor.todo, cursor.steps, cursor.total
        if back > steps and cursor.before is not None:  # in the iteration that ended before
            (epoch, todo, total), back = cursor.before, back - steps
            steps = total
        steps -= back
        left = reading.plan.split(todo, steps)[1] if reading.meeting is None else _rest(todo, steps, reading.plan)
        if steps and total is not None and steps == total - cursor.held:
            epoch, left = epoch + 1, (*(() if reading.endless else left), reading.epoch(epoch + 1))
        position = {"seed": reading.seed, "epoch": epoch, **reading.used(left[-1])}
        if (left[-1].start or left[1:]) and reading.length_known:
            position["length"] = left[-1].stop
        if reading.split_for is not None:
            position["ranks"] = reading.split_for
        kept = [state for at, state in reading.states if at == steps]
        if kept and left[-1].start and epoch == todo[-1].epoch:
            position["source"] = copy.deepcopy(kept[-1])
        return position | ({"carried": [list(stretch) for stretch in left[:-1]]} if left[1:] else {})

    def weft_hold_back(self, count: int) -> bool:
        """Leave the last batches of the iteration that was just begun for the next one; see `Seekable`."""
        if self.weft_reading.meeting is not None:  # which of them are this rank's is not for it alone to say
            return False
        self.weft_cursor.held = count
        return True

    def weft_planned(self) -> Callable[[int], Size] | None:
        """The size of each batch of the iteration that was just begun; see `Seekable`."""
        return self.weft_reading.planned(self.weft_cursor.todo)

    def weft_size(self) -> Size:
        """The size of the batch that was given last; see `Seekable`."""
        reading, cursor = self.weft_reading, self.weft_cursor
        planned, given = reading.planned(cursor.todo), cursor.last
        assert given is not None
        if planned is not None:
            return planned(cursor.steps - 1)
        own = cursor.rows if reading.single else 0 if given.empty else len(given.ids)
        return own, None if reading.single or reading.alone else given.everyone

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position saved at any world size; the next iteration goes on there.

        Raises:
            ValueError: The state is not one of this loader's dataset, or of one of another length, or of data
                that somebody else split among another number of ranks.
        """
        reading = self.weft_reading
        if _other_length(state, reading):
            warnings.warn(f"load_state_dict: {_lengths(state, reading)}: going on with the next epoch", stacklevel=2)
            state = {"seed": state["seed"], "epoch": state["epoch"] + 1, "samples": 0}
        todo = _stretches(state, reading)
        if todo is None:
            known = "" if reading.total is None else f" <= {reading.total}"
            raise value_error(
                "load_state_dict: this is not a position in this loader",
                found=repr(state),
                expected=f"seed, epoch, and 0 <= samples{known}",
                fix="loader.load_state_dict(saved_loader.state_dict())",
            )
        _check_ranks(state, reading)
        for stretch in () if reading.endless else todo:
            reading.plan.check(stretch.stop - stretch.start, "the rest of the epoch")
        reading.seed = state["seed"]
        reading.states.clear()
        if state.get("source") is not None:
            reading.states.append((0, copy.deepcopy(state["source"])))
            self.__dict__["_iterator"] = None  # workers that stay cannot be told
        self._go_to(state["epoch"], todo)
        self.weft_cursor.loaded = True


class _Unwrapped:
    """Torch's iterator over a view of the loader, made new or reset, that notes what it gives."""

    def __init__(self, loader: ShardedLoader[Any]) -> None:
        self._open(loader)

    def _open(self, loader: ShardedLoader[Any]) -> None:
        view, self._given = loader.weft_view()
        self._ready: deque[Any] = deque()
        self._inner = torch_iterator(view)

    def _reset(self, loader: ShardedLoader[Any]) -> None:
        view, self._given = loader.weft_view()
        self._ready.clear()
        self._inner._reset(view)

    def __iter__(self) -> _Unwrapped:
        return self

    def __next__(self) -> Any:
        if self._ready:
            return self._ready.popleft()
        step = next(self._inner)
        if not isinstance(step, Step):
            return step
        parts, given = step
        self._given.extend(given)
        if len(parts) == 1:
            return parts[0]
        self._ready.extend(parts)
        return self._ready.popleft()


def _rows(given: Given) -> SampleIds:
    ids = [] if given.empty else list(given.ids)
    numbers = all(isinstance(one, int) for one in ids)
    valid = torch.zeros(len(ids), dtype=torch.bool)
    valid[: given.valid] = True
    return SampleIds(
        ids=torch.tensor(ids if numbers else [-1] * len(ids), dtype=torch.int64), valid=valid, epoch=given.epoch
    )


def _rest(todo: tuple[Stretch, ...], steps: int, plan: Plan) -> tuple[Stretch, ...]:
    """What is left of data that was split already: counted in full steps, which are alike on all ranks."""
    return (*todo[:-1], todo[-1]._replace(start=todo[-1].start + steps * plan.per_step))


def _has_own_state(cls: type[Any]) -> bool:
    """Whether the user's class of loader had a state before weft gave it one (torchdata's has)."""
    owners = [base for base in cls.__mro__ if "load_state_dict" in vars(base)]
    return len(owners) > 1


def _stretches(state: Mapping[str, Any], reading: Reading) -> tuple[Stretch, ...] | None:
    """What is left to be read from a position on; None if it is none in so many units."""
    # Of a batch sampler "samples" were batches before there was "batches".
    start = "batches" if reading.whole and "batches" in state else "samples"
    named = {"seed", "epoch", start}
    if not named <= set(state) <= named | {"samples", "length", "carried", "windows", "source", "ranks"}:
        return None
    numbers = (state["seed"], state["epoch"], state[start])
    if not all(type(number) is int for number in numbers) or state["epoch"] < 0:
        return None
    seed, reading.seed = reading.seed, state["seed"]
    try:
        full = reading.epoch(state["epoch"])
        carried = [Stretch(*stretch) for stretch in state.get("carried", ())]
        todo = (*carried, full._replace(start=state[start]))
    except TypeError:
        return None
    finally:
        reading.seed = seed
    # Ranks of data that was split already may have less than others have used.
    beyond = UNKNOWN if reading.meeting is not None else 0
    inside = all(type(number) is int for number in itertools.chain(*todo)) and all(
        0 <= each.start <= max(each.stop, beyond) and each.stop <= full.stop for each in todo
    )
    return todo if inside else None


def _other_length(state: Mapping[str, Any], reading: Reading) -> bool:
    """Whether the order that a position is in is that of a dataset of another length.

    Raises:
        ValueError: It is, and nobody said what to do.
    """
    begun = state.get("samples") or state.get("batches") or state.get("carried")
    known = reading.length_known and all(type(state.get(name)) is int for name in ("seed", "epoch", "length"))
    if not begun or not known or state["length"] == reading.length(state["seed"], state["epoch"]):
        return False
    if reading.resized == "next_epoch":
        return True
    raise value_error(
        "load_state_dict: the position is one in a dataset of another length, whose order was another one",
        found=_lengths(state, reading),
        expected="the same length, or the beginning of an epoch",
        fix='weft.shard_data(loader, ctx, resized="next_epoch")  # begins the epoch after the saved one',
    )


def _lengths(state: Mapping[str, Any], reading: Reading) -> str:
    what = "batches" if reading.whole else "samples"
    return f"{state['length']} {what} when it was saved, {reading.length(state['seed'], state['epoch'])} {what} now"


def _check_ranks(state: Mapping[str, Any], reading: Reading) -> None:
    if state.get("ranks") == reading.split_for:
        return
    raise value_error(
        "load_state_dict: the data was split by somebody else, and cannot be split anew",
        found=f"a position of {_ranks(state.get('ranks'))}, loaded by {_ranks(reading.split_for)}",
        expected="the same number of ranks, or a source that weft splits: one order of all samples",
        fix="weft.shard_data(loader, ctx)  # over the whole dataset, without already_sharded=True",
    )


def _ranks(number: int | None) -> str:
    return "data that weft splits" if number is None else f"data split among {number} ranks"


def sharded_copy(loader: DataLoader[T], reading: Reading, ctx: DistContext) -> ShardedLoader[T]:
    """A copy of `loader` that reads as `reading` says; the original is left alone."""
    cursor = Cursor(0, (reading.epoch(0),))
    new: ShardedLoader[T] = extended_copy(loader, ShardedLoader, weft_reading=reading, weft_cursor=cursor, weft_ctx=ctx)
    return new


def is_stock(loader: DataLoader[Any]) -> bool:
    """Whether batches are just consecutive samples of a sampler, so that samples can be shared out."""
    return loader.batch_size is not None or type(loader.batch_sampler) is BatchSampler


def length_of(units: Any) -> int | None:
    """Length of a sampler or stream, or None if it does not tell."""
    measure: Callable[[Any], int] = len
    try:
        return measure(units)
    except (TypeError, NotImplementedError):
        return None
