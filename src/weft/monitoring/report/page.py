"""One page of HTML about a run, or about several side by side. It loads nothing and asks nobody.

[Note: the page's policy] Scripts and styles on the page are allowed by their hash only, and nothing may be loaded or
evaluated: what a log brings in cannot run, even if it got past the escaping. plotly.js needs no eval for the kinds of
traces that `page.js` draws (those on WebGL do). The rules that it adds while it runs go to the page's own sheet,
which is why that has the name `plotly.js-style-global`; a sheet for maps that it would add has a place already.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import html
import importlib
import importlib.resources
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.errors import MissingExtra
from weft.monitoring.report.charts import Chart, charts_of, folded_ranks, trace_chart, with_unit
from weft.monitoring.report.read_run import EXPLAIN, Run, read

__all__ = ["render", "write_report"]

_TOLD = ("loss", "tokens_per_s", "samples_per_s", "mfu", "data_share")  # last values at the head of the page
_EVENTS = ("preempted", "failure", "error")  # names of texts that say why a program ended
_HEALTH = "health"
_SHEET_FOR_MAPS = r'getElementById\("([0-9a-f]{32,})"\)'
_SHOWN = 20  # steps with values that are not finite, by number


def write_report(folders: str | Path | Iterable[str | Path], *, out: str | Path | None = None) -> list[Run]:
    """Read the folder of a run, or of several to compare, and write one page; what `weft report` does.

    Call it on one rank. It reads files only.

    Args:
        folders: Where the trackers of a run wrote, and below; or several of them.
        out: What to write; default: `report.html` in the folder, of several runs in the current directory.

    Returns:
        What was read, by run. If no run has numbers or profiles, nothing is written.

    Raises:
        FileNotFoundError: There is no such folder.
        MissingExtra: The package plotly is not installed.
    """
    places = [Path(each) for each in ([folders] if isinstance(folders, (str, Path)) else folders)]
    runs = [read(place) for place in places]
    if any(run.series or run.traces for run in runs):
        place = Path(out) if out is not None else (places[0] if len(places) == 1 else Path()) / "report.html"
        text = render(runs)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    return runs


def render(runs: Sequence[Run]) -> str:
    """Render what was read as one page: about one run, or a comparison of several.

    Raises:
        MissingExtra: The package plotly is not installed.

    Example:
        >>> page = render([Run(Path("runs/a"), series={"loss": {1: 2.0, 2: 1.0}})])
        >>> page.count('<div class="plot"')
        1
    """
    named = dict(zip(_names(runs), runs, strict=True))
    charts: list[Chart] = []
    body = [_head(named), _CONTROLS]
    body += [_section(title, _figures(drawn, charts)) for title, drawn in charts_of(named).items()]
    body += [_health(named), _profiles(named, charts), _events(named), _settings(named), _texts(named), _sources(named)]
    title = html.escape(" and ".join(named) if len(named) < 3 else f"{len(named)} runs")
    plotly, style = _plotly(), _own("page.css")
    script = f"{plotly}\n{_own('page.js')}"
    places = "".join(f'<i id="{name}" hidden></i>' for name in set(re.findall(_SHEET_FOR_MAPS, plotly)))
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data: blob:"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title} - weft report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><link rel="icon" href="data:,">'
        f'<style id="plotly.js-style-global">{style}</style></head>'
        f"<body><header><h1>{title}</h1></header>{body[0]}{body[1]}<main>{''.join(body[2:])}</main>{places}"
        f'<script type="application/json" id="data">{_json(charts)}</script><script>{script}</script></body></html>\n'
    )


# -- what the page is made of -------------------------------------------------------------------------------------

_CONTROLS = (
    '<form id="controls"><label>Smoothing <input type="range" id="smoothing" min="0" max="0.99" step="0.01" value="0">'
    '<output id="weight">0.00</output></label><label><input type="checkbox" id="log"> Logarithmic scale</label>'
    '<button type="button" id="reset">Reset zoom</button><button type="button" id="theme">Light / dark</button></form>'
)


def _plotly() -> str:
    try:
        library: Any = importlib.import_module("plotly.offline")
    except ImportError as error:
        raise MissingExtra(
            "report: the package plotly is not installed",
            found=str(error),
            expected="the package plotly, which draws the charts",
            fix="pip install 'weft[report]'",
        ) from error
    text: str = library.get_plotlyjs()
    return _one_element(text)


def _own(name: str) -> str:
    return _one_element(importlib.resources.files("weft.monitoring.report").joinpath(name).read_text(encoding="utf-8"))


def _one_element(text: str) -> str:
    """As a browser reads it: with its line ends, and not ending the element that it stands in."""
    return text.replace("\r\n", "\n").replace("\r", "\n").replace("</script", "<\\/script")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _json(value: object) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _section(title: str, inner: str) -> str:
    return f"<section><h2>{title}</h2>{inner}</section>" if inner else ""


def _figures(drawn: Iterable[Chart], charts: list[Chart]) -> str:
    """A place for each chart, which is added to those of the page."""
    parts = []
    for chart in drawn:
        kind = "chart wide" if chart["wide"] else "chart"
        title = html.escape(chart["title"])
        parts.append(
            f'<figure class="{kind}"><figcaption>{title}</figcaption>'
            f'<div class="plot" data-chart="{len(charts)}"></div></figure>'
        )
        charts.append(chart)
    return f'<div class="charts">{"".join(parts)}</div>' if parts else ""


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, empty without rows; numbers stand to the right, and cells that are a color are shown as it."""
    lines = ["".join(map(_cell, row)) for row in rows]
    names = "".join(f"<th>{each if isinstance(each, _Html) else html.escape(each)}</th>" for each in head)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<div class="scroll"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'
        if lines
        else ""
    )


