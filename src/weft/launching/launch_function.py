"""`launch_function`: run a function on ranks of their own, from a notebook, a script or a debugger.

This process starts a launcher and waits; it makes no group, forks nothing and keeps its environment. Function,
results and errors travel as pickles through a folder that only the user can read, and that is gone at the end:
    call                        where modules are found, `sys.argv`, and the pickled function with its arguments
    result-<rank>               what it returned
    error-<attempt>-<rank>      what it raised
    ending.json                 what the launcher says; see callee.py for the other side
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TextIO, TypeVar

import torch.distributed as dist

from weft.checks import check_count
from weft.context.start import launched
from weft.errors import ContextError, PeerError
from weft.launching.mailbox import CALL_FILE, ENDING_FILE, dumps

R = TypeVar("R")


_GRACE_S = 40.0  # after Ctrl-C; the launcher kills ranks that are still there after 30


def launch_function(fn: Callable[..., R], n: int, *args: Any, max_restarts: int = 0) -> list[R]:
    """Call `fn(*args)` on `n` new processes of this machine, in which `weft.start()` finds its job.

    For notebooks and for debugging; a script is started with `weft launch`. The ranks import torch once for all of
    them and share nothing with this process, so it may have used its accelerator. What they print is printed here.

    Changes: starts processes, which have ended when it returns. Collectives: those of `fn`.

    Args:
        fn: Any function; those of a notebook or a script, lambdas and closures need the extra `torchweft[notebook]`.
        n: Number of ranks.
        args: For `fn`; they are pickled, so a rank changes a copy.
        max_restarts: How often all ranks are started again after one of them failed.

    Returns:
        What `fn` returned on each rank, in rank order.

    Raises:
        Exception: What `fn` raised on the rank that failed first, with the traceback of that rank as its cause.
        PeerError: A rank was killed, or left without returning.
        ContextError: This process is a rank of a job itself.
        MissingExtra: `fn` cannot be pickled without cloudpickle.
        ValueError: `n` or `max_restarts` cannot be used.

    Example:
        >>> import weft
        >>> def total(x):
        ...     with weft.start(device="cpu") as ctx:
        ...         return int(weft.reduce(torch.tensor(x + ctx.rank), ctx, "sum"))
        >>> import torch
        >>> weft.launch_function(total, 2, 10)
        [21, 21]
    """
    for name, value, least in (("n", n, 1), ("max_restarts", max_restarts, 0)):
        check_count("launch_function", name, value, least=least, fix="weft.launch_function(fn, 2, max_restarts=0)")
    _refuse_in_a_rank()
    what = f"launch_function: {getattr(fn, '__qualname__', fn)} and its arguments"
    call = sys.path, sys.argv, dumps((fn, args), what)
    with tempfile.TemporaryDirectory(prefix="weft-") as name:
        folder = Path(name)
        (folder / CALL_FILE).write_bytes(pickle.dumps(call))
        code = _run_launcher(["-n", str(n), "--max-restarts", str(max_restarts), name])
        results = [folder / f"result-{rank}" for rank in range(n)]
        if code == 0 and all(path.exists() for path in results):
            return [pickle.loads(path.read_bytes()) for path in results]
        raise _failure(folder, n, code, max_restarts)


def _refuse_in_a_rank() -> None:
    """Raise if this process belongs to a job: its ranks would start jobs in turn, or wait for each other."""
    place = launched()
    group = dist.is_available() and dist.is_initialized()
    if group or place.world_size > 1 or place.source in ("torchrun", "ray"):
        where = f"rank {place.rank} of {place.world_size}, as {place.source} has it in the environment"
        raise ContextError(
            "launch_function: this process is already a rank of a job",
            found="torch.distributed is initialised here" if group else where,
            expected="one process that starts the ranks, such as a notebook",
            fix="call the function itself, or start this program with python instead of a launcher"
            if not group
            else "ctx.close(), or torch.distributed.destroy_process_group(), before weft.launch_function",
        )


def _run_launcher(arguments: Sequence[str]) -> int:
    """Run the launcher to its end, print what it and the ranks print, and return its exit code."""
    program = f"import sys; sys.path[:] = {sys.path!r}; import weft_command; sys.exit(weft_command.call())"
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdin=subprocess.PIPE,  # its end shows the launcher that this process is gone
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C comes here, and is passed on once
    ) as process:
        pairs = [(process.stdout, sys.stdout), (process.stderr, sys.stderr)]
        readers = [threading.Thread(target=_copy, args=pair, daemon=True, name="weft output") for pair in pairs]
        try:
            for reader in readers:
                reader.start()
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            raise
        finally:
            _end(process)
            for reader in readers:
                reader.join(timeout=5)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing running, whatever has happened."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)  # its session: also what ranks have started
        else:
            process.kill()
    process.wait()


def _copy(stream: IO[bytes], out: TextIO) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while data := os.read(stream.fileno(), 65536):
        out.write(decoder.decode(data))
        out.flush()


class _Traceback(Exception):
    """The traceback of another process; shown as the cause of an error, never caught."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}\n"""'


def _failure(folder: Path, n: int, code: int, attempt: int) -> BaseException:
    """The exception of the rank that failed first; or what is known of its end."""
    path = folder / ENDING_FILE
    if not path.exists():
        return PeerError(f"launch_function: the launcher ended with exit code {code}; see its output above")
    ending = json.loads(path.read_text(encoding="utf-8"))
    rank, trace = ending["rank"], ending["trace"]
    if rank < 0:
        rank = next((each for each in range(n) if not (folder / f"result-{each}").exists()), 0)
    last = ending["text"].rpartition("\n")[2].removeprefix("weft launch: ")
    text = trace.splitlines()[-1] if trace and " ended " not in last else last or "left before it had returned"
    said = folder / f"error-{attempt}-{rank}"
    if trace and said.exists():
        try:
            error = pickle.loads(said.read_bytes())
        except Exception as problem:  # noqa: BLE001  (exceptions with arguments of their own often do not unpickle)
            trace += f"\n(the exception itself cannot be sent: {type(problem).__name__}: {problem})"
        else:
            error.__cause__ = _Traceback(trace)
            return error  # type: ignore[no-any-return]
    failure = PeerError(f"launch_function: rank {rank} of {n}: {text}", rank=rank, text=text)
    failure.__cause__ = _Traceback(trace) if trace else None
    return failure
