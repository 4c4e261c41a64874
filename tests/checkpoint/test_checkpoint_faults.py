"""Kills, full disks, damaged and hostile checkpoints: the newest whole one, or an error, and never a half."""

import copy
import errno
import hashlib
import importlib
import io
import itertools
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import weft
from tests.checkpoint.folders import folders
from tests.variants import variants
from weft.checkpoint.format.manifest import check, read_manifest
from weft.errors import CheckpointError, PeerError
from weft.testing import RanksFailed, run_ranks


class Box:
    def __init__(self, value=None, fails=False):
        self.value = value
        self.fails = fails

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]
        if self.fails:
            self.fails = False
            raise RuntimeError("the user's own error")


def _objects(step, fails=False):
    """Objects in which every number tells the step."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(step)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0 + step, momentum=0.9)
    for p in model.parameters():
        optimizer.state[p]["momentum_buffer"] = torch.full_like(p, step)
    return {"model": model, "optimizer": optimizer, "box": Box([step, torch.tensor(step)], fails)}


def _build(ctx, step, **options):
    return weft.checkpointable(_objects(step, **options), ctx)[0]


def _steps_in(state):
    """The steps that the numbers in the objects tell of: one, unless halves were mixed."""
    model, optimizer, box = state.objects.values()
    found = {float(x) for p in model.parameters() for x in p.detach().flatten()}
    found |= {float(x) for e in optimizer.state.values() for x in e["momentum_buffer"].flatten()}
    return found | {optimizer.param_groups[0]["lr"] - 1.0, float(box.value[0]), float(box.value[1])}


def _saved(folder, steps=(1, 2)):
    """Save, as a run that goes on if there is a checkpoint already."""
    ctx = weft.local()
    weft.restore(_build(ctx, -1), folder, ctx)
    for step in steps:
        weft.save(_build(ctx, step), folder, step, ctx)
    return folder / f"step-{steps[-1]:08d}"


def _restored(folder, **options):
    """What a restore of one rank finds; the objects are checked to be all old or all new."""
    ctx = weft.local()
    state = _build(ctx, -1)
    found = weft.restore(state, folder, ctx, **options)
    assert _steps_in(state) == ({found.step} if found else {-1})
    return found


def _refused(folder, match):
    ctx = weft.local()
    state = _build(ctx, -1)
    with pytest.raises(CheckpointError, match=match):
        weft.restore(state, folder, ctx)
    assert _steps_in(state) == {-1}


# -- kills -------------------------------------------------------------------------------------------


def _saves_until_killed(ctx, folder, victims, delay, saves):
    """Save until ranks are killed, some time after the others have made so many saves."""
    state = _build(ctx, 0)
    found = weft.restore(state, folder, ctx)
    step = found.step if found else 0
    if found:
        assert _steps_in(state) == {step}
    weft.barrier(ctx)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process like a kill: nothing can catch it
    for number in itertools.count():
        if number == saves and ctx.rank in victims:
            signal.setitimer(signal.ITIMER_REAL, delay)
        step += 1
        weft.save(_build(ctx, step), folder, step, ctx, keep=3)
        (folder / f"done-{ctx.rank}").write_text(str(step))


@pytest.mark.parametrize("ranks", [1, *variants(2)])
def test_kills_at_random_moments_of_a_save_lose_nothing(tmp_path, ranks):
    chance = random.Random(7)
    for trial in range(8):
        victims = [list(range(ranks)), [0], [ranks - 1]][trial % 3]
        with pytest.raises(RanksFailed) as caught:
            run_ranks(_saves_until_killed, ranks, tmp_path, victims, 0.02 + chance.random() * 0.1, trial % 2)
        survivors = [rank for rank in range(ranks) if rank not in victims]
        assert all(isinstance(caught.value.errors.get(rank), (PeerError, OSError)) for rank in survivors)
        # What was said to be saved is there, and all that can be seen is whole.
        done = max((int(path.read_text() or 0) for path in tmp_path.glob("done-*")), default=0)
        whole = [weft.checkpoint.verify(path).step for path in folders(tmp_path)]
        assert whole == sorted(whole) and (not done or whole[-1] >= done)
        found = _restored(tmp_path)
        assert (found.step if found else 0) == (whole[-1] if whole else 0) and not (found and found.skipped)
    assert whole[-1] >= 4  # however slow the machine


def test_leftovers_are_cleaned_by_the_next_save(tmp_path):
    _saved(tmp_path)
    for name in (".step-00000003.ab.writing", ".step-00000001.cd.removing"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    assert _restored(tmp_path).step == 2
    _saved(tmp_path, [3])
    assert sorted(p.name for p in tmp_path.iterdir()) == [".saving", *(f"step-0000000{n}" for n in (1, 2, 3))]


# -- damage ------------------------------------------------------------------------------------------


def _file(path):
    (found,) = path.glob("*.safetensors")
    return found


def _flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def _swap(path):
    shutil.copy(_file(path.with_name("step-00000001")), _file(path))


def _link(path):
    outside = path.parent.parent / "outside"
    shutil.move(_file(path), outside)
    (path / "rank-00000-of-00001.safetensors").symlink_to(outside)


MANIFEST = "manifest.json"
DAMAGE = {
    "flipped byte": (lambda path: _flip(_file(path), -1), r"XXH3-128 differs(.|\n)*holds .*(model|optimizer|box)/"),
    "flipped header": (lambda path: _flip(_file(path), 20), "XXH3-128 differs"),
    "truncated": (lambda path: os.truncate(_file(path), 100), r"rank-00000\S* is damaged\n  found: +100 bytes; it"),
    "missing": (lambda path: _file(path).unlink(), r"no such file; it holds \S*/"),
    "swapped": (_swap, "XXH3-128 differs"),
    "a link": (_link, "a symbolic link"),
    "a folder": (lambda path: [_file(path).unlink(), (path / "rank-00000-of-00001.safetensors").mkdir()], "no file"),
    "a pipe": (lambda path: [_file(path).unlink(), os.mkfifo(path / "rank-00000-of-00001.safetensors")], "no file"),
    "flipped manifest": (lambda path: _flip(path / MANIFEST, 300), "manifest.json: its SHA-256 differs"),
    "truncated manifest": (lambda path: os.truncate(path / MANIFEST, 300), "its SHA-256 differs"),
    "empty manifest": (lambda path: os.truncate(path / MANIFEST, 0), "its SHA-256 differs"),
    "no manifest": (lambda path: (path / MANIFEST).unlink(), "no plain file manifest.json"),
    "foreign manifest": (lambda path: shutil.copy(path.with_name("step-00000001") / MANIFEST, path), "XXH3-128|bytes"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_the_checkpoint_before_it_restored(tmp_path, kind):
    damage, text = DAMAGE[kind]
    path = _saved(tmp_path / "run")
    damage(path)
    with pytest.raises(CheckpointError, match=text) as caught:
        weft.checkpoint.verify(path)
    assert re.search(r"found: (.|\n)*expected: (.|\n)*fix: ", str(caught.value))
    found = _restored(tmp_path / "run")
    assert found.step == 1
    assert [(skipped, why) for skipped, why in found.skipped] == [(path, str(caught.value))]
    if (path / "manifest.json").exists():
        _refused(path, text)
    _saved(tmp_path / "run", [2])  # the run goes on and comes to that step again
    assert _restored(tmp_path / "run").step == 2 and (tmp_path / "run" / "step-00000002.damaged").is_dir()


def test_latest_looks_at_manifests_and_sizes(tmp_path):
    path = _saved(tmp_path)
    assert weft.checkpoint.latest(tmp_path) == path
    os.truncate(_file(path), 10)
    assert weft.checkpoint.latest(tmp_path).name == "step-00000001"
    (tmp_path / "step-00000001" / "manifest.json").unlink()
    assert weft.checkpoint.latest(str(tmp_path)) is None
    _refused(tmp_path, r"no checkpoint in .* is complete\n  found: .*step-00000002(.|\n)*step-00000001(.|\n)*fix: ")


def test_folders_that_are_links_or_have_other_names_are_no_checkpoints(tmp_path):
    elsewhere = _saved(tmp_path / "elsewhere")
    run = tmp_path / "run"
    _saved(run)
    (run / "step-00000009").symlink_to(elsewhere)
    shutil.copytree(elsewhere, run / "step-9x")
    (run / "step-00000010").write_text("a file")
    assert weft.checkpoint.latest(run).name == "step-00000002" and weft.checkpoint.latest(run / "gone") is None
    ((skipped, why),) = _restored(run).skipped
    assert skipped.name == "step-00000009" and "a symbolic link to" in why
    _refused(run / "step-00000009", r"a symbolic link to (.|\n)*fix: ")


def test_a_checkpoint_without_its_manifest_is_damage_and_no_new_beginning(tmp_path):
    path = _saved(tmp_path)
    (path / "manifest.json").unlink()
    _refused(path, r"step-00000002 has no manifest(.|\n)*fix: ")
    _refused(tmp_path / "step-00000003", r"step-00000003 has no manifest")
    renamed = path.rename(tmp_path / "best")
    _refused(renamed, r"best has no manifest")
    assert _restored(tmp_path).step == 1


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path):
    path = _saved(tmp_path)
    shutil.copytree(path, tmp_path / "step-00000009")
    assert weft.checkpoint.latest(tmp_path) == path and _restored(tmp_path).step == 2
    _refused(tmp_path / "step-00000009", r"the manifest of another checkpoint(.|\n)*manifest.json of step 2")
    assert _restored(path.rename(tmp_path / "best")).step == 2  # a name of the user's own


def test_every_flipped_byte_is_noticed(tmp_path):
    path = _saved(tmp_path, [1])
    chance = random.Random(3)
    for file in (_file(path), path / "manifest.json"):
        data = file.read_bytes()
        places = range(len(data)) if len(data) < 900 else chance.sample(range(len(data)), 300)
        for place in places:
            file.write_bytes(data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :])
            with pytest.raises(CheckpointError):
                weft.checkpoint.verify(path)
        file.write_bytes(data)
    weft.checkpoint.verify(path)


# -- hostile manifests -------------------------------------------------------------------------------


def _seal(text):
    rest = text.removeprefix("{\n") if text.startswith("{\n") else text
    return f'{{"sha256": "{hashlib.sha256(rest.encode()).hexdigest()}",\n{rest}'


def _data(path):
    data = json.loads((path / "manifest.json").read_text())
    del data["sha256"]
    return data


def _plant(path, data):
    (path / "manifest.json").write_text(_seal(json.dumps(data, indent=1)))


def _renamed(data, name):
    old = next(iter(data["files"]))
    data["files"][name] = data["files"].pop(old)
    for entry in data["tensors"].values():
        for piece in entry["pieces"]:
            piece["file"] = name


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "..", "", "a/b.safetensors", "x.pt", "\x00",
                                  "x\n.safetensors", "n" * 300 + ".safetensors", "manifest.json"])  # fmt: skip
def test_paths_stay_inside_of_the_folder(tmp_path, name):
    path = _saved(tmp_path / "run", [1])
    if name.startswith("../"):
        shutil.copy(_file(path), path / name)
    data = _data(path)
    _renamed(data, name)
    _plant(path, data)
    with pytest.raises(CheckpointError, match="contradicts itself"):
        weft.checkpoint.verify(path)
    _refused(path, "contradicts itself")


def test_a_planted_pickle_is_never_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    path = _saved(tmp_path / "run", [1])
    for name in (".metadata", "rank.pt", "data.pkl"):
        (path / name).write_bytes(pickle.dumps(Bomb()))
    assert _restored(tmp_path / "run").step == 1
    data = _data(path)
    bomb = pickle.dumps(Bomb()) + b" " * 4000
    _file(path).write_bytes(bomb)
    data["files"][_file(path).name] = {"bytes": len(bomb), "sha256": hashlib.sha256(bomb).hexdigest()}
    _plant(path, data)
    weft.checkpoint.verify(path)  # its bytes are as the manifest says
    _refused(path, r"(model|optimizer|box)/\S* cannot be read from \S*rank-00000")
    assert not (tmp_path / "exploded").exists()
    source = "\n".join(p.read_text() for p in Path(weft.checkpoint.__file__).parent.rglob("*.py"))
    assert "import pickle" not in source and "torch.load" not in source


def test_without_xxhash_files_are_hashed_by_sha256_and_others_say_what_to_install(tmp_path, monkeypatch):
    fast = _saved(tmp_path / "fast", [1])
    monkeypatch.setitem(sys.modules, "xxhash", None)
    slow = _saved(tmp_path / "slow", [1])
    (entry,) = _data(slow)["files"].values()
    assert entry == {"bytes": entry["bytes"], "sha256": hashlib.sha256(_file(slow).read_bytes()).hexdigest()}
    assert _restored(tmp_path / "slow").step == 1
    with pytest.raises(
        weft.errors.MissingExtra, match=r"xxhash, which is not installed(.|\n)*pip install 'torchweft\[checkpoint\]'"
    ):
        weft.checkpoint.verify(fast)
    state = _build(weft.local(), -1)
    with pytest.raises(weft.errors.MissingExtra, match="xxhash, which is not installed"):
        weft.restore(state, tmp_path / "fast", weft.local())
    assert _steps_in(state) == {-1}
    monkeypatch.undo()
    assert next(iter(_data(fast)["files"].values())).keys() == {"bytes", "xxh3_128"}
    assert _restored(tmp_path / "slow").step == 1
    _flip(_file(slow), -1)
    _refused(tmp_path / "slow", "SHA-256 differs")


def test_a_manifest_that_claims_more_than_its_files_hold_takes_no_memory(tmp_path):
    path = _saved(tmp_path, [1])
    data = _data(path)
    entry = data["tensors"]["model/0.weight"]
    entry["shape"] = entry["pieces"][0]["shape"] = [10**9, 10**6]
    _plant(path, data)
    with pytest.raises(CheckpointError, match=r"contradicts itself(.|\n)*bytes of tensors in"):
        weft.checkpoint.verify(path)
    (path / "manifest.json").write_text(_seal("[" * 200_000))
    with pytest.raises(CheckpointError, match="cannot be read"):
        weft.checkpoint.verify(path)


def test_pieces_that_overlap_or_leave_gaps_are_refused(tmp_path):
    path = _saved(tmp_path, [1])
    data = _data(path)
    entry = data["tensors"]["model/0.weight"]
    file = entry["pieces"][0]["file"]
    assert check(read_manifest(path)) == []
    for pieces in ([([0, 0], [2, 3]), ([1, 0], [2, 3])], [([0, 0], [2, 3])], [([0, 0], [4, 4])], [([0], [12])], []):
        entry["pieces"] = [{"file": file, "offsets": at, "shape": shape} for at, shape in pieces]
        _plant(path, data)
        with pytest.raises(CheckpointError, match=r"contradicts itself(.|\n)*model/0.weight"):
            weft.checkpoint.verify(path)


def _places(value, path=()):
    """Every place in a nested JSON value."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from _places(item, (*path, key))


