"""`weft launch`: a thin front of `torch.distributed.run`.

The agent is torch's own: rendezvous, environment of the ranks, monitoring. Three things differ from
torchrun: ranks are forked from a process that has imported torch already, the traceback of the rank
that failed first is the last thing printed, and a job that was told to end and has saved itself ends
with the exit code that says so.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from weft.context.world import PREEMPTED
from weft.errors import ContextError, PeerError, message
from weft.launchers import Topology, topology

__all__ = ["add_parser", "config", "first_failure", "run_target"]

_PREEMPTED = "weft launch: the job was told to end and has ended; it may be started again to go on"


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "launch",
        help="run a script on several processes",
        usage="weft launch [-n N] [--nnodes N] [--node-rank R] [--rdzv HOST:PORT] [--max-restarts N] [-m] script ...",
        allow_abbrev=False,
        description="Run a script, or a module with -m, on N processes per node. What follows the script is its own.",
    )
    sub.add_argument("-n", "--nproc", type=int, default=1, help="processes on this node (default 1)")
    sub.add_argument("--nnodes", type=int, default=1, help="nodes of the job (default 1)")
    sub.add_argument("--node-rank", type=int, default=None, help="rank of this node; default: as they come")
    sub.add_argument("--rdzv", default=None, metavar="HOST:PORT", help="where the nodes meet; needed for several nodes")
    sub.add_argument(
        "--max-restarts", type=int, default=0, metavar="N", help="start a failed job again, N times at most"
    )
    sub.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    # One argument for both: argparse would take a `--` between the script and its arguments for its own.
    sub.add_argument(
        "script",
        nargs=argparse.PARSER,
        metavar="script ...",
        help="file, or module with -m; then its arguments, passed on untouched",
    )
    sub.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Launch; returns 0, or the exit code of the rank that failed first, after saying why."""
    script, *arguments = options.script[options.script[0] == "--" :]
    try:
        settings = config(options.nproc, options.nnodes, options.node_rank, options.rdzv, options.max_restarts)
        if not options.module and not Path(script).is_file():
            raise ContextError(
                message(
                    f"launch: there is no file {script!r}",
                    found=f"working directory {Path.cwd()}",
                    expected="a python file, or the name of a module with -m",
                    fix=f"weft launch -n {options.nproc} -m {script}",
                )
            )
    except ContextError as error:
        print(f"weft {error}", file=sys.stderr)  # noqa: T201
        return 2
    # The agent logs every failure at length; the one that came first is printed below instead.
    for talker in (
        "distributed.elastic.multiprocessing.api",
        "distributed.elastic.agent.server.api",
        "multiprocessing.spawn",
    ):
        logging.getLogger(f"torch.{talker}").setLevel(logging.CRITICAL)
    # Signals by which schedulers say that the time is nearly over are passed on to the ranks too.
    passed_on = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1,SIGUSR2"
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", passed_on)  # noqa: TID251  (the agent reads it)
    with tempfile.TemporaryDirectory(prefix="weft-") as reports:
        try:
            elastic_launch(settings, run_target)(script, options.module, arguments, reports)
        except ChildFailedError as error:
            text, code = first_failure(error, Path(reports), attempt=options.max_restarts)
            print(text, file=sys.stderr)  # noqa: T201
            return code
        except SignalException as error:
            if len(list(Path(reports).glob("*.preempted"))) >= options.nproc:
                print(_PREEMPTED, file=sys.stderr)  # noqa: T201
                return PREEMPTED
            print(f"weft launch: ended by {error.sigval.name}", file=sys.stderr)  # noqa: T201
            return 128 + error.sigval
    return 0


