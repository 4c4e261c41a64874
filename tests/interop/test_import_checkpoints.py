"""Checkpoints of others as weft's: of DCP, and folders made by hand as Accelerate and the Trainer make them."""

import json
import pickle
import random
import re
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict

import weft
from weft.errors import CheckpointError
from weft.testing import largest_difference, run_ranks

IMPORTS = {
    "accelerate": weft.interop.import_accelerate,
    "trainer": weft.interop.import_trainer,
    "dcp": weft.interop.import_dcp,
}


class Net(nn.Module):
    """Tied weights, a buffer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.second = nn.Linear(7, 7)
        self.third = nn.Linear(7, 7)
        self.third.weight = self.second.weight
        self.head = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.head(self.third(torch.tanh(self.second(torch.tanh(self.norm(self.first(x))))))) * self.scale


def _net(seed=1):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net()


def _optimizer(model):
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 2e-3},
    ]
    return torch.optim.AdamW(groups, 1e-2)


def _scheduler(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def _steps(model, optimizer, scheduler, numbers, rank=0, world_size=1):
    for number in numbers:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        model(x.chunk(world_size)[rank]).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def _like():
    with torch.device("meta"):
        model = Net()
    return {"model": model, "optimizer": _optimizer(model)}


def _trained(steps=3):
    model = _net()
    optimizer = _optimizer(model)
    scheduler = _scheduler(optimizer)
    _steps(model, optimizer, scheduler, range(steps))
    return model, optimizer, scheduler


def _expected():
    return [p.detach() for p in _trained(6)[0].parameters()]


def _continued(ctx, directory, strategies, names=("model", "optimizer", "scheduler")):
    """Three more steps under weft, from what was imported."""
    found = {}
    for strategy in strategies:
        model, after = _net(seed=7), ctx
        if strategy == "replicate":
            model, after = weft.replicate(model, ctx)
        elif strategy == "fully_shard":
            model, after = weft.fully_shard(model, ctx)
        optimizer = _optimizer(model)
        if strategy == "zero_partition":
            model, optimizer, after = weft.zero_partition(model, optimizer, ctx, stage=3)
        scheduler = _scheduler(optimizer)
        state, after = weft.checkpointable(dict(zip(names, (model, optimizer, scheduler), strict=False)), after)
        done = weft.restore(state, directory, after)
        assert (done.step, done.missing, done.unexpected) == (3, (), ())
        if "scheduler" not in names:
            scheduler.last_epoch = 3
        _steps(model, optimizer, scheduler, range(3, 6), ctx.rank, ctx.world_size)
        assert scheduler.last_epoch == 6 and float(model.calls) == 6
        with weft.full_params(model, after):
            found[strategy] = [p.detach().clone() for p in model.parameters()]
    return found


def _check(directory, strategies=("local",), ranks=1, **names):
    expected = _expected()
    for found in run_ranks(_continued, ranks, str(directory), strategies, timeout_s=200, **names):
        for strategy, parameters in found.items():
            assert largest_difference(parameters, expected) <= 1e-6, strategy


# -- DCP -------------------------------------------------------------------------------------------------


def _save(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def _sharded_by_torch(ctx, folder):
    """Trained under torch's own FSDP2, and saved by all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _net()
    fully_shard(model, mesh=init_device_mesh("cpu", (ctx.world_size,)))
    optimizer = _optimizer(model)
    scheduler = _scheduler(optimizer)
    _steps(model, optimizer, scheduler, range(3), ctx.rank, ctx.world_size)
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state, "scheduler": scheduler.state_dict(), "step": 3, "epoch": 1}
    dcp.save(saved, checkpoint_id=f"{folder}/theirs")


def test_shards_of_torch_continue_under_any_strategy_at_any_number_of_ranks(tmp_path):
    run_ranks(_sharded_by_torch, 2, str(tmp_path))
    done = weft.interop.import_dcp(tmp_path / "theirs", tmp_path / "run")
    assert (done.step, done.world_size, done.objects) == (3, 1, ("model", "optimizer", "scheduler"))
    assert any("epoch: 1" in each for each in done.left)
    for ranks in (1, 2):
        _check(tmp_path / "run", ("replicate", "fully_shard", "zero_partition"), ranks)
    files = weft.export(done.path, tmp_path / "weights")
    assert torch.equal(weft.weights.read(files[0])["calls"], torch.tensor(3.0))


