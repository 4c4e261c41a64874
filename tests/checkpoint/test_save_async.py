"""save_async: the values of the moment, nothing held up, no error lost, and nothing half after a kill."""

import contextlib
import errno
import importlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.checkpoint.folders import folders
from tests.variants import variants
from weft.checkpoint import staging
from weft.checkpoint.format.safetensors_write import write_parts
from weft.checkpoint.save_async import _Saver
from weft.context import shutdown
from weft.errors import CheckpointError, PeerError
from weft.peers.agreement import exchange
from weft.peers.store import RankStore
from weft.peers.world import World
from weft.testing import RanksFailed, run_ranks

saving_async = importlib.import_module("weft.checkpoint.save_async")

NUM_TRIALS = int(os.environ.get("KILL_TRIALS", "15"))  # of kills, each at a random moment


class Box:
    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def _objects(step=0, width=4):
    """Objects in which every number tells the step."""
    model = nn.Sequential(nn.Linear(3, width), nn.Linear(width, 2))
    model.register_buffer("seen", torch.tensor([step]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + step, momentum=0.9)
    for p in model.parameters():
        nn.init.constant_(p, step)
        optimizer.state[p]["momentum_buffer"] = torch.full_like(p, step)
    return {"model": model, "optimizer": optimizer, "box": Box([step, {"deep": torch.tensor(step)}])}


def _state(ctx, step=0, **options):
    return weft.checkpointable(_objects(step, **options), ctx)[0]


def _spoil(state):
    """Change every number in the objects, in place."""
    model, optimizer, box = state.objects.values()
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers(), box.value[1]["deep"]]:
            tensor.fill_(99)
    for entry in optimizer.state.values():
        entry["momentum_buffer"].fill_(99)
    optimizer.param_groups[0]["lr"] = 99
    box.value[0] = 99


def _restored(folder):
    """The step of the newest checkpoint; all numbers in it have to be of that step."""
    ctx = weft.local()
    state = _state(ctx, -1)
    found = weft.restore(state, folder, ctx)
    model, optimizer, box = state.objects.values()
    numbers = {float(x) for tensor in model.state_dict().values() for x in tensor.flatten()}
    numbers |= {float(x) for entry in optimizer.state.values() for x in entry["momentum_buffer"].flatten()}
    numbers |= {optimizer.param_groups[0]["lr"] - 1.0, float(box.value[0]), float(box.value[1]["deep"])}
    assert numbers == {found.step if found else -1} and not (found and found.skipped)
    return found.step if found else 0


@contextlib.contextmanager
def _writing(before):
    """Call something in the thread before its file is written."""
    real = staging.file_parts

    def parts(*args):
        before()
        yield from real(*args)

    staging.file_parts = parts
    try:
        yield
    finally:
        staging.file_parts = real


@contextlib.contextmanager
def _held():
    """Saves in the background wait until the event is set, at the end at the latest."""
    gate = threading.Event()
    with _writing(lambda: gate.wait(30)):
        try:
            yield gate
        finally:
            gate.set()


def _full():
    raise OSError(errno.ENOSPC, "No space left on device")


# -- the values of the moment ------------------------------------------------------------------------


def test_what_changes_after_the_call_does_not_reach_the_file(tmp_path):
    ctx = weft.local()
    state = _state(ctx, 7)
    with _held() as gate:
        before = [torch.get_rng_state(), random.getstate()]
        running = weft.save_async(state, tmp_path, 7, ctx)
        _spoil(state)
        torch.rand(3), random.random()
        assert not running.done() and weft.checkpoint.latest(tmp_path) is None
        gate.set()
        assert running.wait() == weft.checkpoint.latest(tmp_path) == running.path
    assert running.done() and running.wait() == running.path
    assert weft.checkpoint.verify(running.path).step == 7 and _restored(tmp_path) == 7
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


STRATEGIES = ["plain", "replicate", "flat", "fully_shard", "zero1", "zero2", "zero3"]


def _trained(ctx, strategy):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx)
    elif strategy in ("replicate", "flat"):
        model, ctx = weft.replicate(model, ctx, flat=strategy == "flat")
    optimizer = torch.optim.AdamW(model.parameters())
    if strategy.startswith("zero"):
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)

    def step():
        x = torch.ones(2, 3) if strategy == "plain" else torch.rand(2, 3) + ctx.rank
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return state, ctx, step


