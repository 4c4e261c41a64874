"""Numbers over steps as SVG: lines on one axis, or areas on top of each other."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["chart", "table", "with_unit"]

_HEIGHT = 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 30
_MOST = 800  # points of a line; of more, the lowest and the highest of each stretch are drawn
_HUES = 8

Points = Sequence[tuple[int, float]]


def chart(
    title: str,
    lines: Mapping[str, Mapping[int, float]],
    *,
    marks: Iterable[int] = (),
    stacked: bool = False,
    wide: bool = False,
) -> str:
    """Draw some series on one axis, as a figure with a legend; what is hovered over is told by the page's script.

    Args:
        title: Of the figure.
        lines: Values by step, by name; values that are not finite are marked at the top.
        marks: Steps with a vertical line: where a run went on.
        stacked: Draw areas that add up.
        wide: Over the whole page instead of half of it.
    """
    found = {name: points for name, each in lines.items() if (points := _finite(each))}
    drawn = _filled(found) if stacked else {name: _thinned(points) for name, points in found.items()}
    lost = {name: [s for s, v in sorted(points.items()) if not math.isfinite(v)] for name, points in lines.items()}
    everything = [point for points in drawn.values() for point in points]
    steps = [step for step, _ in everything] + [step for each in lost.values() for step in each]
    if not steps:
        return ""
    tops = _stacked(drawn) if stacked else drawn
    values = [value for points in tops.values() for _, value in points] or [0.0, 1.0]
    unit = _unit_of(title, max(map(abs, values)))
    ends = (0.0 if stacked else min(values)) / unit[0], max(values) / unit[0]
    ticks = [unit[0] * tick for tick in _axis(*ends, from_zero=_from_zero(title, values))]
    low, high = ticks[0], ticks[-1]
    width = 1200 if wide else 600
    across = _Scale(min(steps), max(steps), _LEFT, width - _RIGHT)
    up = _Scale(low, high, _HEIGHT - _BOTTOM, _TOP)
    parts = [_grid(across, up, ticks, unit, len(set(steps)))]
    parts += [
        f'<line class="mark" x1="{across(step):.1f}" x2="{across(step):.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">'
        f"<title>went on after step {step}</title></line>"
        for step in marks
        if min(steps) <= step <= max(steps)
    ]
    hues = {name: f"h{index % _HUES}" for index, name in enumerate(lines)}
    below: Points | None = None
    for name, points in tops.items():
        floor = below or [(step, 0.0) for step, _ in points]
        parts.append(_drawn(points, across, up, hues[name], floor if stacked else None))
        below = points
    for name, steps_lost in lost.items():
        parts += [
            f'<circle class="lost {hues[name]}" cx="{across(step):.1f}" cy="{_TOP + 4}" r="4">'
            f"<title>not finite at step {step}</title></circle>"
            for step in steps_lost[:50]
        ]
    hover = {
        "x": [across.low, across.high, across.start, across.stop], "unit": list(unit),
        "lines": [{"name": name, "hue": hues[name], "points": points} for name, points in drawn.items()],
    }  # fmt: skip
    named = hues.items() if len(hues) > 1 else ()
    legend = "".join(f'<li><i class="{hue}"></i>{html.escape(_short(name, title))}</li>' for name, hue in named)
    kind = "chart broad" if wide else "chart"
    return (
        f'<figure class="{kind}"><figcaption>{html.escape(_human(title))}<ul>{legend}</ul></figcaption>'
        f'<svg viewBox="0 0 {width} {_HEIGHT}" role="img" aria-label="{html.escape(_human(title))} by step">'
        f'{"".join(parts)}<g class="hover" hidden=""><line y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"/></g></svg>'
        f'<script type="application/json">{_json(hover)}</script><output></output></figure>'
    )


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; numbers stand to the right."""
    lines = "".join(
        "<tr>"
        + "".join(
            f'<td class="n">{html.escape(str(cell))}</td>' if _is_number(cell) else f"<td>{html.escape(str(cell))}</td>"
            for cell in row
        )
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{"".join(f"<th>{html.escape(h)}</th>" for h in head)}</tr></thead>'
        f"<tbody>{lines}</tbody></table></div>"
    )


def with_unit(name: str, value: float) -> str:
    """A value as people read it; its name tells the unit.

    Example:
        >>> with_unit("memory_bytes/rank_0", 3 * 2**30), with_unit("tokens_per_s", 45_300.0), with_unit("step_s", 0.021)
        ('3 GiB', '45.3 k', '21 ms')
    """
    if not math.isfinite(value):
        return str(value)
    factor, text = _unit_of(name, abs(value))
    return f"{value / factor:.4g} {text}".rstrip()


# -- the drawing --------------------------------------------------------------------------------------------