_WRONG = st.sampled_from([
    None, True, -1, 0, 1, 3, 10**30, 1.5, float("nan"), float("inf"), "", "x", "../../etc/passwd", "load", "int8",
    "model/0.bias", "\ud800", "float64", [], [[]], [1, [2]], {}, {"$": "tensor"}, {"$": "tensor", "name": "no"},
    {"$": "tensor", "name": []}, {"$": "dict", "items": [[[], 1]]}, {"$": "tuple"}, {"$": "dict", "items": 3},
    {"$": []}, {"$": "deque", "items": [-1, []]}, {"$": "deque", "items": [1]}, {"$": "set", "items": [[1]]},
    {"$": "set", "items": 1},
])  # fmt: skip


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    path = _saved(folder / "run", [1])
    return path, _data(path)


@pytest.mark.parametrize(
    ("generator", "place", "value"),
    [
        ("numpy", 0, "PCG64"), ("numpy", 1, ""), ("numpy", 1, "00" * 4), ("numpy", 1, "xyz"), ("numpy", 2, 625),
        ("numpy", 2, -1), ("numpy", 2, True), ("numpy", 3, 2), ("numpy", 4, "x"), ("numpy", None, []), ("python", 0, 1),
        ("python", 1, ""), ("python", 1, "00"), ("python", 2, "x"), ("python", None, {}), ("torch", None, ""),
        ("torch", None, "00"), ("torch", None, 3),
    ],
)  # fmt: skip
def test_a_wrong_random_state_is_refused_and_nothing_is_changed(hostile, generator, place, value):
    path, good = hostile
    mutant = json.loads(json.dumps(good))
    states = mutant["ranks"][0]["rng"]
    if place is None:
        states[generator] = value
    else:
        states[generator][place] = value
    _plant(path, mutant)
    _refused(path, r"random states in the checkpoint cannot be used")


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_mutated_manifests_raise_checkpoint_errors_only(hostile, data):
    path, good = hostile
    mutant = json.loads(json.dumps(good))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.sampled_from([place for place in _places(mutant) if place]))
        target = mutant
        for key in place[:-1]:
            target = target[key]
        if data.draw(st.booleans()):
            target[place[-1]] = copy.deepcopy(data.draw(_WRONG))
        else:
            del target[place[-1]]
    try:
        _plant(path, mutant)
    except UnicodeEncodeError:
        return
    ctx = weft.local()
    state = _build(ctx, -1)
    before = torch.get_rng_state()
    start = time.monotonic()
    try:
        found = weft.restore(state, path, ctx, strict=data.draw(st.booleans()))
    except (CheckpointError, RuntimeError, TypeError, ValueError, KeyError) as error:
        # Values of the right form but the wrong kind are for the objects to refuse; they do, and nothing is changed.
        assert isinstance(error, CheckpointError), error
        assert _steps_in(state) == {-1} and torch.equal(before, torch.get_rng_state())
    else:
        assert found.step >= 0
    assert time.monotonic() - start < 20
    assert sorted(p.name for p in path.parent.iterdir()) == [".saving", "step-00000001"]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_as_a_manifest_raise_checkpoint_errors_only(hostile, text, sealed):
    path, _ = hostile
    if sealed:
        text = b'{"sha256": "' + hashlib.sha256(text).hexdigest().encode() + b'",\n' + text
    (path / "manifest.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"found: (.|\n)*fix: "):
        weft.checkpoint.verify(path)


# -- all or nothing on all ranks ---------------------------------------------------------------------


def test_one_rank_that_cannot_read_keeps_all_as_they_are(tmp_path):
    def restores(ctx, folder):
        from weft.checkpoint.format import safetensors_read

        def broken(path):
            raise OSError(5, "Input/output error")

        texts = []
        for kind in ("file", "object"):
            state = _build(ctx, -1, fails=kind == "object" and ctx.rank == 1)
            opens = safetensors_read.open_tensors
            if kind == "file" and ctx.rank == 1:
                safetensors_read.open_tensors = broken
            before = torch.get_rng_state()
            try:
                with pytest.raises((CheckpointError, PeerError, OSError)) as caught:
                    weft.restore(state, folder, ctx)
            finally:
                safetensors_read.open_tensors = opens
            assert _steps_in(state) == {-1} and torch.equal(before, torch.get_rng_state())
            texts.append(str(caught.value))
        return texts

    _saved(tmp_path)
    for ranks in (2, 4):
        for one, two in run_ranks(restores, ranks, tmp_path):
            assert "Input/output error" in one and "the user's own error" in two


def test_a_failure_of_one_rank_in_save_reaches_all_and_leaves_nothing(tmp_path):
    def saves(ctx, folder):
        state = _build(ctx, 1)
        good = state.objects["box"].value
        state.objects["box"].value = object() if ctx.rank == 1 else good
        with pytest.raises((TypeError, PeerError), match="box/value cannot be saved"):
            weft.save(state, folder, 1, ctx)
        state.objects["box"].value = good
        return weft.save(state, folder, 1, ctx)  # and the same ranks can go on

    assert run_ranks(saves, 2, tmp_path)[1] == tmp_path / "step-00000001"
    assert _restored(tmp_path).step == 1


# -- full disks --------------------------------------------------------------------------------------

_FULL = """
import resource, signal, sys, torch, weft
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
for size, limits in ((100, (0, 1, 1000, 20000, 40000, 40400)), (2, (100, 4096, 20000))):  # in data, in the manifest
    folder = f"{sys.argv[1]}{size}"
    ctx = weft.local()
    state, ctx = weft.checkpointable({"model": torch.nn.Linear(size, size)}, ctx)
    weft.save(state, folder, 1, ctx)
    for limit in limits:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        try:
            weft.save(state, folder, 2, ctx)
        except OSError as error:
            assert "large" in str(error), error
        else:
            raise SystemExit(f"saved within {limit} bytes")
        assert weft.checkpoint.latest(folder).name == "step-00000001"
        assert weft.restore(state, folder, ctx).step == 1
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    weft.save(state, folder, 2, ctx)  # again in the same process
    assert weft.restore(state, folder, ctx).step == 2
print("fine")
"""


@pytest.mark.slow
def test_files_that_cannot_grow_leave_nothing_and_a_retry_works(tmp_path):
    command = [sys.executable, "-c", _FULL, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout == "fine\n", done.stderr
    assert sorted(p.name for p in (tmp_path / "run2").iterdir()) == [".saving", "step-00000001", "step-00000002"]


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_raises_on_all_ranks_and_a_retry_works(small_disk):
    def saves(ctx, folder):
        state, ctx = weft.checkpointable({"model": nn.Linear(50, 50), "box": Box(torch.zeros(60_000))}, ctx)
        weft.save(state, folder, 1, ctx)
        filler = folder.parent / "filler" if folder.name == "run" else folder / "filler"
        for free in (0, 8192, 100_000, 200_000):
            if ctx.is_main:
                left = os.statvfs(folder).f_bavail * 4096
                filler.write_bytes(b"x" * (left - free))
            weft.barrier(ctx)
            with pytest.raises((OSError, PeerError), match="No space left on device: '/"):
                weft.save(state, folder, 2, ctx)
            weft.barrier(ctx)
            assert weft.checkpoint.latest(folder).name == "step-00000001"
            if ctx.is_main:
                filler.unlink()
            weft.barrier(ctx)
        weft.save(state, folder, 2, ctx)
        return sorted(p.name for p in folder.iterdir())

    for ranks in (1, 2):
        folder = small_disk / f"run{ranks}"
        folder.mkdir()
        found = run_ranks(saves, ranks, folder)[0]
        assert found == [".saving", "step-00000001", "step-00000002"]
        shutil.rmtree(folder)


# -- power cuts --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_is_brought_to_the_disk_before_the_rename_and_the_folder_after_it(tmp_path):
    strace = shutil.which("strace")
    if strace is None:
        pytest.skip("strace is not installed")
    code = (
        "import sys, torch, weft\n"
        "state, ctx = weft.checkpointable({'model': torch.nn.Linear(2, 2)}, weft.local())\n"
        "weft.save(state, sys.argv[1], 1, ctx)\n"
    )
    trace = tmp_path / "trace"
    calls = "trace=openat,open,write,fsync,fdatasync,rename,renameat,renameat2,close,mkdir"
    subprocess.run(
        [strace, "-f", "-y", "-e", calls, "-o", trace, sys.executable, "-c", code, tmp_path / "new" / "run"],
        check=True, timeout=300, capture_output=True,
    )  # fmt: skip
    lines = trace.read_text().splitlines()
    place = {}
    for number, line in enumerate(lines):
        if "step-00000001" in line or "/new" in line:
            for name, pattern in {
                "data written": r"write\(\d+<.*\.safetensors>", "data synced": r"fsync\(\d+<.*\.safetensors>",
                "manifest written": r"write\(\d+<.*manifest\.json>", "manifest synced": r"fsync\(\d+<.*manifest\.json>",
                "hidden synced": r"fsync\(\d+<.*\.writing>", "renamed": r"rename\w*\(.*\.writing\".*step-00000001\"",
                "folder synced": r"fsync\(\d+<[^>]*/new/run>", "parent synced": r"fsync\(\d+<[^>]*/new>",
            }.items():  # fmt: skip
                if re.search(pattern, line):
                    place[name] = number
    order = ["parent synced", "data written", "data synced", "manifest written", "manifest synced", "hidden synced",
             "renamed", "folder synced"]  # fmt: skip
    assert sorted(place, key=place.get) == order, place


# -- what cannot be read is not damaged --------------------------------------------------------------


def _cannot_read(monkeypatch, number, of):
    """Make one file of a checkpoint unreadable, as a disk, a limit or a permission would."""
    real = os.open

    def opened(path, flags, *more, **options):
        if of in str(path) and not flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), str(path))
        return real(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", opened)
    real_open = io.open

    def opened_file(path, *more, **options):
        if of in str(path):
            raise OSError(number, os.strerror(number), str(path))
        return real_open(path, *more, **options)

    monkeypatch.setattr(io, "open", opened_file)


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("of", ["step-00000002/manifest.json", "step-00000002/rank-00000"])
def test_what_cannot_be_read_now_is_neither_passed_over_nor_renamed(tmp_path, monkeypatch, number, of):
    path = _saved(tmp_path)
    ctx = weft.local()
    state = _build(ctx, -1)
    weft.restore(state, tmp_path, ctx)
    _cannot_read(monkeypatch, number, of)
    calls = [
        lambda: weft.restore(state, tmp_path, ctx),
        lambda: weft.restore(state, path, ctx),
        lambda: weft.checkpoint.verify(path),
        lambda: weft.save(state, tmp_path, 2, ctx),
    ]
    for call in calls + [lambda: weft.checkpoint.latest(tmp_path)] * ("manifest" in of):
        with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
            call()
        assert caught.value.errno == number
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.glob("step*")) == ["step-00000001", "step-00000002"]
    assert _steps_in(state) == {2} and _restored(tmp_path).step == 2


