"""What a rank does around the script or the function that it runs."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import multiprocessing.process
import os
import runpy
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, MappingProxyType

import torch

from weft.environments import Topology, end_with_parent, topology
from weft.launching.failures import crash_file, restart_reason, write_report
from weft.launching.plan import cores_of
from weft.peers.world import PREEMPTED

_RUNPY = runpy.run_path.__code__.co_filename
_STARTERS = frozenset({__file__, str(Path(__file__).with_name("callee.py")), contextlib.__file__, _RUNPY})
ROUND = "round"  # file of the launcher's folder: which meeting of the nodes this is


def run_target(
    target: str, is_module: bool, arguments: list[str], reports: str, cores: Sequence[int], variables: Mapping[str, str]
) -> None:
    """Run a script or module as the main program of this process; called on every rank.

    Args:
        target: File, or module.
        is_module: Which of the two.
        arguments: Of the script.
        reports: Folder in which a rank that fails leaves its traceback.
        cores: Of this machine, of which this process keeps to its share; none: to no cores in particular.
        variables: Of the environment; the process that ranks are forked from was there before them.
    """
    sys.argv = [target, *arguments]
    with as_rank(Path(reports), cores, variables):
        if is_module:
            sys.path.insert(0, str(Path.cwd()))
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(target).resolve().parent))
            runpy.run_path(target, run_name="__main__")


@contextlib.contextmanager
def as_rank(
    reports: Path, cores: Sequence[int] = (), variables: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Topology]:
    """Make this process a rank, and turn how the body ends into an exit code and a report."""
    _end_with_the_launcher()
    # As where Python starts a script: else loaders would start workers by a process that imports torch once more,
    # which stays behind with them if this one is killed.
    multiprocessing.set_start_method(None, force=True)
    os.environ.update(variables)  # noqa: TID251
    threads = os.environ.get("OMP_NUM_THREADS", "")  # noqa: TID251
    if threads.isdecimal() and int(threads) > 0:
        torch.set_num_threads(int(threads))  # `python -m weft` imports torch before it has read what is asked for
    _interrupt_once()
    numbers = {getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)}
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)  # the process that ranks are forked from ignores them
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)  # and blocks them
    place = topology(os.environ)  # noqa: TID251  (what the agent set for this rank)
    crash = crash_file(reports, place).open("w", encoding="utf-8")
    faulthandler.enable(crash, all_threads=False)  # in which line native code crashed; torch has it write to stderr
    again = _times_started(reports, place)
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores_of(place.local_rank, place.local_world_size, cores))
    alone = "TORCHELASTIC_USE_AGENT_STORE" in variables  # a replica: its launcher says what became of it
    if again > 0 and place.rank == 0 and not alone:
        text = f"weft launch: all ranks start again after a failure, attempt {again + 1}\n"
        sys.stderr.write(restart_reason(reports, place.attempt) + text)
    try:
        yield place
    except KeyboardInterrupt:
        sys.exit(130)  # the launcher got it too, and says so once for all ranks
    except SystemExit as error:
        if error.code == PREEMPTED:
            (reports / f"{place.rank}.preempted").touch()
        raise
    except Exception as error:  # noqa: BLE001  (reported and turned into the exit code below)
        write_report(reports, place, error, _STARTERS)
        sys.stdout.flush()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()  # a process that `multiprocessing` has started ends without


def _end_with_the_launcher() -> None:
    """A launcher that was killed can end no rank; and ranks without one hold their devices for nothing."""
    launcher = multiprocessing.parent_process()
    if launcher is None:  # no launcher started this process
        return
    end_with_parent(os.getppid())  # the process that ranks are forked from, which ends with the launcher
    if not sys.platform.startswith("linux"):
        threading.Thread(target=_wait_and_end, args=(launcher,), name="weft launcher", daemon=True).start()
    elif not launcher.is_alive():
        os._exit(1)


def _wait_and_end(launcher: multiprocessing.process.BaseProcess) -> None:
    launcher.join()  # a pipe that closes
    os.kill(os.getpid(), signal.SIGKILL)


def _times_started(reports: Path, place: Topology) -> int:
    """How often all ranks were started before, counted alike on all nodes.

    An agent counts the failures on its own node; those of others it takes for a change of nodes, which it does not
    count. Ranks that meet under the count of their own agent would then never meet.
    """
    path = reports / ROUND
    if not path.exists():
        return place.attempt
    count = path.read_text(encoding="utf-8")
    os.environ["TORCHELASTIC_RESTART_COUNT"] = count  # noqa: TID251
    return int(count)


def _interrupt_once() -> None:
    """One Ctrl-C is one KeyboardInterrupt: the terminal sends it to every process, and the launcher passes it on."""
    last_s = [-1.0]

    def interrupt(number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - last_s[0] > 1.0:
            last_s[0] = now_s
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
