"""Traces of torch's profiler: the operations that took most time."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import value_error

_LARGEST = 300 * 2**20  # bytes of a trace that is still read
_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One trace of one rank.

    Attributes:
        rank: Of the process.
        name: Of the file.
        steps: Milliseconds of each step in it.
        host: Operations on the CPU by their own time in milliseconds, without that of operations inside: name, time,
            how often.
        device: Kernels and copies on the accelerator, likewise.
    """

    rank: int
    name: str
    steps: tuple[float, ...]
    host: tuple[tuple[str, float, int], ...]
    device: tuple[tuple[str, float, int], ...]


def read_trace(path: Path) -> Trace | None:
    """Read a trace; None if the file is something else.

    Raises:
        ValueError: The file is not JSON, or too large to be read.
    """
    rank = re.match(r"rank(\d+)\.", path.name)
    if rank is None:
        return None
    if path.stat().st_size > _LARGEST:
        raise value_error(
            f"report: {path.name} is too large to be read",
            found=f"{path.stat().st_size / 2**20:.0f} MiB",
            expected=f"at most {_LARGEST // 2**20} MiB",
            fix="weft.monitoring.profile(ctx, folder, active=1)  # or open it in Perfetto",
        )
    content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(content, dict) or "traceEvents" not in content:
        return None
    whole = [event for event in content["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    kinds: dict[str, list[Any]] = collections.defaultdict(list)
    for event in whole:
        kinds[event.get("cat", "")].append(event)
    steps = [e["dur"] / 1e3 for e in kinds["user_annotation"] if str(e["name"]).startswith("ProfilerStep")]
    device = [e for kind in ("kernel", "gpu_memcpy", "gpu_memset") for e in kinds[kind]]
    return Trace(
        rank=int(rank[1]),
        name=path.name,
        steps=tuple(steps),
        host=_longest(_own_times(kinds["cpu_op"])),
        device=_longest((e["name"], e["dur"] / 1e3) for e in device),
    )


def _own_times(events: list[Any]) -> Iterable[tuple[str, float]]:
    """Each event's time without that of the events it contains, thread by thread."""
    threads: dict[Any, list[Any]] = collections.defaultdict(list)
    for event in events:
        threads[event.get("pid"), event.get("tid")].append(event)
    for thread in threads.values():
        thread.sort(key=lambda e: (e["ts"], -e["dur"]))
        own = [event["dur"] for event in thread]
        within: list[int] = []
        for index, event in enumerate(thread):
            while within and thread[within[-1]]["ts"] + thread[within[-1]]["dur"] <= event["ts"]:
                within.pop()
            if within:
                own[within[-1]] -= event["dur"]
            within.append(index)
        yield from ((event["name"], max(time, 0) / 1e3) for event, time in zip(thread, own, strict=True))


def _longest(times: Iterable[tuple[str, float]]) -> tuple[tuple[str, float, int], ...]:
    sums: dict[str, list[float]] = collections.defaultdict(list)
    for name, time in times:
        sums[name].append(time)
    rows = sorted(((name, sum(each), len(each)) for name, each in sums.items()), key=lambda row: -row[1])
    rest = rows[_SHOWN:]
    more = [("everything else", sum(r[1] for r in rest), sum(r[2] for r in rest))] if rest else []
    return (*rows[:_SHOWN], *more)
