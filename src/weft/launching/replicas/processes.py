"""The processes of one replica: they are started and ended together."""

from __future__ import annotations

import os
import pathlib
import signal
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Replica"]


@dataclass
class Replica:
    """The processes of one replica.

    Attributes:
        number: Of the replica.
        attempt: How often it was started before.
        processes: By rank.
        stopped_since: When one of them was first seen stopped; None if none is.
        was_inside: It was in some quorum.
    """

    number: int
    attempt: int
    processes: dict[int, Any] = field(default_factory=dict)
    stopped_since: float | None = None
    was_inside: bool = False

    @property
    def name(self) -> str:
        """Of this replica, and of none that takes its place."""
        return f"{self.number}.{self.attempt}"

    def send(self, number: int) -> None:
        """Send all of them a signal."""
        for process in self.processes.values():
            if process.exitcode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def kill(self) -> None:
        """End what is left of it."""
        self.send(signal.SIGKILL)
        for process in self.processes.values():
            process.join()

    def failed(self) -> tuple[int, Any] | None:
        """A rank that has not ended in good order, and its process."""
        ended = {rank: process for rank, process in self.processes.items() if process.exitcode not in (None, 0)}
        return next(iter(ended.items()), None)

    @property
    def is_stopped(self) -> bool:
        """Whether one of them is stopped."""
        return any(process.exitcode is None and _is_stopped(process.pid) for process in self.processes.values())


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; on Linux."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"