def _saves_both_ways(ctx, folder):
    for strategy in STRATEGIES if ctx.world_size > 1 else STRATEGIES[:3]:
        state, mine, step = _trained(ctx, strategy)
        one = weft.checkpoint.verify(weft.save(state, folder / f"{strategy}{ctx.world_size}", 1, mine))
        with _writing(lambda: time.sleep(0.05)):
            running = weft.save_async(state, folder / f"{strategy}{ctx.world_size}", 2, mine)
            step()  # with its collectives, beside those of the save
            two = weft.checkpoint.verify(running.wait())
        assert one.tensors == two.tensors and one.files == two.files, strategy  # with their hashes
        assert one.values == two.values and one.ranks == two.ranks
        three = weft.checkpoint.verify(
            weft.save_async(state, folder / f"{strategy}{ctx.world_size}", 3, mine, keep=1).wait()
        )
        assert three.files.keys() == one.files.keys() and three.files != one.files
        mine.agree("looked")
        assert [path.name for path in folders(folder / f"{strategy}{ctx.world_size}")] == ["step-00000003"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, *variants(1)])
def test_every_strategy_writes_the_bytes_that_save_writes(tmp_path, ranks):
    run_ranks(_saves_both_ways, ranks, tmp_path)


@pytest.mark.parametrize("block_bytes", [None, 64])
def test_the_copy_has_the_bytes_of_every_kind_of_tensor(tmp_path, block_bytes, monkeypatch):
    tensors = {
        "transposed": torch.arange(12.0).view(3, 4).t(), "number": torch.tensor(2.5), "byte": torch.arange(3).byte(),
        "bool": torch.tensor([True, False]), "half": torch.arange(5, dtype=torch.bfloat16), "long": torch.arange(77),
        "strided": torch.arange(10)[::2], "parameter": nn.Parameter(torch.randn(3)),
    }  # fmt: skip
    memory = staging.Staging()
    if block_bytes:  # as for pinned memory, in blocks
        monkeypatch.setattr(memory, "_take", lambda total, device: None)
        memory._blocks = [torch.empty(block_bytes, dtype=torch.uint8) for _ in range(20)]
    parts = memory.copy(tensors, torch.device("cpu"))
    with (tmp_path / "two").open("wb") as file:
        write_parts(file, parts)
    from safetensors.torch import load_file

    found = load_file(tmp_path / "two")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[n], t.detach()) and found[n].dtype == t.dtype for n, t in tensors.items())


def test_a_state_without_tensors_is_saved_too(tmp_path):
    state, ctx = weft.checkpointable({"box": Box(3)}, weft.local())
    weft.save_async(state, tmp_path, 1, ctx).wait()
    state.objects["box"].value = 0
    weft.restore(state, tmp_path, ctx)
    assert state.objects["box"].value == 3


# -- one after the other -----------------------------------------------------------------------------


@pytest.mark.parametrize("again", [weft.save, weft.save_async])
def test_the_next_save_waits_and_readers_see_complete_checkpoints_only(tmp_path, again):
    ctx = weft.local()
    weft.save(_state(ctx, 1), tmp_path, 1, ctx)
    with _held() as gate:
        running = weft.save_async(_state(ctx, 2), tmp_path, 2, ctx)
        assert weft.checkpoint.latest(tmp_path).name == "step-00000001" and _restored(tmp_path) == 1
        assert weft.checkpoint.verify(tmp_path / "step-00000001").step == 1
        with pytest.raises(CheckpointError, match=r"another process is saving(.|\n)*found: (.|\n)*fix: "):
            weft.save(_state(weft.local(), 3), tmp_path, 3, weft.local())  # as another job
        threading.Timer(0.2, gate.set).start()
        last = again(_state(ctx, 3), tmp_path, 3, ctx)
        assert running.done() and (tmp_path / "step-00000002").is_dir()
    if again is weft.save_async:
        last.wait()
    assert _restored(tmp_path) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == [".saving", *(f"step-0000000{n}" for n in (1, 2, 3))]


