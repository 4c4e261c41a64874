"""A rank of a warm pool: joins its world once, then runs one job after the other."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import random
import sys
import tempfile
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import weft.context

__all__ = ["serve_jobs"]


def serve_jobs(fd: int, rank: int, request: dict[str, Any]) -> None:
    """Run jobs that come through `fd` until it is closed."""
    pipe = Connection(fd)
    size = request["fork"]
    limit = timedelta(seconds=request["timeout_s"])
    store = dist.TCPStore("127.0.0.1", request["port"], is_master=False, timeout=limit)
    if size > 1:
        prefixed = dist.PrefixStore(request["name"], store)
        dist.init_process_group("gloo", store=prefixed, rank=rank, world_size=size, timeout=limit)
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        pipe.send_bytes(_run(job))
    if dist.is_initialized():
        dist.destroy_process_group()


def _run(job: dict[str, Any]) -> bytes:
    """Run one job; returns the pickled answer."""
    with _own_output() as output:
        answer = _call(job)
    answer["output"] = output[0]
    try:
        return pickle.dumps(answer)
    except Exception as error:  # noqa: BLE001  (whatever a value's pickling raises is the test's to see)
        text = f"the result cannot be sent back: {type(error).__name__}: {error}"
        return pickle.dumps({"ok": False, "error": None, "trace": text, "output": answer["output"]})


def _call(job: dict[str, Any]) -> dict[str, Any]:
    os.chdir(job["folder"])
    sys.path[:] = job["path"]
    _reset()
    try:
        fn, args, kwargs = pickle.loads(job["call"])
        with _context(job) as ctx:
            result = fn(ctx, *args, **kwargs)
        return {"ok": True, "result": result}
    except BaseException as error:  # noqa: BLE001  (SystemExit and KeyboardInterrupt are failures here too)
        trace = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001
            return {"ok": False, "error": None, "trace": trace}
        return {"ok": False, "error": error.with_traceback(None), "trace": trace}


def _context(job: dict[str, Any]) -> weft.context.DistContext:
    options = job["options"]
    if not dist.is_initialized():
        return weft.context.local(seed=options["seed"], debug=options["debug"])
    return weft.context.adopt(device="cpu", **options)


def _reset() -> None:
    """Let no job see what an earlier one left behind."""
    gc.collect()
    torch.manual_seed(0)
    random.seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=False)


@contextlib.contextmanager
def _own_output() -> Iterator[list[str]]:
    """Catch what the job writes, also from C++, and give it back as text."""
    texts = [""]
    with tempfile.TemporaryFile() as file:
        kept = [os.dup(1), os.dup(2)]
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            yield texts
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, fd in enumerate(kept, start=1):
                os.dup2(fd, number)
                os.close(fd)
            file.seek(0)
            texts[0] = file.read().decode(errors="replace")
