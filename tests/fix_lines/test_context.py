"""Making a context and parts of one, and what the environment says: `weft.context`, `weft.environments`."""

import ast
import contextlib
import copy
import re
import shlex
import signal
import subprocess
import threading
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.run import config_from_args, get_args_parser

import weft
import weft.cli
from tests.environments.test_environments import JSRUN, OPENMPI, PYTORCHJOB, SLURM, TPU
from tests.fix_lines.told import printed, told
from weft.context.config import read_config
from weft.context.settings import parse_mesh
from weft.environments import topology
from weft.testing import RanksFailed, fake, run_ranks


def shell(line, env=None):
    """The environment after a line of bash."""
    done = subprocess.run(
        ["bash", "-c", f"{line}; env -0"], env={"PATH": "/bin:/usr/bin", **(env or {})}, stdout=-1, check=True
    )
    return dict(each.split("=", 1) for each in done.stdout.decode().split("\0") if "=" in each)


def launched(command, env, capsys, monkeypatch, tmp_path):
    """The environment of the last rank that a command of `weft launch` starts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").touch()
    _, _, *words = shlex.split(command)
    assert weft.cli.main(["launch", "--dry-run", *words]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    return {**env, **dict(re.findall(r"([A-Z_]+)=(\S+)", last))}


# -- the environment ---------------------------------------------------------------------------------


def test_numbers_and_ports_of_the_environment(capsys, monkeypatch, tmp_path):
    at = (capsys, monkeypatch, tmp_path)
    for env in ({"RANK": "one", "WORLD_SIZE": "2"}, {"RANK": "1", "WORLD_SIZE": "two"}):
        with told("environments/facts.py", "is not a whole number") as it:
            topology(env)
        assert topology(launched(it.fix.split("`")[1], env, *at)).rank == 1
    with told("environments/facts.py", "is not a port") as it:
        topology({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"})
    assert topology(shell(it.fix, {"RANK": "0", "WORLD_SIZE": "2"})).master_port == 29500
    for env in ({"RANK": "0"}, {"WORLD_SIZE": "2"}, {"PET_NNODES": "2"}, {"TPU_WORKER_ID": "1"}, {"PMI_RANK": "1"}):
        with told("environments/facts.py", "is set, but {names[0]} is not") as it:
            topology(env)
        launch, unset = re.fullmatch(r"start the script with `(.*)`, or (unset \w+)", it.fix).groups()
        assert topology(launched(launch, env, *at)).world_size == 2
        assert topology(shell(unset, env)).world_size == 1
    with told("environments/variables.py", "contradicts itself") as it:
        topology({"RANK": "2", "WORLD_SIZE": "2"})
    assert topology(launched(it.fix.split("`")[1], {"RANK": "2", "WORLD_SIZE": "2"}, *at)).world_size == 2
    env = {**SLURM, "RANK": "0", "WORLD_SIZE": "4"}
    with told("environments/variables.py", "contradict each other") as it:
        topology(env)
    assert topology(shell(it.fix, env)).rank == 3


def test_hosts_of_schedulers():
    def gone(path):
        raise FileNotFoundError(2, "No such file or directory", path)

    def follow(line, env, **options):
        assert topology(shell(line.replace("<host of rank 0>", "node-b"), env), **options).master_addr == "node-b"

    env = {name: text for name, text in JSRUN.items() if name != "LSB_MCPU_HOSTS"}
    with told("environments/facts.py", "cannot be read") as it:
        topology(env, read_file=gone)
    follow(it.fix, env, read_file=gone)
    with told("environments/schedulers.py", "does not say where rank 0 is") as it:
        topology(env)
    follow(it.fix, env)
    env = {name: text for name, text in OPENMPI.items() if name != "MASTER_ADDR"}
    with told("environments/schedulers.py", "does not say where rank 0 is") as it:
        topology(env)
    given = dict(re.findall(r"-x (\w+)=(\S+)", it.fix))
    assert (
        topology({**env, **given, "MASTER_ADDR": shell(f"export A={given['MASTER_ADDR']}")["A"]}).master_port == 29500
    )
    env = {**SLURM, "SLURM_JOB_NODELIST": "gpu[03"}
    with told("environments/hosts.py", "SLURM node list") as it:
        topology(env)
    follow(it.fix, env)
    env = {**JSRUN, "LSB_MCPU_HOSTS": "batch3 1 h36n03"}
    with told("environments/hosts.py", "LSB_MCPU_HOSTS cannot be read") as it:
        topology(env)
    follow(it.fix, env)


def test_pods():
    env = {**PYTORCHJOB, "PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "12"}
    with told("environments/frameworks.py", "the pod asks for a launcher") as it:
        topology(env)
    command, script = re.fullmatch(r"command: \[(\w+), (.*)\]", it.fix).groups()
    ranks = {"RANK": "8", "WORLD_SIZE": "12", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "2"}
    assert command == "torchrun" and topology({**env, **ranks}).world_size == 12
    with pytest.MonkeyPatch.context() as patch:
        for name, text in env.items():
            patch.setenv(name, text)
        config, _, _ = config_from_args(get_args_parser().parse_args([script]))
        assert (config.max_nodes, config.nproc_per_node) == (3, 4)
    env = {**PYTORCHJOB, "WORLD_SIZE": "4"}
    with told("environments/frameworks.py", "of the pod contradict each other") as it:
        topology(env)
    unset, torchrun = it.fix.split(", or ")
    assert topology(shell(unset, env)).world_size == 3 and torchrun == "start torchrun in the pod"
    assert topology({**env, **ranks}).world_size == 12
    env = {**TPU, "TPU_WORKER_ID": "2"}
    with told("environments/frameworks.py", "the environment of tpu contradicts itself") as it:
        topology(env)
    same, unset = it.fix.split(", or ")
    assert same == "start every host with the same command" and topology(TPU).world_size == 2
    assert topology(shell(unset.replace(" and ", " "), env)).world_size == 1


# -- settings ----------------------------------------------------------------------------------------


def test_variables_of_weft(monkeypatch):
    monkeypatch.setenv("WEFT_SEDE", "1")
    monkeypatch.setenv("WEFT_RANK", "1")
    with told("context/settings.py", "which has no effect") as it:
        weft.start(device="cpu")
    for name in it.fix.removeprefix("unset ").split():
        monkeypatch.delenv(name)
    weft.start(device="cpu")
    for name, text in {"MESH": "data", "TIMEOUT_S": "x", "SEED": "x", "DEBUG": "x", "PROBES": "x"}.items():
        monkeypatch.setenv(f"WEFT_{name}", text)
        with told("context/settings.py", "cannot be read") as it:
            weft.start(device="cpu")
        monkeypatch.setenv(f"WEFT_{name}", shell(it.fix)[f"WEFT_{name}"])
        weft.start(device="cpu")
        monkeypatch.delenv(f"WEFT_{name}")
    for wrong in ({"timeout_s": -1}, {"seed": True}, {"probes": "some"}):
        with told("context/settings.py", "ContextError(problem, found=found, expected=expected, fix=fix)") as it:
            weft.start(device="cpu", **wrong)
        it.run()


def test_files_of_configuration(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    with told("context/config.py", "cannot be read") as it:
        weft.start(config="run.toml")
    assert weft.cli.main(shlex.split(it.fix)[1:]) == 0
    weft.start(config="run.toml", device="cpu")
    path.write_text("[start")
    with told("context/config.py", "cannot be read") as it:
        weft.start(config="run.toml")
    assert weft.cli.main(shlex.split(it.fix.removeprefix("correct it, or write another one: "))[1:]) == 0
    weft.start(config="run.toml", device="cpu")
    path.write_text("[start]\nsed = 1\nseed = 2\n[launch]\nnproc = 2\n")
    with told("context/config.py", "values that do not fit") as it:
        weft.start(config="run.toml")
    assert weft.cli.main(shlex.split(it.fix)[1:]) == 0
    assert weft.start(config="run.toml", device="cpu").seed == 2 and read_config("run.toml").launch == {"nproc": 2}
    path.write_text("[start]\nseed = 'x'\n")
    with told("context/config.py", "values that do not fit") as it:
        weft.start(config="run.toml")
    assert it.fix == "take them out, or correct them"
    for text in ("[start]\n", "[start]\nseed = 3\n"):
        path.write_text(text)
        weft.start(config="run.toml", device="cpu")


def test_meshes_and_axes():
    with told("context/settings.py", "does not fit a world of") as it:
        weft.start(mesh={"a": 3}, device="cpu")
    it.run()
    with told("context/settings.py", "names axes that are not in the mesh") as it:
        weft.start(mesh={"a": 1, "b": 1}, data_axes=["c"], device="cpu")
    weft.start(mesh={"a": 1, "b": 1}, data_axes=it.run()["data_axes"], device="cpu")
    with told("context/settings.py", "names axes that are not in the mesh") as it:
        weft.start(mesh={"a": 1}, data_axes="a", device="cpu")
    weft.start(mesh={"a": 1}, data_axes=it.run()["data_axes"], device="cpu")
    with told("context/rank_facts.py", "is not an axis of this context") as it:
        fake(0, 2).on("tensor")
    start, axis = it.fix.split(", or axis=")
    ctx = eval(start, {"weft": weft})
    assert ctx.on("tensor").axes == (("tensor", 1),) and fake(0, 2).on(eval(axis)).world_size == 2
    with told("context/start.py", "is not the outermost axis of the mesh") as it:
        weft.start(mesh={"shard": 1, "replica": -1}, elastic="replica", device="cpu")
    it.run()


# -- parts of a context ------------------------------------------------------------------------------


def test_parts_of_a_context():
    ctx = fake(0, 2)
    for world, ranks in [(ctx, [0, 5]), (weft.local(), [1])]:
        with told("context/sub_contexts.py", "cannot form a context") as it:
            world.subset(ranks)
        it.run(ctx=world)
    with told("context/sub_contexts.py", "is not a rank of this context") as it:
        ctx.only(3)
    it.run(ctx=ctx)
    with told("context/distcontext.py", "merge: the contexts belong to") as it:
        weft.local().merge(ctx)
    assert it.fix == "pass one context through all transforms instead"
    one, after = weft.replicate(nn.Linear(1, 1), weft.local())
    _, after = weft.replicate(nn.Linear(1, 1), after)
    assert len(after.applied) == 2 and after.records(one)


def test_collectives_that_are_refused():
    ctx, x = weft.local(), torch.ones(1)
    solo = ctx.only(0)
    with told("context/guards.py", "refused on a context for rank") as it:
        if solo.here:
            weft.reduce(x, solo)
    assert it.fix == "call it on the full context, outside the code for one rank"
    weft.reduce(x, ctx)
    sub = fake(1, 2).subset([0])
    with told("context/guards.py", "is not one of the ranks of the context") as it:
        weft.reduce(x, sub)
    it.run(sub=sub)
    with told("context/guards.py", "the context {state}") as it:
        weft.reduce(x, fake(1, 2))
    exec(it.fix.replace("...", "weft.reduce(x, ctx)"), {"weft": weft, "x": x})
    ctx = fake(1, 2)
    ctx.close()
    with told("context/guards.py", "the context {state}") as it:
        weft.reduce(x, ctx)
    with weft.start(device="cpu") as ctx:
        assert it.fix == "call it inside of `with weft.start() as ctx:`, before ctx.close()"
        weft.reduce(x, ctx)
        ctx.close()


# -- devices -----------------------------------------------------------------------------------------


def _elsewhere(kind, dtype=torch.float32):
    """A module on an accelerator that may not be there, and what lets its tensors be moved."""
    mode, module = FakeTensorMode(), nn.Module()
    value = torch._subclasses.FakeTensor(mode, torch.empty(2, device="meta", dtype=dtype), torch.device(kind))
    module.register_buffer("table", value)
    return module, mode


def test_modules_and_optimizers_on_devices():
    ctx = weft.local()
    with told("context/placement.py", "is not on {ctx.device}") as it:
        weft.to_device(nn.Linear(2, 2, device="meta"), ctx)
    assert it.fix == "build the module on a real device"
    weft.to_device(nn.Linear(2, 2), ctx)
    module, mode = _elsewhere("cuda:0")
    with told("context/placement.py", "is not on {ctx.device}") as it:
        weft.to_device(module, ctx)
    with mode:
        it.run(module=module)
    weft.to_device(module, ctx)
    module, mode = _elsewhere("mps:0", torch.float64)
    mps = replace(ctx, device=torch.device("mps"))
    with told("context/placement.py", "mps has no float64") as it:
        weft.to_device(module, mps)
    with mode:
        it.run(module=module)
    weft.to_device(module, mps)
    module, meta = nn.Linear(2, 2), replace(ctx, device=torch.device("meta"))  # stands for an accelerator
    with told("context/placement.py", "the optimizer's parameters are not on") as it:
        weft.to_device(torch.optim.SGD(module.parameters()), meta)
    module = it.run(module=module, ctx=meta)["module"]
    weft.to_device(torch.optim.SGD(module.parameters()), meta)


# -- preemption --------------------------------------------------------------------------------------


def test_preemption():
    loader, found = [1, 2, 3], []

    def elsewhere():
        with told("context/preemption.py", "on_preemption: cannot watch") as it:
            weft.on_preemption(ctx)
        found.append(it)

    with weft.local() as ctx:
        with told("context/preemption.py", "on_preemption: cannot watch") as it:
            weft.on_preemption(ctx, signals=[])
        it.run(ctx=ctx, signal=signal)
    with weft.local() as ctx:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        preempted = found[0].run(ctx=ctx)["preempted"]
        with told("context/preemption.py", "a signal is already being watched") as it:
            weft.on_preemption(ctx)
        it.run(preempted=preempted)
        exec(f"{it.fix.partition(' or: ')[2]}\n    pass", {"weft": weft, "ctx": ctx})
    with (
        weft.on_preemption(weft.local()) as preempted,
        told("context/preemption.py", "and before that after step") as it,
    ):
        for _ in range(2):
            for step, _ in enumerate(loader):
                preempted(step)
    asked = []
    with weft.on_preemption(weft.local()) as preempted:
        names = {"loader": loader, "preempted": preempted, "asked": asked}
        loop = it.fix.replace("...", "asked.append((step, preempted(step)))")
        exec(f"for epoch in range(2):\n    {loop}", names)
    assert asked == [(step, False) for step in range(6)]


# -- groups of others --------------------------------------------------------------------------------


@contextlib.contextmanager
def own_group(**options):
    """A program that initialises torch.distributed itself, with one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_groups_that_are_adopted():
    with told("context/start.py", "engine is not an engine") as it:
        weft.start(engine="torch")
    with eval(it.fix, {"weft": weft}) as ctx:
        assert ctx.world_size == 1
    with told("context/start.py", "there is no process group to adopt") as it:
        weft.adopt()
    it.run()
    with own_group(), told("context/settings.py", "adopt: the process group already exists") as it:
        weft.adopt(device="cpu", timeout_s=5)
    first, second = it.fix.split(", or let ")
    assert first == "pass them to torch.distributed.init_process_group" and second == "weft.start() make the group"
    with own_group(timeout=timedelta(seconds=5)):
        weft.adopt(device="cpu", timeout_s=5)
    weft.start(device="cpu", timeout_s=5)
    with own_group():
        with told("context/start.py", "the axes of the mesh have no names") as it:
            weft.adopt(dist.init_device_mesh("cpu", (1, 1)), device="cpu")
        line = it.fix.replace("...", '"cpu", (1, 1)')
        assert weft.adopt(eval(line, {"init_device_mesh": dist.init_device_mesh}), device="cpu").axes[0] == (
            "replica",
            1,
        )


