"""Who was lost, when, why, and what it cost: said by the launcher, and written down for `weft report`.

A line of the file is about one quorum, with what has led to it:
    {"step": 5, "replicas": 2, "elastic": {"time": ..., "new": [], "again": true, "seconds": 0.08, "lost": [...]}}
`time` is in seconds since 1970, `seconds` from the first loss to the quorum, `again`: the step had to be made again.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.peers.quorum import Answer


class LostReplica(NamedTuple):
    """A replica that has ended before the job.

    Attributes:
        replica: Its number.
        rank: The rank that has ended first.
        process: The id of its process.
        how: How that has ended, in words.
        why: Its last words: the last line of its traceback, or why it was killed; "" if that is unknown.
        time: When, in seconds since 1970.
    """

    replica: int
    rank: int
    process: int
    how: str
    why: str
    time: float

    def __str__(self) -> str:
        """In one line."""
        why = f": {self.why}" if self.why else ""
        return f"replica {self.replica} (process {self.process}) ended {self.how}{why}"


class LossLog:
    """What has become of the replicas of a job."""

    def __init__(self, most: int, path: Path | None) -> None:
        """Begin it; `most` replicas are those of the whole job, `path` is a file that lines are appended to."""
        self._most, self._path = most, path
        self._lost: list[LostReplica] = []
        self._since: float | None = None
        self._step, self._count = 0, 0
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)

    def lost(self, loss: LostReplica, since: float, *, was_inside: bool) -> None:
        """A replica has ended; `since` then (on the monotonic clock) the others wait, if it made steps with them."""
        self._lost.append(loss)
        if was_inside:
            self._since = since if self._since is None else min(since, self._since)

    def continues(self, answer: Answer, new: Sequence[int], now: float) -> tuple[str, ...]:
        """A quorum begins; returns what has led to it, line by line."""
        seconds = None if self._since is None else now - self._since
        after = "" if seconds is None else f", {seconds:.2f} s after the loss"
        who = f"; new: {', '.join(map(str, new))}" if answer.number > 1 and new else ""
        print_line(f"from step {answer.step} on with {len(answer.members)} of {self._most} replicas{after}{who}")
        self._step, self._count = answer.step, len(answer.members)
        lost = tuple(map(str, self._lost))
        self._write({"new": list(new) if answer.number > 1 else [], "again": answer.again, "seconds": seconds})
        self._since = None
        return lost

    def end(self, living: int) -> None:
        """The job is over; what was lost after the last quorum is written down."""
        if self._lost:
            self._count = living
            self._write({"new": [], "again": False, "seconds": None})

    def _write(self, what: dict[str, Any]) -> None:
        found = {"time": time.time(), **what, "lost": [loss._asdict() for loss in self._lost]}
        self._lost.clear()
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                print(json.dumps({"step": self._step, "replicas": self._count, "elastic": found}), file=file)


def print_line(text: str) -> None:
    """Print a line of the launcher."""
    sys.stderr.write(f"weft launch: {text}\n")
    sys.stderr.flush()