@pytest.mark.parametrize("header", [True, False])
def test_an_error_while_a_file_is_read_is_no_damage(tmp_path, monkeypatch, header):
    path = _saved(tmp_path)
    state, ctx = _build(weft.local(), -1), weft.local()
    real = os.preadv

    def broken(handle, buffers, at, *more):
        if (at == 8) == header:
            raise OSError(errno.EIO, "Input/output error")
        return real(handle, buffers, at, *more)

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OSError, match="Input/output error"):
        weft.restore(state, tmp_path, ctx)
    monkeypatch.undo()
    assert _steps_in(state) == {-1} and weft.checkpoint.verify(path).step == 2


def test_a_checkpoint_of_a_newer_weft_is_neither_passed_over_nor_renamed(tmp_path):
    path = _saved(tmp_path)
    state, ctx = _build(weft.local(), -1), weft.local()
    data = _data(path)
    data["format"] = "weft checkpoint 3"
    _plant(path, data)
    for call in (
        lambda: weft.restore(state, tmp_path, ctx),
        lambda: weft.checkpoint.latest(tmp_path),
        lambda: weft.checkpoint.verify(path),
    ):
        with pytest.raises(CheckpointError, match=r"another version of weft\n  found: +format 'weft checkpoint 3'"):
            call()
    weft.restore(state, tmp_path / "step-00000001", ctx)
    with pytest.raises(CheckpointError):
        weft.save(state, tmp_path, 2, ctx)
    assert sorted(p.name for p in tmp_path.glob("step*")) == ["step-00000001", "step-00000002"]


