"""Checkpoints: what cannot be saved, what does not fit, what is damaged, and directories of other runs."""

import contextlib
import hashlib
import json
import shutil
import sys
import time

import fsspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

import weft
from tests.fix_lines.told import told
from weft.checkpoint import staging
from weft.checkpoint.format import manifest as manifests
from weft.checkpoint.format import safetensors_write
from weft.checkpoint.storage.directory import Directory
from weft.testing import run_ranks


class Box:
    """An object of the user's own."""

    def __init__(self, value=None):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


def _state(ctx=None, **objects):
    return weft.checkpointable(objects or {"box": Box()}, ctx or weft.local())


def _with(name, value):
    model = nn.Module()
    model.register_buffer(name, value)
    return model


def _saved(folder, *steps, **objects):
    state, ctx = _state(**objects)
    for step in steps:
        weft.save(state, folder, step, ctx)
    return state, ctx


def _weights(folder, *, dtype=None, **objects):
    _saved(folder / "run", 1, **objects)
    return weft.export(folder / "run", folder / "weights", dtype=dtype)[0]


# -- what is saved -------------------------------------------------------------------------------------


def test_objects(tmp_path):
    ctx, model = weft.local(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for objects in ({}, {"a/b": model}):
        with told("checkpoint/state/collect.py", "names cannot be used") as it:
            weft.checkpointable(objects, ctx)
        it.run(model=model, optimizer=optimizer, ctx=ctx)
    with told("checkpoint/state/collect.py", "objects without state_dict") as it:
        weft.checkpointable({"model": model, "meter": object(), "best": 0.0}, ctx)
    assert it.fix.startswith(
        'put numbers into a dict, {"best": 0.0}, which restore fills; or give the class state_dict()'
    )
    state, ctx = _state(model=model, meter=Box(), progress={"best": 0.0})
    weft.save(state, tmp_path, 3, ctx)
    with told("checkpoint/state/collect.py", "cannot be called") as it:
        weft.checkpointable({"model": model}, ctx, before="eval")
    state, _ = eval(it.fix, {"weft": weft, "objects": {"model": model}, "ctx": ctx})
    weft.save(state, tmp_path / "before", 1, ctx)
    with told("checkpoint/state/collect.py", "belong to no module") as it:
        weft.checkpointable({"optimizer": optimizer}, ctx)
    it.run(model=model, optimizer=optimizer, ctx=ctx)
    with told("checkpoint/state/collect.py", "this is not a state") as it:
        weft.save(model, tmp_path / "module", 1, ctx)
    found = it.run(model=model, ctx=ctx)
    weft.save(found["state"], tmp_path / "module", 1, found["ctx"])


class Extra(nn.Linear):
    """What the line about what is no parameter or buffer says to write."""

    def get_extra_state(self):
        """Kept."""
        return {"made_up": torch.ones(1)}

    def set_extra_state(self, state):
        """Restored."""


def test_tensors_and_values(tmp_path):
    def save(**objects):
        state, ctx = _state(**objects)
        weft.save(state, tmp_path / str(time.monotonic_ns()), 1, ctx)

    model = nn.Linear(1, 1)
    model.register_state_dict_post_hook(lambda module, out, prefix, local: out.update(made_up=torch.ones(1)))
    with told("checkpoint/state/collect.py", "no parameter or buffer of the module") as it:
        save(model=model)
    assert it.fix == "return it from get_extra_state() and take it in set_extra_state(state)"
    save(model=Extra(1, 1))
    with told("checkpoint/state/collect.py", "no parameter or buffer of the module") as it:
        save(model=_with("#name", torch.ones(1)))
    assert it.fix == "give it another name"
    save(model=_with("name", torch.ones(1)))
    with told("checkpoint/format/tensor_blocks.py", "elements that share memory") as it:
        save(model=(model := _with("name", (value := torch.ones(1)).expand(3))))
    exec(it.fix, {"self": model, "value": value, "shape": 3})
    save(model=model)

    net = nn.Linear(2, 2)
    optimizers = {"first": torch.optim.SGD(net.parameters())}
    with told("checkpoint/state/json_values.py", "found=found") as it:
        weft.checkpointable({"net": net, "optimizers": optimizers}, weft.local())
    assert it.fix == 'weft.checkpointable({..., "optimizers_first": it}, ctx)  # a name of its own'
    weft.checkpointable({"net": net, "optimizers_first": optimizers["first"]}, weft.local())
    with told("checkpoint/state/json_values.py", "found=found") as it:
        weft.checkpointable({"rows": [array := np.array(["a", "b"])]}, weft.local())
    weft.checkpointable({"rows": [eval(it.fix, {"array": array})]}, weft.local())
    with told("checkpoint/state/json_values.py", "found=found") as it:
        save(box=Box(b"bytes"))
    save(box=Box(None)), save(box=Box([*b"bytes"]))
    with told("checkpoint/format/tensor_blocks.py", "a parameter without a shape") as it:
        save(model=(model := nn.LazyLinear(1)))
    it.run(model=model, example_batch=torch.ones(1, 2))
    save(model=model)
    with told("checkpoint/format/tensor_blocks.py", "a parameter without a shape") as it:
        save(box=Box(value := torch.eye(2).to_sparse()))
    assert it.fix == "leave it out of state_dict(), or convert it there"
    save(box=Box()), save(box=Box(value.to_dense()))
    path = _weights(tmp_path / "weights", model=nn.Linear(2, 2))
    with told("checkpoint/state/collect.py", "load_weights(model") as it:
        save(model=(model := nn.Linear(2, 2, device="meta")))
    it.run(model=model, path=path, ctx=weft.local())
    save(model=model)

    with pytest.MonkeyPatch.context() as patch, told("checkpoint/format/safetensors_write.py", "too long") as it:
        patch.setattr(safetensors_write, "MAX_HEADER_BYTES", 2000)
        save(box=Box({"k" * 900 + str(number): torch.ones(1) for number in range(3)}))
    assert it.fix == "shorter keys in state_dict(), or fewer tensors: torch.cat(tensors)"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_write, "MAX_HEADER_BYTES", 2000)
        save(box=Box({str(number): torch.ones(1) for number in range(3)}))
        save(box=Box({"k" * 900: torch.cat([torch.ones(1)] * 3)}))

    with told("checkpoint/format/transfer.py", "does not fit into") as it:
        _weights(tmp_path / "large", dtype=torch.float16, model=_with("weight", torch.tensor([1e5])))
    dtype = it.run(torch=torch)["dtype"]
    _weights(tmp_path / "small", dtype=dtype, model=_with("weight", torch.tensor([1e5])))


