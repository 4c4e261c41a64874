"""The file of a ledger: a line of JSON for each start of a program and for each step, only ever added to.

[Note: a resumed run] A program that resumes a run adds its lines to the file. A step that goes back removes those from
it on, which were recorded before and are computed again. A line that a killed program left unfinished is left out.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.monitoring.trackers.files import end_line

NAME = "ledger.jsonl"
Entry = Mapping[str, Any]


def write_line(folder: Path, line: Entry) -> None:
    """Add a line to the ledger in a folder; the first of a program has the name "start"."""
    path = folder / NAME
    if "start" in line:
        folder.mkdir(parents=True, exist_ok=True)
        end_line(path)
    with path.open("ab") as file:
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
    path, found, start = Path(folder), Recorded(Path(folder)), {}
    for text in (path if path.is_file() else path / NAME).read_text("utf-8", "replace").split("\n"):
        line = None
        with contextlib.suppress(ValueError, RecursionError):
            line = json.loads(text)
        if isinstance(line, dict) and isinstance(line.get("start"), dict):
            start = line["start"]
        elif isinstance(line, dict) and type(line.get("step")) is int:
            for later in [step for step in found.steps if step >= line["step"]]:
                del found.steps[later], found.starts[later]
            found.steps[line["step"]], found.starts[line["step"]] = line, start
    return found
