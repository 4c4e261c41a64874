"""Shards, gradients and the state of optimizers in the memory of the CPU."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy

import weft
from tests.fix_lines.told import told
from tests.transforms.test_gather_step import Counts
from weft.engines.torch.fsdp.units import offload_policy
from weft.engines.torch.steps.step_by_parts import AroundPart, StepByParts, step_by_parts
from weft.engines.torch.steps.swapped import step_hooks
from weft.testing import largest_difference, run_ranks


def _net():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 3)).double()


def _x(step):
    return torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def _steps(model, optimizer, ctx):
    for step in range(4):
        model(_x(step)[ctx.rank :: ctx.world_size]).square().mean().backward()
        weft.clip_grads(model, ctx, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()


def _train(ctx, strategy):
    model = _net()
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, units=nn.Linear, offload=True)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if strategy != "fully_shard":
        stage = int(strategy[-1])
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=stage, units=nn.Linear, offload="cpu")
    _steps(model, optimizer, ctx)
    held = [*model.parameters(), *(one["exp_avg"] for one in optimizer.state.values())]
    places = {tensor.to_local().device.type for tensor in held}
    with weft.full_params(model, ctx):
        return places, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.variant)])
def test_offloaded_shards_are_trained_as_in_one_process(n):
    plain = _net()
    _steps(plain, torch.optim.AdamW(plain.parameters(), 1e-2), weft.local())
    for strategy in ("fully_shard", "zero2", "zero3"):
        for places, parameters in run_ranks(_train, n, strategy):
            assert places == {"cpu"}
            assert largest_difference(parameters, list(plain.parameters())) < 1e-12


def test_on_an_accelerator_torch_keeps_the_shards_on_the_cpu():
    assert isinstance(offload_policy("cuda", offload=True), CPUOffloadPolicy)
    for device_type, offload in (("cuda", False), ("cpu", True)):
        assert not isinstance(offload_policy(device_type, offload=offload), CPUOffloadPolicy)


def _state_alone(ctx, strategy):
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, rebind=optimizer, offload="optimizer")
    elif strategy == "replicate":
        model, ctx = weft.replicate(model, ctx, offload="optimizer")
    else:
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=int(strategy), offload="optimizer")
    _steps(model, optimizer, ctx)
    with weft.full_params(model, ctx):
        return [p.detach().clone() for p in model.parameters()]


def test_on_a_cpu_the_state_is_there_already():
    plain = _net()
    _steps(plain, torch.optim.AdamW(plain.parameters(), 1e-2), weft.local())
    for strategy in ("fully_shard", "replicate", "1", "3"):
        for parameters in (_state_alone(weft.local(), strategy), *run_ranks(_state_alone, 2, strategy)):
            assert largest_difference(parameters, list(plain.parameters())) < 1e-12


def test_a_step_part_by_part_is_one_step():
    plain, parted = _net(), _net()
    one, other = Counts(list(plain.parameters())), Counts(list(parted.parameters()))
    calls = []

    def around(name, part_bytes):
        return AroundPart(lambda _: calls.append(f"{name} ready"), lambda _: calls.append(f"{name} away"), part_bytes)

    end_inner = step_by_parts(other, around("inner", 10**9))
    end_outer = step_by_parts(other, around("outer", 1))
    seen = []
    other.register_step_pre_hook(lambda *_: seen.append("before"))
    other.register_step_post_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["count"]))
    _steps(plain, one, weft.local())
    _steps(parted, other, weft.local())
    assert largest_difference(list(plain.parameters()), list(parted.parameters())) == 0
    assert seen == ["before", 1, "before", 2, "before", 3, "before", 4]  # its number moves once a step
    assert calls[:4] == ["outer ready", "inner ready", "inner away", "outer away"]
    assert len(calls) == 4 * 4 * len(list(plain.parameters()))
    end_outer()
    calls.clear()
    _steps(parted, other, weft.local())
    assert calls == ["inner ready", "inner away"] * 4
    end_inner()
    assert not any(isinstance(hook, StepByParts) for hook in step_hooks(other))


def test_deepspeed_has_an_offload_of_its_own():
    model, ctx = _net(), weft.local()
    optimizer = torch.optim.SGD(model.parameters())
    with told("transforms/zero_partition.py", "with DeepSpeed, steps are made") as it:
        weft.zero_partition(model, optimizer, ctx, stage=2, engine="deepspeed", offload="optimizer")
    it.run(model=model, optimizer=optimizer, ctx=ctx)


@pytest.mark.parametrize(("stage", "offload"), [(1, "cpu"), (2, "/somewhere"), (3, {"optimizer": "cpu"})])
def test_what_torch_cannot_put_elsewhere_is_refused(stage, offload):
    model = _net()
    with pytest.raises(ValueError, match=f"does not support this in stage {stage}"):
        weft.zero_partition(model, torch.optim.SGD(model.parameters()), weft.local(), stage=stage, offload=offload)