def test_optimizers_of_torchao(tmp_path):
    kind = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": "torchao.optim.adam"})
    model = nn.Linear(2, 2)
    with told("checkpoint/state/collect.py", "of torchao, whose state") as it:
        _state(model=model, optimizer=kind(model.parameters()))
    assert it.fix.endswith("or leave it out of the state")
    state, ctx = _state(model=model)
    weft.save(state, tmp_path, 1, ctx)


# -- arguments and moments -----------------------------------------------------------------------------


def test_arguments(tmp_path):
    state, ctx = _state()
    names = {"state": state, "ctx": ctx, "loss": torch.tensor(0.5)}
    for save in (weft.save, weft.save_async):
        names["directory"] = tmp_path / save.__name__
        with told("checkpoint/save.py", "'step', step") as it:
            save(state, names["directory"], -1, ctx)
        it.run(**names)
        with told("checkpoint/save.py", "'keep', keep") as it:
            save(state, names["directory"], 1, ctx, keep=0)
        it.run(**names, step=1)
        with told("checkpoint/save.py", "'keep_best', keep_best") as it:
            save(state, names["directory"], 2, ctx, keep=1, keep_best=-1)
        it.run(**names, step=2)
        with told("checkpoint/save.py", "has no effect without keep") as it:
            save(state, names["directory"], 3, ctx, keep_best=1)
        it.run(**names, step=3)
        with told("checkpoint/save.py", "is not a number") as it:
            save(state, names["directory"], 4, ctx, score="0.5")
        it.run(**names, step=4)


def test_no_checkpoint(tmp_path):
    model = nn.Linear(2, 2)
    state, ctx = _state(model=model)
    weft.save(state, tmp_path, 1, ctx)
    for read in (lambda path: weft.restore(state, path, ctx), lambda path: weft.load_weights(model, path, ctx)):
        with told("checkpoint/storage/find.py", "or no directory: it is None") as it:
            read(weft.checkpoint.best(tmp_path))
        read(it.run(weft=weft, directory=tmp_path)["path"])


