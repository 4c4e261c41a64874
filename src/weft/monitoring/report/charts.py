"""What the charts of a page show, as plain values for the page's script: which series share an axis, in which unit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from weft.monitoring.report.run import Run
from weft.monitoring.report.trace_events import Trace

TRAINING, SPEED, MEMORY = "Training", "Throughput and parts of a step", "Memory"
PARTS = "step_s/"

_MOST_LINES = 16  # in one chart; of more, and of ranks, the highest and the lowest are drawn
_MOST_POINTS, _FEWEST_POINTS, _ALL_POINTS = 2000, 50, 200_000  # of a line; of a page
_FULL_NAMES = MappingProxyType(
    {
        "lr": "learning rate",
        "mfu": "model FLOPs utilization",
        "data_share": "time spent waiting for data",
        "step_s": "time of a step",
    }
)
_RANK = re.compile(r"rank_(\d+)")
_MOST_LOST = 200  # values of a line that are not finite and marked

Chart = dict[str, Any]
Points = Mapping[int, float]


def charts_of(runs: Mapping[str, Run]) -> dict[str, list[Chart]]:
    """The charts of some runs by section.

    Of one run, names that belong together share a chart: losses; everything below one name, such as
    `memory_bytes/rank_0` and `memory_bytes/rank_1`; `step_s/...` as areas that add up. Of several runs each name has
    a chart with a line per run, and a name that each rank has is the highest of all ranks.
    """
    if len(runs) == 1:
        (run,) = runs.values()
        groups, marks = _groups(run.series), run.resumes
    else:
        groups, marks = _compared(runs), []
    lines = sum(min(len(each), _MOST_LINES) for each in groups.values())
    most = max(_FEWEST_POINTS, min(_MOST_POINTS, _ALL_POINTS // max(lines, 1)))
    if PARTS in groups:
        groups.pop("step_s", None)
    sections: dict[str, list[Chart]] = {TRAINING: [], SPEED: [], MEMORY: []}
    for name in sorted(groups, key=lambda name: ("loss" not in name, not name.endswith("loss"))):
        if any(groups[name].values()):
            sections[_section(name)].append(chart(name, groups[name], marks, most))
    if len(runs) > 1:
        sections[SPEED] += _mean_parts(runs)
    return {title: drawn for title, drawn in sections.items() if drawn}


def chart(title: str, lines: Mapping[str, Points], marks: Iterable[int] = (), most: int = _MOST_POINTS) -> Chart:
    """A chart of values over steps.

    Args:
        title: Name of what is shown; the parts of a step are areas that add up.
        lines: Values by step, by name; values that are not finite are gaps, and marked at the top.
        marks: Steps with a vertical line: where a run was resumed.
        most: Points of a line; of more, the lowest and the highest of each interval.
    """
    steps = sorted({step for points in lines.values() for step in points})
    stacked = title == PARTS
    names = [name.removeprefix(f"{title.rstrip('/')}/") for name in lines]
    band = not stacked and (len(lines) > _MOST_LINES or (len(lines) > 1 and all(map(_RANK.fullmatch, names))))
    if stacked:  # what was not measured in a step took no time
        chosen = steps[:: math.ceil(len(steps) / most)]
        lines = {name: {step: points.get(step, 0.0) for step in chosen} for name, points in lines.items()}
    holders: dict[str, dict[int, str]] = {}
    if band:
        of = "rank" if all(map(_RANK.fullmatch, names)) else f"of {len(lines)} series"
        lines, holders = _band(dict(zip(names, lines.values(), strict=True)))
        names = [f"{name} {of}" for name in lines]
    finite = [value for points in lines.values() for _, value in _finite(points)]
    factor, unit = unit_of(title, max(map(abs, finite), default=1.0))
    drawn = []
    for shown, (name, points) in zip(names, lines.items(), strict=True):
        lost = [(step, str(value)) for step, value in sorted(points.items()) if not math.isfinite(value)][:_MOST_LOST]
        known = [(step, _rounded(value / factor)) for step, value in _thinned(_finite(points), most)]
        kept = sorted([*known, *((step, None) for step, _ in lost)])
        x, y = zip(*kept, strict=True) if kept else ((), ())
        drawn.append({"name": shown, "x": x, "y": y, "lost": lost})
        if band:
            drawn[-1]["who"] = [holders[name].get(step, "") for step in x]
    in_memory = _section(title) == MEMORY
    return {
        "title": "Parts of a step" if stacked else caption(title),
        "unit": unit,
        "lines": drawn,
        "marks": [step for step in marks if steps[0] <= step <= steps[-1]],
        "stacked": stacked,
        "wide": title == "loss",
        "band": band,
        "steps": [steps[0], steps[-1]],
        "fromZero": stacked or (_section(title) == SPEED and min(finite, default=0.0) >= 0),
        # Ranks that differ are told apart, and those that do not are not blown up.
        "shows": [_rounded(0.9 * max(finite) / factor)] if in_memory and finite else [],
    }


def bars(title: str, unit: str, rows: Sequence[str], lines: Mapping[str, Sequence[float]]) -> Chart:
    """A chart of horizontal bars: in each row the lines' values, one after the other."""
    drawn = [{"name": name, "x": [_rounded(value) for value in values]} for name, values in lines.items()]
    return {"title": title, "unit": unit, "rows": list(rows), "lines": drawn, "wide": False}


