"""The file of a ledger: a line of JSON for each start of a program and for each step, only ever added to.

[Note: a resumed run] A program that resumes a run adds its lines to the file. A step that goes back removes those from
it on, which were recorded before and are computed again. A line that a killed program left unfinished is left out.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.monitoring.trackers.files import end_line

NAME = "ledger.jsonl"
Entry = Mapping[str, Any]


class LedgerFile:
    """Where the main rank writes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._rates: object = None
        self._is_open = False

    def start(self, facts: Entry) -> None:
        """Write what the program is that begins or resumes the run."""
        self._write({"start": facts})

    def step(self, step: int, values: Entry, rates: Entry) -> None:
        """Write a step; rates only if they are others than those before."""
        changed = {} if rates == self._rates else {"rates": rates}
        self._rates = rates
        self._write({"step": step, **values, **changed})

    def _write(self, line: Entry) -> None:
        if not self._is_open:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            end_line(self._path)
            self._is_open = True
        with self._path.open("ab") as file:
            file.write(f"{json.dumps(line)}\n".encode())


@dataclass
class Recorded:
    """What a ledger holds.

    Attributes:
        folder: Where it lies.
        steps: The values of each step.
        starts: For each step the facts of the program that recorded it.
    """

    folder: Path
    steps: dict[int, Entry] = field(default_factory=dict)
    starts: dict[int, Entry] = field(default_factory=dict)


def read_ledger(folder: str | Path) -> Recorded:
    """Read the ledger in a folder, or in a file.

    Raises:
        OSError: There is none, or it cannot be read.

    Example:
        >>> import tempfile, weft
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with weft.monitoring.ledger({}, folder, weft.local()) as record:
        ...         record(1, loss=0.5)
        ...     read_ledger(folder).steps[1]["loss"]
        0.5
    """
    path = Path(folder)
    path = path / NAME if path.is_dir() else path
    found, start, rates = Recorded(Path(folder)), {}, {}
    for text in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        line = None
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
        if not isinstance(line, dict):
            continue
        if isinstance(line.get("start"), dict):
            start, rates = line["start"], {}
        elif type(line.get("step")) is int:
            step, rates = line["step"], line.get("rates", rates)
            for later in [each for each in found.steps if each >= step]:
                del found.steps[later], found.starts[later]
            found.steps[step], found.starts[step] = {**line, "rates": rates}, start
    return found


def number(value: float | None) -> float | str | None:
    """A number as JSON has it."""
    return value if value is None or math.isfinite(value) else str(value)
