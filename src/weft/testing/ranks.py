"""`run_ranks`: run a function on real ranks, of gloo unless told otherwise, in milliseconds, and never hang."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch.distributed as dist

from weft.checks import check_count
from weft.engines.probes import ProbeMode
from weft.errors import WeftError
from weft.launching.mailbox import dumps
from weft.peers.connect import listen_at
from weft.testing.rank_worker import OUTERMOST, STACK_SIGNAL
from weft.testing.ranks_failed import failure_of

R = TypeVar("R")
_OPTIONS = MappingProxyType(
    {"mesh": None, "data_axes": None, "seed": 0, "debug": False, "probes": "every", "device": "cpu"}
)  # of a rank
_KEPT = 4  # the largest world that is kept: threads of gloo keep looking for messages
_GROUP_TIMEOUT_S = 60.0
_CUT = "\n  ...\n"  # faulthandler writes the innermost 100 calls
_STACK_LIMIT_S = 2.0  # for a rank to say where it is
_GRACE_S = 10.0  # after the first failure, how long the other ranks may take to notice


def run_ranks(
    fn: Callable[..., R],
    n: int,
    *args: Any,
    timeout_s: float = 60.0,
    mesh: Mapping[str, int] | None = None,
    data_axes: Sequence[str] | None = None,
    seed: int = 0,
    debug: bool = False,
    probes: ProbeMode = "every",
    device: str = "cpu",
    backend: str = "gloo",
    **kwargs: Any,
) -> list[R]:
    """Call `fn(ctx, *args, **kwargs)` on `n` ranks and return their results in rank order.

    The ranks are real processes with a process group between them. They come from a warm pool, so a
    call costs milliseconds and not an import of torch; after a failure the pool is made anew.
    What the ranks print is printed here, marked by rank.

    Changes: starts processes that end with this one. Collectives: those of `fn`.

    Args:
        fn: Any function; local functions and lambdas need the package cloudpickle, which the
            extra `torchweft[test]` installs.
        n: Number of ranks; 1 runs in a process of its own too, without a group.
        args: For `fn`; must pickle.
        timeout_s: A call that takes longer is a hang: the ranks are killed and it fails.
        mesh: As for `weft.start`.
        data_axes: As for `weft.start`.
        seed: As for `weft.start`.
        debug: As for `weft.start`.
        probes: As for `weft.start`.
        device: As for `weft.start`. Ranks may share an accelerator: gloo sends through the memory of the host, and
            some collectives are missing there.
        backend: Of the process group, such as "cpu:gloo,cuda:nccl". Each rank gets another `NCCL_HOSTID`, with which
            NCCL takes ranks that share a device for ranks on several nodes, and sends over sockets.
        kwargs: For `fn`.

    Returns:
        What `fn` returned on each rank; tensors and other values come by pickle.

    Raises:
        RanksFailed: `fn` raised, a rank died, or the time was over; with each rank's traceback.
        TypeError: `fn` or its arguments cannot be pickled.
        MissingExtra: They cannot be pickled without cloudpickle.

    Example:
        >>> def double(ctx, x):
        ...     return ctx.rank + 2 * x
        >>> run_ranks(double, 2, 10)
        [20, 21]
    """
    options = {"mesh": mesh, "data_axes": data_axes, "seed": seed, "debug": debug, "probes": probes, "device": device}
    return _pool(backend).run(fn, n, *args, timeout_s=timeout_s, **options, **kwargs)


@functools.cache
def _pool(backend: str) -> RankPool:
    return RankPool(backend=backend)


class RankPool:
    """Warm ranks: one world per small size, made when first asked for, kept until it fails.

    Args:
        backend: Of the process group of the ranks, as for `run_ranks`.
        environment: Variables of the process that they are forked from, besides those of this one.
    """

    def __init__(self, *, backend: str = "gloo", environment: Mapping[str, str] | None = None) -> None:
        self._backend, self._environment = backend, dict(environment or {})
        self._server: _Server | None = None
        self._worlds: dict[int, _RankWorld] = {}

    def run(self, fn: Callable[..., R], n: int, *args: Any, timeout_s: float = 60.0, **kwargs: Any) -> list[R]:
        """As `run_ranks`, which has the same arguments, on ranks of this pool."""
        check_count("run_ranks", "n", n, below=65, fix="run_ranks(fn, 2)")
        options = {name: kwargs.pop(name, default) for name, default in _OPTIONS.items()}
        what = f"run_ranks: {getattr(fn, '__qualname__', fn)} and its arguments"
        job = {
            "call": dumps((fn, args, kwargs), what, extra="test"),
            "folder": str(Path.cwd()),
            "path": list(sys.path),
            "environment": {**os.environ, "OMP_NUM_THREADS": "1"},
            "options": options,
        }
        world = self._world(n)
        ended: dict[int, int] = {}
        stacks: dict[int, str] = {}
        try:
            answers = world.call(job, timeout_s)
            stacks = world.stacks([rank for rank in range(n) if rank not in answers])
            clean = len(answers) == n and all(one["ok"] and one["reusable"] for one in answers.values())
            if n <= _KEPT and clean and len({one["begun"] for one in answers.values()}) == 1:
                self._worlds[n] = world
        finally:  # also when the caller is interrupted
            if n not in self._worlds:
                ended = world.kill()
        if len(answers) < n or not all(answer["ok"] for answer in answers.values()):
            raise failure_of(n, answers, ended, stacks, timeout_s)
        _show(answers)
        return [answers[rank]["result"] for rank in range(n)]

    def _world(self, n: int) -> _RankWorld:
        """Take the warm world of this size out of the pool, or make one."""
        world = self._worlds.pop(n, None)
        if world is not None:
            if world.is_ready():
                return world
            world.kill()
        if self._server is None or not self._server.is_alive():
            self._server = _Server(self._environment)
        return _RankWorld(self._server, n, self._backend)

    def close(self) -> None:
        """End all ranks and the process they were forked from."""
        for world in self._worlds.values():
            world.kill()
        self._worlds.clear()
        if self._server is not None:
            self._server.close()
            self._server = None


class _Server:
    """The process that ranks are forked from, and the store they meet at."""

    def __init__(self, more: Mapping[str, str]) -> None:
        self._control, theirs = socket.socketpair()
        self.folder = tempfile.mkdtemp(prefix="weft-ranks-")
        path = filter(None, [more.get("PYTHONPATH"), *sys.path])
        environment = {**os.environ, **more, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
        # A process that has asked the CUDA driver how many devices there are cannot fork ranks that use them.
        environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weft.testing.rank_server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._lines = self._control.makefile("r")
        # The store lives here, not in a rank: ranks of tests are killed.
        fd = listen_at("127.0.0.1", 0)
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, master_listen_fd=fd)
        self._names = itertools.count()
        self.close = weakref.finalize(self, _end_server, self._process, self._control, self.folder)
        if self._lines.readline() != "ready\n":
            raise WeftError("run_ranks: the process that ranks are forked from did not start; see its output above")

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, n: int, backend: str) -> tuple[list[int], list[Connection]]:
        """Start `n` ranks; returns their process ids and pipes."""
        pairs = [socket.socketpair() for _ in range(n)]
        name = f"world/{os.getpid()}/{next(self._names)}"
        request = {
            "fork": n, "port": self.store.port, "name": name, "timeout_s": _GROUP_TIMEOUT_S, "folder": self.folder,
            "backend": backend,
        }  # fmt: skip
        socket.send_fds(self._control, [json.dumps(request).encode()], [theirs.fileno() for _, theirs in pairs])
        for _, theirs in pairs:
            theirs.close()
        pids: list[int] = json.loads(self._lines.readline())["pids"]
        return pids, [Connection(os.dup(ours.detach())) for ours, _ in pairs]

    def ended(self, pids: Sequence[int], gone: Sequence[int]) -> dict[int, int]:
        """Exit codes of those of `pids` that ended; those that are `gone` are waited for."""
        self._control.sendall(json.dumps({"ended": list(pids), "gone": list(gone)}).encode())
        answer = json.loads(self._lines.readline())["ended"]
        return {int(pid): code for pid, code in answer.items()}


def _end_server(process: subprocess.Popen[bytes], control: socket.socket, folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # the server is gone already
        control.shutdown(socket.SHUT_RDWR)  # it reads the end of its socket, and kills the ranks
    control.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class _RankWorld:
    """The ranks of one world."""

    def __init__(self, server: _Server, n: int, backend: str) -> None:
        self._server = server
        self._pids, self._pipes = server.fork(n, backend)
        try:  # all meet now, so that this takes nothing from the time of the first call
            for pipe in self._pipes:
                pipe.recv_bytes()  # or the rank ends: its own meeting has a timeout
        except BaseException as error:
            self.kill()
            if isinstance(error, (EOFError, ConnectionResetError)):
                raise WeftError("run_ranks: a rank could not join its group; see its output above") from error
            raise

    def is_ready(self) -> bool:
        """Whether all ranks wait for a job: the pipe of one that ended can be read."""
        return self._server.is_alive() and not wait(self._pipes, timeout=0)

    def call(self, job: dict[str, Any], timeout_s: float) -> dict[int, dict[str, Any]]:
        """Send a job to all ranks and collect their answers; a rank that died has none."""
        data = pickle.dumps(job)
        for pipe in self._pipes:
            pipe.send_bytes(data)
        answers: dict[int, dict[str, Any]] = {}
        waiting = dict(enumerate(self._pipes))
        end = time.monotonic() + timeout_s
        while waiting and time.monotonic() < end:
            ready = wait(list(waiting.values()), timeout=max(end - time.monotonic(), 0))
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    answers[rank] = pickle.loads(waiting[rank].recv_bytes())
                except (EOFError, ConnectionResetError):
                    answers[rank] = {"ok": False, "died": True, "output": self._printed(rank)}
                del waiting[rank]
                if not answers[rank]["ok"]:
                    end = min(end, time.monotonic() + _GRACE_S)
        return answers

    def _printed(self, rank: int) -> str:
        """What the job of a rank that died had printed, with the last words of C++ and where Python was."""
        path = Path(self._server.folder, f"{self._pids[rank]}.printed")
        text = path.read_text(errors="replace") if path.exists() else ""
        return text.partition(f"  {OUTERMOST}")[0]

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """In which lines some ranks are that have not answered; without those that do not say it, as if stopped."""
        paths = {rank: Path(self._server.folder, str(self._pids[rank])) for rank in ranks}
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pids[rank], STACK_SIGNAL)
        found: dict[int, str] = {}
        end = time.monotonic() + _STACK_LIMIT_S
        while len(found) < len(paths) and time.monotonic() < end:
            time.sleep(0.02)
            texts = {rank: path.read_text(errors="replace") for rank, path in paths.items() if path.exists()}
            found = {rank: _own_part(text) for rank, text in texts.items() if OUTERMOST in text or _CUT in text}
        return found

    def kill(self) -> dict[int, int]:
        """End all ranks; returns exit codes by rank of those that had ended by themselves."""
        gone = [pid for pid, pipe in zip(self._pids, self._pipes, strict=True) if _is_closed(pipe)]
        ended = self._server.ended(self._pids, gone) if self._server.is_alive() else {}
        for pid, pipe in zip(self._pids, self._pipes, strict=True):
            pipe.close()
            if pid not in ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
        return {rank: ended[pid] for rank, pid in enumerate(self._pids) if pid in ended}


def _own_part(text: str) -> str:
    """What `faulthandler` wrote, without what called the job."""
    lines = text.splitlines()[1:]
    outermost = next((number for number, line in enumerate(lines) if OUTERMOST in line), None)
    return "\n".join(lines[:outermost])


def _is_closed(pipe: Connection) -> bool:
    """Whether the other end was closed, and all it sent was read."""
    try:
        while pipe.poll():
            pipe.recv_bytes()
    except (EOFError, ConnectionResetError):
        return True
    return False


def _show(answers: Mapping[int, Mapping[str, Any]]) -> None:
    for rank, answer in sorted(answers.items()):
        for line in answer["output"].splitlines():
            print(f"[rank {rank}] {line}")  # noqa: T201  (that is what the ranks printed)
