"""What trackers wrote into the folder of a run, put together again.

[Note: a resumed run] Each program that resumes a run appends to its log. What was logged after the checkpoint that it
resumed from was computed again: it was purged, or a step that goes back removes the later ones. A text with the name
"explain", which `log_start` writes, says that a program started there.
"""

from __future__ import annotations

import contextlib
import csv
import datetime as dt
import importlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.monitoring.report.trace_events import Trace, read_trace

__all__ = ["EXPLAIN", "Rehearsed", "Run", "read"]

Rehearsed = Mapping[str, Any]  # the fields of `weft.rehearsal.Rehearsal`

_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_REHEARSAL = '"format": "weft rehearsal 1"'  # how the file begins
_ELASTIC = "elastic"  # what `weft launch --events` writes of a quorum
EXPLAIN, PROGRAM = "explain", "program"  # texts that `log_start` writes


@dataclass
class Run:
    """Everything that was found.

    Attributes:
        folder: Where.
        series: Values by step, for each name.
        texts: Texts with their steps, for each name.
        settings: Hyperparameters, by name.
        starts: Steps that were done when a program began, if it said so.
        resumes: Those of them at which a run was resumed.
        programs: What `log_start` wrote of each program, and when it began, in seconds since 1970.
        quorums: Of an elastic job: the step with which each began, and what had led to it.
        ended: When the last file was written, in seconds since 1970.
        checkpoints: Names of folders with a manifest.
        traces: What profiles say.
        rehearsals: What `weft rehearse --json` wrote.
        sources: Files that were read.
        problems: What could not be read, and why.
    """

    folder: Path
    series: dict[str, dict[int, float]] = field(default_factory=dict)
    texts: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    resumes: list[int] = field(default_factory=list)
    programs: list[dict[str, Any]] = field(default_factory=list)
    quorums: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    ended: float = 0.0
    checkpoints: list[str] = field(default_factory=list)
    traces: list[Trace] = field(default_factory=list)
    rehearsals: list[Rehearsed] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read(folder: str | Path) -> Run:
    """Read all that trackers and profiles left in a folder and below.

    A number that several trackers wrote is taken from JSON lines first, then CSV, then event files.

    Raises:
        FileNotFoundError: There is no such folder.

    Example:
        >>> import tempfile, weft
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = weft.log({"loss": 0.5}, 3, weft.local(), weft.monitoring.jsonl(f"{folder}/run.jsonl"))
        ...     read(folder).series
        {'loss': {3: 0.5}}
    """
    run = Run(Path(folder))
    if not run.folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder")
    below = (path for path in run.folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    files = sorted(below, key=lambda path: (len(path.parts), path))
    for suffix, entries in ((".jsonl", _lines), (".csv", _rows)):
        for path in files:
            if path.suffix == suffix:
                log = _Log(path)
                for step, values in entries(run, path):
                    log.add(step, values)
                _merge(run, log)
    for place in dict.fromkeys(path.parent for path in files if path.name.startswith("events.out.tfevents.")):
        _merge(run, _log_of_events(run, place))
    for path in files:
        if path.suffix == ".json":
            _read_json(run, path)
    found = [path.parent for path in files if path.name == "manifest.json"]
    run.checkpoints = [str(path.relative_to(run.folder)) for path in sorted(found, key=_by_number)]
    run.programs = list(_programs(run.texts.pop(PROGRAM, [])))
    for program in run.programs:
        run.settings |= program["settings"]
    return run


def _programs(texts: list[tuple[int, str]]) -> Iterator[dict[str, Any]]:
    """What `log_start` wrote; a text of the same name that somebody else wrote is left out."""
    for _, text in texts:
        with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
            program = json.loads(text)
            began = dt.datetime.fromisoformat(program["started"]).timestamp()
            yield {**program, "began": began, "settings": dict(program["settings"])}


def _by_number(path: Path) -> tuple[str, int]:
    name, _, number = path.name.rpartition("-")
    return (str(path.parent / name), int(number)) if number.isdecimal() else (str(path), 0)


class _Log(Run):
    """What one file says, line by line, or the event files of one folder."""

    last = -1

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        begins = EXPLAIN in values
        if begins or step < self.last:
            self._go_back(step, begins=begins)
        self.last = step
        for name, value in values.items():
            number = _NOT_FINITE.get(value) if isinstance(value, str) else value
            if isinstance(number, (int, float)) and not isinstance(number, bool):
                self.series.setdefault(name, {})[step] = float(number)
            elif name == _ELASTIC and isinstance(value, dict):
                self.quorums.append((step, value))
            elif isinstance(value, dict):
                self.settings.update(value)
            elif isinstance(value, str):
                self.texts.setdefault(name, []).append((step, value))

    def _go_back(self, step: int, *, begins: bool) -> None:
        """Forget what comes after `step`, or at it if its values come now."""
        if begins and step == 0:  # from the beginning: another run in the same folder
            self.series.clear()
            self.texts.clear()
            self.starts.clear()
            self.resumes.clear()
        for points in self.series.values():
            for other in [each for each in points if each > step or (each == step and not begins)]:
                del points[other]
        if begins:
            self.starts.append(step)
        if step > 0 and self.last >= 0:
            self.resumes.append(step if begins else step - 1)


def _merge(run: Run, log: _Log) -> None:
    """Add what a file holds and no better one did."""
    path = log.folder
    if not (log.series or log.texts):
        return
    run.sources.append(str(path.relative_to(run.folder)))
    files = [path] if path.is_file() else path.glob("events.out.tfevents.*")
    run.ended = max(run.ended, *(file.stat().st_mtime for file in files))
    for name, points in log.series.items():
        if points and (name not in run.series or _differs(run.series[name], points)):
            place = path.parent if path.is_file() else path
            below = "" if place == run.folder else f"{place.relative_to(run.folder)}/"
            own = name if name not in run.series else f"{below}{name}"
            run.series.setdefault(own, points)
    run.texts = {**log.texts, **run.texts}
    run.settings = {**log.settings, **run.settings}
    run.quorums += log.quorums
    run.starts = run.starts or log.starts
    run.resumes = run.resumes or log.resumes


def _differs(points: Mapping[int, float], others: Mapping[int, float]) -> bool:
    """Whether these are other numbers, and not the same ones in a file of another kind (which may round)."""
    both = points.keys() & others.keys()
    return not both or any(
        not math.isclose(points[step], others[step], rel_tol=1e-4, abs_tol=1e-30)
        for step in both
        if math.isfinite(points[step])
    )


def _lines(run: Run, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    bad = 0
    for line in path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n"):
        try:
            values = json.loads(line)
            step = values.pop("step")
        except (ValueError, AttributeError, KeyError, TypeError):
            bad += 1
            continue
        if isinstance(step, int):
            yield step, values
    if bad:
        run.problems.append(f"{path.relative_to(run.folder)}: {bad} lines are not JSON with a step")


def _rows(run: Run, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if not (row.get("step") or "").isdecimal():
                    continue  # of somebody else
                filled = {name: text for name, text in row.items() if text and name and name != "step"}
                yield int(row["step"]), {name: _number(text) for name, text in filled.items()}
    except (ValueError, csv.Error) as error:
        run.problems.append(f"{path.relative_to(run.folder)}: {error}")


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _log_of_events(run: Run, place: Path) -> _Log:
    log = _Log(place)
    try:
        log.series, log.texts = _read_events(place)
    except ImportError:
        run.problems.append(f"event files were not read: pip install 'weft[tracking]' ({place})")
    return log


def _read_events(folder: Path) -> tuple[dict[str, dict[int, float]], dict[str, list[tuple[int, str]]]]:
    """Scalars by name and step, and texts with their steps, as TensorBoard itself reads them.

    Events that a later run purged are left out.

    Raises:
        ImportError: The package tensorboard is not installed.
    """
    library: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    accumulator = library.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    tags = accumulator.Tags()
    scalars = {tag: {int(e.step): float(e.value) for e in accumulator.Scalars(tag)} for tag in tags["scalars"]}
    texts = {}
    for tag in tags["tensors"]:
        name, _, kind = tag.rpartition("/")
        if kind == "text_summary":
            texts[name] = [
                (int(event.step), b"".join(event.tensor_proto.string_val).decode(errors="replace"))
                for event in accumulator.Tensors(tag)
            ]
    return scalars, texts


def _read_json(run: Run, path: Path) -> None:
    """Read a profile or a rehearsal; what is neither is left alone."""
    try:
        trace, rehearsals = read_trace(path), _rehearsals(path)
    except ValueError as error:
        run.problems.append(f"{path.relative_to(run.folder)}: {error}")
        return
    run.traces += [trace] if trace is not None else []
    run.rehearsals += rehearsals
    if trace is not None or rehearsals:
        run.sources.append(str(path.relative_to(run.folder)))


def _rehearsals(path: Path) -> list[Rehearsed]:
    """What `weft rehearse` wrote, several of a search; none if the file is something else."""
    with path.open(encoding="utf-8", errors="replace") as file:
        if _REHEARSAL not in file.read(64):
            return []
        file.seek(0)
        found: Rehearsed | list[Rehearsed] = json.load(file)
    return found if isinstance(found, list) else [found]