def test_leaving_the_context_waits(tmp_path):
    def saves(ctx, folder):
        weft.save_async(_state(ctx, 1), folder, 1, ctx)
        ctx.close()
        return weft.checkpoint.latest(folder).name

    with _held() as gate, weft.local() as ctx:
        running = weft.save_async(_state(ctx, 1), tmp_path / "one", 1, ctx)
        threading.Timer(0.2, gate.set).start()
    assert running.done() and _restored(tmp_path / "one") == 1
    with _writing(lambda: time.sleep(0.2)):
        assert run_ranks(saves, 1, tmp_path / "two") == ["step-00000001"]


def test_bad_arguments_are_refused_under_its_own_name(tmp_path):
    ctx = weft.local()
    with pytest.raises(ValueError, match=r"save_async: step = -1 cannot be used(.|\n)*found: (.|\n)*fix: .*save_async"):
        weft.save_async(_state(ctx), tmp_path, -1, ctx)
    with pytest.raises(TypeError, match=r"save_async: this is not a state(.|\n)*found: (.|\n)*fix: "):
        weft.save_async({}, tmp_path, 1, ctx)
    with pytest.raises(TypeError, match=r"box/value cannot be saved(.|\n)*fix: "):
        weft.save_async(weft.checkpointable({"box": Box(object())}, ctx)[0], tmp_path, 1, ctx)
    weft.save_async(_state(ctx, 1), tmp_path, 1, ctx).wait()
    for _ in range(2):  # and the lock is free after it
        with pytest.raises(CheckpointError, match=r"step 1 has already been saved(.|\n)*fix: "):
            weft.save_async(_state(ctx, 2), tmp_path, 1, ctx)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".saving", "step-00000001"]


# -- errors ------------------------------------------------------------------------------------------


def test_an_error_is_raised_by_wait_and_else_by_the_next_save(tmp_path):
    ctx = weft.local()
    with _writing(_full):
        running = weft.save_async(_state(ctx, 1), tmp_path, 1, ctx)
        for _ in range(2):
            with pytest.raises(OSError, match="No space left"):
                running.wait()
        assert running.done() and sorted(p.name for p in tmp_path.iterdir()) == [".saving"]
        weft.save_async(_state(ctx, 1), tmp_path, 1, ctx)  # that was seen
    for again in (weft.save, weft.save_async):
        with pytest.raises(OSError, match="No space left"):
            again(_state(ctx, 2), tmp_path, 2, ctx)
        with _writing(_full):
            weft.save_async(_state(ctx, 1), tmp_path, 1, ctx)
    with pytest.raises(OSError, match="No space left"):
        ctx.close()
    ctx.close()
    assert weft.save_async(_state(ctx, 2), tmp_path, 2, ctx).wait().name == "step-00000002"


def test_an_error_of_the_program_keeps_that_of_the_save_as_a_note(tmp_path):
    with pytest.raises(ValueError, match="mine") as caught, weft.local() as ctx, _writing(_full):
        weft.save_async(_state(ctx, 1), tmp_path, 1, ctx)
        raise ValueError("mine")
    assert "OSError: [Errno 28] No space left on device" in "".join(caught.value.__notes__)


def test_a_context_left_by_an_error_does_not_wait_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(shutdown, "_CLOSE_LIMIT_S", 0.05)
    monkeypatch.setattr(saving_async, "_STOP_S", 0.05)
    with pytest.raises(ValueError, match="mine") as caught, _held() as gate, weft.local() as ctx:
        running = weft.save_async(_state(ctx, 1), tmp_path, 1, ctx)
        raise ValueError("mine")
    text = "".join(caught.value.__notes__)
    assert "not complete when the program exited" in text and "found:    still writing after 0.05 s" in text
    assert gate.is_set() and running.wait() == tmp_path / "step-00000001"


