"""Which checkpoints of a directory belong to a run: what is saved, kept, passed over, set aside, or refused."""

import dataclasses
import importlib
import itertools
import os
import shutil
import stat
import threading
import time
from unittest import mock

import pytest
import torch
from torch import nn

import weft
from tests.checkpoint.folders import folders
from weft.checkpoint.format.manifest import read_manifest
from weft.checkpoint.storage.directory import Directory
from weft.checkpoint.storage.find import path_or_url as find_place
from weft.checkpoint.storage.find import storage_of
from weft.errors import CheckpointError, ContextError, PeerError
from weft.testing import run_ranks

restoring = importlib.import_module("weft.checkpoint.restore")


class Box:
    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def _job(value=None):
    """A job of its own: what it knows of directories hangs on its context."""
    return weft.checkpointable({"box": Box(value)}, weft.local())


def _names(directory):
    return [path.name for path in folders(directory)]


def _saved(directory, steps, **options):
    state, ctx = _job()
    for step in steps:
        weft.save(state, directory, step, ctx, **options)
    return state, ctx


def _spoil(path):
    (file,) = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


# -- runs --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [weft.save, weft.save_async])
def test_two_runs_do_not_mix_in_one_directory(tmp_path, how):
    state, ctx = _saved(tmp_path, [101, 102, 103])
    other, its = _job()
    for step in (1, 104):
        with pytest.raises(
            CheckpointError, match=r"holds checkpoints of another run\n  found: +step-00000101, .*103\n(.|\n)*restore"
        ):
            how(other, tmp_path, step, its)
    assert _names(tmp_path) == ["step-00000101", "step-00000102", "step-00000103"]
    assert weft.restore(other, tmp_path, its).step == 103  # now it is that run
    weft.save(other, tmp_path, 104, its)
    runs = {read_manifest(path).run for path in folders(tmp_path)}
    assert len(runs) == 1 and None not in runs
    with pytest.raises(
        CheckpointError, match=r"another job of this run saves into .*\n.*: step-00000104\n(.|\n)*fix: "
    ):
        weft.save(state, tmp_path, 50, ctx)


@pytest.mark.parametrize("how", [weft.save, weft.save_async])
@pytest.mark.parametrize("step", [1, 101, 200])
def test_a_fresh_run_renames_checkpoints_of_others_and_nothing_of_its_own(tmp_path, how, step):
    _saved(tmp_path, [101, 102, 103])
    state, ctx = _job()
    for more in range(2):
        saved = how(state, tmp_path, step + more, ctx, fresh=True)
    if how is weft.save_async:
        saved.wait()
    assert _names(tmp_path) == [f"step-{step + more:08}" for more in range(2)]
    assert sorted(path.name for path in tmp_path.glob("*.discarded")) == [
        f"step-0000010{n}.discarded" for n in (1, 2, 3)
    ]
    assert len({read_manifest(path).run for path in folders(tmp_path)}) == 1
    (tmp_path / "step-00000103.discarded").rename(tmp_path / "step-00000103")
    with pytest.raises(CheckpointError, match=r"another run\n  found: +step-00000103\n(.|\n)*end one of the two jobs"):
        weft.save(state, tmp_path, step + 2, ctx, fresh=True)  # not there when this job came


def test_fresh_has_no_effect_after_a_restore_and_in_a_job_started_again(tmp_path):
    _saved(tmp_path, [101, 102])
    state, ctx = _job()
    weft.restore(state, tmp_path, ctx)
    weft.save(state, tmp_path, 103, ctx, fresh=True)
    assert _names(tmp_path) == ["step-00000101", "step-00000102", "step-00000103"]
    state, ctx = _job()
    again = dataclasses.replace(ctx, attempt=1)
    with pytest.raises(CheckpointError, match="another run"):
        weft.save(state, tmp_path, 1, again, fresh=True)


def test_ranks_agree_on_fresh(tmp_path):
    def saves(ctx, folder):
        state = weft.checkpointable({"box": Box()}, ctx)[0]
        with pytest.raises((ContextError, PeerError), match="fresh"):
            weft.save(state, folder, 1, ctx, fresh=ctx.is_main)
        weft.save(state, folder, 1, ctx, fresh=True)

    _saved(tmp_path, [7])
    run_ranks(saves, 2, tmp_path)
    assert _names(tmp_path) == ["step-00000001"]


