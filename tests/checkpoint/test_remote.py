"""Checkpoints at a URL: a store without rename, whose listing lags behind."""

import io
import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import fsspec
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import nn

import weft
from weft.checkpoint import latest, verify
from weft.checkpoint.storage.bucket import RemotePath
from weft.checkpoint.storage.find import path_or_url
from weft.errors import CheckpointError
from weft.testing import largest_difference, run_ranks


class _Object(io.FileIO):
    """An object that is being sent: it is there once it is closed."""

    def __init__(self, target):
        target.parent.mkdir(parents=True, exist_ok=True)
        self._target, self._part = target, target.with_name(f".{target.name}.{os.getpid()}")
        super().__init__(self._part, "wb")

    def close(self):
        if not self.closed:
            super().close()
            self._part.replace(self._target)


class Bucket(LocalFileSystem):
    """Objects in a folder: each appears as a whole, none is renamed, and a listing does not show the newest folder."""

    protocol = "bucket"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path, **options):
        return super()._strip_protocol(str(path).removeprefix("bucket:/"), **options)

    def mv(self, *args, **kwargs):
        raise NotImplementedError("there is no rename")

    def _open(self, path, mode="rb", **kwargs):
        if mode != "wb":
            return super()._open(path, mode, **kwargs)
        return _Object(Path(self._strip_protocol(path)))

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        del mode, kwargs
        with self._open(path, "wb") as file:
            file.write(value)

    def ls(self, path, detail=False, **kwargs):
        found = [one for one in super().ls(path, detail=True, **kwargs) if "/." not in one["name"]]
        folders = sorted(one["name"] for one in found if one["type"] == "directory")
        found = [one for one in found if one["name"] not in folders[-1:]]
        return found if detail else [one["name"] for one in found]


@pytest.fixture(autouse=True)
def bucket(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "here"))
    (tmp_path / "here").mkdir()
    _register()
    return f"bucket:/{tmp_path}/store/run"


def _register():
    fsspec.register_implementation("bucket", Bucket, clobber=True)


def _state(ctx, value=0.0, size=5):
    model = nn.Linear(size, 3)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, size)).sum().backward()
    optimizer.step()
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    return state, ctx


def test_a_url_is_a_path_that_is_not_on_this_disk():
    path = path_or_url("s3://bucket/run")
    assert isinstance(path, RemotePath)
    assert str(path / "step-00000001") == "s3://bucket/run/step-00000001"
    assert (path / "a").parent == path
    with pytest.raises(TypeError, match="not a local path"):
        path.exists()
    assert path_or_url("file:///tmp/x") == Path("/tmp/x")
    assert path_or_url("runs/one") == Path("runs/one")


def test_saved_found_verified_restored_and_exported(bucket, tmp_path):
    state, ctx = _state(weft.local())
    assert latest(bucket) is None
    assert weft.restore(state, bucket, ctx) is None
    path = weft.save(state, bucket, 3, ctx)
    assert str(path) == f"{bucket}/step-00000003" == str(latest(bucket))
    assert verify(path).step == 3
    other, ctx = _state(weft.local(), value=7.0)
    restored = weft.restore(other, bucket, ctx)
    assert (restored.step, str(restored.path), restored.skipped) == (3, str(path), ())
    assert torch.equal(other.objects["model"].weight, state.objects["model"].weight)
    weft.export(bucket, tmp_path / "weights")
    model = nn.Linear(5, 3)
    weft.load_weights(model, bucket, weft.local())
    assert torch.equal(model.weight, state.objects["model"].weight)
    assert not list((tmp_path / "store").rglob("*.writing"))


