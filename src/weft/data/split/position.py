"""Where the reading of a sharded loader stands: the cursor, and its position as a state that is free of world size."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.data.loader_copy import Size
from weft.data.split.map_samples import AS_PLANNED, BatchInfo
from weft.data.split.read_plan import ReadPlan
from weft.data.split.split_plan import UNKNOWN, Plan, Span
from weft.errors import value_error

__all__ = ["Cursor", "checked_position", "position"]


@dataclass
class Cursor:
    """Where the reading stands; with `ReadPlan.seed` the one mutable thing of a sharded loader.

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
        weighed: Its `share` was asked for, or windows have one.
        has_windows: `accumulate_grads` made a loader of windows, which nobody has iterated yet.
    """

    epoch: int
    todo: tuple[Span, ...]
    steps: int = 0
    held: int = 0
    total: int | None = None
    fresh: bool = True
    before: tuple[int, tuple[Span, ...], int] | None = None
    last: BatchInfo | None = None
    rows: int | None = 0
    loaded: bool = False
    weighed: bool = False
    has_windows: bool = False

    def go_to(self, epoch: int, todo: tuple[Span, ...]) -> None:
        """Let the next iteration read this."""
        self.epoch, self.todo, self.steps, self.held, self.fresh = epoch, todo, 0, 0, True
        self.total, self.before, self.last, self.loaded = None, None, None, False

    def last_size(self, reading: ReadPlan) -> Size:
        """The size of the batch that was given last."""
        planned, given = reading.planned(self.todo), self.last
        assert given is not None
        if planned is not None:
            own, everyone = planned(self.steps - 1)
        else:
            own = self.rows if reading.single else 0 if given.empty else len(given.ids)
            everyone = None if reading.single or reading.alone else given.everyone
        if given.held != AS_PLANNED and not given.empty:
            own = given.held
        return own, own if reading.lone else everyone


def position(reading: ReadPlan, cursor: Cursor, back: int) -> dict[str, Any]:
    """The state of a loader so many batches ago, in the running iteration."""
    epoch, todo, steps, total = cursor.epoch, cursor.todo, cursor.steps, cursor.total
    if back > steps and cursor.before is not None:  # in the iteration that ended before
        (epoch, todo, total), back = cursor.before, back - steps
        steps = total
    steps -= back
    left = reading.plan.split(todo, steps)[1] if reading.uneven_ranks is None else _rest(todo, steps, reading.plan)
    if steps and total is not None and steps == total - cursor.held:
        epoch, left = epoch + 1, (*(() if reading.endless else left), reading.epoch(epoch + 1))
    found = {"seed": reading.seed, "epoch": epoch, **reading.used(left[-1])}
    if (left[-1].start or left[1:]) and reading.length_known:
        found["length"] = left[-1].stop
    if reading.split_for is not None:
        found["ranks"] = reading.split_for
    kept = [state for at, state in reading.states if at == steps]
    if kept and left[-1].start and epoch == todo[-1].epoch:
        found["source"] = copy.deepcopy(kept[-1])
    return found | ({"carried": [list(span) for span in left[:-1]]} if left[1:] else {})


def checked_position(state: dict[str, Any], reading: ReadPlan) -> tuple[dict[str, Any], tuple[Span, ...]]:
    """A state, or that of the next epoch instead, and what is left to be read from there on.

    Raises:
        ValueError: It is no position in this loader.
    """
    if _other_length(state, reading):
        warnings.warn(f"load_state_dict: {_lengths(state, reading)}: resuming with the next epoch", stacklevel=2)
        state = {"seed": state["seed"], "epoch": state["epoch"] + 1, "samples": 0}
    todo = _spans(state, reading)
    if todo is None:
        known = "" if reading.total is None else f" <= {reading.total}"
        raise value_error(
            "load_state_dict: this is not a position in this loader",
            found=repr(state),
            expected=f"seed, epoch, and 0 <= samples{known}",
            fix="loader.load_state_dict(saved_loader.state_dict())",
        )
    _check_ranks(state, reading)
    for span in () if reading.endless else todo:
        reading.plan.check(span.stop - span.start, "the rest of the epoch")
    return state, todo


def _rest(todo: tuple[Span, ...], steps: int, plan: Plan) -> tuple[Span, ...]:
    """What is left of data that was split already: counted in full steps, which are alike on all ranks."""
    return (*todo[:-1], todo[-1]._replace(start=todo[-1].start + steps * plan.per_step))


def _spans(state: Mapping[str, Any], reading: ReadPlan) -> tuple[Span, ...] | None:
    """What is left to be read from a position on; None if it is none in so many units."""
    # Of a batch sampler "samples" were batches before there was "batches".
    start = "batches" if reading.whole and "batches" in state else "samples"
    named = {"seed", "epoch", start}
    if not named <= set(state) <= named | {"samples", "length", "carried", "windows", "source", "ranks"}:
        return None
    numbers = (state["seed"], state["epoch"], state[start])
    if not all(type(number) is int for number in numbers) or state["epoch"] < 0:
        return None
    try:
        full = reading.epoch(state["epoch"], state["seed"])
        todo = (*(Span(*span) for span in state.get("carried", ())), full._replace(start=state[start]))
    except TypeError:
        return None
    # Ranks of data that was split already may have less than others have used.
    beyond = UNKNOWN if reading.uneven_ranks is not None else 0
    inside = all(type(number) is int for number in itertools.chain(*todo)) and all(
        0 <= each.start <= max(each.stop, beyond) and each.stop <= full.stop for each in todo
    )
    return todo if inside else None


def _other_length(state: Mapping[str, Any], reading: ReadPlan) -> bool:
    """Whether the order that a position is in is that of a dataset of another length.

    Raises:
        ValueError: It is, and nobody said what to do.
    """
    begun = state.get("samples") or state.get("batches") or state.get("carried")
    known = reading.length_known and all(type(state.get(name)) is int for name in ("seed", "epoch", "length"))
    if not begun or not known or state["length"] == reading.epoch(state["epoch"], state["seed"]).stop:
        return False
    if reading.resized == "next_epoch":
        return True
    raise value_error(
        "load_state_dict: the position belongs to a dataset of another length, which had a different order",
        found=_lengths(state, reading),
        expected="the same length, or the beginning of an epoch",
        fix='weft.shard_data(loader, ctx, resized="next_epoch")  # begins the epoch after the saved one',
    )


def _lengths(state: Mapping[str, Any], reading: ReadPlan) -> str:
    what = "batches" if reading.whole else "samples"
    now = reading.epoch(state["epoch"], state["seed"]).stop
    return f"{state['length']} {what} when it was saved, {now} {what} now"


def _check_ranks(state: Mapping[str, Any], reading: ReadPlan) -> None:
    if state.get("ranks") == reading.split_for:
        return
    raise value_error(
        "load_state_dict: the data was not split by weft, and cannot be split again",
        found=f"a position of {_ranks(state.get('ranks'))}, loaded by {_ranks(reading.split_for)}",
        expected="the same number of ranks, or a source that weft splits: one order of all samples",
        fix="weft.shard_data(loader, ctx)  # over the whole dataset, without already_sharded=True",
    )


def _ranks(number: int | None) -> str:
    return "data that weft splits" if number is None else f"data split among {number} ranks"