@contextlib.contextmanager
def _slow_disk(seconds):
    real = staging.file_parts

    def parts(*args):
        time.sleep(seconds)
        yield from real(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "file_parts", parts)
        yield


def test_a_program_that_ends_before_its_save(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["weft.checkpoint.save_async"], "_STOP_S", 0.05)
    with _slow_disk(0.4), told("checkpoint/save_async.py", "was not complete when") as it:
        with weft.start(device="cpu", timeout_s=0.05) as ctx:
            weft.save_async(_state()[0], tmp_path / "late", 1, ctx)
    with _slow_disk(0.1):
        with weft.start(device="cpu", timeout_s=0.05) as ctx:
            it.run(running=weft.save_async(_state()[0], tmp_path / "waits", 1, ctx))
        with weft.start(device="cpu", timeout_s=5) as ctx:
            weft.save_async(_state()[0], tmp_path / "longer", 1, ctx)
    assert weft.checkpoint.latest(tmp_path / "longer")


# -- directories ---------------------------------------------------------------------------------------


def test_directories_of_other_runs(tmp_path):
    saved, its = _saved(tmp_path / "a", 10)
    names = {"directory": tmp_path / "a"}
    state, ctx = _state()
    with told("checkpoint/history.py", "checkpoints of another run") as it:
        weft.save(state, tmp_path / "a", 11, ctx)
    weft.save(state, tmp_path / "b", 11, ctx)
    state, ctx = _state()
    assert it.fix.endswith("weft.save(..., fresh=True)")
    anew = shutil.copytree(tmp_path / "a", tmp_path / "anew")
    weft.save(state, anew, 11, ctx, fresh=True)
    state, ctx = _state()
    it.run(**names, state=state, ctx=ctx)
    weft.save(state, tmp_path / "a", 11, ctx)
    shutil.copytree(tmp_path / "b" / "step-00000011", tmp_path / "a" / "step-00000013")
    with told("checkpoint/history.py", "checkpoints of another run") as it:
        weft.save(state, tmp_path / "a", 12, ctx)
    assert it.fix == "end one of the two jobs; or save into another directory"
    shutil.rmtree(tmp_path / "a" / "step-00000013")
    with told("checkpoint/history.py", "another job of this run") as it:
        weft.save(saved, tmp_path / "a", 12, its)
    assert it.fix == "end one of the two jobs; or save into another directory"
    weft.save(saved, tmp_path / "c", 12, its)

    state, ctx = _saved(tmp_path / "d", 10, 20, 30)
    weft.restore(state, tmp_path / "d" / "step-00000010", ctx)
    with told("checkpoint/history.py", "is lower than the steps") as it:
        weft.save(state, tmp_path / "d", 15, ctx)
    it.run(state=state, ctx=ctx)
    weft.save(state, tmp_path / "d", 15, ctx)
    state, ctx = _state()
    weft.restore(state, tmp_path / "d", ctx)
    with told("checkpoint/history.py", "is lower than the steps") as it:
        weft.save(state, tmp_path / "d", 5, ctx)
    assert it.fix == "save into another directory"
    weft.save(state, tmp_path / "e", 5, ctx)

    state, ctx = _saved(tmp_path / "f", 1)
    state.objects["box"].value = 2
    with told("checkpoint/draft.py", "has already been saved") as it:
        weft.save(state, tmp_path / "f", 1, ctx)
    it.run(state=state, ctx=ctx)
    weft.save(state, tmp_path / "f", 2, ctx)

    with told("checkpoint/storage/directory.py", "another process is saving"), Directory(tmp_path / "f").lock():
        weft.save(state, tmp_path / "f", 3, ctx)
    with Directory(tmp_path / "f").lock():
        weft.save(state, tmp_path / "g", 3, ctx)

    (tmp_path / "mount").symlink_to(tmp_path / "gone")
    with told("checkpoint/storage/directory.py", "is not a directory of checkpoints") as it:
        weft.save(state, tmp_path / "mount", 3, ctx)
    (tmp_path / "gone").mkdir()
    weft.save(state, tmp_path / "mount", 3, ctx)
    (tmp_path / "file").touch()
    with told("checkpoint/storage/directory.py", "is not a directory of checkpoints") as it:
        weft.save(state, tmp_path / "file", 4, ctx)
    weft.save(state, tmp_path / "another", 4, ctx)


