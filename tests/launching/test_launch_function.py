"""weft.launch_function: as if the function were called here, on every rank."""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest
import torch
import torch.distributed as dist

import weft
from tests.processes import is_alive, until

SLOW = pytest.mark.slow
PROC = pytest.mark.skipif(not pathlib.Path("/proc/self/task").is_dir(), reason="looks at processes through /proc")


class Refused(Exception):
    """An exception of the user's."""

    def __init__(self, text, rank):
        super().__init__(text, rank)
        self.rank = rank


# -- results -----------------------------------------------------------------------------------------


@SLOW  # the example in the docstring is a quicker one
def test_results_come_in_rank_order_and_output_arrives(capsys):
    factor = 3

    class Point:
        def __init__(self, x):
            self.x = x

    def work(point, *, loud=True):
        with weft.start(device="cpu") as ctx:
            total = weft.reduce(torch.tensor(float(ctx.rank + 1)), ctx, "sum")
            if loud:
                print(f"rank {ctx.rank} says ünï")
                print(f"rank {ctx.rank} complains", file=sys.stderr)
            place = {"rank": ctx.rank, "local": ctx.local_rank, "size": ctx.world_size, "nodes": ctx.num_nodes}
            return Point(point.x * factor), total, place | {"argv": sys.argv, "pid": os.getpid()}

    before = dict(os.environ)
    found = weft.launch_function(work, 2, Point(5))
    assert dict(os.environ) == before and not dist.is_initialized()
    assert [type(point) for point, _, _ in found] == [Point, Point] and [point.x for point, _, _ in found] == [15, 15]
    assert [float(total) for _, total, _ in found] == [3.0, 3.0]
    for rank, (_, _, place) in enumerate(found):
        assert place.pop("pid") != os.getpid() and not is_alive(place.get("pid"))
        assert place == {"rank": rank, "local": rank, "size": 2, "nodes": 1, "argv": sys.argv}
    seen = capsys.readouterr()
    assert sorted(seen.out.splitlines()) == ["rank 0 says ünï", "rank 1 says ünï"]
    assert sorted(seen.err.splitlines()) == ["rank 0 complains", "rank 1 complains"]


NOTEBOOK = """
import weft
offset = 4
def cell():
    return place(lambda ctx: ctx.rank + offset)
def place(read):
    with weft.start(device="cpu") as ctx:
        return read(ctx)
print(weft.launch_function(cell, 2), __name__)
"""


@SLOW
def test_functions_of_a_notebook_are_sent(tmp_path):
    # A program from standard input has no file to import functions from, as a notebook has none.
    done = subprocess.run(
        [sys.executable, "-"], input=NOTEBOOK, capture_output=True, text=True, cwd=tmp_path, check=False, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "[4, 5] __main__\n"), done.stderr


@SLOW
def test_a_script_without_a_guard_does_not_run_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import weft\nprint('once')\nprint(weft.launch_function(lambda: 1, 2))\n")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, cwd=tmp_path, check=False, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "once\n[1, 1]\n"), done.stderr


# -- failures ----------------------------------------------------------------------------------------


def _fails(how, folder=None):
    with weft.start(device="cpu", timeout_s=600) as ctx:
        if folder is not None:
            pathlib.Path(folder, f"{ctx.rank}").write_text(str(os.getpid()))
        if ctx.rank == 1:
            if how == "raise":
                raise Refused("the data of rank 1 is bad", ctx.rank)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "exit":
                sys.exit(3)
            if how == "leave":
                sys.exit(0)
        if how != "leave":
            weft.barrier(ctx)
    if how == "closure":

        class Own(Exception):
            def __init__(self, a, b):
                super().__init__(f"{a} {b}")

        raise Own("two", "words")
    return threading.Lock() if how == "result" else ctx.rank


@PROC
@pytest.mark.slow
def test_the_exception_of_the_rank_that_failed_is_raised_here(tmp_path, capfd):
    started = time.monotonic()
    with pytest.raises(Refused, match="the data of rank 1 is bad") as caught:
        weft.launch_function(_fails, 2, "raise", str(tmp_path))
    assert time.monotonic() - started < 300 and caught.value.rank == 1  # and not only after `timeout_s`
    cause = str(caught.value.__cause__)
    assert re.search(r'Traceback (.|\n)*test_launch_function.py", line \d+, in _fails(.|\n)*Refused: ', cause), cause
    assert "runpy" not in cause and "ranks.py" not in cause and 'callee.py"' not in cause.replace(__file__, "")
    assert not any(is_alive(int(path.read_text())) for path in tmp_path.iterdir())
    assert capfd.readouterr().err == ""


@SLOW
@pytest.mark.parametrize(
    ("how", "text", "cause"),
    [
        ("kill", r"rank 1.*ended by signal 9 \(SIGKILL\)", "None"),
        ("exit", "rank 1.*ended with exit code 3", "None"),
        ("leave", "rank 1 of 2: left before it had returned", "None"),
        ("closure", r"rank [01] of 2: .*Own: two words", r"Own: two words(.|\n)*cannot be sent: TypeError"),
    ],
)
def test_a_rank_that_cannot_say_why_is_named(how, text, cause):
    with pytest.raises(weft.errors.PeerError, match=f"launch_function: {text}") as caught:
        weft.launch_function(_fails, 2, how)
    assert caught.value.rank == 1 or how == "closure"
    assert re.search(cause, str(caught.value.__cause__))


