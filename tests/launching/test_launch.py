"""weft launch: as if each rank were `python script args`, and one clear end."""

import contextlib
import json
import multiprocessing
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import pytest
import torch

import weft.cli
from tests.processes import is_alive, listening, until
from tests.variants import variant_cases, variants
from weft.context.config import LAUNCH, read_config
from weft.errors import ContextError
from weft.launching.devices import chosen_devices
from weft.launching.failures import Ending
from weft.launching.plan import make_plan
from weft.launching.slurm import batch_script

PROGRAM = [str(pathlib.Path(sys.executable).with_name("weft"))]
LIMIT_S = 300


def _environment(**extra):
    own = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    return {k: v for k, v in os.environ.items() if not k.startswith("WEFT_") and k not in own} | extra


def _launch(*arguments, folder, program=PROGRAM, env=None):
    return subprocess.run(
        [*program, "launch", *map(str, arguments)],
        cwd=folder,
        env=env or _environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def _write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


# -- what strangers see ------------------------------------------------------------------------------

WAITS = """
import json, os, pathlib, time
import weft

with weft.start(device="cpu") as ctx:
    found = {"pid": os.getpid(), "secret": os.environ["WEFT_SECRET"], "address": os.environ["MASTER_ADDR"]}
    pathlib.Path(f"part-{ctx.rank}").write_text(json.dumps(found))
    pathlib.Path(f"part-{ctx.rank}").rename(f"rank-{ctx.rank}")
    while not pathlib.Path("end").exists():
        time.sleep(0.02)
"""


def _command_lines():
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # gone
            yield path.read_text(errors="replace")


@pytest.mark.skipif(not pathlib.Path("/proc/net/tcp").exists(), reason="needs /proc")
@pytest.mark.parametrize("given", variants("", "of the user"))
def test_a_job_on_one_node_listens_on_the_loopback_address_and_shows_its_secret_to_nobody(tmp_path, given):
    _write(tmp_path, "train.py", WAITS)
    command = [*PROGRAM, "launch", "-n", "2", "train.py"]
    env = _environment(WEFT_SECRET=given, WEFT_REPLICA="of another job")
    job = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    files = [tmp_path / f"rank-{rank}" for rank in range(2)]
    try:
        assert until(lambda: all(file.exists() for file in files) or job.poll() is not None, LIMIT_S)
        found = [json.loads(file.read_text()) for file in files]
        (secret,) = {each["secret"] for each in found}
        assert secret == given or re.fullmatch("[0-9a-f]{32}", secret)
        assert {each["address"] for each in found} == {host for host, _ in listening(job.pid)} == {"127.0.0.1"}
        assert not any(secret in line for line in _command_lines())
        (tmp_path / "end").touch()
        said, _ = job.communicate(timeout=LIMIT_S)
    finally:
        job.kill()
    assert job.returncode == 0 and said == ""


def test_the_secret_of_the_user_is_not_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WEFT_SECRET", "abc123")
    (tmp_path / "train.py").touch()
    assert weft.cli.main(["launch", "-n", "2", "--dry-run", str(tmp_path / "train.py")]) == 0
    assert weft.cli.main(["explain"]) == 0
    monkeypatch.setenv("WEFT_SECRETS", "abc123")
    assert weft.cli.main(["explain"]) == 2
    shown = "".join(capsys.readouterr())
    assert "WEFT_SECRETS" in shown and "abc123" not in shown


# -- what a script sees ------------------------------------------------------------------------------

SEES = """
import json, os, pathlib, pickle, sys
import torch, weft

class Point:
    def __init__(self, x):
        self.x = x

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return Point(index).x

def double(x):
    return 2 * x

def main():
    import multiprocessing
    found = {
        "argv": sys.argv, "path": sys.path[0], "file": __file__, "name": __name__, "doc": __doc__,
        "main": sys.modules["__main__"].__dict__ is globals(),
        "pickled": pickle.loads(pickle.dumps(Point(3))).x,
        "omp": os.environ.get("OMP_NUM_THREADS"), "threads": torch.get_num_threads(),
        "folder": os.getcwd(),
        "annotations": "reports" in dir() or "launch" in globals(),
        "start": multiprocessing.get_start_method(),
    }
    for method in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Data(), num_workers=1, batch_size=2, multiprocessing_context=method)
        found[method] = [batch.tolist() for batch in loader]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found["pool"] = pool.map(double, [1, 2])
    with weft.start() as ctx:
        found |= {"rank": ctx.rank, "size": ctx.world_size, "local": ctx.local_rank,
                  "sum": float(weft.reduce(torch.ones(()), ctx, "sum"))}
    sys.stdout.write(f"rank {ctx.rank} speaks\\n")  # one write, also under PYTHONUNBUFFERED
    pathlib.Path(os.environ["OUT"], f"{ctx.rank}.json").write_text(json.dumps(found))

if __name__ == "__main__":
    main()
"""

ARGUMENTS = ["--", "--lr=1", "-n", "5", "two words", "", "--", "--help", "-m", "ünï"]


@pytest.mark.slow
def test_a_script_sees_what_python_would_show_it(tmp_path):
    script = _write(tmp_path, "code/train.py", SEES)
    out = tmp_path / "out"
    out.mkdir()
    done = _launch("-n", 2, "code/train.py", *ARGUMENTS, folder=tmp_path, env=_environment(OUT=str(out)))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0 speaks", "rank 1 speaks"]
    for rank in range(2):
        found = json.loads((out / f"{rank}.json").read_text())
        assert found["argv"] == ["code/train.py", *ARGUMENTS]
        assert found["path"] == str(script.parent) and found["folder"] == str(tmp_path)
        assert script.samefile(tmp_path / found["file"])
        assert (found["name"], found["doc"], found["main"], found["pickled"]) == ("__main__", None, True, 3)
        assert found["start"] == multiprocessing.get_all_start_methods()[0]
        assert found["fork"] == found["spawn"] == [[0, 1], [2, 3]] and found["pool"] == [2, 4]
        assert (found["rank"], found["size"], found["local"], found["sum"]) == (rank, 2, rank, 2.0)
        assert found["omp"] == str(found["threads"]) == str(max((os.cpu_count() or 1) // 2, 1))


@pytest.mark.slow
def test_of_ranks_that_fail_apart_the_first_is_told(tmp_path):
    _write(tmp_path, "train.py", "import os\nraise ValueError('on ' + os.environ['RANK'])\n")
    done = _launch("-n", 2, "train.py", folder=tmp_path)
    assert done.returncode == 1 and done.stderr.count("Traceback") == 1, done.stderr
    assert "attempt" not in done.stderr


EXITS = """
import atexit, pathlib, sys
import weft

ctx = weft.start()
atexit.register(lambda: pathlib.Path(f"{sys.argv[1]}-{ctx.rank}").write_text(str(ctx.world_size)))
if sys.argv[1] == "raises":
    raise ValueError("its own error")
sys.exit({"ends": 0, "exits": 3}[sys.argv[1]])
"""


@pytest.mark.parametrize(("how", "code"), variant_cases(("exits", 3), ("ends", 0), ("raises", 1)))
def test_functions_of_atexit_are_called(tmp_path, how, code):
    _write(tmp_path, "train.py", EXITS)
    done = _launch("-n", 2, "train.py", how, folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert ("its own error" in done.stderr) == (how == "raises")
    left = [path.read_text() for path in tmp_path.glob(f"{how}-*")]
    assert left == ["2"] * len(left) and left and (len(left) == 2 or code)  # a failure ends the other rank


MODULE = """
import os, pathlib, sys
from .part import VALUE
import weft
with weft.start() as ctx:
    name = pathlib.Path(sys.argv[0]).name
    text = f"{ctx.rank}/{ctx.world_size} {__name__} {__package__} {VALUE} {sys.argv[1:]} {name}"
    pathlib.Path(f"{ctx.rank}.txt").write_text(text)
"""


@pytest.mark.slow
def test_a_module_and_the_users_thread_count(tmp_path):
    _write(tmp_path, "pkg/__init__.py", "")
    _write(tmp_path, "pkg/part.py", "VALUE = 7\n")
    _write(tmp_path, "pkg/train.py", MODULE)
    done = _launch(
        "--nproc", 2, "-m", "pkg.train", "-m", "x", folder=tmp_path, program=[sys.executable, "-m", "weft"],
        env=_environment(OMP_NUM_THREADS="3"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == f"{rank}/2 __main__ pkg 7 ['-m', 'x'] train.py"


SHOWS = """#!/bin/sh
env > "env-$LOCAL_RANK"
printf '%s|' "$@" > "arguments-$LOCAL_RANK"
[ "$1" != fail ] || exit 5
"""


@pytest.mark.slow
def test_a_program_that_is_no_python_and_the_environment_of_the_plan(tmp_path):
    _write(tmp_path, "run.toml", "[start]\nseed = 3\n")
    _write(tmp_path, "show it.sh", SHOWS).chmod(0o755)
    options = ["--nproc", 2, "--max_restarts", 0, "--threads=3", "--config", "run.toml", "--rdzv", "localhost:0"]
    arguments = ["a b", "", "--", "-m", "--no-python", "$HOME"]
    done = _launch(*options, "--no-python", "./show it.sh", *arguments, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    plan = _plan(nproc=2, threads=3)
    for rank in range(2):
        assert (tmp_path / f"arguments-{rank}").read_text() == "".join(f"{word}|" for word in arguments)
        found = dict(line.split("=", 1) for line in (tmp_path / f"env-{rank}").read_text().splitlines() if "=" in line)
        expected = plan.variables(rank, {"WEFT_CONFIG": str(tmp_path / "run.toml")})
        assert {name: found.get(name) for name in expected} == expected
        assert int(found["MASTER_PORT"]) > 0 and found["MASTER_ADDR"]


@pytest.mark.slow
def test_a_program_that_fails(tmp_path):
    _write(tmp_path, "show.sh", SHOWS).chmod(0o755)
    done = _launch("-n", 2, "--no-python", "./show.sh", "fail", folder=tmp_path)
    assert done.returncode == 5
    assert re.fullmatch(r"weft launch: rank [01] \(process \d+\) ended with exit code 5\n", done.stderr), done.stderr


@pytest.mark.slow
def test_a_script_without_guard_runs_once_per_rank(tmp_path):
    text = 'import os\nopen(f"{os.environ[\'RANK\']}-{os.getpid()}", "w")\n'
    _write(tmp_path, "bare.py", text)
    done = _launch("-n", 2, "bare.py", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    ran = [path.name[0] for path in tmp_path.iterdir() if path.name != "bare.py"]
    assert sorted(ran) == ["0", "1"]


# -- how it ends -------------------------------------------------------------------------------------

ENDS = """
import os, signal, sys
import weft
how = sys.argv[1]
with weft.start(timeout_s=60) as ctx:
    if ctx.rank == 1:
        if how == "module":
            raise ValueError("the data of rank 1 is bad")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "text":
            sys.exit("rank 1 gives up")
        if how == "os":
            os._exit(9)
        if how == "os 0":
            os._exit(0)
    if how != "0":
        weft.barrier(ctx)
    else:
        sys.exit(0)
"""


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        pytest.param("0", 0, r"^$", marks=pytest.mark.slow),
        ("kill", 137, r"^weft launch: rank 1 \(process \d+\) ended by signal 9 \(SIGKILL\)\n$"),
        pytest.param("text", 1, r"rank 1 gives up\n(?s:.*)weft launch: rank 1 .*exit code 1", marks=pytest.mark.slow),
        pytest.param(
            "os 0",
            1,
            r"its process is gone(?s:.*)weft launch: rank 1 \(process \d+\) ended with exit code 0 while others",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "module",
            1,
            r'^Traceback[^\n]*\n  File "[^"]*ends.py", line 8.*bad\nweft launch: rank 1 failed\n$',
            marks=pytest.mark.slow,
        ),
    ],
)
def test_exit_code_and_one_text_come_from_the_rank_that_failed_first(tmp_path, how, code, text):
    _write(tmp_path, "ends.py", ENDS)
    target = ["-m", "ends"] if how == "module" else ["ends.py"]
    done = _launch("-n", 2, *target, how, folder=tmp_path)
    assert done.returncode == code, done.stderr
    assert re.search("(?s)" + text if how not in ("0", "text") else text, done.stderr), done.stderr
    if how != "0":
        assert done.stderr.count("weft launch: rank") == 1, done.stderr
        assert done.stderr.count("Traceback") <= 1 and "runpy" not in done.stderr, done.stderr


FAILS = """
import ctypes, faulthandler, os, signal, sys
how, ranks = sys.argv[1], sys.argv[2].split(",")
import weft
{extra}
def work(rank):
    if str(rank) in ranks:
        if how == "raise":
            raise KeyError("no such column\\nin two lines")
        if how == "exit":
            raise SystemExit(3)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "crash":
            ctypes.string_at(0)
        if how == "import":
            import no_such_module
with weft.start(timeout_s=60) as ctx:
    work(ctx.rank)
    weft.barrier(ctx)
"""
# How rank or ranks fail: exit code, what the output ends with, what is there once.
FAILURES = {
    ("raise", "1"): (1, r"weft launch: rank 1 failed", "KeyError: 'no such column\\nin two lines'"),
    ("raise", "0,1"): (1, r"weft launch: rank [01] failed", "KeyError: 'no such column\\nin two lines'"),
    ("exit", "1"): (3, r"weft launch: rank 1 \(process \d+\) ended with exit code 3", ""),
    ("exit", "0,1"): (3, r"weft launch: rank [01] \(process \d+\) ended with exit code 3", ""),
    ("crash", "1"): (
        139, r"weft launch: rank 1 \(process \d+\) ended by signal 11 \(SIGSEGV\)",
        "Fatal Python error: Segmentation fault",
    ),
    ("import", "0,1"): (1, r"weft launch: rank [01] failed", "ModuleNotFoundError: No module named 'no_such_module'"),
    ("syntax", "0,1"): (1, r"weft launch: rank [01] failed", "SyntaxError: '(' was never closed"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "ranks", "restarts"),
    [*((*case, number % 2) for number, case in enumerate(FAILURES)), ("raise", "1", 1)],
)
def test_the_end_of_the_output_says_once_why(tmp_path, how, ranks, restarts):
    code, last, once = FAILURES[how, ranks]
    _write(tmp_path, "fails.py", FAILS.replace("{extra}", "print((" if how == "syntax" else ""))
    done = _launch("-n", 2, "--max-restarts", restarts, "fails.py", how, ranks, folder=tmp_path)
    assert done.returncode == code, done.stderr
    lines = done.stderr.splitlines()
    assert re.fullmatch(last, lines[-1]), done.stderr
    end = "\n".join(lines[-20:])
    if once:
        assert done.stderr.count(once) == end.count(once) == 1, done.stderr
    if how == "crash":
        assert re.search(r'string_at\n  File "fails.py", line 15 in work\n.*\nweft launch', end), done.stderr
    assert done.stderr.count("Traceback") <= 1, done.stderr
    assert done.stderr.count("all ranks start again after a failure, attempt 2") == restarts
    if how in ("raise", "import"):
        assert f'fails.py", line {9 if how == "raise" else 17}, in work' in end
        assert len(re.findall(r"weft launch: rank [01] failed: \w+ in .*fails.py, line \d+\n", done.stderr)) == restarts


@pytest.mark.slow
def test_an_attempt_that_failed_otherwise_is_told_at_the_end(tmp_path):
    text = "import os\nif os.environ['RANK'] == '0':\n"
    text += "    raise ValueError(f\"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}\")\n"
    _write(tmp_path, "twice.py", text)
    done = _launch("-n", 2, "--max-restarts", 1, "twice.py", folder=tmp_path)
    assert re.search(
        r"attempt 1 failed on rank 0:\nTraceback(.|\n)*attempt 0\nTraceback(.|\n)*attempt 1\n", done.stderr
    )
    assert done.stderr.endswith("weft launch: rank 0 failed\n"), done.stderr


SLEEPS = """
import os, pathlib, subprocess, sys, time
pathlib.Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
time.sleep(100)
"""


def _children_of(pid, depth=99):
    """All living descendants of a process, or those of so many generations."""
    found, waiting = set(), [(pid, 0)]
    while waiting:
        one, generation = waiting.pop()
        try:
            text = " ".join(path.read_text() for path in pathlib.Path(f"/proc/{one}/task").glob("*/children"))
        except FileNotFoundError:
            continue
        children = {int(child) for child in text.split()} - found
        found |= children
        waiting += [(child, generation + 1) for child in children] if generation + 1 < depth else []
    return found


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").is_dir(), reason="looks at processes through /proc")
@pytest.mark.parametrize(
    ("number", "whole_group"),
    [
        (signal.SIGINT, True),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGUSR1, False, marks=pytest.mark.slow),  # of SLURM, before the time is over
    ],
)
def test_a_signal_ends_all_processes(tmp_path, number, whole_group):
    _write(tmp_path, "sleeps.py", SLEEPS)
    process = subprocess.Popen(
        [*PROGRAM, "launch", "-n", "2", "sleeps.py"], cwd=tmp_path, env=_environment(), stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        files = [tmp_path / f"pid-{rank}" for rank in range(2)]
        assert until(lambda: all(f.exists() and f.read_text() for f in files), 200)
        family = _children_of(process.pid)
        assert {int(f.read_text()) for f in files} <= family
        if whole_group:  # as Ctrl-C in a terminal
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        error = process.communicate(timeout=LIMIT_S)[1]
        assert process.returncode == 128 + number, error
        assert error == f"weft launch: ended by {number.name}\n"
        assert until(lambda: not any(map(is_alive, family)), 60), [p for p in family if is_alive(p)]
    finally:
        for pid in {*_children_of(process.pid), process.pid}:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(not pathlib.Path("/proc/self/task").is_dir(), reason="looks at processes through /proc")
@pytest.mark.parametrize("kind", ["script", "program"])
def test_a_signal_ends_a_job_that_is_being_started(tmp_path, kind):
    _write(tmp_path, "sleeps.py", SLEEPS)
    target = ["sleeps.py"] if kind == "script" else ["--no-python", "sleep", "100"]
    process = subprocess.Popen(
        [*PROGRAM, "launch", "-n", "4", *target], cwd=tmp_path, env=_environment(), stderr=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    family = set()

    def has_begun():
        family.update(_children_of(process.pid))
        servers = [] if kind == "program" else family - _children_of(process.pid, depth=1)
        return servers or any(pathlib.Path(f"/proc/{pid}/comm").read_text() == "sleep\n" for pid in family)

    try:
        assert until(has_begun, 60)  # of four ranks one, or two
        process.send_signal(signal.SIGTERM)
        error = process.communicate(timeout=LIMIT_S)[1]
        assert (process.returncode, error) == (128 + signal.SIGTERM, "weft launch: ended by SIGTERM\n")
        assert until(lambda: not any(map(is_alive, family)), 60)
    finally:
        for pid in {*family, *_children_of(process.pid), process.pid}:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").is_dir(), reason="looks at processes through /proc")
@pytest.mark.parametrize("kind", variants("script", "program"))
def test_no_rank_is_left_when_the_launcher_is_killed(tmp_path, kind):
    _write(tmp_path, "sleeps.py", SLEEPS)
    target = ["sleeps.py"] if kind == "script" else ["--no-python", sys.executable, "sleeps.py"]
    process = subprocess.Popen([*PROGRAM, "launch", "-n", "2", *target], cwd=tmp_path, env=_environment())
    family = set()
    try:
        files = [tmp_path / f"pid-{rank}" for rank in range(2)]
        assert until(lambda: all(f.exists() and f.read_text() for f in files), 60)
        family = _children_of(process.pid)
        assert {int(f.read_text()) for f in files} <= family
        process.kill()
        assert until(lambda: not any(map(is_alive, family)), 60), [p for p in family if is_alive(p)]
    finally:
        for pid in {*family, process.pid}:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.wait()


PREEMPTED = """
import pathlib, time, torch, weft
with weft.start(device="cpu", elastic="replica" if ELASTIC else None) as ctx:
    stop = weft.on_preemption(ctx)
    steps = range(10**9)
    if ELASTIC:
        loader, ctx = weft.shard_data(torch.utils.data.DataLoader(range(10**6)), ctx)
        model, ctx = weft.replicate(torch.nn.Linear(1, 1), ctx)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
        steps = weft.resilient(loader, ctx, state=state)
    for i, batch in enumerate(steps):
        if ELASTIC:
            model(batch.float()[:, None]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.002)
        if i == 3 and (steps.leads if ELASTIC else ctx.is_main):
            pathlib.Path("ready").touch()
        if stop(i):
            raise SystemExit(stop.exit_code)
"""
ENDED = "the job was asked to end and has ended"


@pytest.mark.slow
@pytest.mark.parametrize(("elastic", "again"), [(False, "at the end"), (True, "at once")])
def test_the_same_signal_once_more_does_not_change_the_exit_code(tmp_path, again, elastic):
    _write(tmp_path, "train.py", PREEMPTED.replace("ELASTIC", str(elastic)))
    process = subprocess.Popen(
        [*PROGRAM, "launch", "-n", "2", *(["--min-replicas", "1"] if elastic else []), "train.py"],
        cwd=tmp_path, env=_environment(), stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert until((tmp_path / "ready").exists, 60)
        os.killpg(process.pid, signal.SIGTERM)  # as SLURM and systemd do; the launcher passes it on besides
        error = ""
        while again == "at the end" and ENDED not in error and process.poll() is None:
            error += process.stderr.readline()
        while process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            if again == "at once":
                break
        error += process.communicate(timeout=LIMIT_S)[1]
        assert process.returncode == 75, error
        assert ENDED in error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


LEAVES = """
import os, sys, threading, time
if sys.argv[1] == "thread":
    threading.Thread(target=lambda: os._exit(0)).start()
    time.sleep(60)
if os.environ["RANK"] == "0" or sys.argv[1] == "all":
    os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "who"),
    [
        (2, "all"),
        pytest.param(2, "one", marks=pytest.mark.slow),
        pytest.param(1, "thread", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_end_without_a_word_have_ended(tmp_path, ranks, who):
    _write(tmp_path, "leaves.py", LEAVES)
    done = _launch("-n", ranks, "leaves.py", who, folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(("options", "threads"), [(["--threads", "2"], "2"), ([], "3")])
def test_the_command_line_says_how_many_threads(tmp_path, monkeypatch, options, threads):
    path = _write(tmp_path, "train.py", "")
    found = []
    monkeypatch.setattr("weft.cli.launch._launch", lambda *_: found.append(os.environ["OMP_NUM_THREADS"]) or Ending())
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert weft.cli.main(["launch", *options, str(path)]) == 0
    assert found == [threads]


# -- several nodes -----------------------------------------------------------------------------------

NODES = """
import pathlib, weft
with weft.start() as ctx:
    text = f"{ctx.rank}/{ctx.world_size} local {ctx.local_rank}/{ctx.local_world_size} "
    text += f"node {ctx.node_rank}/{ctx.num_nodes}"
    pathlib.Path(f"{ctx.rank}.txt").write_text(text)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranked", [True, False])
def test_two_nodes_meet(tmp_path, ranked):
    _write(tmp_path, "nodes.py", NODES)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launchers = [
        subprocess.Popen(
            [*PROGRAM, "launch", "-n", "2", "--nnodes", "2", *(["--node-rank", str(node)] if ranked else []),
             "--rdzv", f"127.0.0.1:{port}", "nodes.py"],
            cwd=tmp_path, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in launchers]
    finally:
        for process in launchers:
            process.kill()
    assert [process.returncode for process in launchers] == [0, 0], outputs
    found = [(tmp_path / f"{rank}.txt").read_text() for rank in range(4)]
    assert found == [f"{rank}/4 local {rank % 2}/2 node {rank // 2}/2" for rank in range(4)]


# -- options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-n", "0", "x.py"], r"these options cannot be combined\n  found:    -n 0 .*fix:"),
        (["--nnodes", "0", "x.py"], r"found:    -n 1 --nnodes 0.*fix:"),
        (["--nnodes", "2", "x.py"], r"found:    --nnodes 2, no --rdzv.*fix:"),
        (["--nnodes", "2", "--node-rank", "2", "--rdzv", "h:1", "x.py"], r"found:    .*--node-rank 2.*fix:"),
        (["--node-rank", "-1", "x.py"], r"found:    .*--node-rank -1.*fix:"),
        (
            ["nowhere.py"],
            r"there is no file 'nowhere.py'\n  found:    working directory .*fix:      weft launch -n 1 path/to/",
        ),
        (["."], r"there is no file '\.'.*fix:"),
        (["--no-python", "no-such-program"], r"there is no program 'no-such-program'\n  found: .*PATH.*fix:"),
        (["--no-python", "--affinity", "sh"], r"--affinity has no effect.*found:    --no-python --affinity.*fix:"),
        (["--nnodes", "2", "--rdzv", "host", "x.py"], r"found:    --rdzv host\n  expected: host:port.*fix:"),
        (
            ["--nnodes", "2", "--rdzv", "host:0", "x.py"],
            r"found:    --rdzv host:0\n  expected: host:port; port 0.*fix:",
        ),
    ],
)
def test_wrong_options_are_one_error_and_code_2(capsys, arguments, text):
    assert weft.cli.main(["launch", *arguments]) == 2
    seen = capsys.readouterr()
    assert seen.out == "" and re.match(rf"(?s)weft launch: .*{text}", seen.err), seen.err
    assert len(seen.err.splitlines()) == 4


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["launch"], "the following arguments are required: script"),
        (["launch", "-n", "two", "x.py"], "argument -n/--nproc: invalid int value: 'two'"),
        (["launch", "-m", "--no-python", "x"], "argument --no-python: not allowed with argument -m"),
        (["launch", "--nonsense", "x.py"], "unrecognized arguments|required: script"),
        (["fly"], "invalid choice: 'fly'"),
        ([], "required: command"),
    ],
)
def test_what_cannot_be_parsed_is_said_by_the_parser(capsys, arguments, text):
    with pytest.raises(SystemExit, match="2"):
        weft.cli.main(arguments)
    assert re.search(text, capsys.readouterr().err)


def test_help_says_how_to_launch(capsys):
    with pytest.raises(SystemExit, match="0"):
        weft.cli.main(["launch", "--help"])
    text = capsys.readouterr().out
    assert all(word in text for word in ("--nnodes", "--node-rank", "--rdzv", "-m", "script ..."))
    with pytest.raises(SystemExit, match="0"):
        weft.cli.main(["--help"])
    assert "launch" in capsys.readouterr().out
    assert "--node_rank" not in text  # the other spelling works and is not shown


def test_options_of_the_script_stay_its_own():
    options = weft.cli.parser().parse_args(["launch", "-n", "2", "train.py", "-n", "3", "--", "--rdzv", "x", "-m"])
    assert (options.nproc, options.module, options.rdzv) == (2, False, None)
    assert options.script == ["train.py", "-n", "3", "--", "--rdzv", "x", "-m"]
    options = weft.cli.parser().parse_args(["launch", "--node_rank", "1", "--dry_run", "x.py", "--node_rank", "2"])
    assert (options.node_rank, options.dry_run, options.script) == (1, True, ["x.py", "--node_rank", "2"])
    options = weft.cli.parser().parse_args(["launch", "train.py", "--", "x"])
    assert options.script == ["train.py", "--", "x"]
    options = weft.cli.parser().parse_args(["launch", "-m", "pkg.train", "--help"])
    assert (options.module, options.script) == (True, ["pkg.train", "--help"])


def _plan(file=None, cores=8, omp=None, **given):
    return make_plan(given, file, cores=cores, omp_num_threads=omp)


def test_the_configuration_is_torchs():
    one = _plan(nproc=4).torch_config()
    assert (one.min_nodes, one.max_nodes, one.nproc_per_node, one.max_restarts) == (1, 1, 4, 0)
    assert (one.rdzv_backend, one.rdzv_endpoint) == ("c10d", "localhost:0")
    assert one.run_id != _plan(nproc=4).torch_config().run_id
    two = _plan(nproc=4, nnodes=2, node_rank=1, rdzv="first:29500").torch_config()
    assert (two.rdzv_backend, two.rdzv_endpoint, two.rdzv_configs["rank"]) == ("static", "first:29500", 1)
    assert _plan(nnodes=2, rdzv="first:29500").torch_config().rdzv_backend == "c10d"
    elastic = _plan(nnodes="1:3", rdzv="first:29500", max_restarts=2).torch_config()
    assert (elastic.min_nodes, elastic.max_nodes, elastic.max_restarts, elastic.rdzv_backend) == (1, 3, 2, "c10d")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({"nproc": -3}, "-n -3"), ({"nproc": 0}, "-n 0"), ({"nnodes": 0}, "--nnodes 0"),
        ({"nnodes": "3:2"}, "--nnodes 3:2"), ({"nnodes": "x"}, "--nnodes x"), ({"nnodes": 2}, "no --rdzv"),
        ({"nnodes": 2, "node_rank": 2, "rdzv": "a:1"}, "--node-rank 2"), ({"max_restarts": -1}, "--max-restarts -1"),
        ({"nproc": 2, "min_replicas": 3}, "--min-replicas 3"), ({"min_replicas": 0}, "--min-replicas 0"),
        ({"nproc": 4, "min_replicas": 1, "replica_ranks": 3}, "--replica-ranks 3"), ({"replica_ranks": 2}, "no --min"),
        ({"nnodes": 2, "rdzv": "a:1", "min_replicas": 3}, "--min-replicas 3 --nnodes 2"),
        ({"threads": 0}, "--threads 0"), ({"nnodes": "1:2", "node_rank": 0, "rdzv": "a:1"}, "--node-rank 0"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_are_one_error(given, found):
    with pytest.raises(ContextError, match=f"(?s)cannot be combined.*found: .*{found}.*fix:      weft launch"):
        _plan(**given)


def test_the_command_line_goes_before_the_file_and_the_file_before_defaults(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[launch]\nnproc = 3\nmax_restarts = 2\nnnodes = "1:2"\nrdzv = "first:1"\n[start]\nseed = 1\n')
    plan = _plan(read_config(path), nproc=2)
    assert (plan.nproc, plan.max_restarts, plan.least_nodes, plan.most_nodes) == (2, 2, 1, 2)
    sources = dict(plan.sources)
    assert (sources["nproc"], sources["max_restarts"]) == ("the command line", str(path))
    assert sources["affinity"] == "default" and plan.threads == 4 and "8 cores" in sources["threads"]
    fewer = _plan(omp="3")
    assert (fewer.threads, dict(fewer.sources)["threads"]) == (3, "environment OMP_NUM_THREADS")
    assert [_plan(nproc=n, cores=4).threads for n in (1, 2, 3, 4, 8)] == [4, 2, 1, 1, 1]


# What the file says, what the command line says: what the plan is.
TABLE = [
    ("", "", {"nproc": 1, "least_nodes": 1, "most_nodes": 1, "max_restarts": 0, "threads": 8, "affinity": False}),
    ("nproc = 4", "", {"nproc": 4, "threads": 2}),
    ("nproc = 4", "-n 2", {"nproc": 2, "threads": 4}),
    ("nproc = 4\naffinity = true", "--nproc=8 --no-affinity", {"nproc": 8, "threads": 1, "affinity": False}),
    ("affinity = true", "--threads 3", {"affinity": True, "threads": 3}),
    ("threads = 3", "--threads 5", {"threads": 5}),
    (
        'nnodes = "2:4"\nrdzv = "a:1"',
        "--max-restarts 3",
        {"least_nodes": 2, "most_nodes": 4, "rdzv": "a:1", "max_restarts": 3},
    ),
    ('nnodes = "2:4"\nrdzv = "a:1"', "--nnodes 3 --rdzv b:2", {"least_nodes": 3, "most_nodes": 3, "rdzv": "b:2"}),
    ('nnodes = 2\nnode_rank = 0\nrdzv = "a:1"', "--node_rank 1", {"node_rank": 1, "rdzv": "a:1"}),
    ("max_restarts = 2", "--max_restarts=0", {"max_restarts": 0}),
]


@pytest.mark.parametrize(("file", "line", "expected"), TABLE)
def test_file_and_command_line_give_the_plan(tmp_path, file, line, expected):
    path = tmp_path / "run.toml"
    path.write_text(f"[launch]\n{file}\n")
    options = weft.cli.parser().parse_args(["launch", "--config", str(path), *line.split(), "x.py"])
    given = {name: getattr(options, name) for name in LAUNCH}
    plan = make_plan(given, read_config(path), cores=8, omp_num_threads=None)
    assert {name: getattr(plan, name) for name in expected} == expected


def test_what_a_rank_will_find_is_known_before():
    one = _plan(nproc=2, max_restarts=1).variables(1)
    assert one == {
        "RANK": "1", "GROUP_RANK": "0", "WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "1",
        "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "OMP_NUM_THREADS": "4",
    }  # fmt: skip
    two = _plan(nproc=2, nnodes=2, node_rank=1, rdzv="first:29500").variables(1, {"WEFT_CONFIG": "x"})
    assert two.items() >= {"RANK": "3", "MASTER_ADDR": "first", "MASTER_PORT": "29500", "WEFT_CONFIG": "x"}.items()
    unknown = _plan(nproc=2, nnodes="1:2", rdzv="first:29500").variables(1)
    assert not {"RANK", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"} & set(unknown) and unknown["LOCAL_RANK"] == "1"


@pytest.mark.parametrize(
    ("wish", "nproc", "found"),
    [("auto", None, "0 1 2 3"), ("auto", 2, "0 1"), ("0,2", None, "0 2"), ("3, 1", 2, "3 1"), ("2", None, "2")],
)
def test_devices_are_chosen(wish, nproc, found):
    assert chosen_devices(wish, list("0123"), nproc=nproc) == found.split()


@pytest.mark.parametrize(
    ("wish", "nproc", "there"),
    [("4", None, "0123"), ("0,0", None, "0123"), ("0,1", 3, "0123"), ("auto", 5, "0123"), ("auto", None, ""),
     ("", None, "0123"), ("all", None, "0123"), ("-1", None, "01")],
)  # fmt: skip
def test_devices_that_are_not_there_are_refused_with_those_that_are(wish, nproc, there):
    named = ", ".join(there) or "none"
    with pytest.raises(ContextError, match=rf"(?s)--devices {wish} cannot be used.*this machine: {named}\n.*fix: "):
        chosen_devices(wish, list(there), nproc=nproc)


def test_the_devices_of_a_launch_are_one_per_process(monkeypatch, capsys):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    assert weft.cli.main(["launch", "--devices", "4,7", "--dry-run", "-m", "json.tool"]) == 0
    out = capsys.readouterr().out
    assert "world size: 2" in out and out.count("CUDA_VISIBLE_DEVICES=4,7 ") == 2
    assert weft.cli.main(["launch", "--devices", "0", "--dry-run", "-m", "json.tool"]) == 2
    assert "devices of this machine: 4, 5, 7" in capsys.readouterr().err
    assert weft.cli.main(["launch", "--devices", "4", "--slurm", "job.sh", "--dry-run", "-m", "json.tool"]) == 2
    assert "--devices has no effect with --slurm" in capsys.readouterr().err


def test_a_dry_run_prints_the_plan_and_starts_nothing(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    assert (
        weft.cli.main(["launch", "-n", "2", "--affinity", "--threads", "5", "--dry-run", str(script), "--lr", "a b"])
        == 0
    )
    text = capsys.readouterr().out
    assert "nproc         2                             from the command line" in text and "world size: 2" in text
    assert f"LOCAL_RANK=1 OMP_NUM_THREADS=5 python {script} --lr 'a b'  # cores " in text
    assert weft.cli.main(["launch", "--dry-run", "--no-python", "ls", "a b"]) == 0
    assert "OMP_NUM_THREADS=" in (text := capsys.readouterr().out) and text.endswith(" ls 'a b'\n")
    assert weft.cli.main(["launch", "--nnodes", "1:4", "--rdzv", "h:1", "--dry-run", "-m", "json.tool"]) == 0
    assert "world size: 1 to 4" in (text := capsys.readouterr().out) and "python -m json.tool" in text


SBATCH = """#!/bin/bash
#SBATCH --job-name=job
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=24
#SBATCH --output=job-%j.log
#SBATCH --signal=USR1@120
#SBATCH --partition=gpu
#SBATCH --time=4:00:00
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
export WEFT_SECRET=${WEFT_SECRET:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')}
srun --kill-on-bad-exit=1 weft launch -n 4 --nnodes 2 --threads 6 --max-restarts 3 --rdzv "$first:$port" \
-m pkg.train --name 'a b'
"""


def test_a_script_for_slurm(tmp_path, capsys, monkeypatch):
    file = tmp_path / "job.sbatch"
    arguments = ["launch", "-n", "4", "--nnodes", "2", "--max-restarts", "3", "--threads", "6"]
    arguments += ["--slurm", str(file), "--sbatch=--partition=gpu", "--sbatch=--time=4:00:00"]
    script = ["-m", "pkg.train", "--name", "a b"]
    assert weft.cli.main([*arguments, "--dry-run", *script]) == 0
    assert capsys.readouterr().out == SBATCH and not file.exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert weft.cli.main([*arguments, *script]) == 2 and file.read_text() == SBATCH
    assert re.search(r"job.sbatch was written(.|\n)*no command sbatch", capsys.readouterr().err)
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho submitted $1 > {tmp_path}/out\nexit 7\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert weft.cli.main([*arguments, *script]) == 7
    assert (tmp_path / "out").read_text() == f"submitted {file}\n"
    line = next(line for line in SBATCH.splitlines() if "WEFT_SECRET" in line)
    for given, pattern in (("", "[0-9a-f]{32}"), ("mine", "mine")):
        env = {"PATH": os.defpath, "WEFT_SECRET": given}
        command = ["bash", "-euc", f'{line}\nprintf "$WEFT_SECRET"']
        made = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        assert re.fullmatch(pattern, made.stdout), made.stderr
    one = batch_script(_plan(nproc=2), ["train.py"], name="x", options=["--nodes=1", "--output=y"])
    assert one.endswith("pipefail\nsrun --kill-on-bad-exit=1 weft launch -n 2 --nnodes 1 --threads 4 train.py\n")
    assert one.count("--nodes=") == one.count("--output=") == 1
    elastic = batch_script(_plan(nproc=2, nnodes="1:3", rdzv="first:1", min_replicas=2), ["train.py"], name="x")
    assert "#SBATCH --nodes=1-3\n" in elastic and "#SBATCH --no-kill\n" in elastic
    assert "srun --no-kill --kill-on-bad-exit=0 weft launch -n 2 --nnodes 1:3 " in elastic


def test_threads_per_rank_are_known_before_the_parser():
    import weft_command

    def ranks(*arguments):
        return weft_command._number(weft_command._wish(list(arguments)).get("-n")) or 1

    assert ranks("-n", "3", "x.py") == ranks("-n3", "x.py") == ranks("--nproc=3", "x.py") == 3
    assert ranks("--nproc", "3", "-m", "x") == ranks("--nnodes", "2", "--nproc", "3", "x") == 3
    assert ranks("x.py", "-n", "3") == ranks("-m", "x", "-n", "3") == ranks() == 1
    assert ranks("--max_restarts", "2", "--no-python", "-n", "3", "ls") == 3
    assert ranks("--nnodes", "2", "x.py") == ranks("--node-rank=1", "--rdzv", "h:1", "x.py", "-n", "9") == 1
