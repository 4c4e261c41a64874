"""The other side of `weft.launch_function`: its launcher, and what its ranks do; launch_function.py lists the files."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from weft.environments import cores_here
from weft.errors import MissingExtra
from weft.launching.agent import supervise
from weft.launching.failures import earlier_tracebacks
from weft.launching.mailbox import CALL_FILE, ENDING_FILE, dumps
from weft.launching.plan import make_plan, secret_of
from weft.launching.rank_main import as_rank
from weft.peers.replica_groups import REPLICA_VARIABLE
from weft.peers.store import SECRET_VARIABLE


def main(arguments: Sequence[str]) -> int:
    """Launch the ranks of one call, and write down how it ended.

    Args:
        arguments: `-n N --max-restarts N FOLDER`, of which `weft_command` reads the first, too.
    """
    _, nproc, _, max_restarts, name = arguments
    folder = Path(name)
    threading.Thread(target=_end_with_the_caller, args=(folder,), daemon=True).start()
    given = {"nproc": int(nproc), "max_restarts": int(max_restarts)}
    threads = os.environ.get("OMP_NUM_THREADS")  # noqa: TID251
    plan = make_plan(given, None, cores=len(cores_here()), omp_num_threads=threads)
    os.environ["OMP_NUM_THREADS"] = str(plan.threads)  # noqa: TID251  (read when torch is imported)
    secret = secret_of(plan, os.environ)  # noqa: TID251  (for the ranks)
    ending = supervise(plan, run_call, name, secret, folder=folder)
    sys.stderr.write(earlier_tracebacks(folder, ending.trace))
    if folder.exists():
        (folder / ENDING_FILE).write_text(json.dumps(ending._asdict()), encoding="utf-8")
    return ending.code


def _end_with_the_caller(folder: Path) -> None:
    """A caller that was killed has closed its end; then all ranks end, and what it left for them is removed."""
    while os.read(0, 1):
        pass
    shutil.rmtree(folder, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)


def run_call(folder: str, secret: str) -> None:
    """Call the function; called on every rank."""
    place = Path(folder)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)  # a pipe; whole lines, and at once
    with as_rank(place, variables={SECRET_VARIABLE: secret, REPLICA_VARIABLE: ""}) as here:
        sys.path[:], sys.argv[:], call = pickle.loads((place / CALL_FILE).read_bytes())
        try:
            fn, args = pickle.loads(call)
            result = dumps(fn(*args), f"launch_function: the result of rank {here.rank}")
        except Exception as error:
            with contextlib.suppress(TypeError, MissingExtra):  # then the caller gets the traceback alone
                (place / f"error-{here.attempt}-{here.rank}").write_bytes(dumps(error, "the exception"))
            raise
        path = place / f"result-{here.rank}"
        path.with_suffix(".part").write_bytes(result)
        path.with_suffix(".part").replace(path)
