"""The process that ranks of tests are forked from: it imports torch once, and nothing runs in it.

Runs as `python -m weft.testing.rank_server FD`. FD is a socket to the test process. For every
message it forks the ranks of one world: a forked rank is ready in milliseconds, a spawned one
would import torch again. Forking is safe because this process has one thread and never computes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence

from weft.testing.rank_worker import serve_jobs

_REAP_LIMIT_S = 1.0


def main(fd: int) -> None:
    """Fork ranks on request until the test process is gone."""
    control = socket.socket(fileno=fd)
    import torch  # noqa: PLC0415  (after the arguments are known to be right)
    import torch.distributed.fsdp  # noqa: PLC0415, F401

    for module in ("weft.checkpoint", "weft.monitoring", "weft.rehearsal.rehearse", "weft.launching.preload"):
        importlib.import_module(module)
    for name in ("pytest", "hypothesis"):  # which modules of tests import
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # a collection in a rank need not look at what was imported here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control.sendall(b"ready\n")
    children: set[int] = set()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 65536, 64)
        if not data:
            break
        request = json.loads(data)
        if "fork" in request:
            pids = [_fork(control, rank, fd, fds, request) for rank, fd in enumerate(fds)]
            children.update(pids)
            for fd in fds:
                os.close(fd)
            control.sendall(json.dumps({"pids": pids}).encode() + b"\n")
        else:
            ended = _reap(request["ended"], request["gone"])
            children.difference_update(ended)
            control.sendall(json.dumps({"ended": ended}).encode() + b"\n")
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _fork(control: socket.socket, rank: int, mine: int, fds: list[int], request: dict[str, object]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        control.close()
        for fd in fds:
            if fd != mine:
                os.close(fd)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        serve_jobs(mine, rank, request)
        code = 0
    except Exception:  # noqa: BLE001  (the end of this process either way)
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)  # nothing of the server's is to be finalised in a rank


def _reap(pids: Sequence[int], gone: Sequence[int]) -> dict[int, int]:
    """Exit codes of those of `pids` that have ended; negative for a signal.

    A rank that is `gone` closed its pipe: that may be seen a moment before its end.
    """
    ended: dict[int, int] = {}
    end = time.monotonic() + _REAP_LIMIT_S
    while True:
        for pid in pids:
            if pid not in ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    ended[pid] = os.waitstatus_to_exitcode(status)
        if ended.keys() >= set(gone) or time.monotonic() > end:
            return ended
        time.sleep(0.001)


if __name__ == "__main__":
    main(int(sys.argv[1]))
