"""`throughput`: how fast the whole job is, and what its time goes to."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from weft.checks import as_number, option_error
from weft.collectives import reduce
from weft.context import DistContext
from weft.errors import ContextError, listed
from weft.monitoring.flops import peak_flops as peak_of_device
from weft.monitoring.peak_memory import used_bytes
from weft.monitoring.values import hash_of_names
from weft.tensors.messages import control_device

T = TypeVar("T")

_COUNTS = ("seal", "samples", "tokens", "flops", "peak", "memory", "steps", "elapsed")
_PARTS = 24  # how many parts of a step may have names: each rank sends a row of one length
_SHOWN = 32  # ranks whose memory is listed one by one


def throughput(
    ctx: DistContext, *, peak_flops: float | None = None, clock: Callable[[], float] = time.perf_counter
) -> Throughput:
    """Measure samples, tokens and steps per second, the share of time spent waiting for data, and MFU.

    Wrap what the loop iterates in `timed`, say `step(...)` at the end of each step, and ask `read()` when you log.
    Nothing is sent between two reads. On an accelerator nothing waits for the device either, so a
    part that only starts work there is short; over many steps the sum is right.

    Changes: nothing. Collectives: none; `read` makes one all-reduce.

    Args:
        ctx: The context whose ranks take part.
        peak_flops: Operations per second that the device of this rank can do, for MFU; default: what the maker says
            for bfloat16, if the device is known.
        clock: Gives seconds; for tests.

    Returns:
        A meter, whose time begins now.

    Raises:
        ValueError: `peak_flops` is not a number > 0.

    Example:
        >>> import weft
        >>> seconds = iter(range(100))
        >>> speed = weft.monitoring.throughput(weft.local(), clock=lambda: float(next(seconds)))
        >>> for batch in speed.timed([[1, 2], [3, 4]]):
        ...     speed.step(samples=len(batch))
        >>> found = speed.read()
        >>> found["samples_per_s"] == 4 / (found["step_s"] * 2), found["data_share"] > 0
        (True, True)
    """
    peak = as_number(peak_flops)
    if peak_flops is not None and (peak is None or not 0 < peak < math.inf):
        fix = "weft.monitoring.throughput(ctx, peak_flops=989e12)"
        raise option_error("throughput", "peak_flops", peak_flops, expected="a number > 0, or None", fix=fix)
    return Throughput(ctx, peak_of_device(ctx.device) if peak is None else peak, clock)


class Throughput:
    """A meter of one loop; made by `throughput`.

    All time belongs to one part: "data" while the loop waits in `timed`, the parts you name with `part`, and "rest".
    """

    def __init__(self, ctx: DistContext, peak: float | None, clock: Callable[[], float]) -> None:
        self._ctx, self._peak, self._clock = ctx, peak, clock
        self._since = clock()
        self._open_parts = ["rest"]
        self._reset()

    def _reset(self) -> None:
        self._spent = {"data": 0.0, "rest": 0.0}
        self._samples = self._tokens = self._steps = 0
        self._flops = 0.0

    # -- in the loop -----------------------------------------------------------------------------

    def timed(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield what is iterated; the time until each item is there counts as waiting for data.

        Args:
            batches: A loader, windows, or one window.

        Yields:
            Its items.
        """
        with self.part("data"):
            source = iter(batches)
        while True:
            with self.part("data"):
                try:
                    item = next(source)
                except StopIteration:
                    return
            yield item

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the body for itself: `with speed.part("optimizer"): ...`.

        Parts may lie in each other; the time of the inner one is not that of the outer one. All ranks use the
        same names.

        Args:
            name: Of the part.
        """
        self._count_time()
        self._open_parts.append(name)
        try:
            yield
        finally:
            self._count_time()
            self._open_parts.pop()

    def _count_time(self) -> None:
        """The time since it was last counted is that of the innermost part."""
        part, now = self._open_parts[-1], self._clock()
        self._spent[part] = self._spent.get(part, 0.0) + now - self._since
        self._since = now

    def count(self, *, samples: int = 0, tokens: int = 0, flops: float = 0.0) -> None:
        """Add what this rank works on, such as one micro-batch.

        Args:
            samples: Of this rank.
            tokens: Of this rank.
            flops: Of this rank, forward and backward; see `count_flops`.
        """
        self._samples += samples
        self._tokens += tokens
        self._flops += flops

    def step(self, *, samples: int = 0, tokens: int = 0, flops: float = 0.0) -> None:
        """Say that a step is over, and add what this rank worked on; see `count`.

        Args:
            samples: Of this rank.
            tokens: Of this rank.
            flops: Of this rank.
        """
        self.count(samples=samples, tokens=tokens, flops=flops)
        self._steps += 1

    # -- now and then ----------------------------------------------------------------------------

    def read(self) -> dict[str, float]:
        """Tell how fast the whole job was since the last time, and begin anew.

        Collectives: one all-reduce over all ranks.

        Returns:
            The same on all ranks, ready for `weft.log`; empty if there was no step. `samples_per_s`, `tokens_per_s`,
            `flops_per_s`: of all ranks together, each if it was counted. `mfu`: the share of what the devices could
            do at best, if that is known. `step_s`: seconds per step; `step_s/data`, `step_s/rest` and
            `step_s/<part>`: what they went to, as means over the ranks. `data_share`: `step_s/data` by `step_s`.
            `memory_bytes/rank_<r>`: the peak of an accelerator, what the process has on the CPU; with more than
            32 ranks `memory_bytes/max` and `memory_bytes/min`, and as `memory_rank/max` and `memory_rank/min` the ranks
            that have it. Ranks that see the same data count once.

        Raises:
            ContextError: The ranks have other names of parts, or more than 22.
            PeerError: Another rank failed.
        """
        self._count_time()
        names = sorted(self._spent)
        rows = self._rows(names)
        self._reset()
        columns = [list(column) for column in zip(*rows, strict=True)]
        counts = dict(zip(_COUNTS, columns, strict=False))
        sums = {name: math.fsum(column) for name, column in counts.items()}
        steps, elapsed = counts["steps"][0], max(counts["elapsed"])
        if not steps:
            return {}
        counted = [name for name in ("samples", "tokens", "flops") if sums[name]]
        found = {f"{name}_per_s": sums[name] / elapsed if elapsed else math.inf for name in counted}
        if sums["flops"] and elapsed and all(counts["peak"]):
            found["mfu"] = sums["flops"] / elapsed / sums["peak"]
        found["step_s"] = elapsed / steps
        spent = dict(zip(names, map(math.fsum, columns[len(_COUNTS) :]), strict=False))
        found["data_share"] = spent["data"] / sums["elapsed"] if sums["elapsed"] else 0.0
        found |= {f"step_s/{name}": seconds / len(rows) / steps for name, seconds in spent.items()}
        return found | _memory(counts["memory"])

    def _rows(self, names: list[str]) -> list[list[float]]:
        """What each rank brings, in the order of `_COUNTS`, and then its parts."""
        ctx = self._ctx
        seal = hash_of_names(names)
        first = all(place == 0 for axis, place in ctx.coordinates.items() if axis not in ctx.data_axes)
        seen = (self._samples, self._tokens) if first else (0, 0)
        elapsed = math.fsum(self._spent.values())
        facts = (self._flops, self._peak or 0.0, float(used_bytes(ctx.device)), float(self._steps), elapsed)
        mine = [seal, *map(float, seen), *facts, *(self._spent[name] for name in names[:_PARTS])]
        rows = [mine]
        if ctx.world_size > 1:
            table = torch.zeros(ctx.world_size, len(_COUNTS) + _PARTS, dtype=torch.float64)
            table[ctx.rank, : len(mine)] = torch.tensor(mine, dtype=torch.float64)
            rows = reduce(table.to(control_device(ctx.group, ctx.device)), ctx).tolist()
            rows = [mine] * ctx.world_size if ctx.world.pretended else rows
        if len(names) > _PARTS or any(row[0] != seal for row in rows):
            raise ContextError(
                "throughput: the parts of a step differ between the ranks, or are too many",
                found=f"{listed(names)} on rank {ctx.rank}",
                expected=f"the same names on all ranks, at most {_PARTS - 2} besides data and rest",
                fix='with speed.part("optimizer"): ...  # on all ranks',
            )
        return rows


def _memory(used: list[float]) -> dict[str, float]:
    if len(used) > _SHOWN:
        most, least = max(used), min(used)
        ranks = {"memory_rank/max": float(used.index(most)), "memory_rank/min": float(used.index(least))}
        return {"memory_bytes/max": most, "memory_bytes/min": least, **ranks}
    return {f"memory_bytes/rank_{rank}": each for rank, each in enumerate(used)}
