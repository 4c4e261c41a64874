"""Each call of a save goes wrong once: of the system, in a directory, and of the store, at a URL.

Whatever goes wrong, the state before the save or the one after it can be restored, what `save` says is true, and it may
be tried again.
"""

import errno
import itertools
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from torch import nn

import weft
from tests.variants import variant_cases, variants


class Box:
    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def build(value):
    model = nn.Linear(3, 3)
    state, ctx = weft.checkpointable({"model": model, "box": Box(0)}, weft.local(), rng=False)
    fill(state, value)
    return state, ctx


def fill(state, value):
    state.objects["box"].value = value
    with torch.no_grad():
        for p in state.objects["model"].parameters():
            p.fill_(value)


def step_in(place):
    """The step that can be restored, of which every number tells."""
    state, ctx = build(-1)
    found = weft.restore(state, place, ctx)
    numbers = {float(x) for p in state.objects["model"].parameters() for x in p.flatten()}
    assert numbers == {float(state.objects["box"].value)} == {float(found.step)}
    return found.step


def trial(place, how, begin, end):
    """Save step 1, then step 2 with something that goes wrong, and look; what is wrong, in words."""
    state, ctx = build(1)
    weft.save(state, place, 1, ctx)
    fill(state, 2)

    def save():
        keep = None if how == "save" else 1
        if how == "save_async":
            return weft.save_async(state, place, 2, ctx, keep=keep).wait()
        return weft.save(state, place, 2, ctx, keep=keep)

    begin()
    try:
        save()
        said = True
    except Exception:  # noqa: BLE001  (also those that a library of a store has of its own)
        said = False
    end()
    found = step_in(place)
    if found not in (1, 2) or (said and found != 2):
        return f"save {'succeeded' if said else 'raised'}, and step {found} was restored"
    save()
    if step_in(place) != 2:
        return "tried again, it was not saved"
    return None


# -- in a directory --------------------------------------------------------------------------------------

CALLS = ("write", "read", "fsync", "rename", "mkdir", "open", "unlink")
SPECIAL = {"write": ("short", "lost", "garbled"), "read": ("nothing",)}
OWN = {"write": errno.ENOSPC, "fsync": errno.ENOSPC, "open": errno.EMFILE, "mkdir": errno.ENOSPC}  # else a stale handle

TRIALS = textwrap.dedent("""
    import os, sys, warnings
    from pathlib import Path
    from tests.checkpoint.test_failing_calls import build, step_in, trial
    import torch, weft

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, how, *cases = sys.argv[1:]
    folder = Path(folder)

    def forked(call, kind, number, always):
        place, flag, log = (folder / f"{call}-{kind}-{number}-{always}-{name}" for name in ("run", "flag", "log"))
        child = os.fork()
        if not child:
            os.environ.update(FAIL_CALL=call, FAIL_HOW=kind, FAIL_NUMBER=str(number), FAIL_PATH=str(place),
                              FAIL_FLAG=str(flag), FAIL_LOG=str(log), **({"FAIL_ALWAYS": "1"} if always else {}))
            try:
                wrong = trial(place, how, flag.touch, flag.unlink)
            except BaseException as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong is not None:
                print(call, kind, number, always, wrong, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        return log.exists()

    build(0)
    state, ctx = build(1)
    weft.save(state, folder / "warm", 1, ctx)
    step_in(folder / "warm")
    for case in cases:
        call, kind = case.split(":")
        for always in (False, True):
            number = 1
            while forked(call, kind, number, always):
                number += 1
            print("trials", call, number - 1, flush=True)
""")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    compiler = shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("no C compiler, or no Linux")
    found = tmp_path_factory.mktemp("library") / "failing_calls.so"
    source = Path(__file__).with_name("failing_calls.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", found, source, "-ldl"], check=True, capture_output=True)
    return found


def _of_one_call(call):
    kinds = [*map(str, (errno.EIO, errno.EACCES, OWN.get(call, errno.ESTALE))), *SPECIAL.get(call, ())]
    return [f"{call}:{kind}" for kind in kinds]


