"""When the work of an elastic job is done, and who says so: exit code 0 alone does not."""

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.elastic.chaos import LIMIT_S, Job, check, write_garbage
from tests.fix_lines.told import told
from tests.processes import listening, until
from weft.context.config import LAUNCH
from weft.launching.plan import make_plan
from weft.launching.replicas.processes import Replica
from weft.launching.replicas.remote_nodes import Nodes
from weft.launching.replicas.supervise import _ElasticJob
from weft.peers.quorum import LoopPosition
from weft.peers.store import RankStore


def _ends(folder):
    return sorted(path.stem for path in folder.glob("*.end"))


# -- jobs --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_nobody_who_ends_with_code_0_in_the_middle_has_done_the_work(tmp_path):
    code, text = Job(tmp_path, faults={f"{n}.0": [4, "exit0"] for n in range(3)}, restarts=0).ended()
    assert code == 1 and not _ends(tmp_path), text
    last = text.splitlines()[-1]
    assert re.search(r"replica \d \(process \d+\) ended with exit code 0: its work was not done", last), text


@pytest.mark.parametrize(
    "faults",
    [
        {"1.0": [4, "sys.exit"]},
        pytest.param(
            {"1.0": [4, "exit0"], "0.0": [7, signal.SIGKILL], "2.0": [7, signal.SIGKILL]}, marks=pytest.mark.slow
        ),
        pytest.param({"1.0": [4, "leave"], "0.0": [4, "exit0"], "2.0": [4, "raise"]}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_who_leaves_early_is_started_again(tmp_path, faults):
    code, text = Job(tmp_path, epochs=8, pause_s=0.03, faults=faults).ended()
    assert code == 0, text
    check(tmp_path, epochs=8)
    assert re.search(r"replica 1 .* ended with exit code 0: its work was not done: .*; it is started again", text), text


@pytest.mark.slow
def test_a_rank_of_a_replica_that_leaves_early_takes_it_along(tmp_path):
    faults = {"1.0-1": [4, "exit0"], "0.0-0": [9, "sys.exit"]}
    code, text = Job(tmp_path, replicas=2, shards=2, epochs=16, pause_s=0.03, faults=faults).ended()
    assert code == 0, text
    check(tmp_path, replicas=2, epochs=16)
    assert "replica 1" in text and text.count("its work was not done") >= 2, text


@pytest.mark.slow
@pytest.mark.parametrize(
    "script", ["", "import weft\nctx = weft.start(elastic='replica', device='cpu')\nctx.close()\n"]
)
def test_a_program_that_takes_part_in_no_step_has_done_no_work(tmp_path, script):
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "weft", "launch", "-n", "2", "--min-replicas", "1", "--max-restarts", "1"]
    ended = subprocess.run(
        [*command, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 1, ended.stderr
    assert "its work was not done: it ended before weft.resilient" in ended.stderr


# -- the end of a loop -------------------------------------------------------------------------------


def _batches(step=0):
    ctx = weft.start(elastic="replica", device="cpu")
    loader, ctx = weft.shard_data(DataLoader(TensorDataset(torch.ones(8, 1)), batch_size=2), ctx)
    model, ctx = weft.replicate(torch.nn.Linear(1, 1), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
    return ctx, weft.resilient(loader, ctx, state=state, step=step), model, optimizer


def _in_the_body(batches, step):
    for batch in batches:
        step(batch)
        if batches.step == 1:
            sys.exit(0)


def _in_a_function(batches, step):
    def body(batch):
        step(batch)
        sys.exit(0)

    for batch in batches:
        body(batch)


def _before_a_finally(batches, step):
    for batch in batches:
        try:
            step(batch)
            raise SystemExit(0)
        finally:
            step = None


def _in_a_wrapped_loop(batches, step):
    for batch in (each for each in batches):
        try:
            step(batch)
            sys.exit()
        except SystemExit:
            step = None
            raise


def _after_an_error(batches, step):
    try:
        for batch in batches:
            step(batch)
            raise KeyError
    except KeyError:
        sys.exit(0)


def _by_hand(batches, step):
    iterator = iter(batches)
    step(next(iterator))
    sys.exit(0)


def _after_a_break(batches, step):
    for batch in batches:
        step(batch)
        if batches.step == 1:
            break
    sys.exit(0)


def _before_a_loop_that_was_left(batches, step):
    stopped = False
    while True:
        if stopped:
            sys.exit(0)
        for batch in (each for each in batches):
            step(batch)
            stopped = True
            break


def _after_a_function(batches, step):
    def train():
        for batch in batches:
            try:
                step(batch)
                return
            finally:
                pass

    train()
    sys.exit(0)


def _after_an_epoch(batches, step):
    for batch in batches:
        step(batch)
    sys.exit(0)


def _without_a_step(batches, step):
    sys.exit(0)


@pytest.mark.parametrize(
    ("leave", "done"),
    [
        *((leave, False) for leave in (_in_the_body, _in_a_function, _before_a_finally, _in_a_wrapped_loop)),
        *((leave, False) for leave in (_after_an_error, _by_hand)),
        *((leave, True) for leave in (_after_a_break, _before_a_loop_that_was_left, _after_a_function)),
        *((leave, True) for leave in (_after_an_epoch, _without_a_step)),
    ],
)
def test_sys_exit_out_of_a_loop_is_no_end_of_the_work_and_after_it_is(leave, done):
    ctx, batches, model, optimizer = _batches()

    def step(batch):
        model(batch[0]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found, loops = [], []
    ctx.world.root.on_close = lambda error: found.append(ctx.replicas.is_done(error))
    leave_loop = ctx.replicas.report_position
    ctx.replicas.report_position = lambda loop: (loops.append(loop.inside), leave_loop(loop))
    with pytest.raises(SystemExit), ctx:
        leave(batches, step)
    assert found == [done] and (not loops or loops == [True] + [False] * done)


@pytest.mark.parametrize(("where", "steps"), [("first", 2), ("last", 3)])
def test_a_break_ends_the_work_after_the_steps_that_were_made(where, steps):
    ctx, batches, model, optimizer = _batches()
    for (x,) in batches:
        if batches.step == 2 and where == "first":
            break
        model(x).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if batches.step == 2:
            break
    assert ctx.replicas.is_done(None) and ctx.replicas.loop == LoopPosition(steps, inside=False)
    ctx.close()


@pytest.mark.slow
def test_a_break_out_of_a_step_that_has_failed_is_an_error():
    ctx, batches, model, optimizer = _batches()
    for (x,) in batches:
        ctx.replicas.broken = True  # as if another replica were lost in this step
        model(x).mean().backward()
        optimizer.step()
        break
    with told("elastic/resilient_loader.py", "the loop was left in a step that has failed") as it:
        ctx.close()
    ctx, batches, model, optimizer = _batches(step=998)
    body = "\n    model(x).mean().backward()\n    optimizer.step()\n    optimizer.zero_grad()"
    exec(it.fix.replace("x, y", "x,") + body, {"batches": batches, "model": model, "optimizer": optimizer})
    assert batches.step == 1000
    ctx.close()


# -- strangers ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_strangers_can_neither_end_a_job_nor_forge_its_messages(tmp_path):
    job = Job(tmp_path, replicas=2, epochs=10, pause_s=0.04, faults={"1.0": [40, signal.SIGKILL]})
    assert until(lambda: len(list(tmp_path.glob("*.used"))) == 2, LIMIT_S), job.text
    addresses = listening(job.process.pid)
    assert [host for host, _ in addresses] == ["127.0.0.1"]
    write_garbage(job.process.pid, random.Random(0))
    store = dist.TCPStore(*addresses[0], is_master=False, wait_for_workers=False)
    false = {"name": "1.0", "step": 10**9, "fresh": False, "facts": {}, "patience_s": 20, "failed": False}
    for prefix in {""} | {key.partition("/")[0] + "/" for key in getattr(store, "list_keys", list)()}:
        store.queue_push(f"{prefix}weft/replicas/asks", json.dumps({"kind": "ask", **false}))
    silent = []
    for text in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\xc8", os.urandom(1000)) * 20:
        silent.append(socket.create_connection(addresses[0], timeout=10))
        silent[-1].sendall(text)
    code, said = job.ended()
    for each in silent:
        each.close()
    assert code == 0, said
    check(tmp_path, replicas=2, epochs=10)
    assert said.count("it is started again") == 1 and "Traceback" not in said, said


class _Here:
    """A node whose replicas have no processes."""

    number, is_leaving, replicas = 0, False, {}

    def start(self, number, attempt):
        return Replica(number, attempt, self, range(2 * number, 2 * number + 2))


VALID = [
    {"kind": "ask", "name": "1.0", "step": 3, "fresh": True, "facts": {"a": "b"}, "patience_s": 20, "failed": False},
    {"kind": "loop", "name": "1.0", "rank": 2, "step": 3, "inside": True, "whole": False, "done": False},
    {
        "kind": "node", "launcher": "a-1", "node": None, "first": True, "leaving": False, "gone": False,
        "facts": {"-n": 4, "--replica-ranks": 2, "--nnodes": "1:2"},
        "replicas": {"2.0": {"pids": {"4": 1, "5": 2}, "exits": {"4": None, "5": 0}, "stopped": False, "trace": ""}},
    },
]  # fmt: skip
VALUES = [
    None,
    True,
    -1,
    0,
    2**70,
    1e308,
    float("nan"),
    "",
    "1.0",
    "\ud800",
    "x" * 9000,
    [],
    [[]],
    {},
    {"4": -9},
    {"": {}},
]


def _mutated(value, chance):
    """The same with a change or two, at any depth."""
    if chance.random() < 0.05:
        return chance.choice(VALUES)
    if isinstance(value, dict):
        kept = [name for name in value if chance.random() > 0.02]
        names = [str(chance.choice(VALUES)) if chance.random() < 0.02 else name for name in kept]
        return {new: _mutated(value[name], chance) for new, name in zip(names, kept, strict=True)}
    return value


@pytest.mark.parametrize("seed", range(3))
def test_no_message_is_too_strange_for_the_launcher(seed, capfd):
    chance, board = random.Random(seed), RankStore(dist.HashStore(), limit_s=5, secret="a")
    given = {"nproc": 4, "nnodes": "1:2", "rdzv": "127.0.0.1:1234", "min_replicas": 1, "replica_ranks": 2}
    plan = make_plan({name: given.get(name) for name in LAUNCH}, None, cores=1, omp_num_threads=None)
    job = _ElasticJob(plan, _Here(), board, Nodes(plan, board, "job"))
    for number in range(2):
        job.start(number, job.here)
    for _ in range(600):
        value = _mutated(chance.choice(VALID), chance)
        board.push("asks", value)
        job.read_messages(now := time.monotonic())
        job.see_nodes(now)
        job.look_for_early(now)
        job.decide(now)
        assert board.pop("asks") is None
    board.push("order/a-1", {"wait": True})
    assert "has come, with replicas 2, 3" in capfd.readouterr().err, "a valid message was heard"
