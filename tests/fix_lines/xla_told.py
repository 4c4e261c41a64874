"""Lines that are told on XLA, each followed: what test_engine_xla.py runs in processes of its own.

Whether the devices of a process are one mesh is decided once, when it begins.
"""

import sys
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import weft
from tests.fix_lines.told import told


class Block(nn.Linear):
    """A block that takes a tensor in a list."""

    def forward(self, values):
        return super().forward(values[0])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.listed, self.last = nn.Linear(4, 4), Block(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.listed([self.first(x)]))


def _trains(model, ctx):
    """A step changes what the module returns."""
    x = weft.to_device(torch.ones(2, 4), ctx)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model(x).sum().item()
    model(x).sum().backward()
    optimizer.step()
    assert model(x).sum().item() < before


def _placed(ctx):
    model = Net()
    weft.to_device(model, ctx)
    return model


def single_strategies():
    with weft.start(device="xla") as ctx:
        with told("transforms/compile.py", "check_ranks_send") as it:
            weft.compile(_placed(ctx), ctx)
        assert it.fix == "leave weft.compile out"
        _trains(_placed(ctx), ctx)
        with told("engines/xla/engine.py", "xla does not support this policy") as it:
            weft.with_precision(Net(), ctx, "fp16")
        found = it.run(model=Net(), ctx=ctx)
        weft.to_device(found["model"], ctx)
        _trains(found["model"], found["ctx"])
        model, later = weft.fully_shard(Net(), ctx)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with told("transforms/step_in_backward.py", "check_ranks_send") as it:
            weft.step_in_backward(optimizer, later)
        model(weft.to_device(torch.ones(2, 4), ctx)).sum().backward()
        it.run(optimizer=optimizer)
        with told("sharding/owner_step.py", 'offload="optimizer"') as it:
            weft.replicate(Net(), ctx, offload="optimizer")
        assert it.fix == "leave offload out of the call of replicate"
        _trains(*weft.replicate(Net(), ctx))
        with told("transforms/state_in_bf16.py", "check_ranks_send") as it:
            weft.state_in_bf16(torch.optim.AdamW(model.parameters()), later)
        assert it.fix == "leave state_in_bf16 out"
        with told("engines/xla/engine.py", "an engine whose devices are addressed") as it:
            weft.place(nn.Linear(4, 4), ctx, {"cpu": None})
    with eval(it.fix) as ctx:
        weft.place(nn.Linear(4, 4), ctx, {"cpu": None})


def single_recompute():
    with weft.start(device="xla") as ctx:
        with told("engines/xla/activation_checkpoint.py", "recompute: save") as it:
            weft.recompute(Net(), ctx, blocks="first", save=["matmul"])
        model, later = weft.recompute(Net(), ctx, blocks="first", save=it.run()["save"])
        with told("engines/xla/activation_checkpoint.py", "recompute: offload") as it:
            weft.recompute(Net(), ctx, blocks="first", offload=True)
        model, later = weft.recompute(Net(), ctx, blocks="first", offload=it.run()["offload"])
        weft.to_device(model, ctx)
        _trains(model, later)
        model, _ = weft.recompute(_placed(ctx), ctx, blocks=nn.Linear)
        with told("engines/xla/activation_checkpoint.py", "tensors inside other values") as it:
            model(weft.to_device(torch.ones(2, 4), ctx))
        line = it.fix.replace("...", "isinstance(part, nn.Linear)")
        names = {"weft": weft, "model": _placed(ctx), "ctx": ctx, "nn": nn}
        exec(line, names)
        _trains(names["model"], ctx)


def single_modules():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        from torch.distributed.fsdp import fully_shard

        model = fully_shard(Net(), mesh=dist.init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()
    with weft.start(device="xla") as ctx:
        with told("engines/xla/device_transfer.py", "FSDP2 does not work there") as it:
            weft.to_device(model, ctx)
        found = it.run(model=Net(), ctx=ctx)
        _trains(found["model"], found["ctx"])
        model = Net()
        held = model(torch.ones(2, 4))
        with told("engines/xla/device_transfer.py", "that no graph of an earlier forward pass holds") as it:
            weft.to_device(model, ctx)
        del held
        model = Net()
        it.run(model=model, ctx=ctx)
        _trains(model, ctx)


def single_start():
    with told("engines/xla/engine.py", "cannot be chosen") as it:
        weft.start(device="xla:1")
    with eval(it.fix) as ctx:
        _trains(_placed(ctx), ctx)


def late_mesh():
    import torch_xla  # noqa: F401

    torch.zeros(1, device="xla").cpu()
    with told("engines/xla/library.py", "comes too late") as it:
        weft.start(device="xla")
    print(it.fix)


def mesh_pipeline():
    with weft.start(device="xla", mesh={"pipeline": -1}) as ctx:
        with told("transforms/pipeline.py", "check_ranks_send") as it:
            weft.pipeline(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), ctx, loss=nn.functional.mse_loss)
    with weft.start(device="xla") as ctx:
        found = it.run(model=Net(), ctx=ctx)
        _trains(found["model"], found["ctx"])


def hosts_start():
    """One of two processes, of which XLA says that they are those of two hosts with two TPUs each."""
    import torch_xla.runtime as runtime

    with mock.patch.multiple(runtime, device_type=lambda: "TPU", process_count=lambda: 1):
        with told("engines/xla/library.py", "another number of processes") as it:
            weft.start(device="xla")
        print(it.fix)
    hosts = {"device_type": lambda: "TPU", "process_count": lambda: 2, "global_runtime_device_count": lambda: 4}
    with mock.patch.multiple(runtime, **hosts):
        with told("engines/xla/engine.py", "an outermost axis") as it:
            weft.start(device="xla", mesh={"replica": 1, "shard": 4})
        with eval(it.fix) as ctx:
            assert ctx.world_size == 2 and ctx.engine.axes == (("data", 4),)
            optimizer = torch.optim.Adafactor(nn.Linear(4, 4).parameters())
            with told("sharding/owner_step.py", "send tensors to each other") as it:
                weft.gather_step(optimizer, ctx, by="owner")
            it.run(optimizer=optimizer, ctx=ctx)


if __name__ == "__main__":
    for name, case in list(globals().items()):
        if name.startswith(f"{sys.argv[1]}_"):
            case()
            print("followed", name, flush=True)