def test_a_run_saves_into_several_directories_and_goes_on_in_each(tmp_path):
    state, ctx = _saved(tmp_path / "last", [1, 2])
    weft.save(state, tmp_path / "best", 1, ctx)
    other, its = _job()
    weft.restore(other, tmp_path / "last", its)
    weft.save(other, tmp_path / "last", 3, its)
    weft.save(other, tmp_path / "best", 3, its)
    assert _names(tmp_path / "best") == ["step-00000001", "step-00000003"]


def test_a_copy_of_a_checkpoint_begins_where_the_run_goes_on(tmp_path):
    _saved(tmp_path / "run", [1, 2])
    shutil.copytree(tmp_path / "run" / "step-00000002", tmp_path / "copy")
    state, ctx = _job()
    weft.restore(state, tmp_path / "copy", ctx)
    weft.save(state, tmp_path / "run", 3, ctx)
    assert _names(tmp_path / "run")[-1] == "step-00000003"


def test_what_is_imported_from_one_folder_is_one_run(tmp_path, monkeypatch):
    importing = importlib.import_module("weft.interop.deepspeed_checkpoint")
    steps = iter([1, 2, 3])
    monkeypatch.setattr(importing, "guest", lambda name: mock.Mock())
    found = importing.Found(weights={"model": {"w": torch.ones(2)}})
    monkeypatch.setattr(importing, "read_folder", lambda *_, **__: (next(steps), found))
    for source in ("theirs", "others"):
        (tmp_path / source).mkdir()
    importing.import_deepspeed(tmp_path / "theirs", tmp_path / "run")
    importing.import_deepspeed(tmp_path / "theirs", tmp_path / "run")
    assert _names(tmp_path / "run") == ["step-00000001", "step-00000002"]
    with pytest.raises(CheckpointError, match="another run"):
        importing.import_deepspeed(tmp_path / "others", tmp_path / "run")


def test_what_another_job_saves_meanwhile_is_noticed(tmp_path):
    state, ctx = _saved(tmp_path / "a", [1])
    _saved(tmp_path / "b", [2])
    shutil.copytree(tmp_path / "b" / "step-00000002", tmp_path / "a" / "step-00000002")
    with pytest.raises(CheckpointError, match=r"another run\n  found: +step-00000002\n"):
        weft.save(state, tmp_path / "a", 3, ctx)


def test_all_ranks_know_the_run(tmp_path):
    def saves(ctx, folder):
        state = weft.checkpointable({"box": Box()}, ctx)[0]
        weft.save(state, folder / "whole", 1, ctx)
        part = ctx.subset([1])
        if part.here:
            weft.save(state, folder / "part", 1, part)
        weft.barrier(ctx)
        with pytest.raises((CheckpointError, PeerError), match="another run"):
            weft.save(state, folder / "foreign", 9, ctx)

    _saved(tmp_path / "foreign", [1])
    run_ranks(saves, 2, tmp_path)
    assert len({read_manifest(tmp_path / name / "step-00000001").run for name in ("whole", "part")}) == 1


def test_steps_that_would_not_be_found_are_refused(tmp_path):
    state, ctx = _saved(tmp_path, [10**18 - 1])
    assert weft.restore(state, tmp_path, ctx).step == 10**18 - 1
    for step in (10**18, time.time_ns(), 10**30):
        with pytest.raises(ValueError, match=r"step = \d+ cannot be used(.|\n)*0 to 999999999999999999"):
            weft.save(state, tmp_path, step, ctx)


# -- going back --------------------------------------------------------------------------------------


def test_a_save_below_a_branch_that_was_left_is_refused_unless_that_is_discarded(tmp_path):
    state, ctx = _saved(tmp_path, [10, 20, 30])
    for same_job in (True, False):
        state, ctx = (state, ctx) if same_job else _job()
        weft.restore(state, tmp_path / "step-00000010", ctx)
        with pytest.raises(
            CheckpointError,
            match=r"step 15 is lower than (.|\n)*step-00000020, step-00000030\n(.|\n)*discard_newer=True",
        ):
            weft.save(state, tmp_path, 15, ctx, keep=2)
    assert weft.restore(state, tmp_path / "step-00000010", ctx, discard_newer=True).step == 10
    assert _names(tmp_path) == ["step-00000010"] and (tmp_path / "step-00000030.discarded").is_dir()
    for step in (15, 20):
        weft.save(state, tmp_path, step, ctx, keep=2)
    assert weft.restore(*_with_directory(_job(), tmp_path)).step == 20


def _with_directory(job, directory):
    state, ctx = job
    return state, directory, ctx


def test_what_a_run_saves_below_its_own_steps_is_no_branch(tmp_path):
    state, ctx = _saved(tmp_path, [20, 10])
    weft.save(state, tmp_path, 15, ctx)
    assert _names(tmp_path) == ["step-00000010", "step-00000015", "step-00000020"]


