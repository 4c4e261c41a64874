"""`profile`: torch's profiler on a schedule, one trace per rank and cycle."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal, Self

import torch.profiler
from torch.profiler import ProfilerActivity

from weft.checks import check_choice, check_count
from weft.context import DistContext
from weft.peers.pretended import rehearses


def profile(
    ctx: DistContext,
    folder: str | Path,
    *,
    skip_first: int = 0,
    wait: int = 0,
    warmup: int = 1,
    active: int = 1,
    repeat: int = 1,
    form: Literal["chrome", "tensorboard"] = "chrome",
    activities: Iterable[ProfilerActivity] | None = None,
    memory: bool = False,
    shapes: bool = False,
    stack: bool = False,
    flops: bool = False,
    on_trace_ready: Callable[[torch.profiler.profile], object] | None = None,
) -> Profile:
    """Record what some steps of a loop spend their time on, in one trace per rank.

    Use it as a context manager and call `step()` at the end of each step. After `skip_first` steps come cycles of
    `wait` steps that are left alone, `warmup` steps whose record is thrown away, and `active` steps whose record is
    written: n steps give min(repeat, (n - skip_first) // (wait + warmup + active)) traces on each rank, and one
    more if the loop ends when some of the active steps of a cycle are done.

    Source: `torch.profiler`.

    Changes: nothing. Collectives: none.

    Args:
        ctx: Whose rank.
        folder: Is made when the first trace is written.
        skip_first: Steps before the first cycle.
        wait: Steps at the beginning of a cycle that are not looked at; they cost nothing.
        warmup: Steps that are looked at and forgotten: the profiler's own first costs.
        active: Steps that are written; > 0.
        repeat: Cycles; 0: until the end.
        form: "chrome" names the files `rank0.step5.json`, after the last step in them, for chrome://tracing, Perfetto
            and `weft report`. "tensorboard" names them as TensorBoard's profiler plugin expects, with the rank as
            worker. What is in them is the same.
        activities: As torch's; default: the CPU, and the accelerator of `ctx`.
        memory: Record what is allocated and freed.
        shapes: Record the shapes of inputs.
        stack: Record the lines of Python that an operation was called from. Costs much.
        flops: Estimate the floating-point operations of matrix products and convolutions.
        on_trace_ready: Called with torch's own profiler after each trace is written, before its events are cleared:
            `lambda profiler: print(profiler.key_averages().table())`.

    Returns:
        The context manager.

    Raises:
        ValueError: A number of the schedule, or `form`, cannot be used.

    Example:
        >>> import tempfile, weft
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with weft.monitoring.profile(weft.local(), folder, wait=1, warmup=1, active=2) as profile:
        ...         for step in range(6):
        ...             _ = torch.ones(8) * step
        ...             profile.step()
        ...     print([path.name for path in profile.paths])
        ['rank0.step4.json']
    """
    schedule = {"skip_first": skip_first, "wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
    fix = "weft.monitoring.profile(ctx, folder, wait=1, warmup=1, active=3, repeat=2)"
    for name, number in schedule.items():
        check_count("profile", name, number, least=1 if name == "active" else 0, fix=fix)
    forms = ("chrome", "tensorboard")
    check_choice("profile", "form", form, forms, fix='weft.monitoring.profile(ctx, folder, form="tensorboard")')
    chosen = _activities(ctx) if activities is None else list(activities)
    recorded = {"profile_memory": memory, "record_shapes": shapes, "with_stack": stack, "with_flops": flops}
    return Profile(Path(folder), ctx.rank, form, {"activities": chosen, **recorded}, schedule, on_trace_ready)


class Profile:
    """A running profile; made by `profile`.

    Attributes:
        paths: The traces that this rank has written so far.
        profiler: torch's own profiler, for its tables: `profiler.key_averages()`.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        form: str,
        options: dict[str, Any],
        schedule: dict[str, int],
        on_trace_ready: Callable[[torch.profiler.profile], object] | None,
    ) -> None:
        self.paths: list[Path] = []
        self._then = on_trace_ready
        self._folder, self._rank, self._form = folder, rank, form
        self._steps = 0
        self._begins = schedule["skip_first"], schedule["wait"] + schedule["warmup"]
        self._cycle = self._begins[1] + schedule["active"]
        self._dropped = False
        plan = torch.profiler.schedule(**schedule)
        self.profiler = torch.profiler.profile(schedule=plan, on_trace_ready=self._write, **options)

    def step(self) -> None:
        """Say that a step of the loop is over."""
        self._steps += 1
        with warnings.catch_warnings():  # at the second cycle: that the first one's events, which are written, go
            warnings.filterwarnings("ignore", message="(?s).*clears events at the end of each cycle")
            self.profiler.step()

    def __enter__(self) -> Self:
        self.profiler.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # A cycle of which no active step is over, unless something went wrong in the first.
        self._dropped = error is None and (self._steps - self._begins[0]) % self._cycle == self._begins[1] % self._cycle
        self.profiler.stop()

    def _write(self, profiler: torch.profiler.profile) -> None:
        if self._dropped or rehearses():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        mark = f".step{self._steps}.json" if self._form == "chrome" else f".{time.time_ns()}.pt.trace.json"
        path = self._folder / f"rank{self._rank}{mark}"
        beside = self._folder / f".{path.name}.new"  # a reader never sees half a trace
        profiler.export_chrome_trace(str(beside))
        beside.replace(path)
        self.paths.append(path)
        if self._then is not None:
            self._then(profiler)


def _activities(ctx: DistContext) -> list[ProfilerActivity]:
    own = getattr(ProfilerActivity, ctx.device.type.upper(), ProfilerActivity.CPU)
    there = torch.profiler.supported_activities()
    return [each for each in dict.fromkeys((ProfilerActivity.CPU, own)) if each in there]
