"""The `weft` command, up to the point where torch is needed.

It lies outside of the package because importing `weft` imports torch, which reads OMP_NUM_THREADS.
torch is imported once: the process that ranks are forked from is forked from the launcher.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

_WITH_VALUE = frozenset(
    {"--nnodes", "--node-rank", "--rdzv", "--max-restarts", "--threads", "--config", "--slurm", "--sbatch"}
)
_FLAGS = frozenset({"--dry-run", "--affinity", "--no-affinity", "--no-python"})


def main() -> int:
    """Run the `weft` command."""
    try:
        if sys.argv[1:2] == ["launch"] and not {"-h", "--help"} & set(sys.argv[2:3]):
            _start_fork_server(sys.argv[2:])
        import weft.cli  # noqa: PLC0415  (imports torch)

        return weft.cli.main(sys.argv[1:])
    except KeyboardInterrupt:
        return 130


def call() -> int:
    """Launch the ranks of `weft.launch_function`, which starts this in a process of its own."""
    try:
        _start_fork_server(sys.argv[1:])
        import weft.launching.callee  # noqa: PLC0415  (imports torch)

        return weft.launching.callee.main(sys.argv[1:])
    except KeyboardInterrupt:
        return 130


def _start_fork_server(arguments: list[str]) -> None:
    import multiprocessing  # noqa: PLC0415  (not for `weft --help`)
    from multiprocessing import forkserver  # noqa: PLC0415

    wish = _wish(arguments)
    if not sys.platform.startswith("linux") or {"--dry-run", "--slurm", "--no-python"} & wish.keys():
        return  # ranks are spawned, or there are none
    # Read by OpenMP when torch is imported; the ranks share the cores of this machine.
    before = os.environ.get("OMP_NUM_THREADS")  # noqa: TID251
    threads = _number(wish.get("--threads")) or threads_per_rank(_cores(), _number(wish.get("-n")) or 1)
    if before is None or "--threads" in wish:
        os.environ["OMP_NUM_THREADS"] = str(threads)  # noqa: TID251
    multiprocessing.set_forkserver_preload(["weft.launching.preload"])
    import weft.launching.callee  # noqa: PLC0415, F401  (imports torch)

    with _by_fork():
        forkserver.ensure_running()
    if before is None:
        del os.environ["OMP_NUM_THREADS"]  # noqa: TID251  (`weft launch` tells what the user set)
    else:
        os.environ["OMP_NUM_THREADS"] = before  # noqa: TID251


@contextlib.contextmanager
def _by_fork() -> Iterator[None]:
    """Let multiprocessing fork the process that ranks are forked from, which starts with all that is imported here."""
    import multiprocessing.forkserver  # noqa: PLC0415
    import multiprocessing.util  # noqa: PLC0415

    from weft.environments import end_with_parent  # noqa: PLC0415

    util: Any = multiprocessing.util
    server: Any = multiprocessing.forkserver._forkserver
    before = util.spawnv_passfds

    def fork(path: str, arguments: list[str], fds: list[int]) -> int:
        launcher = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            kept = sorted({0, 1, 2, *fds})
            end = os.sysconf("SC_OPEN_MAX")
            for low, high in itertools.pairwise([*kept, end if end > 0 else 2**20]):
                os.closerange(low + 1, high)
            server._lock = threading.RLock()  # the old one is held, by the parent
            util.spawnv_passfds = before
            end_with_parent(launcher)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher and the ranks
            sys.argv[:] = ["-c"]
            exec(arguments[-1], {"__name__": "__main__"})  # noqa: S102  (of multiprocessing: runs until all are gone)
            code = 0
        finally:
            os._exit(code)

    util.spawnv_passfds = fork
    try:
        yield
    finally:
        util.spawnv_passfds = before


def _cores() -> int:
    # As weft.environments.cores_here, which cannot be imported here: importing weft imports torch.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(cores: int, ranks: int) -> int:
    """Cores shared out among ranks, at least one each.

    Example:
        >>> [threads_per_rank(4, ranks) for ranks in (1, 2, 3, 4, 8)]
        [4, 2, 1, 1, 1]
    """
    return max(cores // max(ranks, 1), 1)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def _wish(arguments: list[str]) -> dict[str, str]:
    """The options before the script, before the real parser is there; those of a configuration file too."""
    found: dict[str, str] = {}
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-") if name[:2] == "--" else name
        if name in ("-n", "--nproc"):
            found["-n"] = value if equals else next(rest, "")
        elif argument[:2] == "-n":
            found["-n"] = argument[2:]
        elif name in _WITH_VALUE:
            found[name] = value if equals else next(rest, "")
        elif name in _FLAGS:
            found[name] = ""
        else:
            break  # -m, or the script: what follows is not ours
    return {**_of_file(found["--config"]), **found} if "--config" in found else found


def _of_file(path: str) -> dict[str, str]:
    import tomllib  # noqa: PLC0415  (only if there is a file)
    from pathlib import Path  # noqa: PLC0415

    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("launch", {})
    except (OSError, ValueError):
        return {}  # the real parser will say so
    names = {"nproc": "-n", "threads": "--threads"}
    return {names[key]: str(value) for key, value in table.items() if key in names} if isinstance(table, dict) else {}