def test_discarding_is_agreed_on_and_fails_on_all_ranks(tmp_path):
    def restores(ctx, folder, lacks):
        state = weft.checkpointable({"box": Box()}, ctx)[0]
        real = Directory.set_aside
        Directory.set_aside = _fails if lacks else real
        try:
            with (
                pytest.raises((OSError, PeerError))
                if lacks
                else pytest.raises(weft.errors.ContextError, match="not agree")
            ):
                weft.restore(state, folder / "step-00000001", ctx, discard_newer=lacks or ctx.rank == 0)
        finally:
            Directory.set_aside = real
        weft.restore(state, folder / "step-00000001", ctx, discard_newer=True)

    for lacks in (False, True):
        _saved(tmp_path / str(lacks), [1, 2])
        run_ranks(restores, 2, tmp_path / str(lacks), lacks)
        assert _names(tmp_path / str(lacks)) == ["step-00000001"]


def _fails(*_):
    raise OSError(30, "Read-only file system")


# -- what is kept ------------------------------------------------------------------------------------


def test_checkpoints_that_are_known_to_be_damaged_are_not_counted(tmp_path):
    _saved(tmp_path, [1, 2, 3])
    _spoil(tmp_path / "step-00000003")
    state, ctx = _job()
    assert weft.restore(state, tmp_path, ctx).step == 2
    weft.save(state, tmp_path, 4, ctx, keep=2)
    assert _names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]
    _spoil(tmp_path / "step-00000004")
    assert weft.restore(*_with_directory(_job(), tmp_path)).step == 2


def test_a_damaged_step_that_is_saved_again_counts(tmp_path):
    _saved(tmp_path, [1, 2])
    _spoil(tmp_path / "step-00000002")
    state, ctx = _job()
    assert weft.restore(state, tmp_path, ctx).step == 1
    for step in (2, 3):
        weft.save(state, tmp_path, step, ctx, keep=2)
    assert _names(tmp_path) == ["step-00000002", "step-00000003"]