QUICK = [f"{call}:{errno.EIO}" for call in CALLS] + ["write:short", "read:nothing"]
CASES = [pytest.param("keep", QUICK, id="keep")] + [
    pytest.param(how, _of_one_call(call), id=f"{how}-{call}", marks=pytest.mark.slow)
    for how, call in (
        *itertools.product(["keep"], CALLS),
        ("save_async", "rename"),
    )
]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "cases"), CASES)
def test_a_call_of_the_system_that_goes_wrong(tmp_path, library, how, cases):
    root = Path(__file__).parents[2]
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root)])
    done = subprocess.run(
        [sys.executable, "-c", TRIALS, str(tmp_path), how, *cases],
        capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line for line in lines if line[0] != "trials"] == []
    never = {"unlink"} if how == "save" else set()  # nothing is removed
    assert {call for _, call, count in lines if int(count)} | never == {
        case.partition(":")[0] for case in cases
    } | never


# -- at a URL --------------------------------------------------------------------------------------------


class Odd(Exception):
    """Of a library of its own, and no error of the system."""


class Store(MemoryFileSystem):
    """A store of which one request goes wrong."""

    protocol = "failing"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]
    cachable = False
    fault = None  # call, number, error or word, whether it was done, whether all later ones go wrong, too
    count = 0

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).replace("failing://", "memory://"))

    def _goes_wrong(self, call):
        cls = type(self)
        if cls.fault is None or cls.fault[0] != call:
            return None
        cls.count += 1
        _, number, kind, is_done, always = cls.fault
        return (kind, is_done) if cls.count == number or (always and cls.count > number) else None

    def _ask(self, call, work):
        wrong = self._goes_wrong(call)
        if wrong is None:
            return work()
        kind, is_done = wrong
        if isinstance(kind, Exception) and not is_done:
            raise kind
        found = work()
        if isinstance(kind, Exception):
            raise kind
        return found[: len(found) // 2] if kind == "short" else found

    def ls(self, path, detail=True, **kwargs):
        return self._ask("ls", lambda: super(Store, self).ls(path, detail=detail, **kwargs))

    def info(self, path, **kwargs):
        return self._ask("info", lambda: super(Store, self).info(path, **kwargs))

    def cat_file(self, path, start=None, end=None, **kwargs):
        return self._ask("cat_file", lambda: super(Store, self).cat_file(path, start, end, **kwargs))

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        garbled = type(self).fault is not None and type(self).fault[2] == "garbled"
        if garbled and self._goes_wrong("pipe_file"):
            value = value[:-3] + bytes([value[-3] ^ 1]) + value[-2:]
            return super().pipe_file(path, value, mode, **kwargs)
        return self._ask("pipe_file", lambda: super(Store, self).pipe_file(path, value, mode, **kwargs))

    def rm_file(self, path):
        return self._ask("rm_file", lambda: super(Store, self).rm_file(path))

    def open(self, path, mode="rb", **kwargs):
        opened = self._ask(f"open {mode}", lambda: super(Store, self).open(path, mode, **kwargs))
        garbled = type(self).fault is not None and type(self).fault[2] == "garbled"
        if mode == "wb" and garbled and self._goes_wrong("write"):
            write = opened.write
            opened.write = lambda data: write(bytes(data)[:-1] + bytes([bytes(data)[-1] ^ 1]))
        return opened


@pytest.fixture
def store():
    fsspec.register_implementation("failing", Store, clobber=True)
    yield Store
    Store.fault = None
    Store.store.clear()


ERRORS = (OSError(errno.EIO, "Input/output error"), PermissionError(errno.EACCES, "denied"), Odd("503 slow down"))
REQUESTS = ("ls", "info", "cat_file", "pipe_file", "rm_file", "open wb", "open rb", "write")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "call"),
    [
        *(("keep", call) for call in REQUESTS[3:]),
        *variant_cases(
            *(("keep", call) for call in REQUESTS[:3]),
            *((("save", "save_async")[at % 2], call) for at, call in enumerate(REQUESTS)),
        ),
    ],
)
def test_a_request_to_a_store_that_goes_wrong(store, call, how):
    wrong, count, runs = [], 0, itertools.count()
    kinds = [(error, is_done) for error in ERRORS for is_done in (False, True)] + [("garbled", True)]
    kinds += [("short", True)] if call in ("ls", "cat_file") else []
    for (kind, is_done), always in itertools.product(kinds, (False, True)):
        if (kind == "garbled") != (call == "write") and not (kind == "garbled" and call == "pipe_file"):
            continue
        for number in itertools.count(1):
            place = f"failing://bucket{next(runs)}/run"

            def begin(kind=kind, is_done=is_done, number=number, always=always):
                store.count, store.fault = 0, (call, number, kind, is_done, always)

            def end():
                store.fault = None

            with warnings.catch_warnings(action="ignore"):
                found = trial(place, how, begin, end)
            wrong += [(call, kind, is_done, number, always, found)] if found else []
            if store.count < number:
                break
            count += 1
    assert wrong == [] and (count >= 2 or (call == "rm_file" and how == "save"))  # nothing is removed


