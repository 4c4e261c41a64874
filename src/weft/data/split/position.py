"""Where the reading of a sharded loader stands: the cursor, and its position as a state that is free of world size."""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weft.data.loader_copy import Size
from weft.data.order.epoch_order import OtherOrder
from weft.data.order.loader_place import LoaderPlace
from weft.data.split.map_samples import AS_PLANNED, BatchInfo
from weft.data.split.read_plan import ReadPlan
from weft.data.split.split_plan import UNKNOWN, Span
from weft.errors import ContractError, value_error
from weft.keyed_random.row_keys import RowKeys, note_rows

_NAMES = frozenset(
    {"seed", "epoch", "samples", "length", "mixture", "ranks", "order", "sampler", "source", "read"}
    | {"carried", "carried_in", "windows", "first_window"}
)


@dataclass(eq=False)
class LoaderPass:
    """One iteration over a loader, which runs or is to come.

    Attributes:
        epoch: Its number.
        todo: What it reads: what is left of earlier epochs, then of this.
        whole: The same as it was at the beginning of the epoch, which may have been in an earlier run.
        steps: Batches that were given.
        total: Batches of `todo`; None as long as that is not known.
        left_out: Batches at its end that are not read.
        carries: Whether the next pass begins with those; otherwise they are not read.
        reader: The iterator over it.
        has_ended: The loader stands where the next iteration begins.
    """

    epoch: int
    todo: tuple[Span, ...]
    whole: tuple[Span, ...]
    steps: int = 0
    total: int | None = None
    left_out: int = 0
    carries: bool = True
    reader: weakref.ref[Any] | None = None
    has_ended: bool = False

    @property
    def is_over(self) -> bool:
        """Whether it came to its end, or was left."""
        return self.reader is not None and self.reader() is None

    @property
    def is_complete(self) -> bool:
        """Whether all of its batches were given."""
        return self.total is not None and 0 < self.steps == self.total - self.left_out

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "reader": None}  # which is of this process

    @property
    def endless(self) -> bool:
        """Whether its end is unknown."""
        return self.todo[-1].stop == UNKNOWN


class KeyedBatches:
    """The samples of the batches that were given, for what draws random numbers by sample.

    Attributes:
        last: Those of the batch that was given last.
        unseen: How many batches were given since `latest` was called.
    """

    def __init__(self) -> None:
        self.last: RowKeys | None = None
        self.unseen = 0

    def gave(self, batch: object, rows: RowKeys) -> None:
        """A batch is given: note it."""
        self.last, self.unseen = rows, self.unseen + 1
        note_rows(batch, rows)

    def latest(self) -> RowKeys | None:
        """The rows of the batch that was given last; None if others were given that nobody has asked for."""
        unseen, self.unseen = self.unseen, 0
        return self.last if unseen <= 1 else None


