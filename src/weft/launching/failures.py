"""Why a job failed: each rank that fails leaves a report, and the launcher prints the one that matters, once.

A report is `<attempt>-<rank>.json` in a folder of the launcher. Most failures are echoes: a rank that notices that
another one is gone. The rank to look at failed by itself, or ended without a word: killed, crashed, `os._exit`.
"""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from weft.engines.torch_errors import is_communication_error
from weft.environments import Topology
from weft.errors import PeerError
from weft.peers.world import PREEMPTED

_MOST_EARLIER = 3  # tracebacks of attempts before the last one


class Ending(NamedTuple):
    """How a job ended.

    Attributes:
        code: Exit code of the launcher.
        text: What it says last.
        rank: The rank that failed first; -1 if none did.
        trace: Its traceback, if it raised.
    """

    code: int = 0
    text: str = ""
    rank: int = -1
    trace: str = ""


HAS_PREEMPTED = Ending(PREEMPTED, "weft launch: the job was asked to end and has ended; start it again to resume")


def ended_by(number: int) -> Ending:
    """The end of a launcher that has got a signal."""
    return Ending(128 + number, f"weft launch: ended by {signal.Signals(number).name}")


def write_report(folder: Path, place: Topology, error: Exception, starters: frozenset[str]) -> None:
    """Write down why this rank fails; `starters` are the files that come before the script in a traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    report = {
        "rank": place.rank,
        "time": time.time(),
        "trace": _own_traceback(error, starters),
        "what": type(error).__name__ + (f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""),
        "blames": [error.rank, error.text] if isinstance(error, PeerError) else None,
        "echo": isinstance(error, PeerError) or is_communication_error(error),
        "crashed": False,
    }
    path = folder / f"{place.attempt}-{place.rank}.json"
    path.with_suffix(".part").write_text(json.dumps(report), encoding="utf-8")
    path.with_suffix(".part").replace(path)


def _own_traceback(error: BaseException, starters: frozenset[str]) -> str:
    """The traceback from the script's first line on, without what started the script."""
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in starters:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def first_failure(
    error: ChildFailedError, folder: Path, attempt: int = 0, left: Mapping[int, int] = MappingProxyType({})
) -> Ending:
    """The rank that failed by itself, first; not one that only noticed.

    Args:
        error: What the agent says.
        folder: With the reports of the ranks.
        attempt: How often the ranks were started again; only the last attempt counts.
        left: Process ids of the ranks that ended with code 0 and without a word, which others may have waited for.

    Returns:
        What to say, and the exit code: that of the rank, or 128 + signal.
    """
    rank, failure = error.get_first_failure()
    reports = _reports(folder, attempt)
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    if code == PREEMPTED and not reports:
        return HAS_PREEMPTED._replace(rank=rank)
    silent = all(report["rank"] != rank for report in reports)
    ended = f"weft launch: rank {rank} (process {failure.pid}) ended {exit_in_words(failure.exitcode)}"
    if not reports or (silent and reports[0]["echo"]):
        return Ending(code, ended, rank)
    first = reports[0]
    culprit = first["blames"][0] if first["blames"] else first["rank"]
    if culprit in left and culprit != first["rank"]:
        last = (
            f"weft launch: rank {culprit} (process {left[culprit]}) ended with exit code 0 while others waited for it"
        )
    else:
        last = ended if first["crashed"] and culprit == rank else f"weft launch: rank {culprit} failed"
    return Ending(code, f"{first['trace']}\n{last}", culprit, first["trace"])


def exit_in_words(code: int) -> str:
    """An exit code, or minus the number of a signal, in words."""
    if code >= 0:
        return f"with exit code {code}"
    try:
        name = f" ({signal.Signals(-code).name})"
    except ValueError:
        name = ""
    return f"by signal {-code}{name}"


def last_words(trace: str) -> str:
    """The last line of a traceback that is not indented: the error itself."""
    return next((line for line in reversed(trace.splitlines()) if line[:1].strip()), "")


def report_text(folder: Path, rank: int, attempt: int) -> str:
    """The traceback that a rank has left; "" if it ended without a word."""
    return next((str(report["trace"]) for report in _reports(folder, attempt) if report["rank"] == rank), "")


def restart_reason(folder: Path, attempt: int) -> str:
    """One line about the failure before this attempt; "" if no rank left a report. The traceback comes at the end."""
    reports = _reports(folder, attempt - 1)
    if not reports or (reports[0]["echo"] and not reports[0]["blames"]):
        return ""
    rank, text = reports[0]["blames"] or (reports[0]["rank"], reports[0]["what"])
    return f"weft launch: rank {rank} failed: {text.splitlines()[0] if text else 'nobody knows why'}\n"


def earlier_tracebacks(folder: Path, but: str = "") -> str:
    """Tracebacks of earlier attempts, each once, without the one that is printed anyway; with an end of line."""
    found: dict[str, str] = {}
    attempts = sorted({int(path.stem.partition("-")[0]) for path in folder.glob("*-*.*")})
    reports = {attempt: _reports(folder, attempt) for attempt in attempts}
    for attempt in attempts:
        if but and attempt == attempts[-1] and any(report["trace"] == but for report in reports[attempt]):
            continue  # whatever else failed in the last one
        for report in reports[attempt]:
            if not report["echo"] and report["trace"] != but:
                title = f"weft launch: attempt {attempt + 1} failed on rank {report['rank']}:\n"
                found.setdefault(report["trace"], title)
    last = list(found.items())[-_MOST_EARLIER:]
    return "".join(f"{title}{trace}\n" for trace, title in last)


def _reports(folder: Path, attempt: int) -> list[dict[str, Any]]:
    """Reports of one attempt; those that are no echo first."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(f"{attempt}-*.json")]
    found += [_crash(path) for path in folder.glob(f"{attempt}-*.crash") if path.stat().st_size]
    return sorted(found, key=lambda report: (report["echo"], report["blames"] is None, report["time"]))


def crash_file(folder: Path, place: Topology) -> Path:
    """Where a rank says in which line it was when native code crashed; empty if none did."""
    return folder / f"{place.attempt}-{place.rank}.crash"


def _crash(path: Path) -> dict[str, Any]:
    """What `faulthandler` wrote, as a report: from the crash to the script's first line."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    starter = next(
        (n for n, line in enumerate(lines) if "<frozen runpy>" in line or "/weft/launching/" in line), len(lines)
    )
    lines = [line for line in lines[:starter] if line and not line.startswith("Extension modules")]
    where = re.search(r'File "(.*)", line (\d+)', "\n".join(lines))
    what = lines[0].rpartition(": ")[2]
    return {
        "rank": int(path.stem.partition("-")[2]),
        "time": path.stat().st_mtime,
        "trace": "\n".join(lines),
        "what": what + (f" in {where[1]}, line {where[2]}" if where else ""),
        "blames": None,
        "echo": what == "Aborted",  # how gloo ends when a peer is gone
        "crashed": True,
    }