def trace_chart(trace: Trace) -> list[Chart]:
    """The operations of a trace by the time they took, on the accelerator and on the CPU."""
    found = []
    for place, rows in (("on the device", trace.device), ("on the CPU", trace.host)):
        if rows:
            names = [row[0] if len(row[0]) < 48 else f"{row[0][:47]}…" for row in rows]
            title = f"Rank {trace.rank}, {trace.name}: operations {place}"
            found.append(bars(title, "ms", names, {"own time": [row[1] for row in rows]}))
    return found


def with_unit(name: str, value: float) -> str:
    """A value as people read it; its name says the unit.

    Example:
        >>> with_unit("memory_bytes/rank_0", 3 * 2**30), with_unit("tokens_per_s", 45_300.0), with_unit("step_s", 0.021)
        ('3 GiB', '45.3 k/s', '21 ms')
    """
    if not math.isfinite(value):
        return str(value)
    factor, text = unit_of(name, abs(value))
    return f"{value / factor:.4g}{'' if text.startswith('/') else ' '}{text}".rstrip()


def caption(name: str) -> str:
    """The name of a series, or of what is below it, for people.

    Example:
        >>> caption("loss/train_mean"), caption("tokens_per_s"), caption("memory_bytes/")
        ('Loss, train mean', 'Tokens per second', 'Memory')
    """
    parts = [
        _FULL_NAMES.get(part)
        or re.sub(r"_s$", " time", part.replace("_per_s", " per second")).replace("_bytes", "").replace("_", " ")
        for part in name.rstrip("/").split("/")
    ]
    words = ", ".join(parts)
    return words[:1].upper() + words[1:]


# -- which series belong together ---------------------------------------------------------------------------


def _groups(series: Mapping[str, Points]) -> dict[str, Mapping[str, Points]]:
    """Which series of a run share a chart; "a/" holds what is below a, but for what has a unit of its own."""
    groups: dict[str, dict[str, Points]] = {}
    for name, points in series.items():
        above, slash, _ = name.rpartition("/")
        key = f"{above}/" if slash and unit_of(name, 1.0) == unit_of(f"{above}/", 1.0) else name
        groups.setdefault("loss" if name.endswith("loss") or name.startswith("loss/") else key, {})[name] = points
    return dict(groups)


def _compared(runs: Mapping[str, Run]) -> dict[str, Mapping[str, Points]]:
    """Each name of some runs, with a line per run."""
    groups: dict[str, dict[str, Points]] = {}
    for label, run in runs.items():
        for name, points in folded_ranks(run.series).items():
            if not name.startswith(PARTS):
                groups.setdefault(name, {each: {} for each in runs})[label] = points
    return dict(groups)