def test_urls(tmp_path, monkeypatch):
    state, ctx = _state()
    with told("checkpoint/storage/bucket.py", "is not a place of checkpoints") as it:
        weft.save(state, "nowhere://bucket/run", 1, ctx)
    *_, url, rest = it.fix.split('"')[:7]
    assert url == "memory://run" and rest == ", or a path without "
    weft.save(state, tmp_path / "run", 1, ctx)
    path = weft.save(state, url, 1, ctx)
    with told("checkpoint/storage/bucket.py", "is not a local path") as it:
        (path / "manifest.json").read_text()
    with eval(it.fix, {"fsspec": fsspec}) as file:
        assert file.readline().startswith(b'{"sha256"')
    fsspec.filesystem("memory").rm("/run/step-00000001/manifest.json")
    with told("checkpoint/storage/bucket.py", "has no manifest") as it:
        weft.restore(state, path, ctx)
    weft.save(state, url, 2, ctx)
    it.run(state=state, url=url, ctx=ctx)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with told("checkpoint/storage/bucket.py", "need a package") as it:
        weft.save(state, "gs://bucket/run", 1, ctx)
    assert it.fix == "pip install 'torchweft[remote]' gcsfs"


# -- what does not fit ---------------------------------------------------------------------------------


class Picky(Box):
    """Takes no state of another length."""

    def load_state_dict(self, state):
        if len(state["value"]) != len(self.value):
            raise ValueError("another length")
        self.value = state["value"]


def _restore_left_out(folder, **objects):
    state, ctx = _state(**objects)
    return weft.restore(state, folder, ctx, strict=False)


def test_states_that_do_not_fit(tmp_path):
    model = nn.Linear(2, 2)
    objects = {"model": model, "box": Box(1), "picky": Picky([1]), "optimizer": torch.optim.SGD(model.parameters())}
    names = dict(zip(("state", "ctx"), _saved(tmp_path, 1, **objects), strict=True)) | {"directory": tmp_path}

    def restore(folder=tmp_path, **others):
        names["state"], names["ctx"] = _state(**objects | others)
        return weft.restore(names["state"], folder, names["ctx"])

    with told("checkpoint/state/apply.py", "the objects, names and shapes") as it:
        restore(model=nn.Linear(3, 2), optimizer=Box())
    assert it.fix == "build the model as it was saved, or restore from another directory"
    restore(model=model)
    _saved(tmp_path / "other", 1, model=nn.Linear(3, 2))
    weft.restore(*_in(tmp_path / "other", _state(model=nn.Linear(3, 2))))
    with told("checkpoint/state/apply.py", "the objects, names and shapes") as it:
        restore(new=Box())
    it.run(**names)

    tied = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    _saved(tmp_path / "tied", 1, model=tied)
    again = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with told("checkpoint/state/apply.py", "tied weights with one value") as it:
        again[0].weight = again[1].weight
        weft.restore(*_in(tmp_path / "tied", _state(model=again)))
    assert it.fix == "build the module as it was: the same weights tied, and the same dtypes"
    again[0].weight = nn.Parameter(torch.ones(2, 2))
    weft.restore(*_in(tmp_path / "tied", _state(model=again)))

    without = {key: value for key, value in objects.items() if key not in ("picky", "optimizer")}
    with told("checkpoint/state/apply.py", "could not load its state") as it:
        restore(picky=Picky([1, 2]))
    assert it.fix == "build the object as it was, or leave it out of the state and restore with strict=False"
    restore(picky=Picky([3]))
    _restore_left_out(tmp_path, **without)
    with told("checkpoint/state/apply.py", "different parameters or groups") as it:
        restore(optimizer=torch.optim.SGD([{"params": [model.bias]}, {"params": [model.weight]}]))
    assert it.fix == "build the optimizer as it was, or leave it out of the state and restore with strict=False"
    restore(optimizer=torch.optim.SGD(model.parameters()))
    _restore_left_out(tmp_path, **without)


def _in(folder, state_and_ctx):
    state, ctx = state_and_ctx
    return state, folder, ctx


# -- what is damaged -----------------------------------------------------------------------------------


def _changed(path, change):
    """Change what a manifest says, as a program would that writes them."""
    data = json.loads((path / "manifest.json").read_text())
    del data["sha256"]
    change(data)
    rest = json.dumps(data)[1:]
    (path / "manifest.json").write_text(f'{{"sha256": "{hashlib.sha256(rest.encode()).hexdigest()}",\n{rest}')