@SLOW
def test_a_result_that_cannot_be_sent_is_an_error():
    with pytest.raises(TypeError, match="(?s)the result of rank [01] cannot be sent.*found:.*fix:"):
        weft.launch_function(_fails, 2, "result")


def _second_time(folder):
    with weft.start(device="cpu") as ctx:
        if ctx.attempt < 2 and ctx.rank == ctx.attempt:
            raise ValueError(f"attempt {ctx.attempt}")
        weft.barrier(ctx)
        return ctx.attempt


@SLOW
def test_ranks_are_started_again(capsys, tmp_path):
    assert weft.launch_function(_second_time, 2, str(tmp_path), max_restarts=2) == [2, 2]
    text = capsys.readouterr().err
    for attempt in (0, 1):
        assert text.count(f"weft launch: rank {attempt} failed: ValueError in {__file__}, line ") == 1
        assert text.count(f"\nweft launch: all ranks start again after a failure, attempt {attempt + 2}\n") == 1
        assert text.count(f"ValueError: attempt {attempt}\n") == 1  # at the end
    with pytest.raises(ValueError, match="attempt 1"):
        weft.launch_function(_second_time, 2, str(tmp_path), max_restarts=1)


WAITS = """
import os, pathlib, signal, subprocess, sys, time, weft
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell has started in the background
def waits(folder):
    child = subprocess.Popen(["sleep", "100"])
    pathlib.Path(folder, os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid}")
    time.sleep(100)
try:
    weft.launch_function(waits, 2, sys.argv[1])
except KeyboardInterrupt:
    print("interrupted")
    sys.exit(7)
"""


@SLOW
@PROC
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_when_the_caller_is_interrupted_or_killed_all_ranks_end(tmp_path, number):
    (tmp_path / "waits.py").write_text(WAITS)
    folder = tmp_path / "pids"
    folder.mkdir()
    temporary = pathlib.Path(tempfile.mkdtemp(prefix="w"))  # sockets lie there, whose names may not be long
    process = subprocess.Popen(
        [sys.executable, "waits.py", str(folder)], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, env={**os.environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    pids = []
    try:
        files = [folder / str(rank) for rank in range(2)]
        assert until(lambda: all(f.exists() and f.read_text() for f in files), 60)
        pids = [int(pid) for f in files for pid in f.read_text().split()]
        os.killpg(process.pid, number)  # as a terminal does
        out, error = process.communicate(timeout=300)
        if number == signal.SIGINT:
            assert (process.returncode, out) == (7, "interrupted\n"), error
        ranks = pids[::2]
        assert until(lambda: not any(map(is_alive, pids if number == signal.SIGINT else ranks)), 60)
        assert until(lambda: not list(temporary.glob("weft-*")), 60)
    finally:
        for pid in pids:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        process.kill()
        process.communicate()
        shutil.rmtree(temporary, ignore_errors=True)


# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, -1, True, 1.5, "2"])
def test_a_number_that_cannot_be_used(n):
    with pytest.raises(ValueError, match="(?s)launch_function: n = .* cannot be used.*found:.*fix:"):
        weft.launch_function(len, n, "a")
    with pytest.raises(ValueError, match="max_restarts = -1 cannot be used"):
        weft.launch_function(len, 1, "a", max_restarts=-1)


def test_a_rank_may_not_start_ranks(monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(
            weft.errors.ContextError, match=r"(?s)already a rank of a job.*is initialised here.*fix: +ctx.close"
        ):
            weft.launch_function(len, 2, "a")
    finally:
        dist.destroy_process_group()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        weft.errors.ContextError, match=r"(?s)rank 0 of 1, as torchrun has it in the environment.*fix: +call"
    ):
        weft.launch_function(len, 2, "a")


def test_without_cloudpickle_only_functions_of_modules_are_sent(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(
        weft.errors.MissingExtra, match=r"(?s)<lambda> and its arguments.*found: .*pip install 'torchweft\[notebook\]'"
    ):
        weft.launch_function(lambda: 1, 2)
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "of_main", type("of_main", (), {"__module__": "__main__"}), raising=False)
    with pytest.raises(weft.errors.MissingExtra, match="defined in __main__"):
        weft.launch_function(len, 2, main.of_main)


def test_arguments_that_nothing_can_send():
    with pytest.raises(TypeError, match="(?s)print and its arguments cannot be sent.*found:.*lock.*fix:"):
        weft.launch_function(print, 2, threading.Lock())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_the_caller_may_have_used_its_accelerator():
    def on_device():
        with weft.start() as ctx:
            return float(torch.ones(3, device=ctx.device).sum()), ctx.device.type

    kind = torch.accelerator.current_accelerator()
    torch.ones(3, device=kind).sum().item()
    assert weft.launch_function(on_device, 1) == [(3.0, kind.type)]
