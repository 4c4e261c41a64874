"""What runs on XLA, in a process of its own: `python xla_cases.py single` or `mesh`; prints one line of JSON per case.

Whether the devices of a process are one mesh is decided once, when it begins; test_xla.py starts one for each.
"""

# ruff: noqa: PLW2901  (`with weft.start() as ctx`, then `model, ctx = ...`, as a user writes it)

import copy
import itertools
import json
import sys
import tempfile
import traceback
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft

STEPS = 20


class Net(nn.Module):
    """Blocks that can be computed again, a norm, a tied weight."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2))
        )
        self.back, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 4)
        self.back.weight = self.blocks[0][0].weight

    def forward(self, x):
        return self.last(self.back(self.blocks(self.first(x))))


def net(dropout=0.0):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Net(dropout)


def data(batches, batch=8, more=0):
    draw = torch.Generator().manual_seed(2)
    rows = batches * batch + more
    return DataLoader(
        TensorDataset(torch.randn(rows, 8, generator=draw), torch.randn(rows, 4, generator=draw)), batch_size=batch
    )


def adamw(model):
    return torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.1)


def mse(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def train(model, optimizer, windows, *, clip=None, seen=None, schedule=None):
    """The loop of the user, with nothing of XLA in it; also in plain torch."""
    losses = []
    for window in windows:
        total = 0.0
        for batch in window:
            loss = mse(model, batch) / len(window)
            loss.backward()
            total = total + loss.detach()
        if clip is not None:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        losses.append(total)
        if seen is not None:
            seen()
    return [float(loss) for loss in losses]


def windows_of(loader, steps):
    batches = list(loader)
    return [batches[at : at + steps] for at in range(0, len(batches), steps)]


def plain(loader, steps=1, clip=None, optimizer=adamw, model=None):
    """The truth: plain torch, one process."""
    model = net() if model is None else model
    losses = train(model, optimizer(model), windows_of(loader, steps), clip=clip)
    return losses, model


def difference(model, reference):
    return max(
        float((a.detach().cpu() - b.detach()).abs().max())
        for a, b in zip(model.parameters(), reference.parameters(), strict=True)
    )


def apart(losses, others):
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))


def counted():
    import torch_xla.debug.metrics as metrics

    found = metrics.metric_data("CompileTime")
    return 0 if found is None else found[0]


def executed():
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as metrics

    xm.wait_device_ops()
    found = (metrics.metric_data(name) for name in ("ExecuteTime", "ExecuteReplicatedTime"))
    return sum(0 if data is None else data[0] for data in found)


def on_xla(loader, *, steps=1, policy=None, recompute=False, strategy=None, clip=None, optimizer=adamw, mesh=None):
    """The same with weft; also how many graphs were compiled by each step."""
    compiles = []
    with weft.start(device="xla", mesh=mesh) as ctx:
        loader, ctx = weft.shard_data(loader, ctx)
        model = net()
        if policy is not None:
            model, ctx = weft.with_precision(model, ctx, policy)
        if recompute:
            model, ctx = weft.recompute(model, ctx, blocks="blocks.*")
        early = optimizer(model)  # before the parameters move: they stay the same objects
        if strategy == "replicate":
            model, ctx = weft.replicate(model, ctx)
        elif strategy == "fully_shard":
            model, ctx = weft.fully_shard(model, ctx, rebind=early)
        elif strategy is not None:
            model, early, ctx = weft.zero_partition(model, early, ctx, stage=strategy)
        else:
            weft.to_device(model, ctx)
        model, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps)
        cut = None if clip is None else lambda model: clip(model, ctx)
        before = executed()
        losses = train(model, early, windows, clip=cut, seen=lambda: compiles.append(counted()))
        compiles.append(executed() - before)
        assert model.back.weight is model.blocks[0][0].weight
        assert list(model.state_dict()) == list(net().state_dict())
    return losses, model, early, compiles[:-1], compiles[-1]


def compared(loader, *, steps=1, clip=None, plain_clip=None, optimizer=adamw, **options):
    losses, model, _, compiles, executions = on_xla(loader, steps=steps, clip=clip, optimizer=optimizer, **options)
    expected, reference = plain(loader, steps, plain_clip, optimizer)
    return {
        "steps": len(losses),
        "weights": difference(model, reference),
        "losses": apart(losses, expected),
        "compiled after step 2": compiles[-1] - compiles[1],
        "executed": executions,
        "compiled by step": [b - a for a, b in itertools.pairwise(compiles)],
    }


def clip_torch(model, *_):
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_weft(model, ctx):
    weft.clip_grads(model, ctx, max_norm=0.1)


def shares(tensors):
    """Bytes on each device, of bytes altogether."""
    import torch_xla

    pieces = [torch_xla._XLAC._get_local_shards([t.detach()])[0] for t in tensors]
    whole = sum(t.numel() for t in tensors)
    return [sum(part[device][0].numel() for part in pieces) / whole for device in range(len(pieces[0]))]


def state_of(optimizer):
    return [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.dim()]


# -- one device ----------------------------------------------------------------------------------------


def single_plain():
    return compared(data(STEPS))


def single_accumulation():
    return compared(data(4 * STEPS - 2), steps=4)


def single_ragged_batch():
    return compared(data(STEPS - 1, more=3))


def single_bf16():
    return compared(data(STEPS), policy="bf16")


def single_clipping():
    found = compared(data(STEPS), clip=clip_torch, plain_clip=clip_torch)
    ours = compared(data(STEPS), clip=clip_weft, plain_clip=clip_torch)
    return {**found, "by weft": ours["weights"], "weft compiled": ours["compiled after step 2"]}


def single_recompute():
    found = compared(data(STEPS), recompute=True)
    low = compared(data(STEPS), recompute=True, policy="bf16")
    return {**found, "bf16": low["weights"]}


def single_recompute_draws_the_same():
    """Gradients with dropout, computed twice, against those of one forward pass."""
    found = []
    for recompute in (False, True):
        with weft.start(device="xla", seed=5) as ctx:
            model = net(dropout=0.5)
            if recompute:
                model, ctx = weft.recompute(model, ctx, blocks="blocks.*")
            model, ctx = weft.replicate(model, ctx)
            batch = weft.to_device(next(iter(data(1))), ctx)
            mse(model, batch).backward()
            found.append([p.grad.cpu() for p in model.parameters()])
    different = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
    return {"gradients": different, "some": max(float(g.abs().max()) for g in found[0])}


def single_schedule():
    """A learning rate that differs in every step compiles nothing new."""
    compiles = []
    with weft.start(device="xla") as ctx:
        loader, ctx = weft.shard_data(data(STEPS), ctx)
        model, ctx = weft.replicate(net(), ctx)
        optimizer = adamw(model)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=STEPS)
        windows = ([batch] for batch in loader)
        train(model, optimizer, windows, schedule=schedule, seen=lambda: compiles.append(counted()))
    reference = net()
    optimizer = adamw(reference)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, total_iters=STEPS)
    train(reference, optimizer, windows_of(data(STEPS), 1), schedule=schedule)
    return {"weights": difference(model, reference), "compiled after step 2": compiles[-1] - compiles[1]}


def single_evaluation():
    """Without gradients nobody steps: each batch is a graph of its own, and the same one."""
    compiles, losses = [], []
    with weft.start(device="xla") as ctx, torch.no_grad():
        loader, ctx = weft.shard_data(data(10), ctx)
        model, ctx = weft.replicate(net(), ctx)
        for batch in loader:
            losses.append(mse(model, batch))
            compiles.append(counted())
        values = [float(loss) for loss in losses]
    expected = [float(mse(net(), batch).detach()) for batch in data(10)]
    return {"losses": apart(values, expected), "compiled": compiles[-1] - compiles[2]}


def single_seeds():
    with weft.start(device="xla", seed=7) as ctx:
        one = torch.rand(4, device=ctx.device).tolist()
        weft.rng.set_seed(7, ctx)
        two = torch.rand(4, device=ctx.device).tolist()
        torch.manual_seed(7)
        three = torch.rand(4, device=ctx.device).tolist()
    with weft.start(device="xla", seed=7) as ctx:
        four = torch.rand(4, device=ctx.device).tolist()
    with weft.start(device="xla", seed=8) as ctx:
        five = torch.rand(4, device=ctx.device).tolist()
    return {"same": one == two == four, "manual_seed": three == two, "other": five == four}


def single_checkpoints():
    return checkpoints("replicate")


def single_precisions():
    found = {}
    with weft.start(device="xla") as ctx:
        for policy in ("fp16", "fp16-true", weft.Precision(compute=torch.float16)):
            found[str(policy)] = refusal(weft.with_precision, net(), ctx, policy)
        true, _ = weft.with_precision(net(), ctx, "bf16-true")
        out = true(torch.randn(2, 8).to(ctx.device))
        found["bf16-true"] = [str(out.dtype), str(true.last.weight.dtype)]
        found["compiled"] = refusal(weft.compile, net(), ctx)
        found["save"] = refusal(weft.recompute, net(), ctx, blocks="blocks.*", save=["matmul"])
    return found


def single_averages():
    with weft.start(device="xla") as ctx:
        loader, ctx = weft.shard_data(data(5), ctx)
        model, ctx = weft.replicate(net(), ctx)
        optimizer = adamw(model)
        model, ctx = weft.average_weights(model, ctx, decay=0.5)
        averages = weft.averages(model)
        train(model, optimizer, ([batch] for batch in loader), seen=averages.update)
        with weft.averages(model).swapped():
            found = [p.detach().cpu() for p in model.parameters()]
    reference, ctx = net(), weft.local()
    optimizer = adamw(reference)
    reference, ctx = weft.average_weights(reference, ctx, decay=0.5)
    train(reference, optimizer, windows_of(data(5), 1), seen=weft.averages(reference).update)
    with weft.averages(reference).swapped():
        pairs = zip(found, reference.parameters(), strict=True)
        return {"weights": max(float((a - b.detach()).abs().max()) for a, b in pairs)}


def late_mesh():
    """A mesh is asked for when a device was used already."""
    import torch_xla  # noqa: F401

    torch.zeros(1, device="xla").cpu()
    return {"error": refusal(weft.start, device="xla")}


# -- four devices as one mesh ----------------------------------------------------------------------------


def mesh_replicate():
    return compared(data(STEPS), strategy="replicate")


def mesh_accumulation():
    return compared(data(4 * STEPS - 2), steps=4, strategy="replicate")


def mesh_uneven_batch():
    return compared(data(STEPS - 1, more=3), strategy="fully_shard")


def _cut(strategy, mesh=None, **options):
    losses, model, optimizer, compiles, _ = on_xla(data(STEPS), strategy=strategy, mesh=mesh, **options)
    expected, reference = plain(data(STEPS))
    return {
        "weights": difference(model, reference),
        "losses": apart(losses, expected),
        "parameters": shares(list(model.parameters())),
        "state": shares(state_of(optimizer)),
        "compiled after step 2": compiles[-1] - compiles[1],
    }


def mesh_fully_shard():
    return _cut("fully_shard")


def mesh_replica_and_shard():
    return _cut("fully_shard", mesh={"replica": 2, "shard": -1})


def mesh_zero():
    return {f"stage {stage}": _cut(stage) for stage in (1, 2, 3)}


def mesh_clipping():
    found = compared(data(STEPS), strategy="fully_shard", clip=clip_torch, plain_clip=clip_torch)
    ours = compared(data(STEPS), strategy="fully_shard", clip=clip_weft, plain_clip=clip_torch)
    return {**found, "by weft": ours["weights"]}


def mesh_bf16():
    return compared(data(STEPS), strategy="fully_shard", policy="bf16")


def mesh_recompute():
    return compared(data(STEPS), strategy="fully_shard", recompute=True)


def mesh_whole_tensors():
    """An optimizer that looks at whole matrices, over shards."""
    return compared(data(STEPS), strategy="fully_shard", optimizer=lambda m: torch.optim.Adafactor(m.parameters()))


def mesh_checkpoints():
    return checkpoints("fully_shard")


def mesh_values():
    """Looking at weights, changing them by hand, gradients by name, and taking a strategy back."""
    with weft.start(device="xla") as ctx:
        facts = [ctx.world_size, ctx.data_size, list(map(list, ctx.axes)), list(map(list, ctx.engine.axes))]
        model, ctx = weft.fully_shard(net(), ctx)
        with weft.full_params(model, ctx, write=True), torch.no_grad():
            model.last.bias.fill_(3.0)
        cut = shares(list(model.parameters()))
        batch = weft.to_device(next(iter(data(1))), ctx)
        mse(model, batch).backward()
        gradients = {name: g.cpu() for name, g in weft.full_grads(model, ctx).items()}
        denominator = weft.metrics.denominator(8, ctx)
        model, ctx = weft.undo(model, ctx)
        whole = shares(list(model.parameters()))
        bias = model.last.bias.detach().cpu().tolist()
    reference = net()
    with torch.no_grad():
        reference.last.bias.fill_(3.0)
    mse(reference, next(iter(data(1)))).backward()
    different = max(float((gradients[n] - p.grad).abs().max()) for n, p in reference.named_parameters())
    return {
        "facts": facts, "bias": bias, "cut": cut, "whole": whole, "gradients": different, "denominator": denominator,
    }  # fmt: skip


def mesh_on_meta():
    """A module without values: drawn, or read from a file, then cut."""
    with weft.start(device="xla", seed=3) as ctx:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
        model, ctx = weft.fully_shard(model, ctx)
        drawn = [p.detach().cpu() for p in model.parameters()]
        cut = shares(list(model.parameters()))
    with torch.device("meta"):
        other = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    other, _ = weft.fully_shard(other, weft.local(seed=3))
    equal = all(torch.equal(a, b.detach()) for a, b in zip(drawn, other.parameters(), strict=True))
    return {"equal": equal, "cut": cut}


def mesh_weights():
    """Exported weights, loaded into a module that is cut over the devices."""
    with tempfile.TemporaryDirectory() as folder, weft.start(device="xla") as ctx:
        source = net()
        state, plain_ctx = weft.checkpointable({"model": source}, weft.local())
        weft.export(weft.save(state, Path(folder, "run"), 1, plain_ctx), Path(folder, "out"))
        with torch.no_grad():
            model = net()
            for p in model.parameters():
                p.zero_()
        model, ctx = weft.fully_shard(model, ctx)
        weft.load_weights(model, Path(folder, "out"), ctx)
        return {"weights": difference(model, source), "cut": shares(list(model.parameters()))}


def mesh_fsdp2():
    """A module that torch has cut: refused."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = fully_shard(nn.Linear(4, 4), mesh=dist.init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()
    with weft.start(device="xla") as ctx:
        return {"error": refusal(weft.replicate, model, ctx), "placing": refusal(weft.to_device, model, ctx)}


