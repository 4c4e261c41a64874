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
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weft.monitoring.report.lost_replicas import replica_rows
from weft.monitoring.report.rehearsals import message_rows, rehearsal_charts, rehearsal_facts
from weft.monitoring.report.run import Rehearsed, Run
from weft.monitoring.report.trace_events import read_trace
from weft.monitoring.run_ledger.file import NAME as LEDGER
from weft.monitoring.run_ledger.file import read_ledger

# What comes from outside may be of any form: nothing is shown of it then, and the page is made of the rest.
_WRONG = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError, csv.Error)
_NOT_FINITE = MappingProxyType({"nan": math.nan, "inf": math.inf, "-inf": -math.inf})
_REHEARSAL = '"format": "weft rehearsal 1"'  # how the file begins
_ELASTIC = "elastic"  # what `weft launch --events` writes of a quorum
EXPLAIN, PROGRAM = "explain", "program"  # texts that `log_start` writes


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
            if path.suffix == suffix and path.name != LEDGER:
                with _problems(run, path):
                    _merge(run, _log_of_file(run, path, entries(path)))
    for place in dict.fromkeys(path.parent for path in files if path.name.startswith("events.out.tfevents.")):
        with _problems(run, place):
            _merge(run, _log_of_events(run, place))
    for path in [path for path in files if path.name == LEDGER][:1]:
        with _problems(run, path):
            run.ledger = read_ledger(path)
    for path in files:
        if path.suffix == ".json":
            _read_json(run, path)
    found = [path.parent for path in files if path.name == "manifest.json"]
    run.checkpoints = [str(path.relative_to(run.folder)) for path in sorted(found, key=_by_number)]
    _name_ranks(run.series)
    run.programs = list(_programs(run.texts.pop(PROGRAM, [])))
    for program in run.programs:
        run.settings |= program["settings"]
    return run


@contextlib.contextmanager
def _problems(run: Run, path: Path) -> Iterator[None]:
    """Note what cannot be read, or is not what it should be, and continue with the next file."""
    try:
        yield
    except (OSError, *_WRONG) as error:
        run.problems.append(f"{path.relative_to(run.folder)}: {type(error).__name__}: {error}")


def _programs(texts: list[tuple[int, str]]) -> Iterator[dict[str, Any]]:
    """What `log_start` wrote; a text of the same name that somebody else wrote is left out."""
    for step, text in texts:
        with contextlib.suppress(*_WRONG):
            program = json.loads(text)
            began = dt.datetime.fromisoformat(program["started"]).timestamp()
            yield {**program, "step": step, "began": began, "settings": dict(program["settings"])}


def _name_ranks(series: dict[str, dict[int, float]]) -> None:
    """Of many ranks, `throughput` logs the highest and the lowest memory, and which ranks have it."""
    for name in [name for name in series if re.fullmatch(r"(.*/)?memory_rank/(max|min)", name)]:
        ranks, bytes_name = series.pop(name), name.replace("memory_rank", "memory_bytes")
        values = series.pop(bytes_name, {})
        for step, value in values.items():
            rank = ranks.get(step, math.nan)
            known = bytes_name.rpartition("/")[0] + f"/rank_{round(rank)}" if math.isfinite(rank) else bytes_name
            series.setdefault(known, {})[step] = value


def _by_number(path: Path) -> tuple[str, int]:
    name, _, number = path.name.rpartition("-")
    return (str(path.parent / name), int(number)) if number.isdecimal() else (str(path), 0)


class _Log(Run):
    """What one file says, line by line, or the event files of one folder."""

    last = -1

    def takes(self, step: int, values: Mapping[str, Any]) -> bool:
        """Add the values of a step; whether they could be."""
        try:
            self.add(step, values)
        except _WRONG:
            return False
        return True

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
                list(replica_rows([(step, value)]))  # raises if it cannot be shown
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


def _log_of_file(run: Run, path: Path, entries: Iterator[tuple[int, dict[str, Any]] | None]) -> _Log:
    log, bad = _Log(path), 0
    for entry in entries:
        if entry is None or not log.takes(*entry):
            bad += 1
    if bad:
        run.problems.append(f"{path.relative_to(run.folder)}: {bad} lines are not JSON with a step and its values")
    return log


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]] | None]:
    """Steps with their values; None for a line that is something else."""
    for line in path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n"):
        try:
            values = json.loads(line)
            if "\\u" in line:
                _check_text(values)
            step = values.pop("step")
        except _WRONG:
            yield None
        else:
            if isinstance(step, int):
                yield step, values


def _check_text(value: Any) -> None:
    """Raise `ValueError` if a text has half of a surrogate pair, as JSON may: it has no bytes."""
    json.dumps(value, ensure_ascii=False).encode()


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if not (row.get("step") or "").isdecimal():
                continue  # of somebody else
            filled = {name: text for name, text in row.items() if text and name and name != "step"}
            yield int(row["step"]), {name: _number(text) for name, text in filled.items()}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _log_of_events(run: Run, place: Path) -> _Log:
    """Scalars and texts, as TensorBoard itself reads them. Events that a later run purged are left out."""
    log = _Log(place)
    try:
        library: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    except ImportError:
        run.problems.append(f"event files were not read: pip install 'torchweft[tracking]' ({place})")
        return log
    accumulator = library.EventAccumulator(str(place), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    tags = accumulator.Tags()
    log.series = {tag: {int(e.step): float(e.value) for e in accumulator.Scalars(tag)} for tag in tags["scalars"]}
    log.texts = {
        tag.removesuffix("/text_summary"): [
            (int(event.step), b"".join(event.tensor_proto.string_val).decode(errors="replace"))
            for event in accumulator.Tensors(tag)
        ]
        for tag in tags["tensors"]
        if tag.endswith("/text_summary")
    }
    return log


def _read_json(run: Run, path: Path) -> None:
    """Read a profile or a rehearsal; what is neither is left alone."""
    with _problems(run, path):
        trace, found = read_trace(path), _rehearsals(path)
        _check_text([None if trace is None else [trace.host, trace.device], found])
        for one in found:
            _ = rehearsal_facts(one), rehearsal_charts(one), list(message_rows(one))  # raise if it cannot be shown
        run.traces += [trace] if trace is not None else []
        run.rehearsals += found
        if trace is not None or found:
            run.sources.append(str(path.relative_to(run.folder)))


def _rehearsals(path: Path) -> list[Rehearsed]:
    """What `weft rehearse` wrote, several of a search; none if the file is something else."""
    with path.open(encoding="utf-8", errors="replace") as file:
        if _REHEARSAL not in file.read(64):
            return []
        file.seek(0)
        found: Rehearsed | list[Rehearsed] = json.load(file)
    return found if isinstance(found, list) else [found]