def _flip(path):
    (file,) = path.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_damage(tmp_path, monkeypatch):
    state, ctx = _saved(tmp_path, 1, 2, box=Box(torch.ones(4)), rows=Box(torch.zeros(2)))
    older, newest = (tmp_path / f"step-{step:08d}" for step in (1, 2))
    names = {"state": state, "directory": tmp_path, "ctx": ctx}
    kept = tmp_path.with_name("kept")
    shutil.copytree(tmp_path, kept)

    def again():
        shutil.rmtree(newest), shutil.copytree(kept / newest.name, newest)

    (newest / "manifest.json").write_text("{}")
    with told("checkpoint/format/manifest.py", "has {problem}") as it:
        weft.restore(state, newest, ctx)
    it.run(**names)
    again()
    _flip(newest)
    with told("checkpoint/storage/find.py", "is damaged") as it:
        weft.restore(state, newest, ctx)
    it.run(**names)
    again()

    _changed(newest, lambda data: data.update(format="weft checkpoint 3"))
    with told("checkpoint/format/manifest.py", "another version of weft") as it:
        weft.restore(state, tmp_path, ctx)
    assert it.fix.startswith("install the version of weft that wrote it")
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "_READABLE", (*manifests._READABLE, "weft checkpoint 3"))  # that version
        assert weft.restore(state, tmp_path, ctx).step == 2
    again()

    def swap(data):  # a writer that mixed up two tensors
        data["tensors"]["box/value"], data["tensors"]["rows/value"] = (
            data["tensors"]["rows/value"], data["tensors"]["box/value"],
        )  # fmt: skip

    _changed(newest, swap)
    with told("checkpoint/format/safetensors_read.py", "cannot be read from") as it:
        weft.restore(state, tmp_path, ctx)
    assert it.fix == "an older checkpoint, or a whole copy of the file"
    assert weft.restore(state, older, ctx).step == 1
    again()
    assert weft.restore(state, newest, ctx).step == 2

    _changed(newest, lambda data: data["tensors"].pop("rows/value"))
    with told("checkpoint/reader.py", "is not in the checkpoint") as it:
        weft.restore(state, tmp_path, ctx)
    assert it.fix == "restore an older checkpoint" and weft.restore(state, older, ctx).step == 1
    again()
    _changed(newest, lambda data: data["values"].update(box={"$": "unknown"}))
    with told("checkpoint/state/apply.py", "the values of {key}") as it:
        weft.restore(state, tmp_path, ctx)
    assert it.fix == ("restore an older checkpoint, or leave the object out of the state and restore with strict=False")
    assert weft.restore(state, older, ctx).step == 1
    assert _restore_left_out(tmp_path, rows=Box()).step == 2
    again()
    _changed(newest, lambda data: data["ranks"][0]["rng"].update(python=[]))
    with told("checkpoint/state/random_states.py", "random states in the checkpoint") as it:
        weft.restore(state, tmp_path, ctx)
    found = it.run(objects={"box": Box(), "rows": Box()}, ctx=ctx)
    assert weft.restore(found["state"], tmp_path, found["ctx"]).step == 2
    again()

    for path in (older, newest):
        _flip(path)
        next(path.glob("*.safetensors")).unlink()
    with told("checkpoint/restore.py", "no checkpoint in") as it:
        weft.restore(state, tmp_path, ctx)
    with told("checkpoint/storage/find.py", "there is no complete checkpoint") as it:
        weft.checkpoint.verify(tmp_path)
    assert it.fix == "restore the files from a copy, or name another directory"
    weft.checkpoint.verify(kept)
    with told("checkpoint/storage/find.py", "there is no complete checkpoint") as it:
        weft.checkpoint.verify(tmp_path.with_name("elsewhere"))
    assert it.fix == "the directory that was given to weft.save, or the folder of one checkpoint"
    weft.checkpoint.verify(kept), weft.checkpoint.verify(kept / newest.name)
    again()
    weft.checkpoint.verify(tmp_path)
    assert weft.restore(state, tmp_path, ctx).step == 2

    file = tmp_path / "model.safetensors"
    whole = _weights(tmp_path / "weights", model=nn.Linear(2, 2)).read_bytes()
    file.write_bytes(whole[:-1])
    with told("checkpoint/format/safetensors_read.py", "a whole safetensors file") as it:
        weft.load_weights(nn.Linear(2, 2), file, ctx)
    assert it.fix == "get the file anew, or compare it with its source"
    file.write_bytes(whole)
    weft.load_weights(nn.Linear(2, 2), file, ctx)


