"""`jsonl` and `csv`: a line per step, on the disk as soon as it is written."""

from __future__ import annotations

import csv as csv_format
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.monitoring.values import Artifact, HParams, Table, Tracker, numbers_of

__all__ = ["csv", "jsonl"]


def jsonl(path: str | Path) -> Tracker:
    r"""A tracker that writes a line of JSON per step: `step`, numbers, texts, tables, and the paths of artifacts.

    Lines are added to a file that is there, so a resumed run has one file. Each is handed to the system
    at once: a killed process loses none. A number that is not finite is written as a text, as JSON has no
    such numbers. Nothing is opened before the first step.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jsonl(f"{folder}/run.jsonl")({"loss": 0.5}, step=3)
        ...     Path(f"{folder}/run.jsonl").read_text()
        '{"step": 3, "loss": 0.5}\n'
    """
    place = Path(path)

    def write(values: dict[str, Any], /, *, step: int) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps({"step": step, **_plain(values)}, ensure_ascii=False)
        with place.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    return write


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a line of text can hold."""
    numbers = {name: v if math.isfinite(v) else str(v) for name, v in numbers_of(values).items()}
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in numbers:
            found[name] = numbers[name]
        elif isinstance(value, (str, bool)):
            found[name] = value
        elif isinstance(value, HParams):
            found[name] = dict(value.values)
        elif isinstance(value, Table):
            found[name] = {"columns": list(value.columns), "rows": [list(row) for row in value.rows]}
        elif isinstance(value, Artifact):
            found[name] = str(value.path)
    return found


def csv(path: str | Path) -> Tracker:
    """A tracker that writes a row per step; a column for each name, `step` first.

    Rows are added to a file that is there. A name that comes up later gets a column of its own, empty in the
    rows before it. Numbers and texts only.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write = csv(f"{folder}/run.csv")
        ...     write({"loss": 0.5}, step=1)
        ...     write({"loss": 0.25, "lr": 0.1}, step=2)
        ...     print(Path(f"{folder}/run.csv").read_text(), end="")
        step,loss,lr
        1,0.5,
        2,0.25,0.1
    """
    place = Path(path)
    columns: list[str] = []

    def write(values: dict[str, Any], /, *, step: int) -> None:
        row = {"step": step, **{name: v for name, v in _plain(values).items() if not isinstance(v, dict)}}
        if not columns and place.exists():
            with place.open(encoding="utf-8", newline="") as file:
                columns.extend(next(csv_format.reader(file), []))
        new = [name for name in row if name not in columns]
        if new:
            columns.extend(new)
            _widen(place, columns)
        with place.open("a", encoding="utf-8", newline="") as file:
            csv_format.DictWriter(file, columns, lineterminator="\n").writerow(row)

    return write


def _widen(place: Path, columns: list[str]) -> None:
    """Give a file, which need not be there, these columns; it is never seen half written."""
    rows: list[dict[str, str]] = []
    if place.exists():
        with place.open(encoding="utf-8", newline="") as file:
            rows = list(csv_format.DictReader(file))
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = place.with_name(f".{place.name}.new")
    with beside.open("w", encoding="utf-8", newline="") as file:
        writer = csv_format.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(place)