@dataclass
class Cursor:
    """Where the reading stands; with `ReadPlan.seed` the one mutable thing of a sharded loader.

    Attributes:
        now: The iteration that gave a batch last, or the one that comes next.
        place: Of the loader in the program.
        fresh: The next iteration is `now`, and not the next epoch.
        latest: Number of the epoch that was begun last.
        iterations: How many were begun.
        open: The iterations that run.
        before: The iteration that ended last.
        last: What is known of the batch that was given last.
        noted: Is called with each batch that is given, and what is known of it.
        orders: Of data that rank 0 reads for all, what came with it; see `BatchInfo`. And its epoch.
        rows: How many rows it has, if only its reading could tell.
        weighed: Its `share` was asked for, or windows have one.
        has_windows: `accumulate_grads` made a loader of windows, which was not iterated yet.
        has_schedule: How many steps a window has depends on its number.
        keyed: What draws by sample is told the samples of each batch.
        told: Whether the user was told that its epochs continue those of another loader; None: they do not.
    """

    now: LoaderPass
    place: LoaderPlace
    fresh: bool = True
    latest: int = -1
    iterations: int = 0
    open: set[LoaderPass] = field(default_factory=set)
    before: LoaderPass | None = None
    last: BatchInfo | None = None
    noted: Callable[[Any, BatchInfo], None] | None = None
    orders: tuple[int, Sequence[dict[str, Any]]] | None = None
    rows: int | None = 0
    weighed: bool = False
    has_windows: bool = False
    has_schedule: bool = False
    keyed: KeyedBatches | None = None
    told: bool | None = None

    def go_to(self, epoch: int, todo: tuple[Span, ...], whole: tuple[Span, ...] | None = None) -> None:
        """Let the next iteration read this."""
        self.now, self.fresh, self.before, self.last = LoaderPass(epoch, todo, whole or todo), True, None, None
        self.place.epoch, self.place.has_no_rows = epoch, False

    def begin(self) -> None:
        """Begin the iteration that comes next."""
        self.fresh, self.latest, self.told = False, self.now.epoch, None
        self.place.epoch, self.place.is_fresh = self.latest + 1, False

    def gave(self, running: LoaderPass, given: BatchInfo) -> None:
        """An iteration has given a batch."""
        running.steps += 1
        self.now, self.fresh, self.last = running, False, given
        self.place.has_no_rows = given.empty
        self.orders = (given.epoch, given.orders) if given.orders else None
        if given.last and len(running.todo) == 1:
            running.total = running.steps

    def ended(self, running: LoaderPass, todo: tuple[Span, ...]) -> None:
        """An iteration came to its end; the next one reads this."""
        self.go_to(todo[-1].epoch, todo)
        self.before, running.has_ended = running, True

    def last_size(self, reading: ReadPlan) -> Size:
        """The size of the batch that was given last."""
        planned, given = reading.planned(self.now.todo), self.last
        assert given is not None
        if planned is not None:
            own, everyone = planned(self.now.steps - 1)
        else:
            own = self.rows if reading.single else 0 if given.empty else len(given.ids)
            everyone = None if reading.single or reading.alone else given.everyone
        if given.held != AS_PLANNED and not given.empty:
            own = given.held
        return own, own if reading.lone else everyone


def position(reading: ReadPlan, cursor: Cursor, back: int) -> dict[str, Any]:
    """The state of a loader so many batches ago, in the running iteration.

    Raises:
        ContractError: Another iteration runs, too.
    """
    if cursor.open - {cursor.now}:
        raise ContractError(
            "state_dict: a loader that is read twice at once has no position",
            found=f"{len(cursor.open)} iterations over it that have not ended",
            expected="one iteration at a time over a loader whose position is saved",
            fix="loader.set_epoch(n)  # before the loop, if one was interrupted; or two loaders: "
            "first, ctx = weft.shard_data(DataLoader(data), ctx); second, ctx = weft.shard_data(DataLoader(data), ctx)",
        )
    now, steps = cursor.now, cursor.now.steps
    if back > steps and cursor.before is not None:  # in the iteration that ended before
        now, back, steps = cursor.before, back - steps, cursor.before.steps
    steps -= back
    left = reading.plan.split(now.todo, steps)[1] if reading.uneven_ranks is None else _rest(now.todo, steps, reading)
    whole = now.whole
    if steps == now.steps and now.is_complete:
        following = reading.epoch(now.epoch + 1)
        left = whole = (*(left if now.carries and not now.endless else ()), following)
    found: dict[str, Any] = {"seed": reading.seed, "epoch": left[-1].epoch, **reading.used(left[-1])}
    begun = left[-1].start or left[1:]
    if reading.split_for is not None:
        found["ranks"] = reading.split_for
    elif begun and reading.is_sized and left[-1].stop != UNKNOWN:
        found["length"] = left[-1].stop
    if begun and reading.mixture is not None:
        found["mixture"] = reading.mixture
    mark = reading.mark(left[0]) if left[0].start else None
    if mark is not None:
        found |= {} if mark.state is None else {"source": copy.deepcopy(mark.state)}
        found |= {} if mark.read is None or reading.alone else {"read": list(mark.read)}
    if left[1:]:
        found["carried"] = [list(span) for span in left[:-1]]
    if whole[1:] and left[-1].start:
        found["carried_in"] = [list(span) for span in whole[:-1]]
    return found | reading.order_state(left, cursor.orders)