def test_a_failure_of_one_rank_is_named_on_all_and_the_job_can_go_on(tmp_path):
    def saves(ctx, folder):
        state = _state(ctx, 1)
        texts = []
        for failing in range(ctx.world_size):
            with _writing(_full if ctx.rank == failing else lambda: None):
                running = weft.save_async(state, folder, 1, ctx)
                with pytest.raises((OSError, PeerError), match="No space left") as caught:
                    running.wait()
                assert isinstance(caught.value, PeerError) == (ctx.rank != failing)
                assert ctx.rank == failing or caught.value.rank == failing
                texts.append(sorted(p.name for p in folder.iterdir() if ctx.is_main))
        differs = weft.checkpointable({"box": Box(ctx.rank)}, ctx)[0]
        with pytest.raises((CheckpointError, PeerError), match=r"differs between the ranks(.|\n)*box/value on rank 1"):
            weft.save_async(differs, folder, 1, ctx).wait()
        weft.save_async(state, folder, 1, ctx).wait()
        return texts

    assert run_ranks(saves, 2, tmp_path)[0] == [[".saving"]] * 2
    assert _restored(tmp_path) == 1


@pytest.mark.slow
def test_saving_on_some_ranks_only_fails_on_all_soon(tmp_path):
    def saves(ctx, folder):
        state = _state(ctx, 1)
        weft.reduce(torch.ones(1), ctx)  # which asks for its shape once
        start = time.monotonic()
        with pytest.raises(PeerError) as caught:
            if ctx.is_main:
                weft.save_async(state, folder, 1, ctx)
            else:
                weft.reduce(torch.ones(1), ctx)
        assert time.monotonic() - start < 20
        raise caught.value

    with pytest.raises(RanksFailed) as caught:
        run_ranks(saves, 2, tmp_path)
    assert set(caught.value.errors) == {0, 1}
    text = str(caught.value.errors[0])
    assert "save_async: rank 1 of 2 did not call it" in text and "test_save_async.py" in text


def test_a_rank_that_leaves_with_an_error_lets_the_running_save_end(tmp_path):
    def saves(ctx, folder):
        with _writing(lambda: time.sleep(0.3)):
            running = weft.save_async(_state(ctx, 1), folder, 1, ctx)
            if ctx.rank == 1:
                raise ValueError("mine")
            running.wait()
            weft.barrier(ctx)

    with pytest.raises(RanksFailed) as caught:
        run_ranks(saves, 2, tmp_path)
    assert isinstance(caught.value.errors[1], ValueError)
    assert isinstance(caught.value.errors[0], PeerError) and caught.value.errors[0].rank == 1
    assert _restored(tmp_path) == 1


def test_waiting_for_peers_can_be_stopped():
    world = World(ranks=[0, 1], rank=0, store=RankStore(dist.HashStore(), limit_s=1))
    world.watch = _Saver()
    world.watch.check("save_async", [1], world)
    world.watch.leaving = True
    with pytest.raises(PeerError, match="save_async: rank 1 did not come before this rank left; nothing was committed"):
        exchange(world, "save_async", None)


