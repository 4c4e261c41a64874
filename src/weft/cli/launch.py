"""`weft launch`: a thin front of `torch.distributed.run`.

The agent is torch's own: rendezvous, environment of the ranks, monitoring. Three things differ from
torchrun: ranks are forked from a process that has imported torch already, the traceback of the rank
that failed first is the last thing printed, and a job that was asked to end and has saved itself ends
with the exit code that says so.
"""

from __future__ import annotations

import argparse
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.context.config import LAUNCH, read_config
from weft.context.settings import CONFIG_VARIABLE
from weft.environments import cores_here, end_with_parent
from weft.errors import ContextError
from weft.launching.agent import supervise
from weft.launching.devices import chosen_devices, visible_devices
from weft.launching.failures import Ending
from weft.launching.plan import MEETING_S, LaunchPlan, make_plan, secret_of
from weft.launching.rank_main import run_target
from weft.launching.replicas import LocalNode, supervise_replicas
from weft.launching.slurm import batch_script
from weft.peers.connect import is_here, wait_for_listener
from weft.peers.replica_groups import REPLICA_VARIABLE
from weft.peers.store import SECRET_VARIABLE


def add_parser(commands: Any) -> None:
    """Add the subcommand."""
    sub = commands.add_parser(
        "launch",
        help="run a script on several processes",
        usage="weft launch [options] [-m | --no-python] script ...",
        allow_abbrev=False,
        description="Run a script, or a module with -m, on N processes per node. What follows the script is its own. "
        "Options that are not given are taken from the table [launch] of --config FILE, if it is given.",
    )
    sub.add_argument("-n", "--nproc", type=int, help="processes on this node (default 1)")
    sub.add_argument(
        "--devices", metavar="IDS", help="accelerators of this node, one per process: auto for all, or ids such as 0,2"
    )
    sub.add_argument("--nnodes", metavar="N", help="nodes of the job (default 1), or LEAST:MOST")
    sub.add_argument("--node-rank", type=int, metavar="R", help="rank of this node; default: as they come")
    sub.add_argument("--rdzv", metavar="HOST:PORT", help="where the nodes meet; needed for several nodes")
    sub.add_argument("--max-restarts", type=int, metavar="N", help="start a failed job again, N times at most")
    sub.add_argument(
        "--min-replicas",
        type=int,
        metavar="N",
        help="an elastic job: each process is a replica, started again alone; N of them at least make a step",
    )
    sub.add_argument("--replica-ranks", type=int, metavar="N", help="processes of each replica (default 1)")
    sub.add_argument("--events", metavar="FILE", help="an elastic job: append losses and joins, for `weft report`")
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
    kinds = sub.add_mutually_exclusive_group()
    kinds.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    kinds.add_argument("--no-python", action="store_true", help="the script is a program, started as it is")
    # One argument for both: argparse would take a `--` between the script and its arguments for its own.
    sub.add_argument(
        "script",
        nargs=argparse.PARSER,
        metavar="script ...",
        help="file, or module with -m; then its arguments, passed on untouched",
    )
    # Both spellings, as elsewhere; only one is shown.
    actions = sub._option_string_actions
    actions.update({"--" + name[2:].replace("-", "_"): action for name, action in actions.items() if name[:2] == "--"})


def run(options: argparse.Namespace) -> int:
    """Launch; returns 0, or the exit code of the rank that failed first, after saying why."""
    words = options.script[options.script[0] == "--" :]
    kind = "module" if options.module else "program" if options.no_python else "script"
    file = read_config(options.config) if options.config is not None else None
    given = {name: getattr(options, name) for name in LAUNCH}
    if options.slurm is not None:
        given["rdzv"] = "first:29500"  # the script finds out when it runs
    devices = {}
    if options.devices is not None:
        if options.slurm is not None:
            raise ContextError(
                "launch: --devices has no effect with --slurm",
                found=f"--devices {options.devices} --slurm {options.slurm}",
                expected="the devices of a job of SLURM as SLURM gives them",
                fix=f"weft launch --slurm {options.slurm} --sbatch=--gpus-per-node=2 -n 2 {words[0]}",
            )
        variable, there = visible_devices(os.environ)  # noqa: TID251
        chosen = chosen_devices(options.devices, there, nproc=given["nproc"])
        given["nproc"], devices = len(chosen), {variable: ",".join(chosen)}
    plan = make_plan(given, file, cores=len(cores_here()), omp_num_threads=os.environ.get("OMP_NUM_THREADS"))  # noqa: TID251
    if options.slurm is not None:
        return _submit(plan, words, kind, options)
    _check_target(plan, words[0], kind)
    named = devices if options.config is None else {CONFIG_VARIABLE: str(Path(options.config).resolve()), **devices}
    if options.dry_run:
        print(plan.text(words, kind=kind, cores=cores_here(), variables=named))  # noqa: T201
        return 0
    os.environ["OMP_NUM_THREADS"] = str(plan.threads)  # noqa: TID251  (read when torch is imported)
    # What only the ranks are to know, and nothing of a job that this one is started in.
    named |= {SECRET_VARIABLE: secret_of(plan, os.environ), REPLICA_VARIABLE: ""}  # noqa: TID251
    ending = _launch(plan, words, named, kind)
    if ending.text:
        print(ending.text, file=sys.stderr)  # noqa: T201
    return ending.code