class _SavedPosition(NamedTuple):
    """The numbers of a position: units used of its epoch, and what is left, or was when it began, of earlier ones."""

    seed: int
    epoch: int
    start: int
    carried: tuple[Span, ...]
    carried_in: tuple[Span, ...]


def checked_position(state: dict[str, Any], reading: ReadPlan) -> tuple[dict[str, Any], LoaderPass]:
    """A state, or that of the next epoch instead, and what is to be read from there on.

    Raises:
        ValueError: It is no position in this loader.
        OtherOrder: The order that it is a position in cannot be made again.
    """
    saved = _numbers_of(state, reading)
    if (saved.start or saved.carried) and _is_of_other_data(state, saved, reading):
        state = _next_epoch(state, _data_of(state, saved, reading))
        saved = _numbers_of(state, reading)
    if not state.keys() <= _NAMES | {_start_in(state, reading)}:
        raise _no_position(state, reading)
    undo: Callable[[], object] = lambda: None  # noqa: E731
    if reading.units is not None and reading.split_for is None:
        begun = {span.epoch for span in saved.carried if span.start} | ({saved.epoch} if saved.start else set())
        if not begun and not reading.units.is_plain:
            begun = {saved.epoch - 1}
        try:
            undo = reading.units.resume(saved.seed, state, begun)
        except OtherOrder as error:
            if reading.resized != "next_epoch":
                raise
            why = str(error).partition("\n")[0].removeprefix("load_state_dict: ")
            state = _next_epoch(state, why, 1 if saved.start else 0)
            saved = _numbers_of(state, reading)
    try:
        found = _pass_from(state, saved, reading)
        _check_ranks(state, reading)
        for span in () if found.endless else found.todo:
            reading.plan.check(span.stop - span.start, "the rest of the epoch")
    except ValueError:
        undo()
        raise
    if found.todo[-1].start and not found.endless and reading.steps_in(found.todo) == 0:
        following = (reading.epoch(found.epoch + 1, saved.seed),)  # no step is left of this one
        found = LoaderPass(found.epoch + 1, following, following)
    return state, found


def _next_epoch(state: Mapping[str, Any], why: str, further: int = 1) -> dict[str, Any]:
    warnings.warn(f"load_state_dict: {why}: resuming with the next epoch", stacklevel=5)
    return {"seed": state["seed"], "epoch": state["epoch"] + further, "samples": 0}


def _rest(todo: tuple[Span, ...], steps: int, reading: ReadPlan) -> tuple[Span, ...]:
    """What is left of data that was split already: counted in full steps, which are alike on all ranks."""
    return (*todo[:-1], todo[-1]._replace(start=todo[-1].start + steps * reading.plan.per_step))


def _start_in(state: Mapping[str, Any], reading: ReadPlan) -> str:
    # Of a batch sampler "samples" were batches before there was "batches".
    return "batches" if reading.whole and "batches" in state else "samples"


def _numbers_of(state: Mapping[str, Any], reading: ReadPlan) -> _SavedPosition:
    """The numbers that a position has.

    Raises:
        ValueError: One is missing, or is none.
    """
    numbers: list[Any] = [state.get(name) for name in ("seed", "epoch", _start_in(state, reading))]
    orders = (("order", str), ("sampler", dict))  # by epoch, with the kind of what is said of one
    with contextlib.suppress(TypeError, ValueError):
        carried, carried_in = (tuple(Span(*span) for span in state.get(name, ())) for name in ("carried", "carried_in"))
        epochs = [epoch for name, kind in orders for epoch, said in state.get(name, ()) if isinstance(said, kind)]
        is_whole = all(type(number) is int for number in itertools.chain(numbers, epochs, *carried, *carried_in))
        is_whole = is_whole and len(epochs) == sum(len(state.get(name, ())) for name, _ in orders)
        if is_whole and min(numbers[1:]) >= 0 and [type(part) for part in state.get("read", (0, ""))] == [int, str]:
            seed, epoch, start = numbers
            return _SavedPosition(seed, epoch, start, carried, carried_in)
    raise _no_position(state, reading)