_PROGRAM = """
import errno, sys, time, torch, weft
from weft.checkpoint import staging

real, kind, folder = staging.file_parts, sys.argv[1], sys.argv[2]

def parts(*args):
    time.sleep(0.3)
    if kind == "fails":
        raise OSError(errno.ENOSPC, "No space left on device")
    yield from real(*args)

staging.file_parts = parts
state, ctx = weft.checkpointable({"model": torch.nn.Linear(2, 2)}, weft.local())
weft.save_async(state, folder, 1, ctx)
if kind == "raises":
    raise ValueError("mine")
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["raises", "fails"])
def test_the_end_of_the_program_waits_and_tells_of_a_failure(tmp_path, kind):
    command = [sys.executable, "-c", _PROGRAM, kind, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if kind == "fails":
        assert "weft: save_async of step-00000001 failed: OSError: [Errno 28] No space" in done.stderr, done.stderr
        assert weft.checkpoint.latest(tmp_path) is None
    else:
        assert done.returncode == 1 and "mine" in done.stderr, done.stderr
        assert weft.checkpoint.latest(tmp_path).name == "step-00000001"


# -- what it costs -----------------------------------------------------------------------------------


def _status(name):
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _held_now():
    return {
        "rss": _status("VmRSS"),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "shared": Path("/proc/self/maps").read_text().count("/dev/shm"),
    }


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_fifty_saves_hold_no_more_than_the_first_ones(tmp_path):
    def saves(ctx, folder):
        state = _state(ctx, 1, width=50_000)  # 2 MB with its momentum
        counts = []
        for step in range(50):
            weft.save_async(state, folder, step, ctx, keep=1).wait()
            if step == 4:
                before = _held_now()
            if ctx.world_size > 1 and step >= 4:
                counts.append(dist.distributed_c10d._get_default_store().num_keys())
        return before, _held_now(), counts

    for ranks in (1, 2):
        for before, after, counts in run_ranks(saves, ranks, tmp_path / str(ranks)):
            assert after.pop("rss") < 1.05 * before.pop("rss")
            assert after == before
            # A meeting leaves its two words of state in the store; names and values are removed.
            assert all(b - a <= 12 for a, b in itertools.pairwise(counts)), counts


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc")
def test_a_save_takes_a_copy_of_what_the_rank_writes_and_little_more(tmp_path):
    def saves(ctx, folder):
        torch.manual_seed(0)
        state = weft.checkpointable({"box": Box([torch.ones(2_500_000) for _ in range(20)])}, ctx)[0]  # 200 MB
        weft.save_async(_state(ctx), folder / "warm", 1, ctx).wait()
        Path("/proc/self/clear_refs").write_text("5")
        before = _status("VmRSS")
        weft.save_async(state, folder, 1, ctx).wait()
        return _status("VmHWM") - before

    for extra in run_ranks(saves, 2, tmp_path):
        assert extra <= 100_000_000 + 10_000_000 + 64 * 2**20, extra


def test_a_process_that_is_forked_during_a_save_does_not_keep_the_lock(tmp_path):
    ctx = weft.local()
    with _held() as gate, warnings.catch_warnings():
        running = weft.save_async(_state(ctx, 1), tmp_path, 1, ctx)
        warnings.simplefilter("ignore")  # of later Pythons, about threads
        child = os.fork()
        if not child:  # as a worker of a loader
            time.sleep(60)
            os._exit(0)
        try:
            gate.set()
            running.wait()
            weft.save(_state(ctx, 2), tmp_path, 2, ctx)
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert _restored(tmp_path) == 2


# -- kills -------------------------------------------------------------------------------------------


def _saves_until_killed(ctx, folder, victims, delay, waits):
    """The clock of the kill begins when so many saves were waited for: on any machine some come late."""
    state = _state(ctx, -1)
    found = weft.restore(state, folder, ctx)
    step = found.step if found else 0
    weft.barrier(ctx)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process like a kill: nothing can catch it
    while True:
        if ctx.rank in victims and waits == 0:
            signal.setitimer(signal.ITIMER_REAL, delay)
        step += 1
        state = _state(ctx, step)
        running = weft.save_async(state, folder, step, ctx, keep=3)
        _spoil(state)
        if step % 2:  # else the next save waits
            running.wait()
            (folder / f"done-{ctx.rank}-{step}").touch()
            waits -= 1


@pytest.mark.parametrize(
    ("ranks", "trials"),
    [(1, NUM_TRIALS // 2), pytest.param(2, NUM_TRIALS - NUM_TRIALS // 2, marks=pytest.mark.variant)],
)
def test_kills_at_random_moments_lose_nothing(tmp_path, ranks, trials):
    chance = random.Random(11)
    for trial in range(trials):
        victims = [list(range(ranks)), [0], [ranks - 1]][trial % 3]
        with pytest.raises(RanksFailed) as caught:
            run_ranks(_saves_until_killed, ranks, tmp_path, victims, 0.02 + chance.random() * 0.1, trial % 2 * 2)
        for rank in set(range(ranks)) - set(victims):
            error = caught.value.errors.get(rank)
            assert isinstance(error, PeerError) and error.rank in victims, error
        # What was said to be saved is there, and all that can be seen is whole.
        done = max((int(path.name.rpartition("-")[2]) for path in tmp_path.glob("done-*")), default=0)
        whole = [weft.checkpoint.verify(path).step for path in folders(tmp_path)]
        assert whole == sorted(whole) and (not done or whole[-1] >= done)
        assert _restored(tmp_path) == (whole[-1] if whole else 0)
    assert done > 1  # the kills did not all come before the first save
