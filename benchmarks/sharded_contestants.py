"""The loop of contestants.py with models and optimizers cut into shards; measured by bench_step.py.

`shard` is FSDP2, `zero1` a cut optimizer beside whole parameters. All contestants of a case have the
same units: every linear layer of the MLP; the blocks, the embedding and the head of the transformer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from contestants import (
    BUILDERS,
    Batch,
    Case,
    Run,
    Transformer,
    accelerate_loop,
    autocast_loop,
    fabric_loop,
    forget_accelerate,
    installed,
    make_optimizer,
    simple_loop,
    weft_loop,
)
from contestants import available as available_replicated
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import weft

__all__ = [
    "OTHER_NUMBERS",
    "DeepSpeedStep",
    "accelerate_prepared",
    "available",
    "builders_of",
    "by_hand",
    "deepspeed_prepared",
    "fabric_prepared",
    "torch_zero1_prepared",
]


def units_of(model: nn.Module) -> list[nn.Module]:
    """What every contestant cuts together, besides the model itself."""
    if isinstance(model, Transformer):
        return [model.embed, *model.blocks, model.head]
    return [layer for layer in model.modules() if isinstance(layer, nn.Linear)]


def by_hand(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    keep_tail: bool = False,
    policy: Any = None,
    units: list[nn.Module] | None = None,
) -> nn.Module:
    """Lay FSDP2 on as an expert does.

    Args:
        model: Changed in place.
        mesh: Of one axis.
        keep_tail: The last unit of forward is the first of backward: do not free it in between.
        policy: Precision.
        units: Other ones than `units_of`.
    """
    policy = policy or MixedPrecisionPolicy()
    units = units or units_of(model)
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=not (keep_tail and unit is units[-1]))
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def torch_expert(model: nn.Module, case: Case, *, keep_tail: bool = False, own_bf16: bool = False) -> Run:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if own_bf16 else None
    by_hand(model, init_device_mesh("cpu", (case.ranks,)), keep_tail=keep_tail, policy=policy)
    optimizer = make_optimizer(model)
    if case.bf16 and not own_bf16:
        return autocast_loop(model, optimizer)
    if case.micro == 1:
        return simple_loop(model, optimizer)
    assert isinstance(model, FSDPModule)

    def run(batches: list[Batch]) -> None:
        for index, (x, y) in enumerate(batches, 1):
            last = index % case.micro == 0
            model.set_requires_gradient_sync(last)
            loss = cross_entropy(model(x), y) / case.micro
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

    return run


def accelerate_prepared(model: nn.Module, case: Case) -> tuple[Any, Any, Any]:
    """The accelerator, the module and the optimizer."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import DistributedType, PartialState

    forget_accelerate()
    PartialState(cpu=True)
    # On CPUs Accelerate ignores the plugin without a word and trains with DDP; this leads it past its check.
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    classes = ["TransformerEncoderLayer"] if isinstance(model, Transformer) else ["Linear"]
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=classes,
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if case.bf16 else "no",
        gradient_accumulation_steps=case.micro,
        fsdp_plugin=plugin,
    )
    assert accelerator.is_fsdp2
    wrapped, optimizer = accelerator.prepare(model, make_optimizer(model))
    assert wrapped is model  # it is compared at the end
    assert isinstance(model, FSDPModule)
    return accelerator, wrapped, optimizer


def accelerate(model: nn.Module, case: Case) -> Run:
    return accelerate_loop(*accelerate_prepared(model, case), case)