# -- checkpoints of both engines ---------------------------------------------------------------------------


def prepared(ctx, strategy):
    """A model with dropout, its optimizer and loader, ready to train."""
    loader, ctx = weft.shard_data(data(12), ctx)
    model = net(dropout=0.25)
    optimizer = adamw(model)
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, rebind=optimizer)
    else:
        model, ctx = weft.replicate(model, ctx)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
    return model, optimizer, loader, state, ctx


def some(loader, number):
    for at, batch in enumerate(loader, start=1):
        yield [batch]
        if at == number:
            return


def values(model, optimizer):
    found = [t.detach().cpu() for t in (*model.parameters(), *state_of(optimizer))]
    return found + [torch.as_tensor(float(s["step"])) for s in optimizer.state.values()]


def same(one, two):
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def checkpoints(strategy):
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        # From torch to XLA and back.
        ctx = weft.local()
        model, optimizer, loader, state, ctx = prepared(ctx, "replicate")
        train(model, optimizer, some(loader, 4))
        weft.save(state, Path(folder, "torch"), 4, ctx)
        there = values(model, optimizer)
        with weft.start(device="xla") as ctx:
            model, optimizer, loader, state, ctx = prepared(ctx, strategy)
            found["step"] = weft.restore(state, Path(folder, "torch"), ctx).step
            found["from torch"] = same(there, values(model, optimizer))
            found["parameters"] = shares(list(model.parameters())) if strategy == "fully_shard" else []
            found["state"] = shares(state_of(optimizer)) if strategy == "fully_shard" else []
            weft.save(state, Path(folder, "xla"), 4, ctx)
        back, optimizer, loader, state, ctx = prepared(weft.local(), "replicate")
        weft.restore(state, Path(folder, "xla"), ctx)
        found["to torch"] = same(there, values(back, optimizer))
        # A run on XLA that goes on is the one that was not interrupted, dropout included.
        with weft.start(device="xla", seed=1) as ctx:
            model, optimizer, loader, state, ctx = prepared(ctx, strategy)
            train(model, optimizer, some(loader, 4))
            weft.save_async(state, Path(folder, "run"), 4, ctx).wait()
            train(model, optimizer, ([batch] for batch in loader_rest(loader, state)))
            whole = values(model, optimizer)
        with weft.start(device="xla", seed=2) as ctx:
            model, optimizer, loader, state, ctx = prepared(ctx, strategy)
            weft.restore(state, Path(folder, "run"), ctx)
            train(model, optimizer, ([batch] for batch in loader))
            found["goes on"] = same(whole, values(model, optimizer))
    return found


def loader_rest(loader, state):
    """Go on where `some` stopped."""
    loader.load_state_dict(copy.deepcopy(loader.state_dict()))
    yield from loader


def refusal(fn, *args, **options):
    try:
        fn(*args, **options)
    except (weft.errors.WeftError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(kind, chosen):
    for name, case in list(globals().items()):
        if name.startswith(f"{kind}_") and (not chosen or name in chosen):
            try:
                print(json.dumps({"case": name, **case()}), flush=True)
            except Exception:  # noqa: BLE001  (a case that fails is told to the test)
                print(json.dumps({"case": name, "failed": traceback.format_exc()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