class _App:
    def __init__(self, *objects):
        self.objects = objects

    def state_dict(self):
        model, optimizer, scheduler = self.objects
        weights, state = get_state_dict(model, optimizer)
        return {"model": weights, "optim": state, "scheduler": scheduler.state_dict()}

    def load_state_dict(self, state):
        raise AssertionError


def test_layouts_of_states(tmp_path):
    model, optimizer, scheduler = _trained()
    weights, flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    scaler = {"scale": 8.0, "growth_factor": 4.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 2}
    last = {"scheduler": scheduler.state_dict()}
    states = {
        "app": {"app": _App(model, optimizer, scheduler)},
        "flat": {"model": weights, "optimizer": flat, **last},
        "raw": {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **last},
        "ddp": {"model": {f"module.{k}": v for k, v in model.state_dict().items()}, "scaler": scaler},
        "alone": model.state_dict(),
    }
    folders = {name: _save(state, tmp_path / name) for name, state in states.items()}
    weft.interop.import_dcp(folders["app"], tmp_path / "a")
    _check(tmp_path / "a", names=("model", "optim", "scheduler"))
    weft.interop.import_dcp(folders["flat"], tmp_path / "b")
    _check(tmp_path / "b")
    weft.interop.import_dcp(folders["raw"], tmp_path / "c", like=_like())
    _check(tmp_path / "c")
    done = weft.interop.import_dcp(folders["ddp"], tmp_path / "d", step=5)
    assert done.left[0].startswith("options of the loss scale") and "'growth_factor': 4.0" in done.left[0]
    assert weft.checkpoint.verify(done.path).values["model"]["transforms"] == {
        "LossScale": {"scale": 8.0, "good_steps": 2}
    }
    done = weft.interop.import_dcp(folders["alone"], tmp_path / "e", step=5)
    found = weft.weights.read(done.path)
    assert done.objects == ("model",) and all(torch.equal(found[k], v) for k, v in model.state_dict().items())


def test_keys_that_are_numbers_stay_numbers(tmp_path):
    model = _net()
    optimizer = _optimizer(model)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    _save({"model": model.state_dict(), "scheduler": scheduler.state_dict()}, tmp_path / "theirs")
    done = weft.interop.import_dcp(tmp_path / "theirs", tmp_path / "run", step=0)
    state, ctx = weft.checkpointable({"model": model, "scheduler": scheduler}, weft.local())
    weft.restore(state, tmp_path / "run", ctx)
    assert dict(scheduler.milestones) == {2: 1, 4: 1} and done.objects == ("model", "scheduler")


def test_memory_is_that_of_the_largest_tensor(tmp_path, monkeypatch):
    state = {f"layers.{n}": torch.full((256, 256), float(n)) for n in range(8)}
    _save(state, tmp_path / "theirs")
    sizes, load = [], torch.load

    def loaded(file, device=None, **options):
        found = load(file, device, **options)
        sizes.append(found.numel() if isinstance(found, torch.Tensor) and not found.is_meta else 0)
        return found

    monkeypatch.setattr(torch, "load", loaded)
    done = weft.interop.import_dcp(tmp_path / "theirs", tmp_path / "run", step=1)
    assert len(sizes) == 16 and sum(sizes[:8]) == 0  # looked through first, then read one by one
    assert all(float(t[0, 0]) == n for n, t in enumerate(weft.weights.read(done.path).values()))


# -- folders as Accelerate and the Trainer write them ---------------------------------------------------


def _folder(library, folder, *, safe=True, ranks=2):
    """What the library would have written for `_trained()`."""
    model, optimizer, scheduler = _trained()
    folder.mkdir(parents=True)
    weights = {k: v for k, v in model.state_dict().items() if k != "second.weight"}  # as safetensors has tied ones
    if library == "dcp":
        weights, state = get_state_dict(model, optimizer)
        return _save({"model": weights, "optimizer": state, "scheduler": scheduler.state_dict()}, folder)
    end = "bin" if library == "accelerate" else "pt"
    if safe:
        save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors")
    else:
        torch.save({f"module.{k}": v for k, v in model.state_dict().items()}, folder / "pytorch_model.bin")
    torch.save(optimizer.state_dict(), folder / f"optimizer.{end}")
    torch.save(scheduler.state_dict(), folder / f"scheduler.{end}")
    scaler = {"scale": 4.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 7}
    torch.save(scaler, folder / "scaler.pt")
    for rank in range(ranks):
        torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        if library == "accelerate":
            names, path = ("random_state", "numpy_random_seed", "torch_manual_seed"), f"random_states_{rank}.pkl"
        else:
            names, path = ("python", "numpy", "cpu"), f"rng_state_{rank}.pth" if ranks > 1 else "rng_state.pth"
        torch.save(dict(zip(names, states, strict=True)), folder / path)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3, "log_history": []}))
    return folder