def test_keep_removes_the_oldest_and_a_step_is_saved_once(bucket, tmp_path):
    state, ctx = _state(weft.local())
    for step in range(5):
        weft.save(state, bucket, step, ctx, keep=2)
    assert sorted(path.name for path in (tmp_path / "store" / "run").iterdir()) == [
        "newest",
        "step-00000003",
        "step-00000004",
    ]
    assert str(weft.save(state, bucket, 4, ctx)) == f"{bucket}/step-00000004"  # tried again
    with torch.no_grad():
        state.objects["model"].weight.add_(1.0)
    with pytest.raises(CheckpointError, match="step 4 has already been saved"):
        weft.save(state, bucket, 4, ctx)
    assert len(list((tmp_path / "store" / "run" / "step-00000004").iterdir())) == 2
    with pytest.raises(CheckpointError, match="lower than the steps of checkpoints"):
        weft.restore(state, f"{bucket}/step-00000003", ctx)
        weft.save(state, bucket, 2, ctx)
    restored = weft.restore(state, f"{bucket}/step-00000003", ctx, discard_newer=True)
    assert restored.step == 3
    assert str(latest(bucket)).endswith("step-00000003")
    weft.save(state, bucket, 4, ctx)


def test_a_run_of_another_job_is_not_mixed_in(bucket):
    state, ctx = _state(weft.local())
    weft.save(state, bucket, 1, ctx)
    with pytest.raises(CheckpointError, match="holds checkpoints of another run"):
        weft.save(_state(weft.local())[0], bucket, 2, weft.local())


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "no manifest"])
def test_a_damaged_object_is_passed_over(bucket, tmp_path, damage):
    state, ctx = _state(weft.local())
    weft.save(state, bucket, 1, ctx)
    weft.save(state, bucket, 2, ctx)
    folder = tmp_path / "store" / "run" / "step-00000002"
    file = next(folder.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    if damage == "flip":
        data[-3] ^= 1
        file.write_bytes(data)
    elif damage == "truncate":
        file.write_bytes(data[:-5])
    elif damage == "remove":
        file.unlink()
    else:
        (folder / "manifest.json").unlink()
    restored = weft.restore(state, bucket, ctx)
    assert restored.step == 1
    assert len(restored.skipped) == (0 if damage == "no manifest" else 1)
    weft.save(state, bucket, 2, ctx)  # in the place of the damaged one
    assert weft.restore(state, bucket, ctx).step == 2


def _flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def test_a_damaged_manifest_is_passed_over_and_stops_no_save(bucket, tmp_path):
    state, ctx = _state(weft.local())
    for step in (1, 2, 3):
        weft.save(state, bucket, step, ctx)
    _flip(tmp_path / "store" / "run" / "step-00000003" / "manifest.json")
    assert latest(bucket).name == "step-00000002"
    other, its = _state(weft.local())
    restored = weft.restore(other, bucket, its)
    assert restored.step == 2 and [path.name for path, _ in restored.skipped] == ["step-00000003"]
    assert "damaged manifest" in restored.skipped[0][1] and bucket in restored.skipped[0][1]
    weft.save(other, bucket, 3, its)  # the damaged one makes room
    _flip(tmp_path / "store" / "run" / "step-00000001" / "manifest.json")
    weft.save(other, bucket, 4, its, keep=2)
    assert latest(bucket).name == "step-00000004" and verify(f"{bucket}/step-00000003").step == 3


def test_one_checkpoint_may_have_a_name_of_its_own(bucket, tmp_path):
    state, ctx = _state(weft.local())
    weft.save(state, bucket, 3, ctx)
    (tmp_path / "store" / "run" / "step-00000003").rename(tmp_path / "store" / "best")
    other, its = _state(weft.local(), value=7.0)
    assert weft.restore(other, f"{bucket.rpartition('/')[0]}/best", its).step == 3
    assert torch.equal(other.objects["model"].weight, state.objects["model"].weight)


def test_copies_lie_where_only_this_user_sees_them_and_do_not_stay(bucket, tmp_path, monkeypatch):
    state, ctx = _state(weft.local())
    weft.save(state, bucket, 1, ctx)
    here, seen = tmp_path / "here", []
    left = here / f"weft-copy-{os.getuid()}-left"  # of a process that was killed
    (left / "step-00000001").mkdir(parents=True)
    os.utime(left, (0, 0))
    foreign = here / f"weft-copy-{os.getuid()}-link"
    foreign.symlink_to(tmp_path)
    real = Bucket.get_file

    def get_file(self, rpath, lpath, **kwargs):
        seen.append((Path(lpath).parents[1], Path(lpath).parents[1].stat()))
        return real(self, rpath, lpath, **kwargs)

    monkeypatch.setattr(Bucket, "get_file", get_file)
    weft.restore(state, bucket, ctx)
    weft.weights.read(bucket)
    assert len({folder for folder, _ in seen}) == 2  # a name that cannot be guessed
    assert {(stat.S_IMODE(state.st_mode), state.st_uid) for _, state in seen} == {(0o700, os.getuid())}
    assert list(here.iterdir()) == [foreign]


def test_an_error_in_a_copy_names_the_url(bucket, tmp_path):
    state, ctx = _state(weft.local())
    weft.save(state, bucket, 1, ctx)
    other, its = _state(weft.local(), size=4)
    with pytest.raises(CheckpointError, match="does not fit the state") as caught:
        weft.restore(other, bucket, its)
    assert f"{bucket}/step-00000001" in str(caught.value) and "weft-copy" not in str(caught.value)


def test_what_is_no_url_of_fsspec_is_refused(tmp_path):
    state, ctx = _state(weft.local())
    for call in (lambda: weft.save(state, "nowhere://x/run", 1, ctx), lambda: latest("nowhere://x/run")):
        with pytest.raises(ValueError, match=r"nowhere://x/run is not a place of checkpoints(.|\n)*fix: "):
            call()


def _train(ctx, url, steps, strategy):
    _register()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)).double()
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx)
    elif strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    restored = weft.restore(state, url, ctx)
    for step in range(restored.step if restored else 0, steps):
        x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model(x[ctx.rank :: ctx.world_size]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            weft.save(state, url, step + 1, ctx, keep=2)
        else:
            weft.save_async(state, url, step + 1, ctx).wait()
    with weft.full_params(model, ctx):
        return [p.detach().clone() for p in model.parameters()]


def test_saved_by_two_ranks_and_resumed_by_one_and_two(bucket):
    expected = _train(weft.local(), f"{bucket}-plain", 6, "none")
    run_ranks(_train, 2, bucket, 2, "fully_shard")
    _train(weft.local(), bucket, 4, "none")
    for parameters in run_ranks(_train, 2, bucket, 6, "replicate"):
        assert largest_difference(parameters, expected) < 1e-12


_SAVES = textwrap.dedent("""
    import sys
    import weft
    from tests.checkpoint.test_remote import _register, _state

    _register()
    state, ctx = _state(weft.local(), size=20_000)
    restored = weft.restore(state, sys.argv[1], ctx)
    print("begins", flush=True)
    for step in range(restored.step + 1 if restored else 0, 10**6):
        weft.save(state, sys.argv[1], step, ctx, keep=3)
        print(step, flush=True)
""")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_kills_at_random_moments_tear_nothing(bucket, tmp_path):
    script, root = tmp_path / "saves.py", Path(__file__).parents[2]
    script.write_text(_SAVES)
    saved = -1
    for kill in range(4):
        with subprocess.Popen(
            [sys.executable, str(script), bucket],
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])},
        ) as process:
            assert process.stdout.readline() == "begins\n"
            saved = max(saved, int(process.stdout.readline()))
            time.sleep(0.01 * kill)
            process.send_signal(signal.SIGKILL)
            saved = max([saved, *(int(line) for line in process.stdout.read().split("\n")[:-1])])
        newest = latest(bucket)
        assert verify(newest).step >= saved
        state, ctx = _state(weft.local(), size=20_000)
        restored = weft.restore(state, bucket, ctx)
        assert restored.step >= saved
        assert restored.skipped == ()
