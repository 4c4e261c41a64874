"""`log`: numbers of all ranks become one, and the main rank writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from weft.checks import as_number, check_count, option_error
from weft.collectives import reduce
from weft.context import DistContext
from weft.contract import part_axes
from weft.errors import ContextError, listed
from weft.monitoring.trackers.lifetime import RunTracker, close
from weft.monitoring.values import Tracker, hash_of_names, numbers_to_average

_PADDED_TO = 32  # numbers are reduced in vectors of such lengths, so that ranks with another number of names still meet


def log(
    values: Mapping[str, Any],
    step: int,
    ctx: DistContext,
    trackers: Tracker | Iterable[Tracker] = (),
    *,
    weight: float = 1.0,
    every: int = 1,
) -> dict[str, Any]:
    """Average numbers over the ranks that see different data or parts of it, and let the main rank write them.

    The mean of the ranks' values, each weighted by the samples or tokens it was computed from, is the value
    of the global batch, however it was divided. Texts, pictures and histograms are those of the main rank.

    Changes: nothing. Collectives: one all-reduce of the numbers over the data axes and those of
    `context_parallel`, whose ranks have parts of each sequence; none if `step` is left out by `every`.

    Args:
        values: By name, the same names on all ranks: numbers of Python, numpy or torch, truths (0 or 1), tensors and
            arrays with one element, texts, `Image`, `Histogram`, `Table`, `Figure`, `Artifact`, `HParams`. A tensor
            on an accelerator is waited for.
        step: Of the optimizer, >= 0; the same on all ranks.
        ctx: The context whose ranks take part.
        trackers: One, or several: each is called as `tracker(values, step=step)` on the main rank only. An
            error in one is raised on the main rank.
        weight: What this rank's numbers were computed from, such as its number of tokens, >= 0.
        every: Do this for every so many steps only, and otherwise nothing.

    Returns:
        The values as written, on every rank; empty for a step that is left out.

    Raises:
        TypeError: A value is none of these, such as an array with several elements or None; nothing was sent.
        ContextError: The names of the numbers differ between the ranks.
        ValueError: `weight`, `every` or `step` cannot be used.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> seen = []
        >>> log({"loss": torch.tensor(2.0)}, 1, weft.local(), lambda values, step: seen.append((step, values)))
        {'loss': 2.0}
        >>> seen
        [(1, {'loss': 2.0})]
    """
    weight = _check(step, weight, every)
    if step % every:
        return {}
    numbers = numbers_to_average("log", values)
    found = {**values, **_averages(numbers, ctx, weight)}
    if ctx.is_main:
        for tracker in [trackers] if callable(trackers) else trackers:
            tracker(dict(found), step=step)
    return found


def _averages(numbers: Mapping[str, float], ctx: DistContext, weight: float) -> dict[str, float]:
    axes = (*ctx.data_axes, *part_axes(ctx))
    there = ctx.on(axes) if axes else None
    if there is None or there.world_size == 1:
        return dict(numbers)
    seal = hash_of_names(numbers)
    sums = [weight, seal, *(weight * value if weight else 0.0 for value in numbers.values())]
    sums += [0.0] * (-len(sums) % _PADDED_TO)
    total = reduce(torch.tensor(sums, dtype=torch.float64, device=ctx.device), there).tolist()
    if total[1] != seal * there.world_size:
        raise ContextError(
            "log: the names of the numbers differ between the ranks",
            found=f"{listed(numbers) or 'none'} on rank {ctx.rank}",
            expected="the same names, in the same order, on all ranks; weight=0 where a rank has no samples",
            fix='weft.log({"loss": loss}, step, ctx, trackers, weight=num_tokens)',
        )
    return {
        name: value / total[0] if total[0] else float("nan") for name, value in zip(numbers, total[2:], strict=False)
    }


def _check(step: int, weight: object, every: int) -> float:
    """The weight, as a number of Python."""
    fix = 'weft.log({"loss": loss}, step, ctx, trackers, weight=num_tokens, every=10)'
    check_count("log", "step", step, least=0, fix=fix)
    check_count("log", "every", every, fix=fix)
    number = as_number(weight)
    if number is None or not 0 <= number < float("inf"):
        raise option_error("log", "weight", weight, expected="a finite number >= 0", fix=fix)
    return number


# -- trackers made of trackers -------------------------------------------------------------------------


def every(n: int, tracker: Tracker) -> RunTracker:
    """A tracker that passes on every n-th step only.

    Example:
        >>> seen = []
        >>> some = every(2, lambda values, step: seen.append(step))
        >>> for step in range(5):
        ...     some({}, step=step)
        >>> seen
        [0, 2, 4]
    """

    def passed_on(values: dict[str, Any], /, *, step: int) -> None:
        if step % n == 0:
            tracker(values, step=step)

    return RunTracker(passed_on, lambda: close(tracker))


def chosen(names: Callable[[str], bool] | Iterable[str], tracker: Tracker) -> RunTracker:
    """A tracker that passes on some values only: those of these names, or for which a function is true.

    Example:
        >>> chosen(["loss"], lambda values, step: print(values))({"loss": 1.0, "lr": 0.1}, step=1)
        {'loss': 1.0}
    """
    wanted = names if callable(names) else set(names).__contains__

    def passed_on(values: dict[str, Any], /, *, step: int) -> None:
        some = {name: value for name, value in values.items() if wanted(name)}
        if some:
            tracker(some, step=step)

    return RunTracker(passed_on, lambda: close(tracker))


def averaged(n: int, tracker: Tracker) -> RunTracker:
    """A tracker that passes on the means of the last n calls, at every n-th; what is no number, as it comes last.

    Closing it passes on the mean of the calls that are left, and closes the other tracker.

    Example:
        >>> mean = averaged(2, lambda values, step: print(step, values))
        >>> for step in range(5):
        ...     mean({"loss": float(step)}, step=step)
        1 {'loss': 0.5}
        3 {'loss': 2.5}
        >>> mean.close()
        4 {'loss': 4.0}
    """
    kept: list[tuple[int, dict[str, Any]]] = []

    def passed_on(values: dict[str, Any], /, *, step: int) -> None:
        kept.append((step, values))
        if len(kept) == n:
            pass_on()

    def pass_on() -> None:
        found: dict[str, Any] = {}
        sums: dict[str, list[float]] = {}
        for _, each in kept:
            found.update(each)
            for name, value in numbers_to_average("averaged", each).items():
                sums.setdefault(name, []).append(value)
        step = kept[-1][0]
        kept.clear()
        tracker({**found, **{name: sum(each) / len(each) for name, each in sums.items()}}, step=step)

    def end() -> None:
        try:
            if kept:
                pass_on()
        finally:
            close(tracker)

    return RunTracker(passed_on, end)
