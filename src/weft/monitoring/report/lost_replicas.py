"""Of an elastic job: who was lost, when, why, and what it cost; as `weft launch --events` wrote it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def replica_rows(quorums: Sequence[tuple[int, Mapping[str, Any]]]) -> Iterator[tuple[str, ...]]:
    """A row for each loss, and for the replicas that joined together: step, time, what, why, cost."""
    for step, found in quorums:
        cost = ["a step again"] if found["again"] else []
        cost += [f"{found['seconds']:.2f} s"] if found["seconds"] is not None else []
        for loss in found["lost"]:
            what = f"replica {loss['replica']} (process {loss['process']}) ended {loss['how']}"
            yield f"{step:,}", _clock(loss["time"]), what, loss["why"], ", ".join(cost)
        if found["new"]:
            yield f"{step:,}", _clock(found["time"]), f"joined: replica {', '.join(map(str, found['new']))}", "", ""


def _clock(seconds: float) -> str:
    return f"{dt.datetime.fromtimestamp(seconds).astimezone():%Y-%m-%d %H:%M:%S}"
