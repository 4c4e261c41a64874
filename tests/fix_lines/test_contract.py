"""Rules of transforms, parts of modules, and tensors: `weft.contract` and `weft.tensors`."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import weft
from tests.fix_lines.told import told
from weft.testing import run_ranks


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def trains(model, *optimizers):
    """A step of training."""
    model(torch.ones(2, 4)).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


# -- what a transform is ---------------------------------------------------------------------------


def test_a_transform_is_called_wrongly():
    model, ctx = net(), weft.local()
    with told("contract/transform.py", "{name}: {problem}") as it:
        weft.with_precision(model, ctx, polcy="bf16")
    it.run(module=model, ctx=ctx, policy="bf16")
    with told("contract/transform.py", "check_context(name") as it:
        weft.accumulate_grads(net(), [torch.ones(2, 4)] * 4, None, steps=2)
    found = it.run(modules=net(), loader=[torch.ones(2, 4)] * 4, ctx=ctx)
    assert len(next(iter(found["loader"]))) == 2
    both = weft.replicate(net(), ctx)
    with told("contract/transform.py", "was not unpacked") as it:
        weft.accumulate_grads(both, [torch.ones(2, 4)] * 4, ctx, steps=2)
    trains(it.run(module=net(), ctx=ctx)["module"])


def test_a_transform_breaks_a_rule():
    with told("contract/transform.py", "takes no context after its objects") as it:

        @weft.transform()
        def scaled(module, by):
            return module

    weft.transform()(it.run(__name__=__name__)["scaled"])

    @weft.transform()
    def frozen(module, ctx):
        return module.requires_grad_(requires_grad=False)

    with told("contract/transform.py", "a transform returns its objects") as it:
        frozen(net(), weft.local())

    # `def frozen(module, ctx): ...; return module, ctx`
    names = {"__name__": __name__}
    exec(f"def frozen(module, ctx):\n    {it.fix}", names)
    _, ctx = weft.transform()(names["frozen"])(net(), weft.local())

    @weft.transform()
    def doubled(module, ctx):
        return nn.Sequential(module, module), ctx

    with told("contract/transform.py", "changed the {what} of the module") as it:
        doubled(net(), ctx)
    assert it.fix == "return the same module from doubled, with hooks instead of wrappers"

    @weft.transform()
    def doubled(module, ctx):
        module.register_forward_hook(lambda module, args, result: 2 * result)
        return module, ctx

    doubled(net(), ctx)


def test_transforms_are_combined_wrongly():
    ctx = weft.local()
    model, once = weft.replicate(net(), ctx)
    with told("contract/transform.py", "already has this transform") as it:
        weft.replicate(model, once)
    assert it.fix == "leave one of the two calls of replicate out"
    with told("contract/transform.py", "cannot be combined with {other.name} on one") as it:
        weft.fully_shard(model, once)
    assert it.fix == "leave replicate or fully_shard out"
    weft.fully_shard(net(), ctx)
    with told("contract/transform.py", "comes too late, after {other.name}") as it:
        weft.with_precision(model, once, "bf16")
    assert it.fix == "move the call of with_precision before that of replicate"
    weft.replicate(*weft.with_precision(net(), ctx, "bf16"))


def test_the_context_of_a_transform_is_dropped():
    ctx, loader = weft.local(), [torch.ones(2, 4)] * 4
    model, _ = weft.with_precision(net(), ctx, "bf16")
    with told("contract/marks.py", "the context does not know") as it:
        weft.accumulate_grads(model, loader, ctx, steps=2)
    assert it.fix == "module, ctx = weft.with_precision(module, ctx, policy='bf16')  # pass this ctx on"
    found = it.run(module=net(), ctx=ctx)
    model, loader, ctx = weft.accumulate_grads(found["module"], loader, found["ctx"], steps=2)
    with told("contract/marks.py", "the context does not know") as it:
        weft.undo(model, found["ctx"])
    assert it.fix == "modules, loader, ctx = weft.accumulate_grads(modules, loader, ctx, steps=2)  # pass this ctx on"
    assert weft.undo(model, ctx)[1].applied == ()


def test_two_functions_decide_when_to_communicate():
    model, ctx = weft.replicate(net(), weft.local())
    with told("contract/no_sync.py", "check_module") as it, weft.contract.no_sync([model], ctx):
        pass
    it.run(model=model, ctx=ctx)
    windows, loader, ctx = weft.accumulate_grads(model, [torch.ones(2, 4)] * 4, ctx, steps=2)
    with told("contract/no_sync.py", "accumulate_grads decides") as it, weft.contract.no_sync(windows, ctx):
        pass
    assert "# without no_sync" in it.fix
    it.run(loader=loader)


# -- parts of a module -----------------------------------------------------------------------------


class Blocks(nn.Module):
    def __init__(self, part=lambda: nn.Linear(4, 4)):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(part(), nn.ReLU()) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def chosen(fix):
    """What a line chooses that says what to choose: the words in quotes."""
    return fix.split('"')[1::2]


def test_parts_are_chosen_wrongly():
    ctx = weft.local()
    with told("contract/select_modules.py", "chosen parts are nested") as it:
        weft.recompute(Blocks(), ctx, blocks=["blocks.*", nn.Linear])
    for one in chosen(it.fix):
        weft.recompute(Blocks(), ctx, blocks=one)
    for model in (Blocks(), nn.ModuleDict({"blocks": nn.ModuleList(nn.ModuleList([net()]) for _ in range(2))})):
        with told("contract/select_modules.py", "chosen parts are never called") as it:
            weft.recompute(model, ctx, blocks="blocks")
        weft.recompute(model, ctx, blocks=eval(it.fix))
    with told("contract/select_modules.py", "chooses no parts of a module") as it:
        weft.fully_shard(Blocks(), ctx, ignored=1.5)
    weft.fully_shard(Blocks(), ctx, ignored=eval(it.fix))
    with told("contract/select_modules.py", "no part of") as it:
        weft.recompute(Blocks(), ctx, blocks="layers.*")
    for one in chosen(it.fix):
        weft.recompute(Blocks(), ctx, blocks=one)
    with told("contract/select_modules.py", "no part of") as it:
        weft.recompute(model := nn.Linear(4, 4), ctx, blocks=nn.Linear)
    assert it.fix == "the module itself"
    weft.recompute(model, ctx, blocks=model)
    with told("checks.py", "have no shape yet") as it:
        weft.recompute(model := Blocks(lambda: nn.LazyLinear(4)), ctx, blocks=10)
    it.run(model=model, example_batch=torch.ones(2, 4))
    weft.recompute(model, ctx, blocks=10)


# -- modules that a strategy cannot take -----------------------------------------------------------


def test_a_module_is_not_fit_for_a_strategy():
    ctx = weft.local()
    with told("contract/module_checks.py", "methods = {list(methods)} cannot be used") as it:
        weft.replicate(net(), ctx, methods=["forward"])
    eval(it.fix.replace("...", "net(), ctx"), {"weft": weft, "net": net, "ctx": ctx})
    with told("contract/module_checks.py", "already reduces these gradients") as it:
        weft.replicate(nn.Sequential(nn.DataParallel(net())), ctx)
    assert it.fix == "leave DataParallel(...) out"
    weft.replicate(nn.Sequential(net()), ctx)


def test_parts_of_a_module_are_streamed(tmp_path):
    with weft.weights.on_meta():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    plain, ctx = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), weft.local()
    state, _ = weft.checkpointable({"model": plain}, ctx)
    path = weft.save(state, tmp_path, 1, ctx)
    model, ctx = weft.place(model, ctx, {"cpu": "20KB", "disk": None}, weights=path)
    with told("contract/module_checks.py", "are streamed") as it:
        weft.full_params(model, ctx)
    model, ctx = (found := it.run(model=model, ctx=ctx))["model"], found["ctx"]
    eval(it.fix.partition(" was on meta: ")[2], {"weft": weft, "model": model, "path": path, "ctx": ctx})
    with weft.full_params(model, ctx):
        assert torch.equal(model[1].weight, plain[1].weight)


class Parts:
    """The ranks along an axis see other parts of one batch, as with context parallelism."""

    axes = ("context",)


@weft.transform(before={"replicate"})
def in_parts(module, ctx):
    return module, ctx.offering(Parts())


def leave_axes_out(ctx):
    names = {"weft": weft, "ctx": ctx, "model": net()}
    with told("contract/module_checks.py", "where gradients would not be averaged") as it:
        weft.replicate(net(), ctx, axis="shard")
    first, _, second = it.fix.partition(", or ")
    eval(first.replace("...", "model, ctx"), names)
    ctx = eval(second.partition(" for ")[0].replace("...", "mesh={'replica': 2, 'shard': 1}"), names)
    weft.replicate(net(), ctx, axis="shard")
    ctx = weft.start(mesh={"data": 1, "context": 2})
    model, ctx = in_parts(net(), ctx)
    with told("contract/module_checks.py", "where gradients would not be averaged") as it:
        weft.replicate(model, ctx, axis="data")
    assert it.fix == "weft.replicate(...) without axis: by default over all of them"
    trains(weft.replicate(model, ctx)[0])


def share_parameters_twice(ctx):
    model, optimizer, after = local_steps(ctx)
    with told("contract/module_checks.py", "local_steps averages parameters along") as it:
        weft.fully_shard(model, after, rebind=optimizer)
    model, optimizer, after = local_steps(it.run()["ctx"], axis="replica")
    model, after = weft.fully_shard(model, after, axis="shard", rebind=optimizer)
    trains(model, optimizer)
    model = nn.Sequential(net(), net())
    weft.replicate(model[0], ctx)
    with told("contract/module_checks.py", "sharded or replicated module") as it:
        weft.fully_shard(model, ctx)
    assert it.fix == "call weft.fully_shard once, on the whole model"
    model = nn.Sequential(net(), net())
    trains(weft.fully_shard(model, ctx)[0])


def local_steps(ctx, **options):
    model = net()
    return weft.local_steps(model, torch.optim.AdamW(model.parameters()), ctx, every=2, **options)


def cut_over_the_wrong_ranks(ctx):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(net(), ctx.mesh["data"], plan)
    with told("contract/module_checks.py", "are DTensors over {listed(") as over_data:
        weft.fully_shard(model, ctx)
    model = parallelize_module(net(), DeviceMesh("cpu", [1, 0]), plan)
    with told("contract/layout.py", "which form no axis of the context") as over_none:
        weft.fully_shard(model, ctx)
    for it in (over_data, over_none):
        found = it.run(parallelize_module=parallelize_module, model=net(), plan=plan)
        trains(weft.fully_shard(found["model"], found["ctx"])[0])


@pytest.mark.slow
def test_ranks_hold_a_module_in_two_ways():
    run_ranks(leave_axes_out, 2, mesh={"replica": 2, "shard": 1})
    run_ranks(share_parameters_twice, 2)
    run_ranks(cut_over_the_wrong_ranks, 2)


def partitioned(ctx, **options):
    model = net()
    return weft.zero_partition(model, torch.optim.SGD(model.parameters(), 0.1), ctx, engine="deepspeed", **options)


def deepspeed_keeps_parameters(ctx):
    model, optimizer, after = partitioned(ctx, stage=3)
    with told("contract/module_checks.py", "cannot be combined with {mark.record.name}") as it:
        weft.average_weights(model, after)
    model = net()
    found = it.run(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), ctx=ctx)
    weft.average_weights(model, found["ctx"])
    trains(model, found["optimizer"])
    model, after = weft.tensor_parallel(
        net(), weft.start(mesh={"data": 1, "tensor": 2}), plan={"0": "column", "2": "row"}
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with told("contract/module_checks.py", "are DTensors sharded over another axis") as it:
        weft.zero_partition(model, optimizer, after, stage=2, engine="deepspeed")
    line = it.fix.replace("...", "model, optimizer, ctx, stage=2")
    eval(line, {"weft": weft, "model": model, "optimizer": optimizer, "ctx": after})
    trains(model, optimizer)


def deepspeed_keeps_gradients(ctx):
    model, optimizer, ctx = partitioned(ctx, stage=2)
    trains(model)
    with told("tensors/sharded_grad.py", "lies in pieces on all ranks") as it:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    clip, _, read = it.fix.removesuffix(" to read them").partition(", or ")
    names = {"weft": weft, "model": model, "ctx": ctx}
    eval(clip, names)
    assert eval(read, names)["0.weight"].norm() > 0
    optimizer.step()
    with told("tensors/sharded_grad.py", "was used by optimizer.step()") as it:
        weft.clip_grads(model, ctx, max_norm=1.0)
    with told("tensors/sharded_grad.py", "a second backward pass adds") as again:
        sum(p.square().sum() for p in model.parameters()).backward()
    again.run(optimizer=optimizer)
    sum(p.square().sum() for p in model.parameters()).backward()
    it.run(model=model, ctx=ctx)
    optimizer.step()


@pytest.mark.deepspeed
def test_deepspeed_keeps_parameters_and_gradients():
    run_ranks(deepspeed_keeps_parameters, 2)
    run_ranks(deepspeed_keeps_gradients, 2)


# -- tensors ---------------------------------------------------------------------------------------


class Rows:
    """A batch that is no tensor."""

    def __init__(self, rows):
        self.batch_size = torch.Size([len(rows)])

    def __getitem__(self, rows):
        raise TypeError("not a part of it")


def test_a_batch_cannot_be_without_rows():
    ctx = weft.testing.fake(1, 2)
    loader, _ = weft.shard_data(DataLoader(range(5), batch_size=2, collate_fn=Rows), ctx, uneven="empty")
    with told("tensors/nested.py", "a batch without rows") as it:
        list(loader)
    loader = it.run(loader=DataLoader(range(5), batch_size=2, collate_fn=Rows), ctx=ctx)["loader"]
    assert [ids.valid.tolist() for _, ids in loader] == [[True, True], [False, False]]


def staged(ctx):
    model, ctx = weft.pipeline(net(), ctx, micro_batches=2)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, ctx


def another_stage_is_read(ctx, folder):
    for follow in range(3):
        model, optimizer, after = staged(ctx)
        with told("tensors/remote_parameter.py", "numbers are read that another rank has") as it:
            torch.stack([p.norm() for p in model.parameters()]).norm().item()
        line = it.fix.splitlines()[follow].strip()
        exec(line, names := {"weft": weft, "model": model, "ctx": after, "optimizer": optimizer})
        if follow == 1:
            assert torch.stack([p.norm() for p in eval(line.partition("  #")[0], names)]).norm() > 0
        if follow == 2:
            assert torch.stack([p.norm() for p in model.parameters()]).norm() > 0
    x, options = torch.ones(4, 4), {"loss": nn.functional.mse_loss, "micro_batches": 2}
    model, _ = weft.pipeline(net(), ctx, **options)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.AdamW(model.parameters())
    with told("tensors/remote_parameter.py", "are looked at") as it:
        scaler.scale(model(x, x)).backward()
        scaler.step(optimizer)
    names = it.run(model=net(), ctx=ctx)
    model, _ = weft.pipeline(names["model"], names["ctx"], **options)
    model(x, x).backward()
    torch.optim.AdamW(model.parameters()).step()
    model, optimizer, after = staged(ctx)
    with told("tensors/remote_parameter.py", "cannot be pickled") as it:
        torch.save(model.state_dict(), folder / f"{ctx.rank}.pt")
    state, saving = weft.checkpointable({"model": model}, after)
    directory = folder / "saved"
    eval(it.fix.partition("# or ")[2], {"weft": weft, "state": state, "directory": directory, "step": 1, "ctx": saving})
    it.run(model=model, ctx=after, optimizer=optimizer)
    torch.save(model.state_dict(), folder / f"{ctx.rank}.pt")


@pytest.mark.slow
def test_another_stage_is_read(tmp_path):
    run_ranks(another_stage_is_read, 2, tmp_path, mesh={"pipeline": 2})
