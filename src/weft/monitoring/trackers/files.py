"""`jsonl` and `csv`: a line per step, on the disk as soon as it is written.

[Note: purged lines] A resumed run computes again what was logged after its checkpoint. With `purge_step`, lines from
this step on are removed before the first line is written, and so is a last one that a killed program left unfinished.
The file is written anew beside the old one, which it replaces at once. Only lines that a tracker wrote are removed:
those that begin with the step.
"""

from __future__ import annotations

import csv as csv_format
import io
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from weft.checks import check_count
from weft.monitoring.trackers.lifetime import RunTracker
from weft.monitoring.values import Artifact, HParams, Table, Tracker, numbers_of, plain

_BEGIN = b'{"step": '  # of a line of JSON


def jsonl(path: str | Path, *, purge_step: int | None = None) -> Tracker:
    r"""A tracker that writes a line of JSON per step: `step`, numbers, texts, tables, and the paths of artifacts.

    Lines are added to a file that is there, so a resumed run has one file. Each is handed to the system
    at once: a killed process loses none. A number that is not finite is written as a text, as JSON has no
    such numbers. Nothing is opened before the first step.

    Args:
        path: Of the file.
        purge_step: The first step that a resumed run logs: lines from this step on, of the run before, are removed.

    Returns:
        The tracker.

    Raises:
        ValueError: `purge_step` is no step.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     jsonl(f"{folder}/run.jsonl")({"loss": 0.5}, step=3)
        ...     Path(f"{folder}/run.jsonl").read_text()
        '{"step": 3, "loss": 0.5}\n'
    """
    check_purge_step("jsonl", purge_step)
    place = Path(path)
    is_open = False

    def write(values: dict[str, Any], /, *, step: int) -> None:
        nonlocal is_open
        if not is_open:
            place.parent.mkdir(parents=True, exist_ok=True)
            if purge_step is not None and place.exists():
                _purge_lines(place, purge_step)
            end_line(place)
            is_open = True
        line = json.dumps({"step": step, **_plain(values)}, ensure_ascii=False, default=plain)
        with place.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    return RunTracker(write)


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """What a line of text can hold."""
    numbers = {name: v if math.isfinite(v) else str(v) for name, v in numbers_of(values).items()}
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in numbers:
            found[name] = numbers[name]
        elif isinstance(value, str):
            found[name] = value
        elif isinstance(value, HParams):
            found[name] = dict(value.values)
        elif isinstance(value, Table):
            found[name] = {"columns": list(value.columns), "rows": [list(row) for row in value.rows]}
        elif isinstance(value, Artifact):
            found[name] = str(value.path)
    return found


def _purge_lines(place: Path, purge_step: int) -> None:
    with place.open("rb") as file:
        if any(_is_purged(line, purge_step) for line in file):
            file.seek(0)
            _replace(place, (line for line in file if not _is_purged(line, purge_step)))


def _is_purged(line: bytes, purge_step: int) -> bool:
    """See [Note: purged lines]."""
    if not line.startswith(_BEGIN):
        return _BEGIN.startswith(line)  # not finished
    try:
        step = json.loads(line)["step"]
    except (ValueError, RecursionError):
        return not line.endswith(b"\n")
    return type(step) is int and step >= purge_step


def csv(path: str | Path, *, purge_step: int | None = None) -> Tracker:
    """A tracker that writes a row per step; a column for each name, `step` first.

    Rows are added to a file that is there. A name that comes up later gets a column of its own, empty in the
    rows before it. Numbers and texts only.

    Args:
        path: Of the file.
        purge_step: As for `jsonl`.

    Returns:
        The tracker.

    Raises:
        ValueError: `purge_step` is no step.

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
    check_purge_step("csv", purge_step)
    place = Path(path)
    columns: list[str] | None = None

    def write(values: dict[str, Any], /, *, step: int) -> None:
        nonlocal columns
        if columns is None:
            columns = _columns(place)
            if purge_step is not None and columns[:1] == ["step"]:
                _purge_rows(place, columns, purge_step)
            end_line(place)
        row = {"step": step, **{name: v for name, v in _plain(values).items() if not isinstance(v, dict)}}
        new = [name for name in row if name not in columns]
        if new:
            columns.extend(new)
            place.parent.mkdir(parents=True, exist_ok=True)
            _widen(place, columns)
        with place.open("a", encoding="utf-8", newline="") as file:
            csv_format.DictWriter(file, columns, lineterminator="\n").writerow(row)

    return RunTracker(write)


def _columns(place: Path) -> list[str]:
    if not place.exists():
        return []
    with _opened(place) as file:
        return next(csv_format.reader(file), [])


def _opened(place: Path) -> TextIO:
    return place.open(encoding="utf-8", errors="surrogateescape", newline="")


def _rows(file: TextIO) -> Iterator[tuple[list[str], str]]:
    """The rows of a table, each with its text."""
    read: list[str] = []

    def lines() -> Iterator[str]:
        for line in file:
            read.append(line)
            yield line

    for row in csv_format.reader(lines()):
        yield row, "".join(read)
        read.clear()


def _is_ours(row: list[str]) -> bool:
    return bool(row) and row[0].removeprefix("-").isdecimal()


def _purge_rows(place: Path, columns: list[str], purge_step: int) -> None:
    def is_purged(row: list[str], text: str) -> bool:
        """See [Note: purged lines]."""
        in_quotes = text.count('"') % 2 == 1 and text.count("\n") <= 1
        is_cut = in_quotes or (len(row) != len(columns) and not text.endswith("\n"))
        return _is_ours(row) and (int(row[0]) >= purge_step or is_cut)

    with _opened(place) as file:
        if any(is_purged(row, text) for row, text in _rows(file)):
            file.seek(0)
            _replace(place, (_bytes(text) for row, text in _rows(file) if not is_purged(row, text)))


def _widen(place: Path, columns: list[str]) -> None:
    """Give a file, which need not be there, these columns."""
    header = io.StringIO()
    csv_format.writer(header, lineterminator="\n").writerow(columns)
    found = [header.getvalue()]
    if place.exists():
        with _opened(place) as file:
            for row, text in list(_rows(file))[1:]:
                missing = "," * (len(columns) - len(row)) if _is_ours(row) else ""
                found.append(text.rstrip("\r\n") + missing + "\n" if missing else text)
    _replace(place, map(_bytes, found))


# -- both ----------------------------------------------------------------------------------------------


def check_purge_step(what: str, purge_step: int | None) -> None:
    """Raise if this is no step.

    Raises:
        ValueError: It is not.
    """
    if purge_step is not None:
        fix = f"weft.monitoring.{what}(path, purge_step=restored.step + 1 if restored else None)"
        check_count(what, "purge_step", purge_step, least=0, fix=fix)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def end_line(place: Path) -> None:
    """End the last line of a file that is there."""
    if place.exists() and place.stat().st_size:
        with place.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")


def _replace(place: Path, lines: Iterable[bytes]) -> None:
    """Give a file these lines; it is never seen half written."""
    whole = place.resolve()  # a link stays one
    beside = whole.with_name(f".{whole.name}.new")
    with beside.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    if whole.exists():
        shutil.copymode(whole, beside)
    beside.replace(whole)