def _check_target(plan: LaunchPlan, name: str, kind: str) -> None:
    """Raise if the script or program is not there, or the program cannot be started in the way asked for."""
    if kind == "script" and not Path(name).is_file():
        is_module = not name.endswith(".py") and all(part.isidentifier() for part in name.split("."))
        raise ContextError(
            f"launch: there is no file {name!r}",
            found=f"working directory {Path.cwd()}",
            expected="a python file, or the name of a module with -m",
            fix=f"weft launch -n {plan.nproc} -m {name}"
            if is_module
            else f"weft launch -n {plan.nproc} path/to/{Path(name).stem or 'train'}.py",
        )
    if kind == "program" and shutil.which(name) is None:
        raise ContextError(
            f"launch: there is no program {name!r}",
            found=f"neither in PATH nor in {Path.cwd()}",
            expected="with --no-python, a program that can be executed",
            fix=f"weft launch -n {plan.nproc} {name}"
            if name.endswith(".py")
            else f"weft launch -n {plan.nproc} --no-python path/to/{Path(name).name}  # after chmod +x",
        )
    if kind == "program" and plan.min_replicas is not None:
        raise ContextError(
            "launch: --min-replicas has no effect on a program",
            found="--no-python --min-replicas",
            expected="a script or a module that calls weft.start(elastic=...)",
            fix=f"weft launch -n {plan.nproc} --no-python {name}",
        )
    if kind == "program" and plan.affinity:
        raise ContextError(
            "launch: --affinity has no effect on a program",
            found="--no-python --affinity",
            expected="a program that chooses its own cores",
            fix=f"weft launch -n {plan.nproc} --no-affinity --no-python {name}",
        )


def _submit(plan: LaunchPlan, words: list[str], kind: str, options: argparse.Namespace) -> int:
    """Write the script for SLURM and hand it in."""
    text = batch_script(
        plan,
        words,
        kind=kind,
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
        raise ContextError(
            f"launch: {options.slurm} was written, but cannot be submitted",
            found="no command sbatch",
            expected="a machine of the cluster",
            fix=f"sbatch {options.slurm}",
        )
    return subprocess.run([command, str(options.slurm)], check=False).returncode  # noqa: S603  (the user's own command)


def _launch(plan: LaunchPlan, words: list[str], variables: Mapping[str, str], kind: str) -> Ending:
    """Start the ranks, and wait until they have ended."""
    if plan.rdzv is not None and plan.most_nodes > 1:
        host, _, port = plan.rdzv.rpartition(":")
        first = is_here(host) if plan.node_rank is None else plan.node_rank == 0
        if not first:
            wait_for_listener(host, int(port), who="launch: this node", limit_s=MEETING_S)
    cores = cores_here() if plan.affinity else []
    with tempfile.TemporaryDirectory(prefix="weft-") as name:
        folder = Path(name)
        if kind == "program":
            # No process stands between this one and the programs, which end with it.
            os.environ.update(variables)  # noqa: TID251
            if sys.platform.startswith("linux"):
                words = [sys.executable, "-I", "-c", _becoming(), str(os.getpid()), *words]
            return supervise(plan, words[0], *words[1:], folder=folder)

        def arguments(own: Mapping[str, str]) -> tuple[Any, ...]:
            return words[0], kind == "module", words[1:], name, cores, {**variables, **own}

        if plan.min_replicas is not None:
            in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else name  # noqa: S108
            with tempfile.TemporaryDirectory(prefix="weft-", dir=in_memory) as memory:
                here = LocalNode(plan, run_target, arguments, folder, Path(memory))
                return supervise_replicas(plan, here, variables[SECRET_VARIABLE])
        return supervise(plan, run_target, *arguments({}), folder=folder)


def _becoming() -> str:
    """What a process does before it becomes a program; what it asks of the system outlasts that."""
    start = "end_with_parent(int(sys.argv[1]))\nos.execvp(sys.argv[2], sys.argv[2:])"
    return f"import os, signal, sys\n{inspect.getsource(end_with_parent)}\n{start}"