def fabric_prepared(model: nn.Module, case: Case) -> tuple[Any, Any, Any]:
    """Fabric, the module and the optimizer."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return by_hand(module, mesh["data_parallel"])

    strategy: Any = ModelParallelStrategy(parallelize, data_parallel_size=case.ranks, tensor_parallel_size=1)
    precision: Any = "bf16-mixed" if case.bf16 else "32-true"
    lightning = Fabric(accelerator="cpu", devices=case.ranks, strategy=strategy, precision=precision)
    lightning.launch()
    assert lightning.world_size == case.ranks
    wrapped = lightning.setup_module(model)
    assert isinstance(model, FSDPModule)
    optimizer = lightning.setup_optimizers(make_optimizer(model))
    return lightning, wrapped, optimizer


def fabric(model: nn.Module, case: Case) -> Run:
    return fabric_loop(*fabric_prepared(model, case), case)


def weft_sharded(model: nn.Module, case: Case, *, default_units: bool = False, gather: bool = False) -> Run:
    ctx = weft.adopt()
    if case.bf16:
        bf16, fp32 = torch.bfloat16, torch.float32
        policy = weft.Precision(param=fp32, compute=bf16, gather=bf16, output=fp32) if gather else "bf16"
        model, ctx = weft.with_precision(model, ctx, policy)
    units = None if default_units or isinstance(model, Transformer) else nn.Linear
    model, ctx = weft.fully_shard(model, ctx, units=units)
    expected = 1 if units is None and not isinstance(model, Transformer) else len(units_of(model)) + 1
    assert sum(isinstance(part, FSDPModule) for part in model.modules()) == expected
    return weft_loop(model, make_optimizer(model), ctx, case)


def torch_zero1_prepared(model: nn.Module) -> tuple[nn.Module, ZeroRedundancyOptimizer]:
    """The module and the optimizer."""
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, parameters_as_bucket_view=True, lr=1e-4, fused=True
    )
    return wrapped, optimizer


class DeepSpeedStep:
    """The engine of DeepSpeed in the place of an optimizer."""

    def __init__(self, engine: Any, model: nn.Module) -> None:
        self._engine = engine
        self._model = model

    def step(self) -> None:
        self._engine.step()

    def zero_grad(self) -> None:
        self._engine.zero_grad()

    def tensors(self) -> dict[str, list[torch.Tensor]]:
        """What this rank holds; gradients were freed by the step."""
        parameters = [getattr(p, "ds_tensor", p).data for p in self._model.parameters()]
        inner = self._engine.optimizer.optimizer
        masters = [p.data for entry in inner.param_groups for p in entry["params"]]
        moments = [v for state in inner.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
        return {"parameters": parameters, "gradients": [], "state": [*masters, *moments]}


def deepspeed_prepared(model: nn.Module, stage: int) -> tuple[nn.Module, DeepSpeedStep]:
    """The engine, which is called like the module, and its step."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled; gloo does it as well
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,  # 1.0 if it is not given
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "memory_efficient_linear": False},
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=make_optimizer(model), config=config)
    return engine, DeepSpeedStep(engine, model)


def torch_zero1(model: nn.Module, case: Case) -> Run:
    return simple_loop(*torch_zero1_prepared(model))


def weft_zero1(model: nn.Module, case: Case) -> Run:
    model, optimizer, ctx = weft.zero_partition(model, make_optimizer(model), weft.adopt(), stage=1)
    return weft_loop(model, optimizer, ctx, case)


Builders = dict[str, Callable[[nn.Module, Case], Run]]
SHARD: Builders = {
    "torch": torch_expert,
    "control": torch_expert,
    "torch tail": partial(torch_expert, keep_tail=True),
    "torch own": partial(torch_expert, own_bf16=True),
    "accelerate": accelerate,
    "fabric": fabric,
    "weft": weft_sharded,
    "weft units": partial(weft_sharded, default_units=True),
    "weft gather": partial(weft_sharded, gather=True),
}
# They cast the weights to bf16 and compute with those, which is not what autocast does.
OTHER_NUMBERS = {"shard-bf16": {"torch own", "accelerate"}}
ZERO1: Builders = {"torch": torch_zero1, "control": torch_zero1, "weft": weft_zero1}


def builders_of(case: Case) -> Builders:
    """All contestants of a case."""
    return {"replicate": BUILDERS, "shard": SHARD, "zero1": ZERO1}[case.strategy]


def available(case: Case, model: nn.Module) -> list[str]:
    """The contestants that are installed and mean something in this case."""
    if case.strategy == "replicate":
        return available_replicated(case)
    names = [name for name in builders_of(case) if installed(name)]
    left_out = {"torch tail"} if case.micro > 1 or case.bf16 else set()
    left_out |= {"torch own", "weft gather"} if not case.bf16 else set()
    left_out |= {"weft units"} if isinstance(model, Transformer) else set()  # the same as "weft"
    return [name for name in names if name not in left_out]