class _Scale:
    """From numbers to places."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self.low, self.high = (low, high) if high > low else (low - 0.5, high + 0.5)
        self.start, self.stop = start, stop

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def _grid(across: _Scale, up: _Scale, ticks: Sequence[float], unit: tuple[float, str], num_steps: int) -> str:
    parts = []
    for tick in ticks:
        y = up(tick)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{across.stop}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = f"{tick / unit[0]:.4g}{'&#8239;' + unit[1] if unit[1] and tick == ticks[-1] else ''}"
        parts.append(f'<text x="{_LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    whole = _whole(across.low, across.high) if num_steps > 1 else [round(across.low + 0.5)]
    parts += [f'<text x="{across(s):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{s:,}</text>' for s in whole]
    return "".join(parts)


def _drawn(points: Points, across: _Scale, up: _Scale, hue: str, below: Points | None) -> str:
    places = [f"{across(step):.1f},{up(value):.1f}" for step, value in points]
    if below is not None:
        back = [f"{across(step):.1f},{up(value):.1f}" for step, value in reversed(below)]
        return f'<polygon class="area {hue}" points="{" ".join([*places, *back])}"/>'
    dots = ""
    if len(points) <= 2:
        dots = "".join(
            f'<circle class="dot {hue}" cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="4"/>' for p in places
        )
    return f'<polyline class="line {hue}" points="{" ".join(places)}"/>{dots}'


def _filled(lines: Mapping[str, Points]) -> dict[str, Points]:
    """The same steps for all: what was not measured took no time."""
    steps = sorted({step for points in lines.values() for step, _ in points})
    steps = steps[:: math.ceil(len(steps) / _MOST)] if steps else []
    values = {name: dict(points) for name, points in lines.items()}
    return {name: [(step, known.get(step, 0.0)) for step in steps] for name, known in values.items()}


def _stacked(lines: Mapping[str, Points]) -> dict[str, Points]:
    """Each series on top of those before."""
    found: dict[str, Points] = {}
    below: Points = []
    for name, points in lines.items():
        floor = dict(below)
        found[name] = below = [(step, value + floor.get(step, 0.0)) for step, value in points]
    return found


def _finite(points: Mapping[int, float]) -> Points:
    return [(step, value) for step, value in sorted(points.items()) if math.isfinite(value)]


def _thinned(points: Points) -> Points:
    """Of many points the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= _MOST:
        return points
    stretch = math.ceil(len(points) / (_MOST // 2))
    kept = []
    for start in range(0, len(points), stretch):
        piece = points[start : start + stretch]
        ends = {min(piece, key=lambda p: p[1]), max(piece, key=lambda p: p[1])}
        kept += sorted(ends)
    return [points[0], *[p for p in kept if p not in (points[0], points[-1])], points[-1]]


# -- numbers and names ----------------------------------------------------------------------------------------


def _axis(low: float, high: float, *, from_zero: bool) -> list[float]:
    """About five round numbers, from below `low` to above `high`."""
    low = min(low, 0.0) if from_zero else low
    if high <= low:
        low, high = low - abs(low) * 0.1 - 1e-12, high + abs(high) * 0.1 + 1e-12
    size = _round_size((high - low) / 5)
    return [round(n * size, 12) for n in range(math.floor(low / size), math.ceil(high / size) + 1)]


def _round_size(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(n * power for n in (1, 2, 2.5, 5, 10) if n * power >= rough * 0.999)


def _whole(low: float, high: float) -> list[int]:
    """About five round steps between."""
    size = max(round(_round_size((high - low) / 5)), 1)
    return list(range(math.ceil(low / size) * size, math.floor(high) + 1, size))


def _from_zero(title: str, values: Sequence[float]) -> bool:
    """Amounts begin at zero; a loss does not have to."""
    return min(values) >= 0 and any(word in title for word in ("_s", "bytes", "share", "mfu"))


def _unit_of(name: str, largest: float) -> tuple[float, str]:
    if "bytes" in name:
        return next(((2.0**p, u) for p, u in ((30, "GiB"), (20, "MiB"), (10, "KiB")) if largest >= 2**p), (1.0, "B"))
    if name.endswith("share") or name == "mfu":
        return 0.01, "%"
    seconds = name == "step_s" or name.startswith("step_s/")
    if seconds:
        return next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if largest >= s), (1e-6, "us"))
    if largest >= 1e4:
        return next((s, u) for s, u in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if largest >= s)
    return 1.0, ""


def _human(title: str) -> str:
    words = re.sub(r"_s$", " seconds", title.replace("_per_s", " per second")).replace("_bytes", "").replace("_", " ")
    return words[:1].upper() + words[1:]


def _short(name: str, title: str) -> str:
    return (name.removeprefix(f"{title}/") if name.startswith(f"{title}/") else name).replace("_", " ")


def _is_number(cell: object) -> bool:
    text = str(cell)
    return isinstance(cell, (int, float)) or (text[:1].isdigit() and text[-1:] in "0123456789%sBkMGT")


def _json(value: object) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(value, separators=(",", ":")).replace("<", "\\u003c")
