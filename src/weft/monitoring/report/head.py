"""What stands at the head of a page: each start of a run, and the numbers one asks for first."""

from __future__ import annotations

import datetime as dt
import math
import re
import statistics
from collections.abc import Mapping

from weft.monitoring.report.charts import caption, folded_ranks, with_unit
from weft.monitoring.report.run import Run

_FIRST = ("loss", "tokens_per_s", "samples_per_s", "mfu", "data_share")  # ends of names whose last value is a card
_OF_EACH_START = ("started", "from step", "ranks")
_RECENT = 10  # values whose median is the speed
_BYTES, _HIGHEST = "memory_bytes", "Peak memory (highest rank)"
_MANY = 1e9  # seconds and steps that no run has
_MOST_RANKS = 16  # in a table

Row = tuple[str, ...]


def common_settings(run: Run) -> tuple[dict[str, str], list[Row]]:
    """What all starts of a run have in common; and if there are several, a table of the rest with its head."""
    described = [_described(program) for program in run.programs]
    names = dict.fromkeys(name for each in described for name in each)
    differ = [n for n in names if n in _OF_EACH_START or len({each.get(n, "") for each in described}) > 1]
    if len(described) < 2:
        return described[0] if described else {}, []
    common = {name: described[0][name] for name in names if name not in differ}
    rows = [(f"{number}", *(each.get(n, "") for n in differ)) for number, each in enumerate(described, start=1)]
    return common, [("start", *differ), *rows]


def summary_cell(run: Run) -> dict[str, str]:
    """A run in one column of several: what differs between its starts, one after the other."""
    described = [_described(program) for program in run.programs]
    names = dict.fromkeys(name for each in described for name in each)
    return {n: " → ".join(dict.fromkeys(each[n] for each in described if n in each)) for n in names}


def _described(program: Mapping[str, object]) -> dict[str, str]:
    """What `log_start` wrote, in words."""
    hidden = {"settings", "began", "step", "steps", "nodes", "host", "attempt"}
    nodes, host, attempt = program.get("nodes"), program.get("host"), program.get("attempt")
    found = {
        "started": program["started"],
        "from step": f"{program['step']:,}",
        "ranks": program.get("ranks"),
        "hosts": host if nodes is None else f"{nodes} ({host})" if nodes == 1 else f"{nodes} (the first is {host})",
        "restarted": f"{attempt} x by the launcher" if attempt else "",
        **{name: value for name, value in program.items() if name not in hidden},
    }
    return {name: str(value) for name, value in found.items() if value not in (None, "")}


def cards(run: Run) -> dict[str, str]:
    """The numbers one asks for first, under names for people."""
    if not run.series:
        return {}
    last = _last_step(run)
    totals = [each.get("steps") for each in run.programs]
    total = next((each for each in reversed(totals) if isinstance(each, int) and last < each < _MANY), None)
    found = {"Step": f"{last:,}" if total is None else f"{last:,} of {total:,}"}
    recent = [value for _, value in sorted(run.series.get("step_s", {}).items())[-_RECENT:] if 0 < value < _MANY]
    if recent:
        step_s = statistics.median(recent)
        found["Speed"] = f"{1 / step_s:.3g} steps/s" if step_s <= 1 else f"{step_s:.3g} s per step"
        if total is not None and (total - last) * step_s < _MANY:
            found["Time left"] = str(dt.timedelta(seconds=round((total - last) * step_s)))
    if run.programs:
        whole = max(round(run.ended - run.programs[0]["began"]), 0)
        found["Duration" if len(run.programs) == 1 else "Duration, with pauses"] = str(dt.timedelta(seconds=whole))
    for name, text in _last_values(run).items():
        if name.endswith(_FIRST) or "memory_bytes" in name or name.startswith("loss/"):
            _add(found, name, text)
    peaks = _peaks(run)
    if peaks:
        found["Peak memory"] = found.pop(_HIGHEST) + (f", rank {max(peaks)[1]}" if len(peaks) > 1 else "")
    return found


def final_values(run: Run) -> dict[str, str]:
    """The last step, and the last value of each series; of memory the highest."""
    found = {"Step": f"{_last_step(run):,}"}
    for name, text in _last_values(run).items():
        _add(found, name, text)
    return found


def memory_rows(run: Run) -> tuple[str, list[Row]]:
    """Of each rank the highest memory, when it was, and the last; of many ranks, those with the most."""
    peaks = _peaks(run)
    most = sorted(peaks, reverse=True)[:_MOST_RANKS]
    rows: list[Row] = []
    for peak, rank, finite in sorted(most, key=lambda each: each[1]):
        at, last = max(finite, key=lambda step: finite[step]), max(finite)
        rows.append((f"{rank}", with_unit(_BYTES, peak), f"{at:,}", with_unit(_BYTES, finite[last]), f"{last:,}"))
    title = "By rank" if len(peaks) == len(most) else f"The {len(most)} ranks with the highest peaks, of {len(peaks)}"
    return title, [("rank", "peak", "at step", "last value", "at step"), *rows] if len(rows) > 1 else []


def _peaks(run: Run) -> list[tuple[float, int, dict[int, float]]]:
    """Of each rank the highest memory, its number, and its memory by step."""
    found = []
    for name, points in run.series.items():
        match = re.fullmatch(rf"{_BYTES}/rank_(\d{{1,9}})", name)
        finite = {step: value for step, value in points.items() if math.isfinite(value)}
        if match and finite:
            found.append((max(finite.values()), int(match[1]), finite))
    return found


def _last_step(run: Run) -> int:
    return max((step for points in run.series.values() for step in points), default=0)


def _last_values(run: Run) -> dict[str, str]:
    found = {}
    for name, points in folded_ranks(run.series).items():
        values = [points[step] for step in sorted(points) if math.isfinite(points[step])]
        if values:
            found[name] = with_unit(name, max(values) if "memory_bytes" in name else values[-1])
    return found


def _add(found: dict[str, str], name: str, text: str) -> None:
    """Under a name for people, unless another series has it."""
    words = caption(name).replace("Memory", "Peak memory") if "memory_bytes" in name else caption(name)
    found[name if words in found else words] = text
