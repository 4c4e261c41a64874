"""A job that is asked to end stops after the same step on all ranks, whichever of them was asked."""

import contextlib
import os
import random
import re
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import weft
from tests.processes import is_alive, until
from weft.launching.failures import first_failure
from weft.testing import RanksFailed, fake, run_ranks

# -- one rank ----------------------------------------------------------------------------------------


def test_one_rank_stops_after_the_step_in_which_it_is_told():
    before = signal.getsignal(signal.SIGTERM)
    with weft.on_preemption(weft.local()) as preempted:
        assert not preempted(3) and not preempted(3) and preempted.reason == ""
        os.kill(os.getpid(), signal.SIGTERM)
        # It was said already that step 3 is not the last.
        assert not preempted(3) and preempted(4) and preempted(4) and preempted(9)
        assert preempted.reason == "SIGTERM on rank 0" and preempted.exit_code == 75
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_signals_are_given_back_when_the_context_ends():
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with weft.local() as ctx:
            preempted = weft.on_preemption(ctx, signals=[signal.SIGTERM, signal.SIGUSR1])
            os.kill(os.getpid(), signal.SIGUSR1)
            assert preempted(1) and preempted.reason == "SIGUSR1 on rank 0"
        os.kill(os.getpid(), signal.SIGUSR1)
        assert seen == [signal.SIGUSR1] and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        preempted.release()  # again
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_cannot_be_watched():
    ctx = weft.local()
    for signals in ([], [1000], ["SIGTERM"], 15):
        with pytest.raises(ValueError, match="(?s)on_preemption: cannot watch.*found:.*fix:"):
            weft.on_preemption(ctx, signals=signals)
    found = []

    def elsewhere():
        with pytest.raises(ValueError, match="(?s)found:    the thread.*expected: the main thread.*fix:"):
            weft.on_preemption(ctx)
        found.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    with weft.on_preemption(ctx) as preempted:
        with pytest.raises(weft.errors.ContractError, match=r"(?s)found:    SIGTERM.*fix:.*release\(\)"):
            weft.on_preemption(ctx, signals=[signal.SIGUSR1, signal.SIGTERM])
        preempted(5)
        with pytest.raises(ValueError, match="(?s)found:    4 < 5.*fix:"):
            preempted(4)
    with pytest.raises(weft.errors.ContextError, match="(?s)has no process group.*fix:"):
        weft.on_preemption(fake(0, 2))
    assert found and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_asking_costs_microseconds():
    with weft.on_preemption(weft.local()) as preempted:
        start = time.perf_counter()
        for step in range(20_000):
            preempted(step)
        assert (time.perf_counter() - start) / 20_000 < 20e-6  # less than one on a quiet machine


# -- several ranks -----------------------------------------------------------------------------------


def _trials(ctx, count, together):
    """Stop steps of many short loops; in each some ranks are told at some moment."""
    found = []
    for trial in range(count):
        draw = random.Random(trial)
        told = draw.sample(range(ctx.world_size), draw.choice([1, 1, ctx.world_size]))
        at, pace = draw.randrange(40), random.Random(f"{trial} {ctx.rank}")
        with weft.on_preemption(ctx) as preempted:
            for step in range(1, 100_000):
                if step - 1 == at and ctx.rank in told:
                    os.kill(os.getpid(), signal.SIGTERM)
                if together:
                    weft.reduce(torch.ones(()), ctx)
                time.sleep(pace.random() * 2e-3)
                if preempted(step):
                    break
            found.append((step, preempted.reason))
        weft.barrier(ctx)
    return found


@pytest.mark.parametrize(
    ("n", "together", "count"),
    [
        (2, True, 5),
        pytest.param(2, False, 4, marks=pytest.mark.slow),
        pytest.param(4, True, 3, marks=pytest.mark.slow),
        pytest.param(4, False, 2, marks=pytest.mark.slow),
    ],
)
def test_all_ranks_stop_after_the_same_step(n, together, count):
    found = run_ranks(_trials, n, count, together)
    assert all(each == found[0] for each in found)
    assert all(step < 5000 and reason.startswith("SIGTERM on rank ") for step, reason in found[0])


def _sends(ctx, steps):
    """Messages that asking sends when nobody was told."""
    from torch.distributed.tensor.debug import CommDebugMode

    with weft.on_preemption(ctx) as preempted, CommDebugMode() as counter:
        meetings = ctx.world.meetings
        start = time.perf_counter()
        answers = {preempted(step) for step in range(steps)}
        cost = (time.perf_counter() - start) / steps
    return answers, counter.get_total_counts(), ctx.world.meetings - meetings, cost < 20e-6


