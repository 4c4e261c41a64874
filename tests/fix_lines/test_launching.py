"""The commands, starting ranks, and what is for tests: `weft.cli`, `weft.launching`, `weft.testing`."""

import re
import shlex
import subprocess
import sys
import threading
import tomllib

import pytest
import torch
import torch.distributed as dist

import weft
import weft.cli
from tests.fix_lines.sites import ROOT
from tests.fix_lines.told import printed, told
from weft.context.config import read_config
from weft.testing import fake, largest_difference, run_ranks


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('trains')\n")
    return tmp_path


def weft_(line, *more):
    """The exit code of a command line of `weft`, with more options."""
    name, command, *words = shlex.split(line, comments=True)
    assert name == "weft"
    return weft.cli.main([command, *more, *words])


def extra(line):
    """The packages of an extra of weft that `pip install` is told."""
    name = re.fullmatch(r"pip install 'torchweft\[(\w+)\]'", line)[1]
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][name]


# -- the commands ------------------------------------------------------------------------------------


def test_config(folder):
    with told("cli/config.py", "means nothing") as it:
        weft.cli.main(["config", "nproc=2"])
    assert weft_(it.fix) == 0 and read_config("run.toml").start == {"seed": 1}
    with told("cli/config.py", "already exists") as it:
        weft.cli.main(["config", "launch.nproc=4"])
    assert weft_(it.fix) == 0 and read_config("run.toml").launch == {"nproc": 4}
    (folder / "run.toml").unlink()
    with told("cli/foreign/accelerate.py", "cannot be converted") as it:
        weft.cli.main(["config", "import", "no.yaml"])
    path = folder / ".cache" / "huggingface" / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("num_processes: 3\n")
    assert weft_(it.fix.replace("~", str(folder))) == 0 and read_config("run.toml").launch["nproc"] == 3


def test_estimate_and_migrate(folder, capsys):
    with told("cli/estimate.py", "is not a model") as it:
        weft.cli.main(["estimate", "nothing_here"])
    assert weft_(it.fix) == 0 and "parameters" in capsys.readouterr().out
    with told("cli/migrate.py", "no use of") as it:
        weft.cli.main(["migrate", "train.py"])
    model, ctx = torch.nn.Linear(2, 2), weft.local()
    assert it.run(model=model, ctx=ctx)["ctx"].applied[-1].name == "replicate"
    page = re.search(r"torchweft.github.io/weft/(\w+).html", it.fix)[1]
    assert "## The plain loop" in (ROOT / "docs" / f"{page}.md").read_text()
    (folder / "train.py").unlink()
    with told("cli/migrate.py", "cannot be translated") as it:
        weft.cli.main(["migrate", "trian.py"])
    (folder / "train.py").write_text("from accelerate import Accelerator\naccelerator = Accelerator()\n")
    assert weft_(it.fix) in (0, 1) and "+import weft" in capsys.readouterr().out


def test_targets_of_launch(folder):
    (folder / "path" / "to").mkdir(parents=True)
    for name in ("trian.py", "run.sh"):
        (folder / "path" / "to" / name).touch()
    with told("cli/launch.py", "launch: there is no file") as it:
        weft.cli.main(["launch", "-n", "2", "trian.py"])
    assert weft_(it.fix, "--dry-run") == 0
    with told("cli/launch.py", "launch: there is no file") as it:
        weft.cli.main(["launch", "-n", "2", "train"])
    assert weft_(it.fix, "--dry-run") == 0 and it.fix.endswith("-m train")
    with told("cli/launch.py", "launch: there is no program") as it:
        weft.cli.main(["launch", "--no-python", "train.py"])
    assert weft_(it.fix, "--dry-run") == 0
    with told("cli/launch.py", "launch: there is no program") as it:
        weft.cli.main(["launch", "--no-python", "run.sh"])
    line, comment = it.fix.split("  # after ")
    subprocess.run([*comment.split(), "path/to/run.sh"], check=True)
    assert weft_(line, "--dry-run") == 0
    with told("cli/launch.py", "--min-replicas has no effect on a program") as it:
        weft.cli.main(["launch", "--no-python", "--min-replicas", "1", "sh"])
    assert weft_(it.fix, "--dry-run") == 0
    with told("cli/launch.py", "--affinity has no effect on a program") as it:
        weft.cli.main(["launch", "--no-python", "--affinity", "sh"])
    assert weft_(it.fix, "--dry-run") == 0


def test_options_of_launch(folder):
    given = [
        "-n 0", "--nnodes 0", "--node-rank 1", "--max-restarts -1", "-n 2 --min-replicas 3", "--replica-ranks 2",
        "-n 3 --replica-ranks 2 --min-replicas 1", "--events losses.jsonl", "--threads 0", "--nnodes 2", "--rdzv host",
        "--nnodes 2 --rdzv host:0", "--nnodes 1:2 --node-rank 0 --rdzv a:1",
    ]  # fmt: skip
    for options in given:
        with told("launching/plan.py", "launch: these options cannot be combined") as it:
            weft.cli.main(["launch", *options.split(), "train.py"])
        assert weft_(it.fix, "--dry-run") == 0
        assert "first-node" not in it.fix or "node" in options or "nnodes" in options  # else it would wait for a node


def test_jobs_of_slurm(folder, monkeypatch):
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    with told("cli/launch.py", "launch: --devices has no effect with --slurm") as it:
        weft.cli.main(["launch", "--devices", "0,1", "--slurm", "job.sh", "train.py"])
    submit = folder / "sbatch"
    submit.write_text("#!/bin/sh\necho submitted > done.txt\n")
    with told("cli/launch.py", "was written, but cannot be submitted") as written:
        weft_(it.fix)
    submit.chmod(0o755)
    assert weft_(it.fix) == 0 and "--gpus-per-node=2" in (folder / "job.sh").read_text()
    (folder / "done.txt").unlink()
    subprocess.run(written.fix.split(), check=True)
    assert (folder / "done.txt").exists()


