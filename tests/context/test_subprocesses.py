"""What a rank starts is no rank: `weft.start` gives it a world of its own, unless the rank has left."""

import multiprocessing
import os
import socket
import subprocess
import sys

import pytest

from tests.variants import variants
from weft.context.start import launched
from weft.environments.joined import JOINED_VARIABLE, forget_joined, is_inside_a_rank, note_joined

RANK = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29555"}

# The ranks start processes in the ways there are, and each of these prints its world.
INSIDE = """
import torch, weft
def main(**more):
    with weft.start(device="cpu", timeout_s=30, **more) as ctx:
        return f"{ctx.rank} of {ctx.world_size}, {float(weft.reduce(torch.ones(1), ctx))}"
if __name__ == "__main__":
    print(main() + "\\n", end="", flush=True)
"""
OUTSIDE = """
import multiprocessing, os, subprocess, sys
import torch, torch.distributed as dist, weft
import inside

def call(queue):
    queue.put(inside.main())

def process(kind):
    context = multiprocessing.get_context(kind)
    queue = context.Queue()
    one = context.Process(target=call, args=(queue,))
    one.start()
    found = queue.get(timeout=300)
    one.join()
    return found

def run(*command, **env):
    text = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=300)
    return text.stdout.strip() + text.stderr[-500:]

def say(*words):  # at once: ranks share what they write to
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

if __name__ == "__main__":
    if sys.argv[1:] == ["own group"]:
        dist.init_process_group("gloo")
    with weft.start(device="cpu") as ctx:
        me = f"{ctx.rank} of {ctx.world_size}"
        with weft.local():  # its end is not that of the rank
            pass
        if ctx.rank == 0 or sys.argv[1:] == ["own group"]:
            inner = run("bash", "-c", f"{sys.executable} inside.py; true", WEFT_MESH="replica=2")
            say(me, "shell", inner)
        if ctx.rank == 0:
            say(me, "fork", process("fork"))
        elif sys.argv[1:] != ["own group"]:
            say(me, "spawn", process("spawn"))
            if "again" in sys.argv:
                say(me, "again", "started before" in run(sys.executable, "inside.py", WEFT_JOINED=""))
        total = weft.reduce(torch.ones(1), ctx)
        say(me, "outer", float(total))
"""
REPLICA = """
import subprocess, sys, torch, weft
with weft.start(device="cpu", elastic="replica") as ctx:
    if sys.argv[1:] == ["inside"]:
        print(f"{ctx.world_size} {ctx.replicas.most}\\n", end="", flush=True)
        sys.exit()
    subprocess.run([sys.executable, sys.argv[0], "inside"], timeout=300, check=True)
    loader, ctx = weft.shard_data(torch.utils.data.DataLoader(range(4)), ctx)
    model, ctx = weft.replicate(torch.nn.Linear(1, 1), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
    for batch in weft.resilient(loader, ctx, state=state):
        model(batch.float()[:, None]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def _environment(**extra):
    before = {name: text for name, text in os.environ.items() if not name.startswith("WEFT_") and name not in RANK}
    return before | extra


def _run(command, folder):
    done = subprocess.run(
        command, cwd=folder, env=_environment(), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(done.stdout.splitlines())


@pytest.fixture
def programs(tmp_path):
    for name, text in (("inside", INSIDE), ("outside", OUTSIDE), ("replica", REPLICA)):
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


@pytest.mark.parametrize("more", variants([], ["again"]))
def test_a_process_of_a_rank_has_a_world_of_its_own(programs, more):
    command = [sys.executable, "-m", "weft", "launch", "-n", "2", "outside.py", *more]
    assert _run(command, programs) == [
        *("0 of 2 fork 0 of 1, 1.0", "0 of 2 outer 2.0", "0 of 2 shell 0 of 1, 1.0"),
        *(f"1 of 2 {one} True" for one in more),
        *("1 of 2 outer 2.0", "1 of 2 spawn 0 of 1, 1.0"),
    ]


@pytest.mark.slow
def test_a_process_of_a_rank_that_made_the_group_itself(programs):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = _environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]), WORLD_SIZE="2")
    command = [sys.executable, "outside.py", "own group"]
    started = [
        subprocess.Popen(
            command, cwd=programs, env=env | {"RANK": rank, "LOCAL_RANK": rank}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    for rank, one in enumerate(started):
        out, err = one.communicate(timeout=300)
        assert one.returncode == 0, err
        fork = ["0 of 2 fork 0 of 1, 1.0"] if rank == 0 else []
        assert out.splitlines() == [f"{rank} of 2 shell 0 of 1, 1.0", *fork, f"{rank} of 2 outer 2.0"]


@pytest.mark.slow
def test_a_process_of_a_replica_is_none(programs):
    command = [sys.executable, "-m", "weft", "launch", "-n", "2", "--min-replicas", "1", "replica.py"]
    assert _run(command, programs) == ["1 1", "1 1"]


@pytest.mark.slow
def test_another_launcher_inside_of_a_rank_starts_ranks(programs):
    text = 'with weft.start(device="cpu"):\n    subprocess.run(sys.argv[1:], check=True)\n'
    (programs / "nested.py").write_text(f"import subprocess, sys, weft\n{text}")
    launch = [sys.executable, "-m", "weft", "launch", "-n"]
    command = [*launch, "2", "nested.py", *launch, "2", "inside.py"]
    assert _run(command, programs) == sorted(2 * ["0 of 2, 2.0", "1 of 2, 2.0"])


def _child(env, queue):
    queue.put(is_inside_a_rank(env))


def test_the_note_is_that_of_one_process_and_one_place():
    env = dict(RANK)
    note_joined(env)
    assert not is_inside_a_rank(env)  # the rank itself
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [dict(env), env | {"EVAL": "1"}, env | {"MASTER_PORT": "29556"}, env | {"RANK": "0"}, dict(RANK)]
    for child, inside in zip(children, [True, True, False, False, False], strict=True):
        process = context.Process(target=_child, args=(child, queue))
        process.start()
        assert queue.get(timeout=30) is inside
        process.join()
    forget_joined(env)
    assert env == RANK
    other = {JOINED_VARIABLE: "1:0"}
    forget_joined(other)  # that of another process stays
    assert other == {JOINED_VARIABLE: "1:0"}


def test_the_source_says_who_started_it(monkeypatch):
    env = dict(RANK)
    note_joined(env)
    env[JOINED_VARIABLE] = env[JOINED_VARIABLE].replace(str(os.getpid()), "1", 1)
    for name, text in env.items():
        monkeypatch.setenv(name, text)
    assert launched().source == "a process that rank 1 of 2 started"
    assert (launched().rank, launched().world_size) == (0, 1)
    monkeypatch.delenv(JOINED_VARIABLE)
    assert (launched().rank, launched().world_size) == (1, 2)