def folded_ranks(series: Mapping[str, Points]) -> dict[str, Points]:
    """One series instead of one per rank: the highest of all ranks."""
    found: dict[str, dict[int, float]] = {}
    for name, points in series.items():
        above, _, below = name.rpartition("/")
        if not re.fullmatch(r"rank_\d+", below):
            found[name] = dict(points)
            continue
        highest = found.setdefault(f"{above} (highest rank)", {})
        for step, value in points.items():
            highest[step] = max(value, highest.get(step, value))
    return dict(found)


def _mean_parts(runs: Mapping[str, Run]) -> list[Chart]:
    """What a step of each run consists of, in the mean; a part that was not measured in a step took no time."""
    names = list(dict.fromkeys(name for run in runs.values() for name in run.series if name.startswith(PARTS)))
    if not names:
        return []
    means: dict[str, list[float]] = {name: [] for name in names}
    for run in runs.values():
        num_steps = len({step for name in names for step in run.series.get(name, {})}) or 1
        for name in names:
            means[name].append(sum(value for _, value in _finite(run.series.get(name, {}))) / num_steps)
    factor, unit = unit_of(PARTS, max(sum(each) for each in zip(*means.values(), strict=True)))
    lines = {name.removeprefix(PARTS): [value / factor for value in values] for name, values in means.items()}
    return [bars("Parts of a step, mean", unit, list(runs), lines)]


def _band(lines: Mapping[str, Points]) -> tuple[dict[str, Points], dict[str, dict[int, str]]]:
    """The lowest and the highest of many lines, and whose value that is at each step."""
    values: dict[int, list[tuple[float, str]]] = {}
    for name, points in lines.items():
        for step, value in _finite(points):
            values.setdefault(step, []).append((value, name.replace("rank_", "rank ")))
    pairs = {"lowest": {s: min(v) for s, v in values.items()}, "highest": {s: max(v) for s, v in values.items()}}
    found = {way: {step: value for step, (value, _) in each.items()} for way, each in pairs.items()}
    return dict(found), {way: {step: name for step, (_, name) in each.items()} for way, each in pairs.items()}


def _section(name: str) -> str:
    if _is_time(name) or name.endswith(("_per_s", "data_share", "mfu")):
        return SPEED
    return MEMORY if "memory" in name or "bytes" in name else TRAINING


def _is_time(name: str) -> bool:
    return re.search(r"(^|/)step_s(/|$)|(?<!_per)_s$", name) is not None


# -- numbers and names ----------------------------------------------------------------------------------------


def _finite(points: Points) -> list[tuple[int, float]]:
    return [(step, value) for step, value in sorted(points.items()) if math.isfinite(value)]


def _thinned(points: list[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Of many points the lowest and the highest of each interval, so that no spike is lost."""
    if len(points) <= most:
        return points
    interval = math.ceil(2 * len(points) / most)
    kept = {points[0], points[-1]}
    for start in range(0, len(points), interval):
        piece = points[start : start + interval]
        kept |= {min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1])}
    return sorted(kept)


def _rounded(value: float) -> float:
    return float(f"{value:.7g}")


def unit_of(name: str, largest: float) -> tuple[float, str]:
    """By what a value is divided, and the unit it then has."""
    if "bytes" in name:
        return _prefix(largest, (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))
    if name.endswith(("share", "mfu")):
        return 0.01, "%"
    if _is_time(name):
        return _prefix(largest, (1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    per_s = "/s" if name.endswith("_per_s") else ""
    if largest >= 1e4:
        factor, prefix = _prefix(largest, (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
        return factor, prefix + per_s
    return 1.0, per_s


def _prefix(largest: float, *units: tuple[float, str]) -> tuple[float, str]:
    return next((each for each in units if largest >= each[0]), units[-1])