def _told_in_a_wait(ctx, again):
    """Rank 1 waits in C++ when it is told, for rank 0, which comes when it knows of that."""
    with weft.on_preemption(ctx) as preempted:
        assert not preempted(1)
        other = ctx.world.store.read("peer/1")["pid"]
        if ctx.rank == 0:
            time.sleep(0.3)
            os.kill(other, signal.SIGTERM)
            assert until(lambda: preempted._asked, 60)
            if again:
                time.sleep(1.2)
                os.kill(other, signal.SIGTERM)
                assert until(lambda: not is_alive(other), 60)
        dist.all_reduce(torch.ones(1))
        return [preempted(step) for step in (2, 3)], preempted.reason


def test_a_signal_is_seen_by_others_during_a_wait():
    assert run_ranks(_told_in_a_wait, 2, again=False) == [([True, True], "SIGTERM on rank 1")] * 2


@pytest.mark.slow
def test_a_second_signal_during_a_wait_ends_the_process():
    with pytest.raises(RanksFailed, match="exit code 143"):
        run_ranks(_told_in_a_wait, 2, again=True, timeout_s=55)


def _forks(ctx):
    """What comes to a fork did not come to the rank; and an event loop keeps its place."""
    signals = [signal.SIGUSR1]
    with weft.on_preemption(ctx, signals=signals) as preempted:
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
        assert until(lambda: " S " in Path(f"/proc/{pid}/stat").read_text(), 60)
        os.kill(pid, signal.SIGUSR1)
        os.waitpid(pid, 0)
        assert preempted._arrivals.take() == b"" and not preempted(1)
        assert signal.set_wakeup_fd(-1) != -1
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    signal.set_wakeup_fd(theirs.fileno())
    with weft.on_preemption(ctx, signals=signals) as preempted:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert ours.recv(1) == bytes([signal.SIGUSR1]) and preempted._signal
    assert signal.set_wakeup_fd(-1) == theirs.fileno()
    weft.barrier(ctx)


def test_only_signals_of_the_rank_count_and_an_event_loop_keeps_its_place():
    run_ranks(_forks, 2)


def test_asking_sends_nothing():
    assert run_ranks(_sends, 2, 5000) == [({False}, 0, 0, True)] * 2


def _uneven(ctx, after_end):
    """Rank 0 ends its loop long before rank 1, which is told before or after that."""
    limit = 3 if ctx.rank == 0 else 12
    with weft.on_preemption(ctx) as preempted:
        for step in range(limit):
            if ctx.rank == 1 and step == (6 if after_end else 1):
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            if preempted(step):
                return "stopped"
    return step


@pytest.mark.parametrize("after_end", [True, False])
def test_a_rank_that_ended_its_loop_is_not_waited_for(after_end):
    start = time.monotonic()
    found = run_ranks(_uneven, 2, after_end)
    assert found == [2, 11] or (not after_end and found == ["stopped", "stopped"])
    assert time.monotonic() - start < 20


def _dies(ctx):
    preempted = weft.on_preemption(ctx)
    if ctx.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGTERM)
    preempted(1)


def test_a_rank_that_died_is_named_and_not_waited_for():
    with pytest.raises(RanksFailed, match="(?s)on_preemption: rank 1 failed: its process is gone"):
        run_ranks(_dies, 2)


def _different(ctx):
    try:
        weft.on_preemption(ctx, signals=[signal.SIGTERM] if ctx.rank else [signal.SIGUSR1])
    except weft.errors.ContextError as error:
        return str(error)
    return "nothing raised"


def test_ranks_that_watch_different_signals_are_told():
    assert all("signals: ['SIGUSR1'] on rank 0, ['SIGTERM'] on rank 1" in found for found in run_ranks(_different, 2))


# -- a second signal, and other processes ------------------------------------------------------------


def _told_twice(ctx, pause):
    preempted = weft.on_preemption(ctx)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(pause)
    os.kill(os.getpid(), signal.SIGTERM)
    return preempted(1)


def test_a_second_signal_ends_the_process_at_once():
    # What a launcher passes on comes at nearly the same moment, and is the same signal.
    assert run_ranks(_told_twice, 1, 0.1) == [True]
    with pytest.raises(RanksFailed, match="exit code -15"):
        run_ranks(_told_twice, 1, 1.1)


def _ends(number):
    """How a process that was forked while signals are watched ends on a signal."""
    child = os.fork()
    if child == 0:
        time.sleep(20)
        os._exit(3)
    time.sleep(0.1)
    os.kill(child, number)
    time.sleep(0.1)
    ended, status = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(status)


def _forks(ctx):
    with weft.on_preemption(ctx, signals=[signal.SIGTERM, signal.SIGUSR1]) as preempted:
        return _ends(signal.SIGTERM), _ends(signal.SIGUSR1), preempted(1)


