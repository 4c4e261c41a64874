"""`fix:` lines of imports of checkpoints, each followed."""

import shutil

import torch

import weft
from tests.fix_lines.told import told
from tests.interop.test_import_checkpoints import Bomb, Net, _folder, _like, _net, _optimizer, _save


def _named(folder, kind):
    """A folder whose optimizer says the names of its parameters."""
    model = _net()
    optimizer = kind([(name, p) for name, p in model.named_parameters()], 0.1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save({f"module.{k}": v for k, v in model.state_dict().items()}, folder / "pytorch_model.bin")
    return folder


def test_folders_of_others(tmp_path):
    read, folder = weft.interop.import_accelerate, _folder("accelerate", tmp_path / "theirs")
    named = _named(_folder("accelerate", tmp_path / "named", safe=False), torch.optim.AdamW)
    stepless = _named(_folder("accelerate", tmp_path / "stepless", safe=False), torch.optim.SGD)
    numbers = iter(range(99))

    def follow(it, source):
        it.run(folder=source, out=tmp_path / f"out-{next(numbers)}")

    def follow_like(it):
        names = {"model": _like()["model"]}
        names["optimizer"] = _optimizer(names["model"])
        like = eval(it.fix.removeprefix("like="), names)
        read(folder, tmp_path / f"out-{next(numbers)}", like={"optimizer": names["optimizer"], **like})

    with told("interop/saved_folder.py", "is no whole checkpoint") as it:
        read(tmp_path / "nowhere", tmp_path / "out")
    follow(it, named)
    with told("interop/imported.py", "the step is not known") as it:
        read(stepless, tmp_path / "out")
    follow(it, stepless)
    with told("interop/imported.py", "are not known") as it:
        read(folder, tmp_path / "out")
    follow_like(it)
    like = _like()
    like["model"].head = torch.nn.Linear(1, 1)
    with told("interop/imported.py", "do not fit") as it:
        read(folder, tmp_path / "out", like=like)
    follow_like(it)
    like = _like()
    like["optimizer"].param_groups[0]["params"].reverse()
    with told("interop/imported.py", "does not fit the weights") as it:
        read(folder, tmp_path / "out", like=like)
    follow_like(it)
    whole = (named / "scheduler.bin").read_bytes()
    torch.save(Bomb(tmp_path / "exploded"), named / "scheduler.bin")
    with told("interop/torch_files.py", "holds more than tensors") as it:
        read(named, tmp_path / "out")
    follow(it, named)
    shutil.copytree(named, tmp_path / "planted")
    torch.save(Bomb(tmp_path / "exploded"), tmp_path / "planted" / "pytorch_model.bin")
    with told("interop/torch_files.py", "holds more than tensors") as it:
        read(tmp_path / "planted", tmp_path / "out")
    assert it.fix == "ask who wrote it for a file of values alone"
    (named / "scheduler.bin").write_bytes(whole[:100])
    with told("interop/torch_files.py", "copy the folder anew") as it:
        read(named, tmp_path / "out")
    (named / "scheduler.bin").write_bytes(whole)
    read(named, tmp_path / "out")
    assert not (tmp_path / "exploded").exists()


def test_a_folder_of_dcp(tmp_path):
    _save({"model": Net().state_dict(), "step": 5}, tmp_path / "theirs")
    shutil.copytree(tmp_path / "theirs", tmp_path / "half")
    (tmp_path / "half" / ".metadata").unlink()
    with told("interop/dcp_checkpoint.py", "is no whole checkpoint") as it:
        weft.interop.import_dcp(tmp_path / "half", tmp_path / "out")
    it.run(checkpoint_id=tmp_path / "theirs", out=tmp_path / "out")
