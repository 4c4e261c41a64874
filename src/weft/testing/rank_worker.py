"""A rank of a warm pool: joins its world once, then runs one job after the other."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from weft import torch_internals
from weft.context import DistContext, adopt, local
from weft.peers.gloo_connections import connections
from weft.tensors.rng_state import seed_torch
from weft.testing.fake import fake

STACK_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)  # upon which a rank writes down where it is
OUTERMOST = f'File "{__file__}", line '  # in what it writes: the caller of the job

_FILTERS = tuple(warnings.filters)


def serve_jobs(fd: int, rank: int, request: dict[str, Any]) -> None:
    """Run jobs that come through `fd` until it is closed."""
    pipe = Connection(fd)
    size = request["fork"]
    # C code writes to it, whatever the rank is doing.
    stack = Path(request["folder"], str(os.getpid())).open("w", encoding="utf-8")  # noqa: SIM115  (kept open)
    faulthandler.register(STACK_SIGNAL, stack, all_threads=False)
    printed = Path(request["folder"], f"{os.getpid()}.printed")
    faulthandler.enable(2)  # where a rank that crashes was goes to what its job printed
    limit = timedelta(seconds=request["timeout_s"])
    store = dist.TCPStore("127.0.0.1", request["port"], is_master=False, timeout=limit)
    if size > 1:
        prefixed = dist.PrefixStore(request["name"], store)
        dist.init_process_group(request["backend"], store=prefixed, rank=rank, world_size=size, timeout=limit)
    # NCCL, which reads this when it connects for the first time, refuses two ranks of one host on one device.
    own = {} if request["backend"] == "gloo" else {"NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
    whole = connections()
    pipe.send_bytes(b"ready")
    while True:
        try:
            job = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        job["environment"] |= own
        data, failed = _run(job, size, printed, whole)
        pipe.send_bytes(data)
        gc.collect()  # groups that nothing refers to any more have threads that keep looking
        if failed and dist.is_initialized():
            # The world ends now; ranks that wait for this one in a collective wake up at once.
            dist.destroy_process_group()
    if dist.is_initialized():
        dist.destroy_process_group()


def _run(job: dict[str, Any], size: int, printed: Path, whole: set[tuple[int, int]]) -> tuple[bytes, bool]:
    """Run one job; returns the pickled answer, and whether the job failed. `whole`: the connections of the group."""
    with _own_output(printed) as output:
        answer = _call(job, size)
    clean = _is_clean(size) and whole <= connections() and not answer.get("abandoned")
    answer |= {"output": output[0], "reusable": clean, "begun": _num_begun()}
    try:
        data = pickle.dumps(answer)
        pickle.loads(data)
    except Exception as error:  # noqa: BLE001  (whatever a value's pickling raises is the test's to see)
        text = answer.get("trace") or f"the result cannot be sent back: {type(error).__name__}: {error}"
        return pickle.dumps({**answer, "ok": False, "result": None, "error": None, "trace": text}), True
    return data, not answer["ok"]


def _call(job: dict[str, Any], size: int) -> dict[str, Any]:
    os.chdir(job["folder"])
    sys.path[:] = job["path"]
    if dict(os.environ) != job["environment"]:
        os.environ.clear()
        os.environ.update(job["environment"])
    _reset()
    try:
        fn, args, kwargs = pickle.loads(job["call"])
        with _context(job["options"], size) as ctx:
            try:
                result = fn(ctx, *args, **kwargs)
            except SystemExit as error:  # a failure: a context takes code 0 for the orderly end of a script
                raise RuntimeError(f"SystemExit({error.code!r}): a rank has to return or raise") from error
        return {"ok": True, "result": result, "abandoned": ctx.world.root.abandoned}
    except BaseException as error:  # noqa: BLE001  (SystemExit and KeyboardInterrupt are failures here too)
        return {"ok": False, "trace": traceback.format_exc(), "error": error.with_traceback(None)}


def _context(options: dict[str, Any], size: int) -> DistContext:
    if size > 1:
        return adopt(**options)
    debug, probes, device = (options.pop(name) for name in ("debug", "probes", "device"))
    return replace(fake(**options), debug=debug, probes=probes, device=local(device=device).device)


def _reset() -> None:
    """Let no job see what an earlier one left behind."""
    warnings.filters[:] = _FILTERS  # type: ignore[index]
    seed_torch(0)
    random.seed(0)
    np.random.seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_autocast_enabled("cpu", False)  # noqa: FBT003
    torch.set_num_threads(1)
    with warnings.catch_warnings(action="ignore"):  # torch 2.9 warns about any value
        torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(mode=False)


def _is_clean(size: int) -> bool:
    """Whether another job can run here: the group is as it was made, and nothing runs in the background."""
    groups = len(torch_internals.world.found.pg_map) if dist.is_initialized() else 0
    ours = [thread for thread in threading.enumerate() if not thread.name.startswith("Dummy-")]  # not of a device
    return groups == (size > 1) and len(ours) == 1


def _num_begun() -> int:
    """How many collectives this rank has begun on the group; one that is ahead of the others still waits for them."""
    group: Any = dist.group.WORLD
    return 0 if group is None else int(torch_internals.MESSAGES_BEGUN.of(group)())


@contextlib.contextmanager
def _own_output(path: Path) -> Iterator[list[str]]:
    """Catch what the job writes, also from C++, and give it back as text; it stays in the file if the rank dies."""
    texts = [""]
    with path.open("w+b") as file:
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
            file.truncate(0)