def test_devices_of_launch(folder, monkeypatch):
    with told("launching/devices.py", "launch: --devices {wish} cannot be used") as it:
        weft.cli.main(["launch", "--devices", "auto", "train.py"])
    assert weft_(it.fix, "--dry-run") == 0
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)
    with told("launching/devices.py", "launch: --devices {wish} cannot be used") as it:
        weft.cli.main(["launch", "--devices", "7", "train.py"])
    assert weft_(it.fix, "--dry-run") == 0 and "--devices 0,1" in it.fix


# -- functions on ranks ------------------------------------------------------------------------------


def test_packages_that_pickle(monkeypatch):
    lock = threading.Lock()
    with told("launching/mailbox.py", "{what} cannot be sent to another process', found=found, expected='values") as it:
        run_ranks(print, 2, lock)
    assert it.fix == "make files, locks and connections inside the function, and return plain values"
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    for call in (lambda: run_ranks(lambda ctx: ctx.rank, 2), lambda: weft.launch_function(lambda: 1, 2)):
        with told("launching/mailbox.py", "cannot be sent to another process without cloudpickle") as it:
            call()
        assert any(package.startswith("cloudpickle") for package in extra(it.fix))


def test_worlds_and_values_of_tests():
    with told("testing/fake.py", "cannot be") as it:
        fake(2, 2)
    it.run()
    with told("testing/equivalence.py", "cannot be compared") as it:
        largest_difference([torch.ones(2)], [torch.ones(3)])
    assert it.fix == "compare values of one structure"
    assert largest_difference([torch.ones(2)], [torch.zeros(2)]) == 1


def _rank(ctx):
    return ctx.rank


def _rank_of_job():
    with weft.start(device="cpu") as ctx:
        return ctx.rank


def _with_own_lock():
    lock = threading.Lock()
    with lock:
        return _rank_of_job()


@pytest.mark.slow
def test_functions_for_ranks():
    with told("testing/ranks.py", "check_count('run_ranks', 'n', n") as it:
        run_ranks(_rank, 0)
    assert eval(it.fix, {"run_ranks": run_ranks, "fn": _rank}) == [0, 1]
    assert run_ranks(lambda ctx: threading.Lock().locked(), 2) == [False, False]  # made inside the function


@pytest.mark.slow
def test_functions_that_are_launched(monkeypatch):
    lock = threading.Lock()
    with told("launching/mailbox.py", "{what} cannot be sent to another process', found=found, expected='values") as it:
        weft.launch_function(lock.acquire, 2)
    assert it.fix == "make files, locks and connections inside the function, and return plain values"
    with told("launching/launch_function.py", "check_count('launch_function'") as call:
        weft.launch_function(_with_own_lock, 0)
    with monkeypatch.context() as patch:
        for name, text in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
            patch.setenv(name, text)
        with told("launching/launch_function.py", "this process is already a rank of a job") as it:
            weft.launch_function(_with_own_lock, 2)
        itself, python = it.fix.split(", or ")
        assert itself == "call the function itself" and _with_own_lock() == 0
    assert python == "start this program with python instead of a launcher"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with told("launching/launch_function.py", "this process is already a rank of a job") as it:
        weft.launch_function(_with_own_lock, 2)
    _, destroy, _ = re.fullmatch(r"(.*), or (.*), before (.*)", it.fix).groups()
    exec(destroy, {"torch": torch})
    assert eval(call.fix, {"weft": weft, "fn": _with_own_lock}) == [0, 1]


# -- scripts on ranks --------------------------------------------------------------------------------

_REPLICA = """
import sys, torch, weft
with {start} as ctx:
    loader, ctx = weft.shard_data(torch.utils.data.DataLoader(range(4)), ctx)
    model, ctx = weft.replicate(torch.nn.Linear(1, 1), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, ctx = weft.checkpointable({{"model": model, "optimizer": optimizer, "loader": loader}}, ctx)
    for batch in weft.resilient(loader, ctx, state=state):
        model(batch.float()[:, None]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
_TWICE = """
import weft
with weft.start(device="cpu") as ctx:
    ctx.print("one of", ctx.world_size)
if ctx.is_main:
    with weft.local() as ctx:
        print("alone", ctx.world_size)
    with weft.start(device="cpu") as ctx:
        pass
"""


def _run(line, folder, *more):
    """What a command line of `weft` writes."""
    command = [sys.executable, "-m", *shlex.split(line)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_launchers_of_replicas_and_of_ranks(folder, monkeypatch):
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    with monkeypatch.context() as patch:
        for name, text in place.items():
            patch.setenv(name, text)
        with told("context/start.py", "this launcher restarts other ranks as well when one fails") as launcher:
            weft.start(elastic="replica", device="cpu")
        patch.setenv("WEFT_REPLICA", '{"ranks": 1}')  # of weft launch --min-replicas
        with told("context/start.py", "this launcher restarts a failed rank on its own") as program:
            weft.start(device="cpu")
    start, without = program.fix.split(", or ")
    (folder / "train.py").write_text(_REPLICA.format(start=start))
    done = _run(launcher.fix, folder)
    assert done.returncode == 0, done.stderr
    assert without == "weft launch without --min-replicas"
    (folder / "train.py").write_text(_TWICE)
    done = _run("weft launch -n 2 train.py", folder)
    assert done.stdout.splitlines() == ["one of 2", "alone 1"]
    it = printed("peers/liveness.py", "of this job has been started before", done.stderr)
    assert it.fix == "weft.local() in a process that a rank starts; one weft.start() for all of a program"