@pytest.mark.parametrize("call", ["ls", *variants("info", "cat_file", "open rb")])
def test_a_reader_of_a_store_never_takes_an_error_for_damage(store, call):
    state, ctx = build(1)
    for step in (1, 2):
        fill(state, step)
        weft.save(state, "failing://bucket/run", step, ctx)
    reads = {
        "restore": lambda: weft.restore(build(-1)[0], "failing://bucket/run", weft.local()).step,
        "latest": lambda: int(weft.checkpoint.latest("failing://bucket/run").name[5:]),
        "verify": lambda: weft.checkpoint.verify("failing://bucket/run").step,
        "read": lambda: int(weft.weights.read("failing://bucket/run")["bias"][0]),
    }
    kinds = [*ERRORS, *(["short"] if call in ("ls", "cat_file") else [])]
    for (what, read), kind, always in itertools.product(reads.items(), kinds, (False, True)):
        for number in itertools.count(1):
            store.count, store.fault = 0, (call, number, kind, False, always)
            try:
                assert read() == 2, (what, kind, number, always)
            except (OSError, Odd):
                assert isinstance(kind, Exception) or always
            if store.count < number:
                break


# -- what is read ----------------------------------------------------------------------------------------


def test_a_stack_that_is_nearly_full_is_no_damage(tmp_path):
    state, ctx = build(1)
    weft.save(state, tmp_path, 1, ctx)
    value = 2
    for _ in range(190):
        value = {"a": value}
    state.objects["box"].value = value
    weft.save(state, tmp_path, 2, ctx)

    def at(depth, work):
        return work() if depth == 0 else at(depth - 1, work)

    def restore():
        return weft.restore(build(-1)[0], tmp_path, weft.local())

    outcomes = set()
    for depth in range(0, sys.getrecursionlimit(), 60):
        try:
            found = at(depth, restore)
            assert (found.step, found.skipped) == (2, ())
            outcomes.add("restored")
        except RecursionError:
            outcomes.add("raised")
    assert outcomes == {"restored", "raised"}


def test_a_file_that_returns_nothing_is_tried_again_and_then_an_error(tmp_path, monkeypatch):
    state, ctx = build(1)
    weft.save(state, tmp_path, 1, ctx)
    fill(state, 2)
    weft.save(state, tmp_path, 2, ctx)
    real, empty = os.preadv, [0]

    def reads(handle, buffers, at):
        empty[0] -= 1
        return 0 if empty[0] >= 0 else real(handle, buffers, at)

    monkeypatch.setattr(os, "preadv", reads)
    empty[0] = 2
    assert weft.checkpoint.latest(tmp_path).name == "step-00000002"
    empty[0] = 10**9
    for read in (weft.checkpoint.latest, weft.checkpoint.verify, lambda place: weft.restore(state, place, ctx)):
        with pytest.raises(OSError, match="returned nothing, before the end of the file") as caught:
            read(tmp_path)
        assert caught.value.errno == errno.EIO


def test_a_listing_that_shows_nothing_is_not_believed_at_once(tmp_path, monkeypatch):
    state, ctx = build(1)
    weft.save(state, tmp_path, 1, ctx)
    real, empty = Path.iterdir, [0]

    def lists(self):
        empty[0] -= 1
        return iter(()) if self == tmp_path and empty[0] >= 0 else real(self)

    monkeypatch.setattr(Path, "iterdir", lists)
    for read in (weft.checkpoint.latest, lambda place: weft.restore(state, place, ctx)):
        empty[0] = 3
        assert read(tmp_path) is not None


@pytest.mark.slow
def test_what_could_not_be_read_again_is_not_written(tmp_path):
    state, ctx = build(1)
    weft.save(state, tmp_path, 1, ctx, keep=1)
    state.objects["box"].value = {"k" * 200_000 + str(number): torch.ones(1) for number in range(510)}
    for save in (weft.save, lambda *args, **options: weft.save_async(*args, **options).wait()):
        with pytest.raises(
            weft.errors.CheckpointError, match=r"too long for a safetensors file(.|\n)*found: (.|\n)*fix: "
        ):
            save(state, tmp_path, 2, ctx, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".saving", "step-00000001"]
