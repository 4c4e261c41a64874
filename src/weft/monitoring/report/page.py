"""One page of HTML about a run, or about several side by side. It loads nothing from the network.

[Note: the page's policy] Scripts and styles on the page are allowed by their hash only, and nothing may be loaded or
evaluated: what a log brings in cannot run, even if it got past the escaping. plotly.js needs no eval for the kinds of
traces that `page.js` draws (those on WebGL do). The rules that it adds while it runs go to the page's own sheet,
which is why that has the name `plotly.js-style-global`; a sheet for maps that it would add has a place already.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import importlib.resources
import json
import math
import os
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from weft.checks import import_extra
from weft.monitoring.report.charts import MEMORY, Chart, charts_of, trace_chart
from weft.monitoring.report.head import cards, common_settings, final_values, memory_rows, summary_cell
from weft.monitoring.report.lost_replicas import replica_rows
from weft.monitoring.report.read_run import EXPLAIN, read
from weft.monitoring.report.rehearsals import message_rows, rehearsal_charts, rehearsal_facts
from weft.monitoring.report.run import Run
from weft.monitoring.run_ledger.compare import compare_recorded
from weft.peers.pretended import rehearses

_EVENTS = ("preempted", "failure")  # names of texts that say why a program ended
_RECORDS = "records"  # a table of rows that stand one below the other where the screen is narrow
_REPLICA = ("before step", "time", "what happened", "why", "cost")
_HEALTH, _PROBES = "health", "probes"
_SHEET_FOR_MAPS = r'getElementById\("([0-9a-f]{32,})"\)'
_SHOWN = 20  # steps with values that are not finite, by number

Runs = Mapping[str, Run]


def write_report(folders: str | Path | Iterable[str | Path], *, out: str | Path | None = None) -> list[Run]:
    """Read the folder of a run, or of several to compare, and write one page; what `weft report` does.

    Call it on one rank. It reads files only.

    Args:
        folders: Where the trackers of a run wrote, and below; or several of them.
        out: What to write; default: `report.html` in the folder, of several runs in the current directory.

    Returns:
        What was read, by run. If no run has numbers, profiles or rehearsals, nothing is written; in a rehearsal, in
        which trackers write nothing, nothing is read either.

    Raises:
        FileNotFoundError: There is no such folder.
        MissingExtra: The package plotly is not installed.
    """
    places = [Path(each) for each in ([folders] if isinstance(folders, (str, Path)) else folders)]
    if rehearses():
        return [Run(place) for place in places]
    runs = [read(place) for place in places]
    if any(run.series or run.traces or run.rehearsals for run in runs):
        place = Path(out) if out is not None else (places[0] if len(places) == 1 else Path()) / "report.html"
        text = render(runs)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8", newline="\n")
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
    sections = {title: _figures(drawn, charts) for title, drawn in charts_of(named).items()}
    if MEMORY in sections:
        sections[MEMORY] += _memory(named)
    sections |= {
        "Replicas": _of_runs(named, _REPLICA, lambda run: replica_rows(run.quorums), _RECORDS),
        "Health": _of_runs(named, ("step", "finding"), _findings),
        "Probes": _of_runs(named, ("transform", "what was measured", "up to step"), _measured, _RECORDS),
        "Ledger": _ledger(named),
        "Profiles": _profiles(named, charts),
        "Rehearsals": _rehearsals(named, charts),
        "Checkpoints, preemptions and failures": _of_runs(named, ("step", "what happened"), _events),
        "Settings" if len(runs) == 1 else "Settings that differ": _settings(named),
        "Texts": _texts(named),
    }
    expected = "the package plotly, which draws the charts"
    library = import_extra(
        "plotly.offline", "report: the package plotly is not installed", expected=expected, extra="report"
    )
    plotly, style = str(library.get_plotlyjs()), _asset("page.css")
    script = f"{plotly}\n{_asset('page.js')}".replace("\r\n", "\n").replace("</script", "<\\/script")
    return string.Template(_asset("page.html")).substitute(
        title=html.escape(" and ".join(named) if len(named) < 3 else f"{len(named)} runs"),
        policy=f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; img-src data: blob:",
        style=style,
        head=_head(named),
        main="".join(f"<section><h2>{title}</h2>{inner}</section>" for title, inner in sections.items() if inner)
        + _sources(runs),
        places="".join(f'<i id="{name}" hidden></i>' for name in set(re.findall(_SHEET_FOR_MAPS, plotly))),
        data=json.dumps(charts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        script=script,
    )


def _asset(name: str) -> str:
    return importlib.resources.files("weft.monitoring.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


# -- what sections are made of ------------------------------------------------------------------------------------


def _figures(drawn: Iterable[Chart], charts: list[Chart]) -> str:
    """A place for each chart, which is added to those of the page."""
    parts = []
    for chart in drawn:
        parts.append(
            f'<figure class="chart{" wide" if chart["wide"] else ""}"><figcaption>{html.escape(chart["title"])}'
            f'</figcaption><div class="plot" data-chart="{len(charts)}"></div></figure>'
        )
        charts.append(chart)
    return f'<div class="charts">{"".join(parts)}</div>'


def _table(head: Sequence[str], rows: Iterable[Sequence[object]], kind: str = "") -> str:
    """A table, empty without rows."""
    labels = head if kind == _RECORDS else [""] * len(head)
    lines = "".join(f"<tr>{''.join(map(_cell, row, labels))}</tr>" for row in rows)
    names = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    table = f'<table class="{kind}"><thead><tr>{names}</tr></thead><tbody>{lines}</tbody></table>'
    return f'<div class="scroll">{table}</div>' if lines else ""


def _table_of(lines: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table whose first line is its head; empty without lines."""
    return _table(lines[0], lines[1:], kind) if lines else ""


