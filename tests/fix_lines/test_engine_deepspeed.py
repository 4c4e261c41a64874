"""`zero_partition(engine="deepspeed")`: what is told, and followed.

Ranks import DeepSpeed for seconds, so they do much.
"""

import os
import shutil
import subprocess
import sys
import traceback
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import weft
from tests.fix_lines.told import printed, told
from weft.testing import run_ranks

pytestmark = pytest.mark.deepspeed


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


class Branches(nn.Linear):
    """Has a part that is not called."""

    def __init__(self):
        super().__init__(4, 4)
        self.unused = nn.Linear(4, 4)


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), 0.01)


def _partitioned(ctx, model=None, optimizer=None, **options):
    model = _net() if model is None else model
    optimizer = _adamw(model) if optimizer is None else optimizer
    return weft.zero_partition(model, optimizer, ctx, **{"stage": 2, "engine": "deepspeed", **options})


def _x(dtype=torch.float32):
    return torch.ones(2, 4, dtype=dtype)


def _trains(model, optimizer, ctx, dtype=torch.float32):
    """A step changes what the module returns."""
    before = model(_x(dtype)).detach().clone()
    model(_x(dtype)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert not torch.equal(model(_x(dtype)), before)


def _set(it, **names):
    """The options that a line sets."""
    names = {"weft": weft, "torch": torch, **names}
    return {name: value for name, value in it.run(**names).items() if name not in {*names, "__builtins__"}}


def _arguments(ctx, folder):
    with told("interop/deepspeed_partition.py", "cannot be used with DeepSpeed") as it:
        _partitioned(ctx, unused="zero")
    _trains(*_partitioned(ctx, unused="zero", **_set(it)))
    with told("interop/deepspeed_partition.py", "check_count") as it:
        _partitioned(ctx, bucket_bytes=0)
    _trains(*_partitioned(ctx, **_set(it)))
    with told("interop/deepspeed_partition.py", "offload = {offload!r}") as it:
        _partitioned(ctx, offload="nvme")
    _trains(*_partitioned(ctx, **_set(it)))
    with told("interop/deepspeed_partition.py", "does not support this kind of offload") as it:
        _partitioned(ctx, offload={"parameters": "cpu"})
    _trains(*_partitioned(ctx, offload={"parameters": "cpu"}, **_set(it)))
    with told("interop/deepspeed_partition.py", "with_precision in fp16") as it:
        model, after = weft.with_precision(_net(), ctx, "fp16")
        _partitioned(after, model)
    found = it.run(model=_net(), ctx=ctx)
    _trains(*_partitioned(found["ctx"], found["model"]))


def _models(ctx, folder):
    model = _net().requires_grad_(False)
    optimizer = _adamw(model)
    with told("interop/deepspeed_partition.py", "no parameter with requires_grad") as it:
        _partitioned(ctx, model, optimizer)
    it.run(model=model)
    _trains(*_partitioned(ctx, model, optimizer))

    model = _net()
    optimizer = _adamw(model[0])
    with told("interop/deepspeed_partition.py", "not in the optimizer") as it:
        _partitioned(ctx, model, optimizer)
    assert it.fix == "requires_grad_(False) on them before zero_partition"
    model[2].requires_grad_(False)
    _trains(*_partitioned(ctx, model, optimizer))

    model = _net().double()
    optimizer = _adamw(model)
    with told("interop/deepspeed_partition.py", "parameters of {listed(dtypes)}") as it:
        _partitioned(ctx, model, optimizer)
    it.run(model=model)
    _trains(*_partitioned(ctx, model, optimizer))
    _trains(*_partitioned(ctx, _net().double(), engine="torch"), torch.float64)

    for kind in (torch.optim.Adafactor, torch.optim.Adagrad):
        model = _net()
        with told("interop/deepspeed_partition.py", "refusal(kind.__name__") as it:
            _partitioned(ctx, model, kind(model.parameters(), 0.01))
        it.error = None  # which holds that optimizer
        _trains(*_partitioned(ctx, model, it.run(model=model, torch=torch)["optimizer"]))
        _trains(*_partitioned(ctx, model := _net(), kind(model.parameters(), 0.01), engine="torch"))


def _configurations(ctx, folder):
    with told("engines/deepspeed/ds_config.py", "config is not a configuration") as it:
        _partitioned(ctx, config=[1])
    _trains(*_partitioned(ctx, **_set(it)))
    file = folder / f"{ctx.rank}.json"
    file.write_text("zero_optimization: {stage: 2}")
    with told("engines/deepspeed/ds_config.py", "holds no configuration") as it:
        _partitioned(ctx, config=file)
    file.write_text(it.fix)
    _trains(*_partitioned(ctx, config=file))
    config = {"gradient_accumulation_steps": 4, "wall_clock_breakdown": False}
    with told("engines/deepspeed/ds_config.py", "contradict the pipeline") as it:
        _partitioned(ctx, config=config)
    del config["gradient_accumulation_steps"]
    _trains(*_partitioned(ctx, config=config))
    config = {"zero_optimization": {"no_such_key": 1, "reduce_scatter": False}}
    with told("engines/deepspeed/build.py", "DeepSpeed rejects the configuration") as it:
        _partitioned(ctx, config=config)
    assert it.fix == "config={...}  # without them"
    del config["zero_optimization"]["no_such_key"]
    _trains(*_partitioned(ctx, config=config))


def _loops(ctx, folder):
    model, optimizer, after = _partitioned(ctx)
    out = model(_x())
    loss_a, loss_b = out.sum(), (out**2).sum()
    with told("engines/deepspeed/backward.py", "a second backward pass") as it:
        loss_a.backward(retain_graph=True)
        loss_b.backward()
    optimizer.zero_grad()
    out = model(_x())
    it.run(loss_a=out.sum(), loss_b=(out**2).sum())
    optimizer.step()
    with told("engines/deepspeed/placeholders.py", "optimizer.step() without optimizer.zero_grad()") as it:
        model(_x()).sum().backward()
    it.run(optimizer=optimizer)
    _trains(model, optimizer, after)

    model, optimizer, after = _partitioned(ctx, Branches())
    with told("engines/deepspeed/backward.py", "got no gradient") as it:
        model(_x()).sum().backward()
    model = Branches()
    model.unused.requires_grad_(False)  # as the line says, and what it says after "or"
    _trains(*_partitioned(ctx, model))
    _trains(*_partitioned(ctx, Branches(), **eval(f"dict({it.fix.partition(', or ')[2]})")))

    model, optimizer, after = _partitioned(ctx)
    loader = [[_x()], [_x()], [_x()]]
    model, loader, after = weft.accumulate_grads(model, loader, after, steps=2)
    with told("engines/deepspeed/step.py", "that are not averaged over the ranks") as it:
        for window in loader:
            for (x,) in window:
                model(x).sum().backward()
                optimizer.step()
    model, optimizer, after = _partitioned(ctx)
    model, loader, after = weft.accumulate_grads(model, [[_x()], [_x()], [_x()]], after, steps=2)
    line = it.fix.replace("...", "model(batch[0]).sum().backward()") + "; optimizer.zero_grad()"
    exec(line, {"loader": loader, "model": model, "optimizer": optimizer})

    model, optimizer, after = _partitioned(ctx)
    (model(_x()).sum() * torch.nan).backward()
    with told("engines/deepspeed/step.py", "DeepSpeed skipped the step") as it, pytest.raises(FloatingPointError):
        optimizer.step()
    optimizer.zero_grad()
    (model(_x()).sum() * torch.nan).backward()
    it.run(model=model, ctx=after)
    optimizer.step()
    optimizer.zero_grad()
    _trains(model, optimizer, after)


def _groups(ctx, folder):
    """Parameters that were trained before others."""
    model = _net()
    optimizer = _adamw(model)
    model[0](_x()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with told("engines/deepspeed/parameters.py", "have been trained differently") as it:
        _partitioned(ctx, model, optimizer)
    assert it.fix == "a group of its own for each kind of parameters"
    model = _net()
    optimizer = torch.optim.AdamW([{"params": model[0].parameters()}, {"params": model[2].parameters()}], 0.01)
    model[0](_x()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    _trains(*_partitioned(ctx, model, optimizer))


def _all(ctx, folder):
    wrong = []
    for work in (_arguments, _models, _configurations, _loops, _groups):
        try:
            work(ctx, folder)
        except Exception:  # noqa: BLE001  (what fails is told to the test, and the others run)
            wrong.append(traceback.format_exc())
    return "\n".join(wrong)


def test_arguments_models_configurations_and_loops(tmp_path):
    found = run_ranks(_all, 2, tmp_path)
    assert not any(found), "\n".join(found[::-1])


def _to_a_disk(ctx, folder):
    from deepspeed.accelerator import get_accelerator

    builder = type(get_accelerator().create_op_builder("AsyncIOBuilder"))
    with (
        mock.patch.object(builder, "is_compatible", lambda self, verbose=False: False),
        told("engines/deepspeed/library.py", "DeepSpeed cannot offload to a disk here") as it,
    ):
        _partitioned(ctx, stage=3, offload=folder)
    if any(Path(os.environ.get("TORCH_EXTENSIONS_DIR", "/nowhere")).glob("**/async_io.so")):
        _trains(*_partitioned(ctx, stage=3, offload=folder))  # as where both are installed
    return it.fix


def test_to_a_disk(tmp_path):
    for fix in run_ranks(_to_a_disk, 2, tmp_path):
        assert fix in ("apt-get install g++ libaio-dev", "")


# -- one process ---------------------------------------------------------------------------------------


def test_in_a_rehearsal():
    def body(ctx, engine="deepspeed"):
        model, optimizer, _ = _partitioned(ctx, engine=engine)

        def step():
            model(_x()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    with told("interop/deepspeed_partition.py", "check_not_pretended") as it:
        weft.rehearse(body, 4)
    assert weft.rehearse(lambda ctx: body(ctx, **_set(it)), 4)


def _on_stages(ctx):
    model, optimizer = _net(), None
    plan = [["0", "1"], ["2"]]
    model, ctx = weft.pipeline(model, ctx, loss=nn.functional.mse_loss, stages=plan, micro_batches=2)
    optimizer = _adamw(model)
    with told("interop/deepspeed_partition.py", "on other ranks") as it:
        _partitioned(ctx, model, optimizer, stage=1)
    model, optimizer, ctx = _partitioned(ctx, model, optimizer, stage=1, **_set(it))
    model(_x(), _x()).backward()
    optimizer.step()


def test_on_stages_of_a_pipeline():
    run_ranks(_on_stages, 2, mesh={"data": 1, "pipeline": 2})


def _without_a_group(ctx):
    with told("interop/deepspeed_partition.py", "needs a process group to offload") as it:
        _partitioned(ctx, offload="cpu")
    try:
        ctx = it.run(torch=torch)["ctx"]
        _trains(*_partitioned(ctx, offload="cpu"))
        ctx.close()
    finally:
        torch.distributed.destroy_process_group()


def test_offload_by_one_process():
    run_ranks(_without_a_group, 1)


PROGRAM = """
import torch, weft
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
ctx = weft.adopt(device="cpu")
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=1, engine="deepspeed")
print("partitioned")
ctx.close()
torch.distributed.destroy_process_group()
"""


def _run(**more):
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env={**os.environ, **more})


def test_another_accelerator():
    done = _run(DS_ACCELERATOR="cuda")
    it = printed("engines/deepspeed/library.py", "computes on another device", done.stderr)
    setting = it.fix.partition("  #")[0]
    assert setting == "DS_ACCELERATOR=cpu"
    assert "partitioned" in _run(**dict([setting.split("=")])).stdout


# -- folders of DeepSpeed -------------------------------------------------------------------------------


def _saved_by_deepspeed(ctx, folder):
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with mock.patch.dict(os.environ, LOCAL_RANK="0"):
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        model = _net()
        engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=config)
        for tag in ("first", "second"):
            engine.backward(engine(_x()).sum())
            engine.step()
            engine.save_checkpoint(str(folder / "run"), tag=tag)
        engine.destroy()
    dist.destroy_process_group()
    _imported(folder / "run", folder)


def _imported(run, folder):
    read, numbers = weft.interop.import_deepspeed, iter(range(99))

    def follow(it, **names):
        directory = folder / f"checkpoints-{next(numbers)}"
        it.run(directory=directory, **names)
        weft.load_weights(_net(), directory, weft.local())

    with told("interop/deepspeed_checkpoint.py", "there is no checkpoint of DeepSpeed") as it:
        read(folder / "nowhere", folder / "out")
    follow(it, path=run)
    with told("interop/deepspeed_checkpoint.py", "there is no checkpoint of DeepSpeed") as it:
        read(run, folder / "out", tag="third")
    follow(it)
    with told("interop/deepspeed_checkpoint.py", "{what} in {folder}") as it:
        read(run / "first", folder / "out")
    assert 'tag="first"' in it.fix
    follow(it)
    (file,) = (run / "second").glob("*optim_states.pt")
    state = torch.load(file, weights_only=False)
    del state["optimizer_state_dict"]["param_slice_mappings"]  # as in older versions
    torch.save(state, file)
    with told("interop/deepspeed_checkpoint.py", "{what} in {folder}") as it:
        read(run, folder / "out", tag="second")
    follow(it)
    file.write_bytes(file.read_bytes()[:100])
    with told("interop/deepspeed_checkpoint.py", "{what} in {folder}") as it:
        read(run, folder / "out")
    follow(it)
    whole = (run / "first" / file.name).read_bytes()
    (run / "first" / file.name).write_bytes(b"")
    shutil.rmtree(run / "second")
    with told("interop/deepspeed_checkpoint.py", "{what} in {folder}") as it:
        read(run, folder / "out", tag="first")
    assert it.fix == "the files of all ranks in one folder, and whole"
    (run / "first" / file.name).write_bytes(whole)
    weft.interop.import_deepspeed(run, folder / "out", tag="first")


def test_folders_of_deepspeed(tmp_path):
    run_ranks(_saved_by_deepspeed, 1, tmp_path)