def _drawn(ctx, directory):
    state, ctx = weft.checkpointable({"nothing": {}}, ctx)
    weft.restore(state, directory, ctx, strict=False)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def _scaled(ctx, directory):
    model = nn.Sequential()
    model, ctx = weft.with_precision(_net(), ctx, "fp16")
    optimizer = _optimizer(model)
    optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    scheduler = _scheduler(optimizer)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "scheduler": scheduler}, ctx)
    done = weft.restore(state, directory, ctx)
    again = weft.save(state, f"{directory}-again", 4, ctx)
    return done.unexpected, weft.checkpoint.verify(again).values["model"]["transforms"]


@pytest.mark.parametrize("library", ["accelerate", "trainer"])
def test_folders_with_numbers_for_names(library, tmp_path):
    read = IMPORTS[library]
    for safe in (True, False):
        folder, out = _folder(library, tmp_path / f"theirs-{safe}" / "3", safe=safe), tmp_path / f"run-{safe}"
        with pytest.raises(
            CheckpointError, match=r"names of the parameters in optimizer are not known(.|\n)*fix: .*like="
        ):
            read(folder, out)
        assert not out.exists()
        done = read(folder, out, like=_like(), skip=["scaler"])
        assert (done.step, done.world_size, done.objects) == (3, 2, ("model", "optimizer", "scheduler"))
        assert any("scaler.pt" in each for each in done.left)
        _check(out)
    done = read(folder, tmp_path / "scaled", like=_like())
    assert _scaled(weft.local(), done.path.parent) == ((), {"LossScale": {"scale": 4.0, "good_steps": 7}})
    expected = []
    for rank in range(2):
        torch.manual_seed(rank), random.seed(rank), np.random.seed(rank)
        expected.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
    assert run_ranks(_drawn, 2, str(done.path.parent)) == expected


# -- what is refused -------------------------------------------------------------------------------------


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


PLANTED = {
    "accelerate": ["pytorch_model.bin", "optimizer.bin", "scheduler.bin", "scaler.pt", "random_states_1.pkl"],
    "trainer": ["pytorch_model.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state_0.pth"],
    "dcp": [".metadata"],
}


@pytest.mark.parametrize(("library", "name"), [(library, name) for library, names in PLANTED.items() for name in names])
def test_a_planted_pickle_does_not_run(library, name, tmp_path):
    folder, bomb = _folder(library, tmp_path / "theirs", safe=False), Bomb(tmp_path / "exploded")
    for write in (torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))):
        if name == ".metadata" and write is torch.save:
            continue
        write(bomb, folder / name)
        with pytest.raises(
            CheckpointError, match=rf"{name} (holds more than|cannot be read)(.|\n)*found: (.|\n)*fix: "
        ):
            IMPORTS[library](folder, tmp_path / "run", like=_like())
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "run").exists()


def test_a_pickle_planted_in_a_chunk_of_dcp_does_not_run(tmp_path):
    for number, kind in enumerate(("a tensor", "a value")):
        folder = _folder("dcp", tmp_path / f"theirs-{number}")
        there = pickle.loads((folder / ".metadata").read_bytes())
        chosen = [k for k in there.storage_data if (k.offset is None) == (kind == "a value")]
        (file,) = folder.glob("*.distcp")
        with file.open("ab") as appended:
            start = appended.tell()
            torch.save(Bomb(tmp_path / "exploded"), appended)
            for key in chosen[-1:]:
                place = there.storage_data[key]
                place.offset, place.length = start, appended.tell() - start
        (folder / ".metadata").write_bytes(pickle.dumps(there))
        with pytest.raises(CheckpointError, match=r"holds more than tensors and plain values"):
            weft.interop.import_dcp(folder, tmp_path / "run")
    assert not (tmp_path / "exploded").exists() and not (tmp_path / "run").exists()


