"""One page of HTML about a run: pictures first, then settings. It loads nothing and asks nobody."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from weft.monitoring.report.charts import chart, table, with_unit
from weft.monitoring.report.read_run import EXPLAIN, Run, finite, read
from weft.monitoring.report.style import SCRIPT, STYLE
from weft.monitoring.report.trace_events import Trace

__all__ = ["render", "write_report"]

_SPEED = ("_per_s", "data_share", "mfu")


def render(run: Run) -> str:
    """Render what was read as one page.

    Names that belong together share an axis: losses; everything below one name, such as `memory_bytes/rank_0`
    and `memory_bytes/rank_1`; `step_s/...` as areas that add up.

    Example:
        >>> from pathlib import Path
        >>> page = render(Run(Path("runs/a"), series={"loss": {1: 2.0, 2: 1.0}}))
        >>> page.count("<svg"), page.count("://")
        (1, 0)
    """
    groups = _groups(run.series)
    sections = [
        ("Loss", [g for g in groups if "loss" in g.lower()]),
        ("Throughput", [g for g in groups if g.endswith(_SPEED)]),
        (
            "Time and memory",
            [g for g in ("step_s/", "step_s") if g in groups][:1]
            + [g for g in groups if "memory" in g or "bytes" in g],
        ),
    ]
    known = {"step_s", *(g for _, chosen in sections for g in chosen)}
    sections.append(("More", [g for g in groups if g not in known]))
    body = [_facts(run)]
    for title, chosen in sections:
        figures = "".join(
            chart(g.rstrip("/"), groups[g], marks=run.resumes, stacked=g == "step_s/", wide=g == "loss")
            for g in dict.fromkeys(chosen)
        )
        if figures:
            body.append(f'<section><h2>{title}</h2><div class="charts">{figures}</div></section>')
    body += [_profiles(run.traces), _settings(run), _going_on(run), _texts(run.texts), _sources(run)]
    name = html.escape(run.folder.name or str(run.folder))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>'
        f"{name} - weft report</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        f"style-src '{_hash(STYLE)}'; script-src '{_hash(SCRIPT)}'; img-src data:\">"
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head>'
        f"<body><header><h1>{name}</h1></header><main>{''.join(body)}</main>"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


def _hash(text: str) -> str:
    """By which a browser knows the page's own style and script from what a log may have brought in."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def write_report(folder: str | Path, *, out: str | Path | None = None) -> Run:
    """Read the folder of a run, and write one page about it; what `weft report` does.

    Call it on one rank. It reads files only.

    Args:
        folder: Where trackers wrote, and below.
        out: What to write; default: `report.html` in the folder.

    Returns:
        What was read. With neither numbers nor profiles nothing is written.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    run = read(folder)
    if run.series or run.traces:
        place = Path(folder) / "report.html" if out is None else Path(out)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(render(run), encoding="utf-8")
    return run


def _groups(series: Mapping[str, Mapping[int, float]]) -> dict[str, dict[str, Mapping[int, float]]]:
    """Which series share an axis; "a/" holds what is below a."""
    groups: dict[str, dict[str, Mapping[int, float]]] = {}
    for name in series:
        above, slash, _ = name.rpartition("/")
        key = "loss" if name.endswith("loss") or name.startswith("loss/") else f"{above}/" if slash else name
        groups.setdefault(key, {})[name] = series[name]
    return groups


def _facts(run: Run) -> str:
    """The numbers one asks for first."""
    last = max((step for points in run.series.values() for step in points), default=None)
    facts = [("steps", f"{last:,}")] if last is not None else []
    for name, points in run.series.items():
        values = list(finite(points))
        if values and name.endswith(("loss", "tokens_per_s", "mfu", "data_share")):
            facts.append((f"last {name.replace('_', ' ')}", with_unit(name, values[-1][1])))
    memory = [v for n, points in run.series.items() if "memory_bytes" in n for _, v in finite(points)]
    if memory:
        facts.append(("most memory of a rank", with_unit("bytes", max(memory))))
    ranks = re.match(r"rank \d+ of (\d+) on (\S+)", run.texts.get(EXPLAIN, ""))
    if ranks:
        facts.append(("ranks", f"{ranks[1]} on {ranks[2]}"))
    if run.resumes:
        facts.append(("went on", f"{len(run.resumes)} time{'s' if len(run.resumes) > 1 else ''}"))
    shown = "".join(f"<div><dt>{html.escape(n)}</dt><dd>{html.escape(v)}</dd></div>" for n, v in facts)
    return f'<dl class="facts">{shown}</dl>'


def _profiles(traces: Iterable[Trace]) -> str:
    parts: list[str] = []
    for trace in traces:
        steps = ", ".join(f"{ms:.1f}" for ms in trace.steps)
        title = f"Rank {trace.rank}, {trace.name}" + (f": steps of {steps} ms" if steps else "")
        inner = ""
        for place, rows in (("on the CPU", trace.host), ("on the device", trace.device)):
            total = sum(time for _, time, _ in rows) or 1.0
            if rows:
                lines = [(n, f"{ms:.2f} ms", f"{100 * ms / total:.0f}%", calls) for n, ms, calls in rows]
                inner += table((f"operation, {place}", "own time", "share", "calls"), lines)
        parts.append(f"<details{'' if parts else ' open'}><summary>{html.escape(title)}</summary>{inner}</details>")
    return f"<section><h2>Profile</h2>{''.join(parts)}</section>" if parts else ""


def _settings(run: Run) -> str:
    found = ""
    if EXPLAIN in run.texts:
        rows, others = [], []
        for line in run.texts[EXPLAIN].splitlines():
            value, source, origin = line[18:].rpartition(" from ")
            if line.startswith("  ") and source:
                rows.append((line[2:18].strip(), value.strip(), origin))
            else:
                others.append(line)
        found += table(("setting", "value", "from"), rows) if rows else ""
        found += f"<pre>{html.escape(chr(10).join(others))}</pre>"
    if run.settings:
        found += table(("hyperparameter", "value"), sorted((str(k), str(v)) for k, v in run.settings.items()))
    return f"<section><h2>Settings</h2>{found}</section>" if found else ""


def _going_on(run: Run) -> str:
    rows = [("went on after step", str(step)) for step in run.resumes]
    rows += [("checkpoint", name) for name in run.checkpoints]
    return f"<section><h2>Checkpoints and restarts</h2>{table(('what', 'which'), rows)}</section>" if rows else ""


def _texts(texts: Mapping[str, str]) -> str:
    parts = [
        f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(text)}</pre></details>"
        for name, text in texts.items()
        if name != EXPLAIN
    ]
    return f"<section><h2>Texts</h2>{''.join(parts)}</section>" if parts else ""


def _sources(run: Run) -> str:
    problems = "".join(f"<li>{html.escape(problem)}</li>" for problem in run.problems)
    read = html.escape(", ".join(run.sources) or "nothing")
    return (
        f'<footer><p>Read from {html.escape(str(run.folder))}: {read}.</p><ul class="problems">{problems}</ul></footer>'
    )