def _of_runs(runs: Runs, head: Sequence[str], rows_of: Callable[[Run], Iterable[Sequence[str]]], kind: str = "") -> str:
    """A table of what runs have; of several, each row begins with the name of its run."""
    if len(runs) == 1:
        return _table(head, rows_of(*runs.values()), kind)
    return _table(["run", *head], [(name, *row) for name, run in runs.items() for row in rows_of(run)], kind)


def _cell(value: object, label: str) -> str:
    """Numbers stand to the right."""
    text = str(value)
    kind = ' class="n"' if re.fullmatch(r"-?\d[\d.,e+-]*( ?[%a-zA-Z/]{1,3})?", text) else ""
    kind += f' data-label="{html.escape(label)}"' if label else ""
    return f"<td{kind}>{html.escape(text)}</td>"


def _pairs(kind: str, rows: Mapping[str, str]) -> str:
    shown = "".join(f"<div><dt>{html.escape(n)}</dt><dd>{html.escape(v)}</dd></div>" for n, v in rows.items())
    return f'<dl class="{kind}">{shown}</dl>' if rows else ""


def _side_by_side(columns: Sequence[Mapping[str, str]]) -> list[tuple[str, ...]]:
    """A row for each name that any column has, with each column's value."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, *(column.get(name, "") for column in columns)) for name in names]


def _details(title: str, inner: str, *, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{html.escape(title)}</summary>{inner}</details>"


# -- the sections ---------------------------------------------------------------------------------------------------


def _names(runs: Sequence[Run]) -> list[str]:
    """Names of folders; of several runs with the same name, paths below the folder that has them all."""
    places = [run.folder.resolve() for run in runs]
    names = [place.name or str(place) for place in places]
    if len(set(names)) < len(set(places)):
        names = [str(place.relative_to(os.path.commonpath(places))) for place in places]
    return [name if names.index(name) == index else f"{name} ({index + 1})" for index, name in enumerate(names)]


def _head(runs: Runs) -> str:
    if len(runs) == 1:
        (run,) = runs.values()
        common, table = common_settings(run)
        return _pairs("about", common or _ranks(run)) + _table_of(table, _RECORDS) + _pairs("facts", cards(run))
    columns = [summary_cell(run) or _ranks(run) for run in runs.values()], [final_values(run) for run in runs.values()]
    return "<h2>Final values</h2>".join(_table(["", *runs], _side_by_side(each), "runs") for each in columns)


def _ranks(run: Run) -> dict[str, str]:
    """What `explain` says, if `log_start` wrote nothing."""
    ranks = re.match(r"rank \d+ of (\d+ on \S+)", _explained(run))
    return {"ranks": ranks[1]} if ranks else {}


def _memory(runs: Runs) -> str:
    """Of one run: each rank, for those that lie on each other in the chart."""
    if len(runs) > 1:
        return ""
    title, table = memory_rows(*runs.values())
    return f"<h3>{title}</h3>{_table_of(table)}" if table else ""


def _findings(run: Run) -> Iterator[tuple[str, str]]:
    yield from ((f"{step:,}", text) for step, text in run.texts.get(_HEALTH, []))
    for series, points in run.series.items():
        lost = sorted(step for step, value in points.items() if not math.isfinite(value))
        at = ", ".join(f"{step:,}" for step in lost[:_SHOWN]) + (", ..." if len(lost) > _SHOWN else "")
        if lost:
            yield f"{lost[0]:,}", f"{series} is not finite at {len(lost)} step(s): {at}"


def _measured(run: Run) -> list[tuple[str, ...]]:
    """What `probe_results` said last."""
    last = run.texts.get(_PROBES, [])[-1:]
    return [(*line.partition(": ")[::2], f"{step:,}") for step, text in last for line in text.splitlines()]


def _ledger(runs: Runs) -> str:
    """Which steps were recorded, and of several runs the first that differs from those of the first one."""
    recorded = {name: run.ledger for name, run in runs.items() if run.ledger is not None and run.ledger.steps}
    rows: list[tuple[str, str, str]] = []
    for name, one in recorded.items():
        found = ""
        with contextlib.suppress(ValueError, TypeError, LookupError, AttributeError):  # a line may be of any form
            found = compare_recorded(next(iter(recorded.values())), one).text
        rows.append((name, f"{min(one.steps)} to {max(one.steps)}", found if rows else ""))
    if len(runs) == 1:
        return _table(["steps recorded"], [row[1:2] for row in rows])
    return _table(["run", "steps recorded", f"against {next(iter(recorded), '')}"], rows)


def _profiles(runs: Runs, charts: list[Chart]) -> str:
    parts: list[str] = []
    for name, trace in ((name, trace) for name, run in runs.items() for trace in run.traces):
        inner = "" if parts else _figures(trace_chart(trace), charts)
        for place, rows in (("on the CPU", trace.host), ("on the device", trace.device)):
            total = sum(time for _, time, _ in rows) or 1.0
            lines = [(n, f"{ms:.2f} ms", f"{100 * ms / total:.0f}%", calls) for n, ms, calls in rows]
            inner += _table((f"operation, {place}", "own time", "share", "calls"), lines)
        steps = ", ".join(f"{ms:.1f}" for ms in trace.steps)
        title = f"{name}: rank {trace.rank}, {trace.name}" + (f": steps of {steps} ms" if steps else "")
        parts.append(_details(title, inner, opened=not parts))
    return "".join(parts)


def _rehearsals(runs: Runs, charts: list[Chart]) -> str:
    parts: list[str] = []
    for name, found in ((name, found) for name, run in runs.items() for found in run.rehearsals):
        inner = _pairs("facts", rehearsal_facts(found)) + _figures(rehearsal_charts(found), charts)
        head = ("messages of a step", "axis", "ranks", "count", "whole", "sent")
        inner += _table(head, message_rows(found), _RECORDS)
        parts.append(_details(f"{name}: {found['program']}, before it runs", inner, opened=not parts))
    return "".join(parts)


def _events(run: Run) -> Iterator[tuple[str, str]]:
    yield from ((f"{step:,}", "resumed after this step") for step in run.resumes)
    yield from ((f"{step:,}", f"{what}: {text}") for what in _EVENTS for step, text in run.texts.get(what, []))
    yield from (("", f"checkpoint {each}") for each in run.checkpoints)


def _settings(runs: Runs) -> str:
    rows = _side_by_side([_own_settings(run) for run in runs.values()])
    if len(runs) > 1:
        return _table(["setting", *runs], [row for row in rows if len(set(row[1:])) > 1]) or "<p>None.</p>"
    explained = "".join(map(_explained, runs.values()))
    return _table(("setting", "value"), rows) + (f"<pre>{html.escape(explained)}</pre>" if explained else "")


def _own_settings(run: Run) -> dict[str, str]:
    """Hyperparameters, and what `explain` says of the context: lines of a name, a value and where it is from."""
    lines = re.findall(r"^  (\S.{15}) (.*?) +from ", _explained(run), re.MULTILINE)
    return {name.strip(): value for name, value in lines} | {str(n): str(v) for n, v in run.settings.items()}


def _explained(run: Run) -> str:
    """The last text of `explain`, if there is one."""
    return "".join(text for _, text in run.texts.get(EXPLAIN, [])[-1:])


def _texts(runs: Runs) -> str:
    return "".join(
        _details(f"{name}: {what}", f"<pre>{html.escape(texts[-1][1])}</pre>")
        for name, run in runs.items()
        for what, texts in run.texts.items()
        if what not in (*_EVENTS, _HEALTH, _PROBES, EXPLAIN)
    )


def _sources(runs: Sequence[Run]) -> str:
    parts = [f"Read from {run.folder}: {', '.join(run.sources) or 'nothing'}." for run in runs]
    problems = "".join(f"<li>{html.escape(problem)}</li>" for run in runs for problem in run.problems)
    return f'<footer>{html.escape(" ".join(parts))}<ul class="problems">{problems}</ul></footer>'