def _no_position(state: Mapping[str, Any], reading: ReadPlan) -> ValueError:
    known = "" if reading.total is None else f" <= {reading.total}"
    return value_error(
        "load_state_dict: this is not a position in this loader",
        found=repr(state),
        expected=f"seed, epoch, and 0 <= samples{known}, and pairs of an epoch and its order, as in saved positions",
        fix="loader.load_state_dict(saved_loader.state_dict())",
    )


def _pass_from(state: Mapping[str, Any], saved: _SavedPosition, reading: ReadPlan) -> LoaderPass:
    """What is left to be read from a position on.

    Raises:
        ValueError: It is none in so many units.
    """
    full = _measured(saved, reading) if saved.start else reading.epoch(saved.epoch, saved.seed)
    todo = (*saved.carried, full._replace(start=saved.start))
    # Ranks of data that was split already may have less than others have used.
    beyond = UNKNOWN if reading.uneven_ranks is not None else 0
    if not all(0 <= each.start <= max(each.stop, beyond) and each.stop <= full.stop for each in todo):
        raise _no_position(state, reading)
    return LoaderPass(saved.epoch, todo, (*(saved.carried_in if saved.start else saved.carried), full))


def _is_of_other_data(state: Mapping[str, Any], saved: _SavedPosition, reading: ReadPlan) -> bool:
    """Whether the order that a position is in is that of a dataset of another length, or of another mixture.

    Raises:
        ValueError: It is, and the caller did not say what to do.
    """
    # A sampler may yield more in one epoch than in another: its orders are compared when they are made.
    sized = reading.units is None or reading.units.is_plain or saved.epoch not in dict(state.get("order", ()))
    known = sized and reading.split_for is None and reading.is_sized and type(state.get("length")) is int
    same_length = not known or state["length"] == _measured(saved, reading).stop
    if same_length and state.get("mixture", reading.mixture) == reading.mixture:
        return False
    if reading.resized == "next_epoch":
        return True
    raise value_error(
        "load_state_dict: the position belongs to a dataset of another length or mixture, which had a different order",
        found=_data_of(state, saved, reading),
        expected="the same length, and seed and weights of a mixture, or the beginning of an epoch",
        fix='loader, ctx = weft.shard_data(loader, ctx, resized="next_epoch")  # begins the epoch after the saved one',
    )


def _measured(saved: _SavedPosition, reading: ReadPlan) -> Span:
    return reading.measured((reading.epoch(saved.epoch, saved.seed),), saved.seed)[0]


def _data_of(state: Mapping[str, Any], saved: _SavedPosition, reading: ReadPlan) -> str:
    if state.get("mixture", reading.mixture) != reading.mixture:
        return f"mixture {state.get('mixture')} when it was saved, {reading.mixture} now"
    what = "batches" if reading.whole else "samples"
    return f"{state['length']} {what} when it was saved, {_measured(saved, reading).stop} {what} now"


def _check_ranks(state: Mapping[str, Any], reading: ReadPlan) -> None:
    if state.get("ranks") == reading.split_for:
        return
    raise value_error(
        "load_state_dict: the data was not split by weft, and cannot be split again",
        found=f"a position of {_ranks(state.get('ranks'))}, loaded by {_ranks(reading.split_for)}",
        expected="the same number of ranks, or a source that weft splits: one order of all samples",
        fix="loader, ctx = weft.shard_data(loader, ctx)  # over the whole dataset, without already_sharded=True"
        if state.get("ranks") is None
        else f"loader.set_epoch({state['epoch'] + 1})  # the next epoch, in place of this position",
    )


def _ranks(number: int | None) -> str:
    return "data that weft splits" if number is None else f"data split among {number} ranks"
