"""`RanksFailed`: which ranks failed, with their tracebacks, and which one to look at first."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.errors import PeerError, WeftError


class RanksFailed(WeftError):
    """A function failed on some ranks.

    Attributes:
        errors: Exception per failed rank; `TimeoutError` if it did not answer in time, `RuntimeError` if it ended
            without an answer, or raised what could not be sent.
        traces: Traceback text per failed rank; of one that did not answer, where it was.
        first: The rank to look at first, which is one of `errors`: its error is not the echo of another's.
    """

    def __init__(self, text: str, errors: Mapping[int, BaseException], traces: Mapping[int, str], first: int) -> None:
        super().__init__(text)
        self.errors = dict(errors)
        self.traces = dict(traces)
        self.first = first

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (self.args[0], self.errors, self.traces, self.first)


def _waits(stack: str) -> bool:
    """Whether a rank is in this package or in torch.distributed, where it waits for other ranks."""
    waits = tuple(f'File "{code.co_filename}"' for code in (threading.Event.wait.__code__, Future.result.__code__))
    innermost = next((line for line in stack.splitlines() if not line.lstrip().startswith(waits)), "")
    return any(f'File "{place}' in innermost for place in (Path(__file__).parents[1], Path(dist.__file__).parent))


def failure_of(
    n: int,
    answers: Mapping[int, Mapping[str, Any]],
    ended: Mapping[int, int],
    stacks: Mapping[int, str],
    timeout_s: float,
) -> RanksFailed:
    """The error of a call that did not succeed on all ranks."""
    errors: dict[int, BaseException] = {}
    traces: dict[int, str] = {}
    for rank in range(n):
        answer = answers.get(rank)
        if answer is None:
            traces[rank] = "still running when it was killed" + (
                f", here (innermost call first):\n{stacks[rank]}" if rank in stacks else ", and did not say where"
            )
            errors[rank] = TimeoutError(traces[rank])
        elif answer.get("died"):
            code = ended.get(rank)
            traces[rank] = "ended without an answer" + (f", exit code {code}" if code is not None else "")
            errors[rank] = RuntimeError(traces[rank])
        elif not answer["ok"]:
            traces[rank] = answer["trace"]
            errors[rank] = RuntimeError(answer["trace"]) if answer["error"] is None else answer["error"]
        if answer is not None and answer.get("output"):
            traces[rank] = traces.get(rank, "fine") + "\nIt printed:\n" + answer["output"]
    guilty = [r for r in traces if r in answers and not answers[r]["ok"] and not isinstance(errors.get(r), PeerError)]
    silent = [r for r in range(n) if r not in answers]
    first = min(guilty or [r for r in silent if not _waits(stacks.get(r, ""))] or silent or errors)
    hang = all(rank not in answers or answers[rank]["ok"] for rank in range(n))
    headline = f"no answer within {timeout_s:g} s" if hang else f"rank {first} failed first"
    parts = [f"run_ranks: {headline}"]
    parts += [
        f"---- rank {rank} of {n} ----\n{traces[rank].rstrip()}"
        for rank in sorted(traces, key=lambda r: (r != first, r))
    ]
    failure = RanksFailed("\n".join(parts), errors, traces, first)
    failure.__cause__ = errors.get(first)
    return failure