def test_one_rank_that_cannot_read_its_manifest_stops_all(tmp_path):
    def restores(ctx, folder):
        restoring = importlib.import_module("weft.checkpoint.restore")

        real = restoring.read_manifest

        def broken(path):
            raise OSError(errno.EIO, "Input/output error", str(path))

        state = _build(ctx, -1)
        restoring.read_manifest = broken if ctx.rank == 1 else real
        try:
            with pytest.raises(OSError if ctx.rank == 1 else PeerError, match="Input/output error"):
                weft.restore(state, folder, ctx)
        finally:
            restoring.read_manifest = real
        return weft.restore(state, folder, ctx).step

    _saved(tmp_path)
    assert run_ranks(restores, 2, tmp_path) == [2, 2]


# -- tensors that change while they are saved --------------------------------------------------------


def test_a_tensor_that_changes_during_a_save_is_in_a_whole_checkpoint(tmp_path):
    buffer, ends = torch.zeros(2**20), threading.Event()

    def acts():
        value = 0.0
        while not ends.is_set():
            buffer.fill_(value)
            value += 1.0

    state, ctx = weft.checkpointable({"box": Box(buffer)}, weft.local())
    actor = threading.Thread(target=acts)
    actor.start()
    try:
        for step in range(6):
            weft.save(state, tmp_path, step, ctx, keep=1)
            weft.checkpoint.verify(tmp_path / f"step-{step:08d}")
        weft.save_async(state, tmp_path, 6, ctx, keep=1).wait()
    finally:
        ends.set()
        actor.join()
    back = weft.checkpointable({"box": Box()}, weft.local())[0]
    found = weft.restore(back, tmp_path, weft.local())
    assert found.step == 6 and not found.skipped and back.objects["box"].value.shape == buffer.shape
