"""`progress`: how far a loop is. A bar in a terminal, a line now and then elsewhere; one for all ranks."""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO, TypeVar

from weft.context import DistContext
from weft.data.loader_copy import length_of

T = TypeVar("T")


def progress(
    steps: Iterable[T],
    ctx: DistContext,
    *,
    total: int | None = None,
    done: int = 0,
    title: str = "",
    show: Callable[[], str] | None = None,
    every_s: float = 10.0,
    file: TextIO | None = None,
) -> Iterator[T]:
    """Yield what a loop yields, and show how far it is, on the main rank only.

    In a terminal, with the package rich: a bar. Elsewhere a line at the first step, every `every_s` seconds and at the
    end, so that a log file stays readable. Both show steps per second (seconds per step, if it is less than one) and
    the time left, as soon as a second has passed since the first step, which is not counted: it often takes longer.
    What is yielded is not touched, and closing early is harmless.

    Changes: nothing. Collectives: none.

    Args:
        steps: A loader, windows, a range.
        ctx: Whose rank.
        total: Number of steps, those that are done included; default: `done + len(steps)` if there is a length.
        done: Steps that an earlier run has done.
        title: Of the bar or line.
        show: Gives a text to put behind it, such as the loss; called when something is printed.
        every_s: Seconds between two lines.
        file: Where to print; default: standard error.

    Yields:
        What `steps` yields.

    Example:
        >>> import sys, weft
        >>> list(weft.progress([1, 2], weft.local(), title="epoch 1", every_s=60, file=sys.stdout))
        epoch 1: 1 of 2
        epoch 1: 2 of 2
        [1, 2]
    """
    length = length_of(steps)
    count = total if total is not None or length is None else done + length
    if not ctx.is_main:
        yield from steps
        return
    where = sys.stderr if file is None else file
    bar = _bar(where) if where.isatty() else None
    text = show or str  # an empty one
    said, last = -1, time.monotonic() - every_s
    pace = _Pace(count)

    def say() -> None:
        nonlocal said, last
        said, last = done, time.monotonic()
        of = "" if count is None else f" of {count}"
        speed = ", ".join(["", *pace.words(done)])
        print(f"{title or 'step'}: {done}{of}{speed}{'' if show is None else '  ' + text()}", file=where, flush=True)

    with contextlib.nullcontext() if bar is None else bar:
        task = None if bar is None else bar.add_task(title, total=count, completed=done, pace="", text="")
        for step in steps:
            yield step
            done += 1
            pace.begin(done)
            if bar is not None:
                bar.update(task, advance=1, pace=", ".join(pace.words(done)), text=text())
            elif time.monotonic() - last >= every_s:
                say()
    if bar is None and said != done:
        say()


class _Pace:
    """Speed since the first step, and the time that is left."""

    def __init__(self, count: int | None) -> None:
        self._count = count
        self._first: tuple[int, float] | None = None  # which step it was, and when it was over

    def begin(self, done: int) -> None:
        self._first = self._first or (done, time.monotonic())

    def words(self, done: int) -> list[str]:
        step, since = self._first or (done, 0.0)
        seconds = time.monotonic() - since
        if done == step or seconds < 1:
            return []
        rate = (done - step) / seconds
        speed = f"{rate:.3g} steps/s" if rate >= 1 else f"{1 / rate:.3g} s per step"
        left = 0 if self._count is None else max(self._count - done, 0) / rate
        return [speed, f"{dt.timedelta(seconds=round(left))} left"] if left else [speed]


def _bar(file: TextIO) -> Any:
    try:
        rich: Any = importlib.import_module("rich.progress")
        console: Any = importlib.import_module("rich.console")
    except ImportError:
        return None
    columns = [
        rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(),
        rich.TextColumn("{task.fields[pace]}"), rich.TextColumn("{task.fields[text]}"),
    ]  # fmt: skip
    # What is printed meanwhile goes above the bar; what goes to a file stays there.
    lines = {"redirect_stdout": sys.stdout.isatty(), "redirect_stderr": sys.stderr.isatty()}
    return rich.Progress(*columns, console=console.Console(file=file), **lines)