def test_a_state_that_is_part_of_another_checkpoint(tmp_path):
    state, ctx = _saved(tmp_path, 1, model=nn.Linear(2, 2))

    def broken(*_):
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.checkpoint.reader.Reader.read_live", broken)
        with pytest.raises(OSError, match="Input/output"):
            weft.restore(state, tmp_path, ctx)
    with told("checkpoint/save.py", "part of another checkpoint") as it:
        weft.save(state, tmp_path, 2, ctx)
    it.run(state=state, directory=tmp_path, ctx=ctx)
    weft.save(state, tmp_path, 2, ctx)


# -- on several ranks ----------------------------------------------------------------------------------


class Gathered(Box):
    """What the line about plain values says to write."""

    def __init__(self, value, fix, ctx):
        super().__init__(value)
        self.fix, self.ctx = fix, ctx

    def state_dict(self):
        names = {"weft": weft, "value": self.value, "ctx": self.ctx}
        exec(self.fix, names)
        return {"value": names["value"]}


def _differs(ctx, folder):
    with told("checkpoint/draft.py", "the state differs between the ranks") as it:
        weft.save(_state(ctx, box=Box(ctx.rank))[0], folder, 1, ctx)
    assert "box/value on rank 1" in str(it.error)
    fix = weft.broadcast(it.fix, ctx)
    weft.save(_state(ctx, box=Gathered(ctx.rank, fix, ctx))[0], folder, 1, ctx)

    model, own = weft.replicate(nn.Linear(2, 2), ctx)
    with torch.no_grad():
        model.weight.fill_(ctx.rank)
    state, _ = _state(own, model=model)
    with told("checkpoint/compare_replicas.py", "replicas of a tensor have different values") as it:
        weft.save(state, folder, 2, ctx)
    it.fix = weft.broadcast(it.fix, ctx)
    assert it.fix.startswith("tensor.data.copy_")
    it.run(tensor=model.weight, ctx=own, model=model)
    weft.save(state, folder, 2, ctx)
    weft.check(own, model=model)  # as it says
    hidden = torch.full((1, 2), float(ctx.rank))
    with told("checkpoint/compare_replicas.py", "replicas of a tensor have different values") as it:
        weft.save(_state(ctx, progress={"hidden": hidden})[0], folder, 3, ctx)
    it.fix = weft.broadcast(it.fix, ctx)
    assert it.fix.startswith("value = weft.gather")
    whole = it.run(value=hidden, ctx=ctx)["value"]
    weft.save(_state(ctx, progress={"hidden": whole})[0], folder, 3, ctx)
    assert whole.tolist() == [[0, 0], [1, 1]]

    def cut(size):
        return Box(distribute_tensor(torch.arange(float(size)), ctx.mesh, [Shard(0)], src_data_rank=None))

    folder = folder / "cut"
    weft.save(_state(ctx, box=cut(6))[0], folder, 1, ctx)
    with told("checkpoint/reader.py", "has another shape in the checkpoint") as it:
        weft.restore(_state(ctx, box=cut(8))[0], folder, ctx)
    fix = weft.broadcast(it.fix, ctx)
    assert fix == "build the object as it was, or leave it out of the state and restore with strict=False"
    weft.restore(_state(ctx, box=cut(6))[0], folder, ctx)
    weft.restore(_state(ctx, other=Box())[0], folder, ctx, strict=False)


@pytest.mark.slow
def test_ranks_that_differ(tmp_path):
    run_ranks(_differs, 2, tmp_path)


def _temperature(ctx, folder, fix=None):
    """Some steps of a number that no strategy trains, then a save."""
    p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.AdamW([p], 0.1)
    entropy = torch.linspace(-1, 2, 8, dtype=torch.float64).chunk(ctx.world_size)[ctx.rank]
    for _ in range(3):
        (p.exp() * entropy).mean().backward()
        if fix is not None:
            names = {"weft": weft, "p": p, "ctx": ctx}
            exec(fix, names)
        optimizer.step()
        optimizer.zero_grad()
    state, ctx = _state(ctx, alpha=nn.ParameterList([p]), alpha_optimizer=optimizer)
    weft.save(state, folder, 1, ctx)
    return p.item()


