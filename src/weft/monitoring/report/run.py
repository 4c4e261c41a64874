"""What was found of a run: numbers by step, texts, checkpoints, profiles, rehearsals."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.monitoring.report.trace_events import Trace
from weft.monitoring.run_ledger.file import Recorded

Rehearsed = Mapping[str, Any]  # the fields of `weft.rehearsal.Rehearsal`


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
        programs: What `log_start` wrote of each program, at which step, and when it began, in seconds since 1970.
        quorums: Of an elastic job: the step with which each began, and what had led to it.
        ended: When the last file was written, in seconds since 1970.
        checkpoints: Names of folders with a manifest.
        traces: What profiles say.
        rehearsals: What `weft rehearse --json` wrote.
        ledger: What `weft.monitoring.ledger` recorded; None if there is none.
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
    ledger: Recorded | None = None
    sources: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
