"""Faults in real scripts, started by hand: every other rank ends in seconds and names the culprit."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.processes import until
from tests.variants import variant_cases

# A short timeout is not to be spent on imports, which take as long as the machine needs: all begin together.
MEETS = """
import os, pathlib, time
import torch, weft

here = pathlib.Path(__file__).parent
(here / f"imported-{os.environ['RANK']}").touch()
while len(list(here.glob("imported-*"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)
"""
SHORT_S = 8

SCRIPT = f"""{MEETS}
import signal, sys

fault = sys.argv[1]
with weft.start(timeout_s={SHORT_S} if fault == "hang" else 60, debug=fault == "shape") as ctx:
    model, ctx = weft.replicate(torch.nn.Linear(4, 4), ctx)
    for step in range(20):
        if step == 5 and ctx.rank == 1:
            if fault == "raise":
                raise ValueError("the data of rank 1 is bad")
            if fault == "kill":
                os.kill(os.getpid(), 9)
            while fault == "hang" and not ctx.world.store.has("parted/0"):
                time.sleep(0.05)
            if fault == "only":
                weft.reduce(torch.ones(1), ctx.only(1))
        if step == 5 and fault == "shape":
            weft.reduce(torch.ones(2 + ctx.rank), ctx)
        model(torch.randn(2, 4)).sum().backward()
        with torch.no_grad():  # by hand: an optimizer imports torch._dynamo, a second on each rank
            for p in model.parameters():
                p -= 0.1 * p.grad
        model.zero_grad()
print("fine")
"""


def _port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _start(path, n, *arguments):
    base = {k: v for k, v in os.environ.items() if not k.startswith("WEFT_")}
    common = {
        **base,
        "WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_port()),
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, str(path), *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(n)
    ]


def _end(processes, limit_s=60):
    end = time.monotonic() + limit_s
    try:
        outputs = [p.communicate(timeout=max(end - time.monotonic(), 0.1))[0] for p in processes]
    finally:
        for p in processes:
            p.kill()
    return [p.returncode for p in processes], outputs


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("fault", "n", "text"),
    [
        pytest.param("raise", 2, "rank 1 failed.*ValueError: the data of rank 1 is bad", marks=pytest.mark.slow),
        pytest.param("kill", 2, "rank 1 failed.*its process is gone", marks=pytest.mark.slow),
        pytest.param("hang", 2, f"rank 1 failed.*rank 1 did not arrive within {SHORT_S} s", marks=pytest.mark.slow),
        pytest.param(
            "only",
            2,
            "rank 1 failed.*CollectiveRefused: reduce: refused on a context for rank 1 only, at .*train.py:\\d+",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_fault_on_one_rank_ends_all_and_is_named(script, fault, n, text):
    codes, outputs = _end(_start(script, n, fault))
    assert all(code != 0 for code in codes)
    assert codes[1] == (-signal.SIGKILL if fault == "kill" else 1)
    for rank, output in enumerate(outputs):
        if rank != 1:
            assert re.search(text, output, re.DOTALL), f"rank {rank}:\n{output}"
            assert "terminate called" not in output


@pytest.mark.slow
def test_a_mismatch_raises_on_all_ranks_with_debug(script):
    codes, outputs = _end(_start(script, 2, "shape"))
    assert codes == [1, 1]
    for output in outputs:
        assert "value: [2] torch.float32' on rank 0 at" in output and re.search(r"train.py:\d+", output)


@pytest.mark.slow
def test_a_run_ends_with_zero_and_in_good_order(script):
    codes, outputs = _end(_start(script, 2, "none"))
    assert codes == [0, 0], outputs
    assert all(output == "fine\n" for output in outputs)


OTHERS_GO_ON = """
import os, time
import torch, weft
from weft.context import shutdown

shutdown._CLOSE_LIMIT_S = 0.1
with weft.start(mesh={"data": 2, "tensor": 2}, timeout_s=60) as ctx:
    line = ctx.on("data")
    weft.reduce(torch.ones(1), line)
    first = ctx.world.store.read("peer/0")["pid"]
    weft.barrier(ctx)
    if ctx.coordinates["tensor"] == 1:
        end = time.monotonic() + 5  # a rank that serves the store stays, and another one is gone sooner
        while os.path.exists(f"/proc/{first}") and time.monotonic() < end:
            time.sleep(0.05)
        for _ in range(3):
            torch.distributed.all_reduce(torch.ones(1), group=line.group)
            weft.reduce(torch.ones(1), line)
            weft.barrier(line)
"""


@pytest.mark.slow
def test_a_line_goes_on_after_the_one_with_the_store_is_done(tmp_path):
    path = tmp_path / "others.py"
    path.write_text(OTHERS_GO_ON)
    codes, outputs = _end(_start(path, 4))
    assert codes == [0] * 4, outputs


LATE_IN_A_LINE = f"""{MEETS}
with weft.start(mesh={{"data": 2, "tensor": 2}}, timeout_s={SHORT_S}) as ctx:
    line = ctx.on("data")
    weft.reduce(torch.ones(1), line)
    if ctx.rank == 0:
        torch.distributed.all_reduce(torch.ones(1), group=line.group)
    elif ctx.rank != 1:
        while not ctx.world.store.has("parted/0"):
            time.sleep(0.05)
"""


@pytest.mark.slow
def test_who_is_late_is_named_and_nobody_of_another_line(tmp_path):
    path = tmp_path / "late.py"
    path.write_text(LATE_IN_A_LINE)
    codes, outputs = _end(_start(path, 4))
    assert (
        codes[0] == 1 and f"rank 2 failed, and with it rank 0: rank 2 did not arrive within {SHORT_S} s" in outputs[0]
    )


FREEZES = f"""{MEETS}
import signal, sys
where, folder = sys.argv[1:]
with weft.start(timeout_s={SHORT_S}) as ctx:
    model, ctx = weft.replicate(torch.nn.Linear(4, 4), ctx)
    for step in range(3):
        if step == 2:
            weft.barrier(ctx)
            if ctx.rank == 0:
                pathlib.Path(folder, "frozen").write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            if where == "barrier":
                weft.barrier(ctx)
            elif where == "reduce":
                weft.reduce(torch.ones(1), ctx)
        model(torch.randn(2, 4)).sum().backward()
"""


def _kill(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "where"),
    [
        ("variables", "backward"),
        *variant_cases(("torchrun", "backward"), ("weft", "barrier")),
    ],
)
def test_a_frozen_rank_0_is_named_by_all_others(tmp_path, launcher, where):
    path = tmp_path / "freezes.py"
    path.write_text(FREEZES)
    n = 2 if (launcher, where) == ("variables", "backward") else 3
    with contextlib.ExitStack() as stack:
        if launcher == "variables":
            processes = _start(path, n, where, str(tmp_path))
        else:
            torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node"]  # others may run at its usual port
            module = ["weft", "launch", "-n"] if launcher == "weft" else torchrun
            line = [sys.executable, "-m", *module, str(n), str(path), where, str(tmp_path)]
            processes = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)]
        for process in processes:
            stack.callback(process.communicate)
            stack.callback(process.kill)
        note = tmp_path / "frozen"
        if not until(lambda: note.exists() and note.read_text(), 100):
            for process in processes:
                process.kill()
            pytest.fail("\n".join(process.communicate()[0] for process in processes))
        stack.callback(_kill, int(note.read_text()))
        frozen = time.monotonic()
        if launcher == "variables":
            for process in processes[1:]:
                process.wait(timeout=60)
            texts = [process.stdout.read() for process in processes[1:]]
        elif launcher == "weft":  # tells the first cause alone
            processes[0].wait(timeout=60)
            texts = [processes[0].stdout.read()]
        else:  # waits long for the frozen rank
            texts = []
            for line in processes[0].stdout:
                if "PeerError: " in line:
                    texts.append(line)
                if len(texts) == n - 1:
                    break
        assert time.monotonic() - frozen < SHORT_S + 30
        for text in texts:
            assert re.search("PeerError: .*rank 0( failed| of 3 did not arrive)", text), text


WITHOUT_WITH = """
import sys
import torch, weft
ctx = weft.start(timeout_s=60)
weft.reduce(torch.ones(1), ctx)
if sys.argv[1] == "raise" and ctx.rank == 0:
    raise ValueError("rank 0 is bad")
weft.reduce(torch.ones(1), ctx)
"""


@pytest.mark.slow
def test_a_context_that_nobody_closes(tmp_path):
    path = tmp_path / "open.py"
    path.write_text(WITHOUT_WITH)
    codes, outputs = _end(_start(path, 2, "fine"))
    assert codes == [0, 0] and outputs == ["", ""]
    codes, outputs = _end(_start(path, 2, "raise"))
    assert codes == [1, 1] and "rank 0 failed" in outputs[1] and "ValueError: rank 0 is bad" in outputs[1]


@pytest.mark.slow
def test_a_rank_that_never_comes(tmp_path):
    path = tmp_path / "lonely.py"
    path.write_text("import weft\nweft.start(timeout_s=2)\n")
    processes = _start(path, 2)
    late = processes.pop()
    late.kill()
    late.communicate()
    codes, outputs = _end(processes)
    assert codes == [1] and "rank 0 of 2 cannot connect to the others" in outputs[0] and "fix:" in outputs[0]


SIDE_BY_SIDE = """
import copy, gc, os, weakref
import torch, weft
from torch import nn

def build(policy, steps):
    torch.manual_seed(0)
    ctx = weft.local(seed=1)
    data = torch.utils.data.TensorDataset(torch.randn(24, 4))
    loader, ctx = weft.shard_data(torch.utils.data.DataLoader(data, batch_size=2, shuffle=True), ctx)
    model, ctx = weft.with_precision(nn.Linear(4, 4), ctx, policy)
    model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps)
    return model, optimizer, loader, ctx

def steps(model, optimizer, loader):
    for window in loader:
        for (x,) in window:
            (model(x).square().mean() / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield

def solo(*args):
    parts = build(*args)
    for _ in steps(*parts[:3]):
        pass
    return [p.detach().clone() for p in parts[0].parameters()]

for name in weft.__all__:
    getattr(weft, name)  # loaded when asked for
torch.optim.SGD([torch.ones(1)])  # torch's own lazy imports set variables; not ours to answer for
before = (dict(os.environ), torch.get_default_dtype(), {n: id(v) for n, v in vars(weft).items()})
alone = [solo("fp32", 1), solo("bf16", 4)]
one, two = build("fp32", 1), build("bf16", 4)
turns = [steps(*one[:3]), steps(*two[:3])]
while turns:
    for turn in list(turns):
        if next(turn, "end") == "end":
            turns.remove(turn)
for parts, expected in zip((one, two), alone):
    assert all(torch.equal(p, e) for p, e in zip(parts[0].parameters(), expected))
state = torch.get_rng_state()
build_state = weft.local(), weft.local(seed=2)
assert torch.equal(state, torch.get_rng_state())
assert before == (dict(os.environ), torch.get_default_dtype(), {n: id(v) for n, v in vars(weft).items()})
refs = [weakref.ref(part) for parts in (one, two) for part in parts]
del one, two, parts, turns, turn, build_state
gc.collect()
assert [r() for r in refs] == [None] * 8, [r() for r in refs]
print("fine")
"""


@pytest.mark.slow
def test_two_contexts_side_by_side_leave_nothing_behind(tmp_path):
    path = tmp_path / "side_by_side.py"
    path.write_text(SIDE_BY_SIDE)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "fine\n", done.stderr


ENDS = """
import atexit, signal, sys, time
import weft
from weft.context import shutdown
from tests.peers.waiting_group import NAME, register

register()
atexit.register(time.sleep, 60)  # in place of a destructor of NCCL
shutdown._END_LIMIT_S = 1
with weft.start(backend=NAME, device="cpu") as ctx:
    weft.barrier(ctx)
    if ctx.rank == 1:
        raise ValueError("bad data")
    weft.barrier(ctx)
"""


@pytest.mark.slow
def test_a_process_ends_after_a_failure_whatever_waits_at_its_end(tmp_path, monkeypatch):
    (tmp_path / "ends.py").write_text(ENDS)
    root = pathlib.Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")])))
    codes, outputs = _end(_start(tmp_path / "ends.py", 2), limit_s=50)
    assert codes == [-signal.SIGALRM] * 2, outputs
    assert "PeerError: barrier: rank 1 failed: ValueError: bad data" in outputs[0]