def test_names_of_metadata_are_those_of_torch_alone(tmp_path):
    folder = _folder("dcp", tmp_path / "theirs")
    for planted in (b"cos\nsystem\n(S'touch x'\ntR.", b"cbuiltins\neval\n(S'1'\ntR.", b"cbuiltins\ngetattr\n."):
        (folder / ".metadata").write_bytes(planted)
        with pytest.raises(CheckpointError, match=r"a pickle that calls (os|builtins)"):
            weft.interop.import_dcp(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def _refused(library, folder, tmp_path, match, **options):
    with pytest.raises(CheckpointError, match=match) as caught:
        IMPORTS[library](folder, tmp_path / "out", **options)
    assert re.search(r"\n  found: .*\n  expected: .*\n  fix: ", str(caught.value))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("library", ["accelerate", "trainer"])
def test_half_a_folder_is_refused(library, tmp_path):
    end = "bin" if library == "accelerate" else "pt"
    whole, like = _folder(library, tmp_path / "whole"), _like()
    _refused(library, tmp_path / "nowhere", tmp_path, "no whole checkpoint")
    first = "random_states_0.pkl" if library == "accelerate" else "rng_state_0.pth"
    for name, match in (
        ("model.safetensors", "no whole checkpoint"),
        (f"optimizer.{end}", "no whole checkpoint"),
        (first, "no whole checkpoint"),
    ):
        folder = shutil.copytree(whole, tmp_path / f"without-{name}")
        (folder / name).unlink()
        _refused(library, folder, tmp_path, match, like=like)
    for name in ("model.safetensors", f"optimizer.{end}", f"scheduler.{end}", first):
        folder = shutil.copytree(whole, tmp_path / f"cut-{name}")
        (folder / name).write_bytes((folder / name).read_bytes()[:-300])
        _refused(library, folder, tmp_path, "cannot be read", like=like)
    (whole / "trainer_state.json").unlink()
    if library == "trainer":
        _refused(library, whole, tmp_path, "trainer_state.json cannot be read", like=like)


def test_half_a_folder_of_dcp_is_refused(tmp_path):
    whole = _folder("dcp", tmp_path / "whole")
    _refused("dcp", tmp_path / "nowhere", tmp_path, "no whole checkpoint")
    (file,) = whole.glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data[:-300])
    _refused("dcp", whole, tmp_path, "cannot be read")
    file.unlink()
    _refused("dcp", whole, tmp_path, "cannot be read")
    file.write_bytes(data)
    (whole / ".metadata").unlink()
    _refused("dcp", whole, tmp_path, "no whole checkpoint")


@pytest.mark.parametrize("library", ["accelerate", "dcp"])
def test_what_does_not_fit_the_program_is_refused(library, tmp_path):
    folder = _folder(library, tmp_path / "theirs")
    for change, match in (
        (
            lambda model: setattr(model, "more", nn.Linear(1, 1)),
            r"more.weight: not in the files, \(1, 1\) in the module",
        ),
        (
            lambda model: setattr(model, "head", nn.Linear(7, 4)),
            r"head.weight: \(3, 7\) in the files, \(4, 7\) in the module",
        ),
        (lambda model: delattr(model, "norm"), r"norm.weight: \(7,\) in the files, not in the module"),
    ):
        like = _like()
        change(like["model"])
        _refused(library, folder, tmp_path, match, like=like)
    model = _like()["model"]
    if library == "accelerate":
        _refused(library, folder, tmp_path, "are not known", like={"model": model})  # one group, and not two
        turned = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
        turned.param_groups[:2] = [
            {**g, "params": list(p)} for g, p in zip(turned.param_groups, _split(model), strict=False)
        ]
        del turned.param_groups[2:]
        _refused(library, folder, tmp_path, "does not fit the weights", like={"model": model, "optimizer": turned})


def _split(model):
    wide = [p for p in model.parameters() if p.dim() > 1]
    return wide[::-1], [p for p in model.parameters() if p.dim() <= 1]


def test_the_directory_is_another_ones(tmp_path):
    folder = _folder("dcp", tmp_path / "theirs" / "3")
    other = _folder("dcp", tmp_path / "others" / "3")
    done = weft.interop.import_dcp(folder, tmp_path / "run")
    assert weft.interop.import_dcp(folder, tmp_path / "run").path == done.path  # the same once more
    with pytest.raises(CheckpointError, match=r"another run(.|\n)*fix: "):
        weft.interop.import_dcp(other, tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"not a directory of checkpoints(.|\n)*fix: "):
        weft.interop.import_dcp(folder, tmp_path / "file")
    assert [path.name for path in (tmp_path / "run").glob("step*")] == ["step-00000003"]
    with pytest.raises(CheckpointError, match=r"the step is not known(.|\n)*step=1000"):
        weft.interop.import_dcp(folder, tmp_path / "other", skip=["optimizer"])
    assert get_model_state_dict(_net()) and not (tmp_path / "other").exists()