class _Html(str):
    """Text that is escaped already."""

    __slots__ = ()


def _cell(value: object) -> str:
    text = html.escape(str(value))
    is_number = isinstance(value, (int, float)) or (text[:1].isdigit() and text[-1:] in "0123456789%sBkMGT")
    return f'<td class="n">{text}</td>' if is_number else f"<td>{text}</td>"


def _pairs(kind: str, rows: Mapping[str, str]) -> str:
    shown = "".join(f"<div><dt>{html.escape(n)}</dt><dd>{html.escape(v)}</dd></div>" for n, v in rows.items())
    return f'<dl class="{kind}">{shown}</dl>' if rows else ""


# -- the sections ---------------------------------------------------------------------------------------------------


def _names(runs: Sequence[Run]) -> list[str]:
    """Names of folders; of several runs, the parts in which they differ."""
    places = [run.folder.resolve() for run in runs]
    names = [place.name or str(place) for place in places]
    if len(set(names)) < len(names):
        common = os.path.commonpath(places)
        names = [str(place.relative_to(common)) for place in places]
    return [name if names.index(name) == index else f"{name} ({index + 1})" for index, name in enumerate(names)]


def _head(runs: Mapping[str, Run]) -> str:
    if len(runs) == 1:
        (run,) = runs.values()
        return f"<div>{_pairs('about', _about(run))}{_pairs('facts', _facts(run))}</div>"
    columns = [_Html(f'<i class="c{index % 8}"></i>{html.escape(name)}') for index, name in enumerate(runs)]
    about = _side_by_side([_about(run) for run in runs.values()])
    finals = _side_by_side([_finals(run) for run in runs.values()])
    return f"<div>{_table(['', *columns], about)}<h2>Final values</h2>{_table(['', *columns], finals)}</div>"