def _ranks_disagree(ctx):
    group = dist.new_group([0], backend="gloo")
    if ctx.rank == 1:
        with told("context/start.py", "this process is not a member of the group") as it:
            weft.adopt(group, device="cpu")
        it.run(group=group, dist=dist)
    else:
        weft.adopt(group, device="cpu")
    mesh = DeviceMesh("cpu", [0])
    if ctx.rank == 1:
        with told("context/start.py", "this process is not in the mesh") as it:
            weft.adopt(mesh, device="cpu")
        it.run(mesh=mesh)
    else:
        assert weft.adopt(mesh, device="cpu").world_size == 1
    with told("peers/agreement.py", "compare(what, entries, fix=fix)") as it:
        ctx.agree("my_transform", {"width": 8 + ctx.rank})
    with told("peers/agreement.py", "the ranks do not agree") as same:
        ctx.agree("my_transform", {"width": 8 + ctx.rank})
    assert it.fix == same.fix == "compute these values from arguments that are equal on all ranks"
    ctx.agree("my_transform", {"width": 8})
    with told("peers/agreement.py", "the ranks do not agree") as it:
        if ctx.is_main:
            weft.barrier(ctx)
        else:
            ctx.agree("my_transform")
    assert it.fix == "call barrier and my_transform on all ranks, without `if ctx.is_main:` around it"
    weft.barrier(ctx)
    ctx.agree("my_transform")
    short = weft.adopt(dist.new_group([0, 1], timeout=timedelta(seconds=4), backend="gloo"), device="cpu")
    with told("peers/agreement.py", "did not arrive") as it:
        if ctx.is_main:
            weft.barrier(short)
        else:
            time.sleep(6)
            weft.barrier(short)
    if ctx.is_main:
        assert it.fix == (
            "call barrier on all ranks, without `if ctx.is_main:` around it; or raise start(timeout_s=...)"
        )
    weft.barrier(weft.adopt(dist.new_group([0, 1], timeout=timedelta(seconds=60), backend="gloo"), device="cpu"))
    longer = weft.adopt(dist.new_group([0, 1], timeout=timedelta(seconds=60), backend="gloo"), device="cpu")
    time.sleep(2 * ctx.rank)
    weft.barrier(longer)