def test_older_ones_that_cannot_be_removed_are_left_with_a_warning(tmp_path, monkeypatch):
    state, ctx = _saved(tmp_path, [1])
    real = os.rename

    def rename(path, target):
        if str(target).endswith(".removing"):
            raise PermissionError(1, "Operation not permitted", str(path))
        return real(path, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.warns(
        RuntimeWarning, match=r"step-00000002 is saved, but .* failed: .*Operation not permitted.*step-00000001"
    ):
        assert weft.save(state, tmp_path, 2, ctx, keep=1).name == "step-00000002"
    monkeypatch.undo()
    weft.save(state, tmp_path, 3, ctx, keep=1)
    assert _names(tmp_path) == ["step-00000003"]


def test_a_file_that_does_not_come_back_as_it_was_written_removes_nothing(tmp_path, monkeypatch):
    state, ctx = _saved(tmp_path, [1])
    monkeypatch.setattr("weft.checkpoint.storage.directory.digest_of", lambda path, kind: "0")
    with pytest.raises(OSError, match="what is read back differs from what was written; nothing was committed"):
        weft.save(state, tmp_path, 2, ctx, keep=1)
    assert _names(tmp_path) == ["step-00000001"]


def test_every_manifest_is_read_once_however_many_are_kept(tmp_path, monkeypatch):
    _saved(tmp_path, range(70))
    state, ctx = _job()
    weft.restore(state, tmp_path, ctx)
    read = []
    real = Directory.manifest
    monkeypatch.setattr(Directory, "manifest", lambda self, name: read.append(name) or real(self, name))
    for step in range(70, 75):
        weft.save(state, tmp_path, step, ctx, keep=70)
    assert len(_names(tmp_path)) == 70 and len(read) == len(set(read)) <= 75


# -- the best ----------------------------------------------------------------------------------------


SCORES = {10: 0.9, 20: 0.4, 30: 0.6, 40: None, 50: float("nan"), 60: 0.4, 70: 0.8}


@pytest.mark.parametrize("how", ["directory", "url"])
@pytest.mark.parametrize("save", [weft.save, weft.save_async])
def test_the_best_are_kept_beside_the_newest(tmp_path, how, save):
    place = tmp_path if how == "directory" else f"memory://{tmp_path.name}-{save.__name__}/run"
    state, ctx = _job()
    assert weft.checkpoint.best(place) is None
    for step, score in SCORES.items():
        running = save(state, place, step, ctx, keep=1, keep_best=2, score=score)
        if save is weft.save_async:
            running.wait()
    names = storage_of(find_place(place)).names()
    assert names == ["step-00000020", "step-00000060", "step-00000070"]  # of equal ones, those that came first
    assert weft.checkpoint.best(place).name == "step-00000020"
    assert weft.checkpoint.latest(place).name == "step-00000070"
    assert weft.restore(*_with_directory(_job(), weft.checkpoint.best(place))).step == 20
    other, its = _job()
    weft.restore(other, place, its)
    weft.save(other, place, 80, its, keep=1, keep_best=1, score=-1)
    assert storage_of(find_place(place)).names() == ["step-00000080"]


@pytest.mark.parametrize("save", [weft.save, weft.save_async])
def test_saves_without_a_score_leave_those_with_one(tmp_path, save):
    state, ctx = _job()

    def there(step, **options):
        running = save(state, tmp_path, step, ctx, **options)
        if save is weft.save_async:
            running.wait()
        return [int(name[5:]) for name in storage_of(tmp_path).names()]

    for step, score in ((10, 0.9), (20, 0.4), (30, 0.6)):
        there(step - 2, keep=1)
        there(step - 1, keep=1)
        there(step, keep=1, keep_best=2, score=score)
    assert there(31, keep=2) == [20, 30, 31]
    assert there(32, keep=2) == [20, 30, 31, 32]
    assert there(33, keep=1) == [20, 30, 33]
    assert there(40, keep=1, score=0.7) == [40]
    assert there(50, keep=1, keep_best=0) == [50]


def test_a_score_is_a_number_that_is_the_same_on_all_ranks(tmp_path):
    state, ctx = _job()
    for save in (weft.save, weft.save_async):
        with pytest.raises(ValueError, match=r"keep_best = 2 has no effect without keep(.|\n)*fix: "):
            save(state, tmp_path, 1, ctx, keep_best=2)
        with pytest.raises(ValueError, match=r"keep_best = -1 cannot be used(.|\n)*fix: "):
            save(state, tmp_path, 1, ctx, keep=1, keep_best=-1)
        for wrong in ("low", True, torch.ones(2)):
            with pytest.raises(TypeError, match=r"score = .* is not a number(.|\n)*fix: .*score=float\(loss\)"):
                save(state, tmp_path, 1, ctx, score=wrong)

    def saves(ctx, folder):
        state = weft.checkpointable({"box": Box()}, ctx)[0]
        with pytest.raises(weft.errors.ContextError, match="score"):
            weft.save(state, folder, 1, ctx, score=0.5 + ctx.rank)
        return weft.save(state, folder, 1, ctx, score=0.5).name

    assert run_ranks(saves, 2, tmp_path) == ["step-00000001"] * 2


def _branch(place, state, ctx, steps, value):
    for step in steps:
        state.objects["box"].value = value
        weft.save(state, place, step, ctx, keep=1)


@pytest.mark.parametrize("how", ["directory", "url"])
def test_the_best_of_a_branch_that_was_abandoned_make_room(tmp_path, how):
    """The newest and the best in two directories; the run is killed, and reaches the same steps again."""
    last, best = tmp_path / "last", tmp_path / "best"
    if how == "url":
        last, best = (f"memory://{tmp_path.name}/{name}" for name in ("last", "best"))
    state, ctx = _job()
    for place, steps in ((best, [3, 6]), (last, [8]), (best, [9, 12, 15])):
        _branch(place, state, ctx, steps, "one")
    # Killed at 15; the next job resumes from 8, and what was the best at 9 is so again.
    state, ctx = _job()
    assert weft.restore(state, last, ctx).step == 8
    names = storage_of(find_place(best)).names
    assert names() == ["step-00000015"]
    _branch(best, state, ctx, [9], "one")
    assert names() == ["step-00000009"]
    weft.save(state, best, 9, ctx, keep=1)
    # Killed again; with other values this time.
    state, ctx = _job()
    assert weft.restore(state, last, ctx).step == 8
    _branch(best, state, ctx, [9], "another")
    assert names() == ["step-00000009"]
    _branch(best, state, ctx, [12], "another")
    assert names() == ["step-00000012"]
    other = _job()
    assert weft.restore(*_with_directory(other, best)).step == 12 and other[0].objects["box"].value == "another"
    if how == "directory":
        aside = sorted(path.name for path in best.iterdir() if path.name.endswith(".discarded"))
        assert aside == ["step-00000009.discarded", "step-00000015.discarded"]


def test_two_jobs_that_resume_one_run_do_not_take_turns(tmp_path):
    _saved(tmp_path, [1])
    jobs = [_job(), _job()]
    for state, ctx in jobs:
        assert weft.restore(state, tmp_path, ctx).step == 1
    (one, its), (two, theirs) = jobs
    weft.save(one, tmp_path, 2, its)
    two.objects["box"].value = 2
    for step in (2, 3):
        with pytest.raises(
            CheckpointError, match=r"another job of this run saves into .*\n.*step-00000002\n(.|\n)*fix: "
        ):
            weft.save(two, tmp_path, step, theirs)
    weft.save(one, tmp_path, 3, its)
    assert weft.restore(two, tmp_path, theirs).step == 3
    weft.save(two, tmp_path, 4, theirs)


# -- other readers and writers -----------------------------------------------------------------------


@pytest.mark.parametrize("how", ["restore", "latest"])
def test_a_reader_beside_a_run_that_removes_what_it_was_told_of_looks_again(tmp_path, monkeypatch, how):
    state, ctx = _saved(tmp_path, [1])
    module = restoring if how == "restore" else importlib.import_module("weft.checkpoint.storage.directory")
    real, moves = module.read_manifest, 3

    def read(folder):
        nonlocal moves
        if moves and not threading.current_thread().name.startswith("saves"):
            moves -= 1
            step = int(folder.name.removeprefix("step-"))
            saving = threading.Thread(
                target=weft.save, args=(state, tmp_path, step + 1, ctx), kwargs={"keep": 1}, name="saves"
            )
            saving.start()
            saving.join()
        return real(folder)

    monkeypatch.setattr(module, "read_manifest", read)
    if how == "restore":
        found = weft.restore(*_with_directory(_job(), tmp_path))
        assert found.step == 4 and not found.skipped
    else:
        assert weft.checkpoint.latest(tmp_path).name == "step-00000004"


@pytest.mark.parametrize("reads", [60, pytest.param(2000, marks=[pytest.mark.variant, pytest.mark.timeout(600)])])
def test_readers_beside_a_run_that_keeps_one_always_find_one(tmp_path, reads):
    state, ctx = _saved(tmp_path, [0])
    ends, failed = threading.Event(), []

    def trains():
        try:
            for step in itertools.count(1):
                weft.save(state, tmp_path, step, ctx, keep=1)
                if ends.is_set():
                    break
        except Exception as error:  # noqa: BLE001
            failed.append(error)

    training = threading.Thread(target=trains)
    training.start()
    try:
        step = 0
        for _ in range(reads):
            found = weft.restore(*_with_directory(_job(), tmp_path))
            assert found is not None and found.step >= step and not found.skipped
            newest = weft.checkpoint.latest(tmp_path)
            assert newest is not None and int(newest.name[5:]) >= found.step
            step = weft.checkpoint.verify(tmp_path).step
    finally:
        ends.set()
        training.join()
    assert not failed


def test_what_is_no_directory_is_no_new_beginning(tmp_path):
    state, ctx = _job()
    (tmp_path / "file").write_text("text")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for place, found in (("file", "a file"), ("link", "a symbolic link to nothing"), ("link/run", "to nothing"),
                         ("file/run", "a file")):  # fmt: skip
        for call in (
            lambda place=place: weft.restore(state, tmp_path / place, ctx),
            lambda place=place: weft.checkpoint.latest(tmp_path / place),
        ):
            with pytest.raises(
                CheckpointError, match=rf"is not a directory of checkpoints\n  found: .* {found}\n(.|\n)*fix: "
            ):
                call()
    (tmp_path / "real").mkdir()
    (tmp_path / "good").symlink_to(tmp_path / "real")
    assert (
        weft.restore(state, tmp_path / "good", ctx) is None
        and weft.restore(state, tmp_path / "new" / "run", ctx) is None
    )


def test_only_its_user_can_hold_the_lock(tmp_path):
    (tmp_path / ".saving").touch(mode=0o644)
    for folder in (tmp_path, tmp_path / "new"):
        _saved(folder, [1])
        assert stat.S_IMODE((folder / ".saving").stat().st_mode) == 0o600


def test_restoring_in_inference_mode_gives_tensors_to_train_with(tmp_path):
    def build():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        return (
            model,
            optimizer,
            *weft.checkpointable({"model": model, "optimizer": optimizer, "box": Box()}, weft.local()),
        )

    model, optimizer, state, ctx = build()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state.objects["box"].value = torch.ones(2)
    weft.save(state, tmp_path, 1, ctx)
    model, optimizer, state, ctx = build()
    with torch.inference_mode():
        weft.restore(state, tmp_path, ctx)
    assert not state.objects["box"].value.is_inference()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