def _side_by_side(columns: Sequence[Mapping[str, str]], *, differing: bool = False) -> list[tuple[str, ...]]:
    """A row for each name that any column has, with each column's value."""
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [(name, *(column.get(name, "") for column in columns)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1] if differing else rows


def _about(run: Run) -> dict[str, str]:
    """What `log_start` wrote, in words."""
    if not run.programs:
        ranks = re.match(r"rank \d+ of (\d+ on \S+)", "".join(_explained(run)))
        return {"Ranks": ranks[1]} if ranks else {}
    first, last = run.programs[0], run.programs[-1]
    began = _time(first.get("time"))
    found = {
        "Started": "" if began is None else f"{began:%Y-%m-%d %H:%M} UTC",
        "Duration": "" if began is None else _duration(run.ended - began.timestamp()),
        "Command": last.get("command"),
        "Host": last.get("host"),
        "Ranks": f"{last.get('ranks')} on {last.get('device')}, {last.get('nodes')} node(s)",
        "Strategy": ", ".join(map(str, last.get("transforms", []))),
        "Versions": ", ".join(f"{name} {last.get(name)}" for name in ("weft", "torch", "python")),
        "Commit": last.get("commit"),
    }
    return {name: str(value) for name, value in found.items() if value}


def _time(text: object) -> dt.datetime | None:
    try:
        return dt.datetime.fromisoformat(str(text)).astimezone(dt.UTC)
    except ValueError:
        return None


def _duration(seconds: float) -> str:
    minutes, s = divmod(max(round(seconds), 0), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours} h {m:02} min" if hours else f"{m} min {s:02} s" if m else f"{s} s"


def _finals(run: Run) -> dict[str, str]:
    """The last value of each series that has one, and the last step."""
    last = max((step for points in run.series.values() for step in points), default=0)
    found = {"steps": f"{last:,}"}
    for name, points in folded_ranks(run.series).items():
        values = [points[step] for step in sorted(points) if math.isfinite(points[step])]
        if values:
            found[name] = with_unit(name, max(values) if "memory_bytes" in name else values[-1])
    return found


def _facts(run: Run) -> dict[str, str]:
    """The numbers one asks for first."""
    finals = _finals(run)
    found = {"steps": finals["steps"]} if run.series else {}
    found |= {f"last {name.replace('_', ' ')}": text for name, text in finals.items() if name.endswith(_TOLD)}
    memory = [text for name, text in finals.items() if "memory_bytes" in name]
    if memory:
        found["most memory of a rank"] = memory[0]
    if run.resumes:
        found["resumed"] = f"{len(run.resumes)} time{'s' if len(run.resumes) > 1 else ''}"
    return found


def _health(runs: Mapping[str, Run]) -> str:
    rows = []
    for name, run in runs.items():
        rows += [(name, f"{step:,}", text) for step, text in run.texts.get(_HEALTH, [])]
        for series, points in run.series.items():
            lost = sorted(step for step, value in points.items() if not math.isfinite(value))
            if lost:
                more = ", ..." if len(lost) > _SHOWN else ""
                at = ", ".join(f"{step:,}" for step in lost[:_SHOWN])
                rows.append((name, f"{lost[0]:,}", f"{series} is not finite at {len(lost)} step(s): {at}{more}"))
    return _section("Health", _table(("run", "step", "finding"), rows))


def _profiles(runs: Mapping[str, Run], charts: list[Chart]) -> str:
    parts: list[str] = []
    for name, run in runs.items():
        for trace in run.traces:
            steps = ", ".join(f"{ms:.1f}" for ms in trace.steps)
            title = f"rank {trace.rank}, {trace.name}" + (f": steps of {steps} ms" if steps else "")
            inner = "" if parts or (drawn := trace_chart(trace)) is None else _figures([drawn], charts)
            for place, rows in (("on the CPU", trace.host), ("on the device", trace.device)):
                total = sum(time for _, time, _ in rows) or 1.0
                lines = [(n, f"{ms:.2f} ms", f"{100 * ms / total:.0f}%", calls) for n, ms, calls in rows]
                inner += _table((f"operation, {place}", "own time", "share", "calls"), lines)
            opened = "" if parts else " open"
            parts.append(f"<details{opened}><summary>{html.escape(f'{name}: {title}')}</summary>{inner}</details>")
    return _section("Profiles", "".join(parts))


def _events(runs: Mapping[str, Run]) -> str:
    rows: list[tuple[str, str, str]] = []
    for name, run in runs.items():
        rows += [(name, f"{step:,}", "resumed after this step") for step in run.resumes]
        rows += [(name, f"{s:,}", f"{what}: {text}") for what in _EVENTS for s, text in run.texts.get(what, [])]
        for program in run.programs[1:]:
            rows.append((name, "", f"started again at {program.get('time')} on {program.get('ranks')} ranks"))
        rows += [(name, "", f"checkpoint {each}") for each in run.checkpoints]
    return _section("Checkpoints, preemptions and failures", _table(("run", "step", "what happened"), rows))


def _settings(runs: Mapping[str, Run]) -> str:
    tables = [_own_settings(run) for run in runs.values()]
    if len(runs) > 1:
        rows = _side_by_side(tables, differing=True)
        return _section("Settings that differ", _table(["setting", *runs], rows) or "<p>None.</p>")
    (run,) = runs.values()
    found = _table(("setting", "value"), tables[0].items())
    return _section("Settings", found + "".join(f"<pre>{html.escape(text)}</pre>" for text in _explained(run)))


def _own_settings(run: Run) -> dict[str, str]:
    """Hyperparameters, and what `explain` says of the context: lines of a name, a value and where it is from."""
    found = {str(name): str(value) for name, value in run.settings.items()}
    for line in "".join(_explained(run)).splitlines():
        value, origin, _ = line[18:].rpartition(" from ")
        if line.startswith("  ") and origin:
            found.setdefault(line[2:18].strip(), value.strip())
    return found


def _explained(run: Run) -> list[str]:
    """The last text of `explain`, if there is one."""
    return [text for _, text in run.texts.get(EXPLAIN, [])[-1:]]


def _texts(runs: Mapping[str, Run]) -> str:
    parts = [
        f"<details><summary>{html.escape(f'{name}: {what}')}</summary><pre>{html.escape(texts[-1][1])}</pre></details>"
        for name, run in runs.items()
        for what, texts in run.texts.items()
        if what not in (*_EVENTS, _HEALTH, EXPLAIN)
    ]
    return _section("Texts", "".join(parts))


def _sources(runs: Mapping[str, Run]) -> str:
    parts = []
    for run in runs.values():
        problems = "".join(f"<li>{html.escape(problem)}</li>" for problem in run.problems)
        files = html.escape(", ".join(run.sources) or "nothing")
        parts.append(f'<p>Read from {html.escape(str(run.folder))}: {files}.</p><ul class="problems">{problems}</ul>')
    return f"<footer>{''.join(parts)}</footer>"
