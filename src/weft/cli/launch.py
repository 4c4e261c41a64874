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
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType, TracebackType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from weft.cli.plan import Plan, cores_of, make_plan
from weft.cli.slurm import batch_script
from weft.context.config import LAUNCH, read_config
from weft.context.settings import CONFIG_VARIABLE
from weft.context.world import PREEMPTED
from weft.errors import ContextError, PeerError, message
from weft.launchers import Topology, topology

__all__ = ["add_parser", "first_failure", "run_target"]

_PREEMPTED = "weft launch: the job was told to end and has ended; it may be started again to go on"


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "launch",
        help="run a script on several processes",
        usage="weft launch [options] [-m] script ...",
        allow_abbrev=False,
        description="Run a script, or a module with -m, on N processes per node. What follows the script is its own. "
        "Options that are not given are taken from the table [launch] of --config FILE, if it is given.",
    )
    sub.add_argument("-n", "--nproc", type=int, help="processes on this node (default 1)")
    sub.add_argument("--nnodes", type=_nodes, metavar="N", help="nodes of the job (default 1), or LEAST:MOST")
    sub.add_argument("--node-rank", type=int, metavar="R", help="rank of this node; default: as they come")
    sub.add_argument("--rdzv", metavar="HOST:PORT", help="where the nodes meet; needed for several nodes")
    sub.add_argument("--max-restarts", type=int, metavar="N", help="start a failed job again, N times at most")
    sub.add_argument("--threads", type=int, metavar="N", help="CPU threads per process; default: cores / processes")
    sub.add_argument(
        "--affinity",
        action=argparse.BooleanOptionalAction,
        help="keep each process on cores of its own",
    )
    sub.add_argument("--config", metavar="FILE", help="a TOML file; its table [start] is for weft.start in the script")
    sub.add_argument("--dry-run", action="store_true", help="say what would be started, and from where it is known")
    sub.add_argument(
        "--slurm",
        metavar="FILE",
        type=Path,
        help="write a script for sbatch, and submit it; with --dry-run only print it",
    )
    sub.add_argument(
        "--sbatch", metavar="OPTION", action="append", default=[], help="with --slurm: as in --sbatch=--partition=gpu"
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


def _nodes(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdecimal() else text


def run(options: argparse.Namespace) -> int:
    """Launch; returns 0, or the exit code of the rank that failed first, after saying why."""
    words = options.script[options.script[0] == "--" :]
    try:
        file = read_config(options.config) if options.config is not None else None
        given = {name: getattr(options, name) for name in LAUNCH}
        if options.slurm is not None:
            given["rdzv"] = "first:port"  # the script finds out when it runs
        plan = make_plan(given, file, cores=len(_cores()), omp_num_threads=os.environ.get("OMP_NUM_THREADS"))  # noqa: TID251
        if not options.module and options.slurm is None and not Path(words[0]).is_file():
            raise ContextError(
                message(
                    f"launch: there is no file {words[0]!r}",
                    found=f"working directory {Path.cwd()}",
                    expected="a python file, or the name of a module with -m",
                    fix=f"weft launch -n {plan.nproc} -m {words[0]}",
                )
            )
    except ContextError as error:
        print(f"weft {error}", file=sys.stderr)  # noqa: T201
        return 2
    if options.slurm is not None:
        return _submit(plan, words, options)
    if options.dry_run:
        print(plan.text(words, is_module=options.module, cores=_cores()))  # noqa: T201
        return 0
    named = {} if options.config is None else {CONFIG_VARIABLE: str(Path(options.config).resolve())}
    os.environ.setdefault("OMP_NUM_THREADS", str(plan.threads))  # noqa: TID251  (read when torch is imported)
    return _launch(plan, words, named, is_module=options.module)


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _submit(plan: Plan, words: list[str], options: argparse.Namespace) -> int:
    """Write the script for SLURM and hand it in."""
    text = batch_script(
        plan,
        words,
        is_module=options.module,
        name=options.slurm.stem,
        options=options.sbatch,
        config=None if options.config is None else str(Path(options.config).resolve()),
    )
    if options.dry_run:
        print(text, end="")  # noqa: T201
        return 0
    options.slurm.write_text(text, encoding="utf-8")
    command = shutil.which("sbatch")
    if command is None:
        text = message(
            f"launch: {options.slurm} is written, and cannot be submitted",
            found="no command sbatch",
            expected="a machine of the cluster",
            fix=f"sbatch {options.slurm}",
        )
        print(f"weft {text}", file=sys.stderr)  # noqa: T201
        return 2
    return subprocess.run([command, str(options.slurm)], check=False).returncode  # noqa: S603  (the user's own command)


def _launch(plan: Plan, words: list[str], variables: Mapping[str, str], *, is_module: bool) -> int:
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
    cores = _cores() if plan.affinity else []
    with tempfile.TemporaryDirectory(prefix="weft-") as reports:
        try:
            elastic_launch(plan.torch_config(), run_target)(words[0], is_module, words[1:], reports, cores, variables)
        except ChildFailedError as error:
            text, code = first_failure(error, Path(reports), attempt=plan.max_restarts)
            print(text, file=sys.stderr)  # noqa: T201
            return code
        except SignalException as error:
            if len(list(Path(reports).glob("*.preempted"))) >= plan.nproc:
                print(_PREEMPTED, file=sys.stderr)  # noqa: T201
                return PREEMPTED
            print(f"weft launch: ended by {error.sigval.name}", file=sys.stderr)  # noqa: T201
            return 128 + error.sigval
    return 0


def run_target(
    target: str,
    is_module: bool,
    arguments: list[str],
    reports: str,
    cores: Sequence[int] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run a script or module as the main program of this process; called on every rank.

    Args:
        target: File, or module.
        is_module: Which of the two.
        arguments: Of the script.
        reports: Folder in which a rank that fails leaves its traceback.
        cores: Of this machine, of which this process keeps to its share; none: to no cores in particular.
        variables: Of the environment; the process that ranks are forked from was there before them.
    """  # noqa: DOC501  (the script's own)
    sys.argv = [target, *arguments]
    os.environ.update(variables)  # noqa: TID251
    _interrupt_once()
    for number in signal.SIGTERM, *(getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)):
        signal.signal(number, signal.SIG_DFL)  # the process that ranks are forked from ignores them
    place = topology(os.environ)  # noqa: TID251  (what the agent set for this rank)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores_of(place.local_rank, place.local_world_size, cores))
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


def _interrupt_once() -> None:
    """One Ctrl-C is one KeyboardInterrupt: the terminal sends it to every process, and the launcher passes it on."""
    last_s = [-1.0]

    def interrupt(number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - last_s[0] > 1.0:
            last_s[0] = now_s
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)


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