def test_a_process_that_was_forked_ends_alone():
    assert run_ranks(_forks, 1) == [(-signal.SIGTERM, None, False)]


# -- the main job ------------------------------------------------------------------------------------

SCRIPT = str(Path(__file__).parents[2] / "examples" / "train_lm.py")
WEFT = [sys.executable, "-m", "weft", "launch"]
SETTINGS = "--steps 50 --width 32 --depth 1 --context 32 --batch 8 --accumulate 2 --log-every 1 --save-every 5".split()


def _start(command, out, *options):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WEFT_")}
    return subprocess.Popen(
        [*command, SCRIPT, *SETTINGS, "--out", str(out), *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=environment | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def _ends_with(process, code):
    try:
        text = process.communicate(timeout=300)[0]
    finally:
        process.kill()
    assert process.returncode == code, text
    return text


def _wait_for_step(process, out, least):
    """Wait until there is a checkpoint of at least this step."""
    end = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < end:
        newest = weft.checkpoint.latest(out / "checkpoints")
        if newest and int(newest.name.partition("-")[2]) >= least:
            return
        time.sleep(0.01)
    raise AssertionError(process.communicate(timeout=10)[0])


def _ranks(launcher):
    """Processes of the ranks: those that the children of the launcher have forked."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return [pid for pid, parent in parents.items() if parents.get(parent) == launcher.pid]


def _curve(out):
    """Step to loss, as logged in float32."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out)).Reload().Scalars("loss")
    return {event.step: event.value for event in events}


def _main(ctx, out, *options):
    """The main job, in a rank that has imported torch already."""
    sys.argv = [SCRIPT, *SETTINGS, "--out", str(out), *options]
    module = runpy.run_path(SCRIPT, run_name="example")
    module["main"](module["parse"](), ctx)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at processes through /proc")
@pytest.mark.slow
@pytest.mark.timeout(240)  # two launches, one of which starts twice
def test_the_main_job_goes_on_after_sigterm_and_after_a_killed_rank(tmp_path):
    out, undisturbed, alone, exported = (tmp_path / name for name in ("out", "undisturbed", "alone", "exported"))
    first = _start([*WEFT, "-n", "2"], out)
    _wait_for_step(first, out, 5)
    # As a scheduler: to the launcher, what it forks from, and the ranks, which also get it from the launcher.
    os.killpg(first.pid, signal.SIGTERM)
    text = _ends_with(first, 75)
    assert len(re.findall(r"SIGTERM on rank [01]: saved after step \d+; --resume continues from there", text)) == 1
    assert "weft launch: the job was asked to end" in text and "Traceback" not in text
    told = int(re.search(r"saved after step (\d+)", text)[1])
    assert weft.checkpoint.latest(out / "checkpoints").name == f"step-{told:08d}"
    shutil.copytree(out, alone)

    again = _start([*WEFT, "-n", "2", "--max-restarts", "1"], out, "--resume", "--export", str(exported))
    _wait_for_step(again, out, told + 5)
    os.kill(_ranks(again)[-1], signal.SIGKILL)
    text = _ends_with(again, 0)
    assert text.count("weft launch: all ranks start again after a failure, attempt 2\n") == 1, text
    steps = [int(step) for step in re.findall(r"^step +(\d+)  loss", text, re.MULTILINE)]
    assert steps[0] == told + 1 and steps[-1] == 50 and len(steps) - len(set(steps)) < 10

    run_ranks(_main, 2, undisturbed)
    whole = _curve(undisturbed)
    assert _curve(out) == whole and sorted(whole) == list(range(1, 51))
    told_of = weft.monitoring.report.read(out)
    assert told_of.resumes[0] == told and len(told_of.resumes) == 2 and told_of.starts[0] == 0
    assert told_of.series["loss"] == pytest.approx(whole) and sorted(told_of.series["loss"]) == list(range(1, 51))
    assert "resumed after this step" in (out / "report.html").read_text(encoding="utf-8")
    weights = [load_file(folder / "model.safetensors") for folder in (undisturbed, out, exported)]
    assert all(torch.equal(value, other[name]) for other in weights[1:] for name, value in weights[0].items())

    run_ranks(_main, 1, alone, "--resume")
    # Float32: sums in another order, and AdamW carries a rounding on.
    assert _curve(alone) == pytest.approx(whole, abs=1e-5)


def test_the_exit_code_of_a_rank_that_was_told_to_end_comes_through(tmp_path):
    error = ChildFailedError("ends.py", {0: ProcessFailure(local_rank=0, pid=1, exitcode=75, error_file="")})
    ending = first_failure(error, tmp_path)
    text = "weft launch: the job was asked to end and has ended; start it again to resume"
    assert (ending.text, ending.code) == (text, 75)