def _trained_by_nobody(ctx, folder):
    if ctx.world_size > 1:
        with told("checkpoint/compare_replicas.py", "replicas of a tensor have different values") as it:
            _temperature(ctx, folder / "apart")
        assert not ctx.is_main or "no strategy averages the gradients of alpha/0" in str(it.error)
        fix = weft.broadcast(it.fix, ctx)
        assert fix.startswith('p.grad = weft.reduce(p.grad, ctx, "mean")')
        start = fix.partition("before the first step ")[2].partition(";")[0]
        once = nn.Parameter(torch.full((2,), float(ctx.rank)))
        exec(start, {"weft": weft, "p": once, "ctx": ctx})
        assert once.tolist() == [0, 0]
    else:
        fix = None
    return _temperature(ctx, folder / f"{ctx.world_size} ranks", fix)


@pytest.mark.slow
def test_a_parameter_that_no_strategy_trains(tmp_path):
    expected = run_ranks(_trained_by_nobody, 1, tmp_path)
    for ranks in (2, 4):
        assert run_ranks(_trained_by_nobody, ranks, tmp_path / str(ranks)) == pytest.approx(expected * ranks, abs=1e-12)


class _Center(nn.Module):
    """A running mean of the batch, and statistics of a batch norm, of a module without gradients."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("center", torch.zeros(2))

    def update(self, x, reduced=lambda value: value):
        self.center.lerp_(reduced(self.norm(x).detach().square().mean(0) + x.mean(0)), 0.1)


def _updated_by_own_batch(ctx, folder):
    rows = torch.arange(16.0).sin().view(8, 2).chunk(ctx.world_size)[ctx.rank]
    if ctx.world_size > 1:
        teacher = _Center()
        teacher.update(rows)
        with told("checkpoint/compare_replicas.py", "replicas of a tensor have different values") as it:
            weft.save(_state(ctx, teacher=teacher)[0], folder, 1, ctx)
        assert not ctx.is_main or "teacher/center: one value on rank 0, another on rank 1" in str(it.error)
        reduced, _, norms = weft.broadcast(it.fix, ctx).partition(
            '  # before a buffer is updated with it, sums without "mean"; '
        )
    teacher = _Center()

    def mean(value):
        names = {"weft": weft, "value": value, "ctx": ctx}
        exec(reduced, names)
        return names["value"]

    if ctx.world_size > 1:
        exec(norms.removeprefix("for batch norms, "), {"weft": weft, "model": teacher, "ctx": ctx})
        teacher.update(rows, mean)
    else:
        teacher.update(rows)
    weft.save(_state(ctx, teacher=teacher)[0], folder, 2, ctx)
    return [*teacher.buffers()]


@pytest.mark.slow
def test_buffers_that_each_rank_updates_from_its_own_batch(tmp_path):
    expected = run_ranks(_updated_by_own_batch, 1, tmp_path / "1")[0]
    for found in run_ranks(_updated_by_own_batch, 2, tmp_path / "2"):
        torch.testing.assert_close(found, expected)


def _own_mesh(ctx, folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))["shard"]
    for value in (DTensor.from_local(torch.ones(2), mesh, [kind]) for kind in (Shard(0), Partial())):
        with told("checkpoint/draft.py", "hold each tensor exactly once") as it:
            weft.save(_state(ctx, box=Box(value))[0], folder, 1, ctx)
        it.fix = weft.broadcast(it.fix, ctx)
        whole = eval(it.fix, {"value": value})
        weft.save(_state(ctx, box=Box(whole))[0], folder / type(value.placements[0]).__name__, 1, ctx)


def _mesh_of_weft(ctx, folder):  # the other way that the line names
    value = DTensor.from_local(torch.ones(2), ctx.mesh["shard"], [Shard(0)])
    weft.save(_state(ctx, box=Box(value))[0], folder, 1, ctx)


@pytest.mark.slow
def test_a_mesh_of_ones_own(tmp_path):
    run_ranks(_own_mesh, 4, tmp_path)
    run_ranks(_mesh_of_weft, 4, tmp_path, mesh={"replica": 2, "shard": 2})