def config(
    nproc: int, nnodes: int = 1, node_rank: int | None = None, rdzv: str | None = None, max_restarts: int = 0
) -> LaunchConfig:
    """Turn the options into torch's launch configuration.

    Args:
        nproc: Processes on this node.
        nnodes: Nodes of the job.
        node_rank: Rank of this node; None lets the rendezvous give ranks as nodes come.
        rdzv: Where the nodes meet, `host:port`; None for one node: a free port of this machine.
        max_restarts: How often all ranks are started again after one of them failed.

    Returns:
        The configuration; ranks are forked where the system can, else spawned.

    Raises:
        ContextError: Numbers out of range, or several nodes without `rdzv`.
    """
    wrong = None
    if nproc < 1 or nnodes < 1 or not 0 <= (node_rank or 0) < nnodes:
        wrong = (f"-n {nproc} --nnodes {nnodes} --node-rank {node_rank}", "counts >= 1, 0 <= node rank < nodes")
    elif max_restarts < 0:
        wrong = (f"--max-restarts {max_restarts}", "0 or more")
    elif nnodes > 1 and rdzv is None:
        wrong = (f"--nnodes {nnodes}, no --rdzv", "the address of the first node")
    if wrong is not None:
        fix = "weft launch -n 2 --nnodes 2 --node-rank 0 --rdzv first-node:29500 train.py"
        raise ContextError(
            message("launch: these options do not fit together", found=wrong[0], expected=wrong[1], fix=fix)
        )
    static = nnodes > 1 and node_rank is not None
    return LaunchConfig(
        min_nodes=nnodes,
        max_nodes=nnodes,
        nproc_per_node=nproc,
        run_id="weft" if rdzv is not None else str(uuid.uuid4()),
        rdzv_backend="static" if static else "c10d",
        rdzv_endpoint=rdzv or "localhost:0",
        rdzv_configs={"rank": node_rank or 0, "timeout": 900} if static else {"timeout": 900},
        max_restarts=max_restarts,
        monitor_interval=0.1,
        start_method="forkserver" if sys.platform.startswith("linux") else "spawn",
    )


def run_target(target: str, is_module: bool, arguments: list[str], reports: str) -> None:
    """Run a script or module as the main program of this process; called on every rank.

    Args:
        target: File, or module.
        is_module: Which of the two.
        arguments: Of the script.
        reports: Folder in which a rank that fails leaves its traceback.
    """  # noqa: DOC501  (the script's own)
    sys.argv = [target, *arguments]
    for number in signal.SIGTERM, *(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)):
        signal.signal(number, signal.SIG_DFL)  # the process that ranks are forked from ignores them
    place = topology(os.environ)  # noqa: TID251  (what the agent set for this rank)
    if place.attempt > 0 and place.rank == 0:
        sys.stderr.write(f"weft launch: all ranks start again after a failure, attempt {place.attempt + 1}\n")
    try:
        if is_module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target).resolve().parent))
            runpy.run_path(target, run_name="__main__")
    except KeyboardInterrupt:
        sys.exit(130)  # the launcher got it too, and says so once for all ranks
    except SystemExit as error:
        if error.code == PREEMPTED:
            (Path(reports) / f"{place.rank}.preempted").touch()
        raise
    except Exception as error:  # noqa: BLE001  (reported and turned into the exit code below)
        _say_why(error, place)
        report = {
            "rank": place.rank,
            "attempt": place.attempt,
            "time": time.time(),
            "trace": _own_traceback(error),
            "blames": [error.rank, error.text] if isinstance(error, PeerError) else None,
        }
        (Path(reports) / f"{place.rank}.json").write_text(json.dumps(report), encoding="utf-8")
        sys.stdout.flush()
        sys.exit(1)


def _say_why(error: Exception, place: Topology) -> None:
    """If the job will start again, say now why this attempt ends; the launcher speaks when all is over."""
    if place.attempt < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):  # noqa: TID251
        echo = isinstance(error, PeerError)
        why = str(error) if echo else _own_traceback(error).rstrip()
        sys.stderr.write(f"{why}\nweft launch: rank {place.rank} {'ends too' if echo else 'failed'}\n")
        sys.stderr.flush()


def _own_traceback(error: BaseException) -> str:
    """The traceback from the script's first line on, without what started the script."""
    starters = {run_target.__code__.co_filename, runpy.run_path.__code__.co_filename}
    trace: TracebackType | None = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in starters:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def first_failure(error: ChildFailedError, reports: Path, attempt: int = 0) -> tuple[str, int]:
    """Text and exit code of the rank that failed by itself, first; not of one that only noticed.

    Args:
        error: What the agent says.
        reports: Folder with the tracebacks of the ranks.
        attempt: How often the ranks were started again; only the last attempt counts.

    Returns:
        Text to print, exit code: that of the rank, or 128 + signal.
    """
    rank, failure = error.get_first_failure()
    found = [json.loads(path.read_text(encoding="utf-8")) for path in reports.glob("*.json")]
    found = [report for report in found if report["attempt"] == attempt]
    found.sort(key=lambda report: (report["blames"] is not None, report["time"]))
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    if found:
        trace = found[0]["trace"].rstrip()
        culprit, why = found[0]["blames"] or (found[0]["rank"], trace.splitlines()[-1])
        return f"{trace}\nweft launch: rank {culprit} failed: {why}", code
    if code == PREEMPTED:
        return _PREEMPTED, code
    how = f"by signal {-failure.exitcode}" if failure.exitcode < 0 else f"with exit code {failure.exitcode}"
    return f"weft launch: rank {rank} (process {failure.pid}) ended {how}", code