def _kinds_of_tensors(ctx):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model, ctx = weft.fully_shard(model, ctx, ignored=["0"])
    model(torch.ones(1, 2)).sum().backward()
    with told("engines/torch_errors.py", "torch computes with tensors of one kind") as it, weft.adopt(device="cpu"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    norm, full, term, decay = re.fullmatch(
        r"(.*), or max_value=, before optimizer.step\(\); (.*) for parameters; (.*) for each term .*, "
        r"or (weight_decay=) of an optimizer",
        it.fix,
    ).groups()
    for line in (norm, norm.replace("max_norm=", "max_value=")):
        exec(line, {"weft": weft, "model": model, "ctx": ctx})
    with eval(full, {"weft": weft, "model": model, "ctx": ctx}):
        assert sum(p.square().sum() for p in model.parameters()) > 0
    penalty, own = model[1].weight.square().sum(), model[0].weight.square().sum()
    (model(torch.ones(1, 2)).sum() * 0 + own + eval(term, {"penalty": penalty})).backward()
    torch.optim.SGD(model.parameters(), **{decay[:-1]: 0.1}).step()


class _Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Conv1d(1, 2, 2)

    def features(self, x):
        return self.inner(x).tanh()

    def describe(self, x):
        return self.features(x).mean(1)

    def forward(self, x):
        return self.features(x).sum()


def _kinds_in_a_method_and_a_follower(ctx):
    torch.manual_seed(0)
    x, whole = torch.linspace(-1, 1, 8).view(2, 1, 4), _Encoder()
    student, here = weft.fully_shard(copy.deepcopy(whole), ctx)
    student(x).backward()  # until the first call, calls of parts are refused in another way
    with told("engines/torch_errors.py", "torch computes with tensors of one kind") as it, weft.adopt(device="cpu"):
        with torch.no_grad():
            student.describe(x)
    listed = it.run(model=copy.deepcopy(whole), ctx=ctx)["model"]
    loop = it.fix.rpartition("such as generation: ")[2].replace("...", "found = model.describe(x)")
    names = {"weft": weft, "model": student, "ctx": here, "x": x}
    with torch.no_grad():
        exec(loop, names)
        assert torch.equal(listed.describe(x), whole.describe(x)) and torch.equal(names["found"], whole.describe(x))
        assert "; or call the model; " in it.fix and torch.equal(student(x), whole(x))

    @torch.no_grad()
    def follow(teacher, weights):
        for p, q in zip(teacher, weights, strict=True):
            p.mul_(0.5).add_(q, alpha=0.25)

    with told("engines/torch_errors.py", "torch computes with tensors of one kind") as it, weft.adopt(device="cpu"):
        follow(copy.deepcopy(whole).parameters(), student.parameters())
    assert "weft.average_weights" in it.fix
    teacher = it.run(teacher=copy.deepcopy(whole), ctx=ctx)["teacher"]
    follow(teacher.parameters(), student.parameters())
    for p, q in zip(teacher.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(p.full_tensor(), 0.75 * q)
    state = it.fix.rpartition("; ")[2].partition(" in an optimizer")[0]
    for p in student.parameters():
        names = {"torch": torch, "p": p}
        exec(state, names)
        follow([names["state"]], [p])


def _settings_drift(ctx, lr):
    model, ctx = weft.replicate(nn.Linear(2, 2), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.param_groups[0]["lr"] = lr[ctx.rank] if step == 1 else 0.1
        optimizer.step()
        optimizer.zero_grad()


def _gradients_drift(ctx, limit):
    model, ctx = weft.replicate(nn.Linear(2, 2), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        loss = model(torch.ones(1, 2)).sum() + ctx.rank
        loss.backward()
        if eval(limit, {"weft": weft, "loss": loss, "ctx": ctx}) > 0.5:
            model.weight.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()


def _save(ctx, folder, on):
    model, ctx = weft.replicate(nn.Linear(2, 2), ctx)
    state, ctx = weft.checkpointable({"model": model}, ctx)
    weft.reduce(torch.ones(1), ctx)  # which asks for its shape once
    if ctx.rank in on:
        weft.save(state, folder, 1, ctx)
    weft.reduce(torch.ones(1), ctx)


@pytest.mark.slow
def test_ranks_that_disagree(tmp_path):
    run_ranks(_ranks_disagree, 2)
    run_ranks(_kinds_of_tensors, 2)
    run_ranks(_kinds_in_a_method_and_a_follower, 2)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_settings_drift, 2, [0.1, 0.2])
    it = printed("peers/ledger.py", "compare(f'{self._name}: {what}'", str(caught.value.errors[1]))
    assert it.fix.startswith("the same learning rate and model.train() on all ranks;")
    run_ranks(_settings_drift, 2, [0.2, 0.2])
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_gradients_drift, 2, "ctx.rank")
    it = printed("engines/torch/steps/watch.py", "weights before", str(caught.value.errors[1]))
    run_ranks(_gradients_drift, 2, it.fix.partition(" where a loss decides")[0])
    with pytest.raises(RanksFailed) as caught:
        run_ranks(_save, 2, tmp_path, [0])
    it = printed("peers/straggler_watch.py", "did not call it", str(caught.value.errors[0]))
    assert it.fix.startswith("call save on all ranks: no `if ctx.is_main:` around it, ")
    run_ranks(_save, 2, tmp_path, [0, 1])


# -- pretended ranks ---------------------------------------------------------------------------------


class _Parts:
    axes = ("context",)


@weft.transform(before={"fully_shard"})
def in_parts(module, ctx):
    return module, ctx.offering(_Parts())


def _apart(ctx):
    module, ctx = in_parts(nn.Linear(4, 4), ctx)
    module, ctx = weft.fully_shard(module, ctx)
    return lambda: module(torch.ones(1, 4)).sum().backward()


def _other_mesh(ctx):
    with weft.start(mesh={"data": 2, "tensor": 2}, device="cpu") as ctx:
        return lambda: ctx.axes


_SCRIPT = """
import torch, weft
with weft.start({}) as ctx:
    model, ctx = weft.replicate(torch.nn.Linear(1, 1), ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_programs_of_pretended_ranks(tmp_path):
    with told("context/sub_contexts.py", "of the mesh are not adjacent") as it:
        weft.rehearse(_apart, 8, mesh={"data": 2, "tensor": 2, "context": 2})
    mesh = ast.literal_eval(it.fix.removeprefix("weft.start(mesh=").removesuffix(")"))
    assert weft.rehearse(_apart, 8, mesh=mesh).mesh == (("data", 2), ("context", 2), ("tensor", 2))
    with told("context/start.py", "start: the rehearsal has a different mesh") as it:
        weft.rehearse(_other_mesh, 4)
    call, option = it.fix.split(", or --mesh ")
    found = eval(call, {"weft": weft, "program": _other_mesh, "ranks": 4})
    assert dict(found.mesh) == parse_mesh(option) == {"data": 2, "tensor": 2}
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT.format('elastic="replica"'))
    with told("context/start.py", "start: an elastic job") as it:
        weft.cli.main(["rehearse", "--ranks", "4", str(script)])
    script.write_text(_SCRIPT.format(it.fix.removeprefix("weft.start(").removesuffix(")")))
    assert weft.cli.main(["rehearse", "--ranks", "4", str(script)]) == 0
