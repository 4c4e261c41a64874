"""`zero_partition(engine="deepspeed")`: arguments checked, ranks agreed, then an engine of DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.checks import check_choice, check_count
from weft.context import DistContext
from weft.context.placement import check_place, place_module
from weft.context.sub_contexts import mesh_along
from weft.contract import agree_on_parameters, check_methods, check_plain_module, layouts, offered, reduce_dtype
from weft.contract.layout import apart_axes
from weft.engines.deepspeed.build import check_config, partition
from weft.engines.deepspeed.ds_config import Facts, complete, read
from weft.engines.deepspeed.library import check_accelerator, deepspeed, load_async_io
from weft.engines.deepspeed.partition import Partition, PartitionOptions
from weft.engines.options import Offload
from weft.engines.torch.amp.loss_scale import LossScale
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.steps.combined_optimizer import CombinedOptimizer
from weft.engines.torch.steps.swapped import is_elementwise
from weft.errors import ContextError, ContractError, OrderError, listed, value_error
from weft.peers.ledger import Ledger
from weft.peers.pretended import check_not_pretended
from weft.sharding import check_optimizers, exchange_parameters, groups_of, sharding_axes
from weft.sharding.meta import Materializer, is_meta
from weft.tensors.remote_parameter import is_elsewhere


def zero_partition(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    ctx: DistContext,
    *,
    stage: int,
    by: str,
    axis: str | Sequence[str] | None,
    units: object,
    unused: str,
    buffers: str,
    bucket_bytes: int,
    methods: tuple[str, ...],
    offload: Offload,
    config: Mapping[str, Any] | str | Path | None,
) -> Partition | None:
    """Check, agree with the other ranks, then let DeepSpeed do it; arguments as `weft.zero_partition` describes them.

    Returns:
        What is offered to later transforms; None with one rank and no process group.

    Raises:
        ContextError: Something is to be offloaded, and there is no process group.
        OrderError: `local_steps` was applied before.
        ValueError: An option that DeepSpeed does not have.
    """
    if by == "owner":
        raise value_error(
            "zero_partition: DeepSpeed steps on all parameters of a group together",
            found="by='owner' with engine='deepspeed'",
            expected="engine='torch' with it",
            fix='weft.zero_partition(model, optimizer, ctx, stage=2, by="owner")',
        )
    if apart := apart_axes(module):
        raise OrderError(
            "zero_partition: DeepSpeed averages over all ranks, of which local_steps lets some step apart",
            found=f"local_steps along {listed(map(repr, apart))}",
            expected="the other engine with local_steps",
            fix='weft.zero_partition(model, optimizer, ctx, stage=2, engine="torch")',
        )
    check_not_pretended('zero_partition(engine="deepspeed")', ctx.world.group, 'engine="torch"  # the same stage')
    check_plain_module("zero_partition", module)
    check_methods("zero_partition", module, methods)
    _check_options(unused, buffers, units, bucket_bytes)
    _check_trained(module, optimizer)
    places = _places(offload, stage)
    axes = sharding_axes("zero_partition", module, layouts(module, ctx), ctx, axis)
    sub = ctx.on([name for together in axes for name in together])
    deepspeed()
    check_accelerator(ctx.device)
    facts = Facts(
        stage=stage,
        dtype=next(p.dtype for p in module.parameters() if p.requires_grad),
        ranks=sub.world_size,
        optimizer=type(optimizer).__name__,
        options=optimizer.param_groups[0],
        bucket_bytes=bucket_bytes,
        reduce_dtype=reduce_dtype(module),
        optimizer_place=places.get("optimizer"),
        parameter_place=places.get("parameters"),
    )
    completed = complete({} if config is None else read(config), facts)
    if sub.world_size == 1 and sub.group is None:
        if places:
            raise ContextError(
                "zero_partition: DeepSpeed needs a process group to offload, also for one rank",
                found=f"a context without one, and offload to {listed(places.values())}",
                expected="a group of one rank",
                fix="torch.distributed.init_process_group("
                "'gloo', store=torch.distributed.HashStore(), rank=0, world_size=1)\nctx = weft.adopt()",
            )
        place_module("zero_partition", module, ctx)
        return None
    ctx.require_collective("zero_partition")
    assert sub.group is not None
    check_config(completed, sub.group, ctx.local_rank)
    check_optimizers("zero_partition", module, (optimizer,))
    if any(place != "cpu" for place in places.values()):
        _load_async_io(ctx)
    on_meta = stage == 3 and is_meta(module)
    if not on_meta:
        check_place("zero_partition", module, ctx)
    agreed: dict[str, object] = {"stage": stage, "engine": "deepspeed", "buffers": buffers, "offload": sorted(places)}
    agreed |= {"axes": list(map(list, axes)), "methods": list(methods), "config": repr(completed)}
    agreed |= {"optimizer": groups_of(module, [optimizer]), "meta": on_meta}
    agree_on_parameters("zero_partition", module, ctx, agreed)
    old = dict(module.named_parameters())
    source = Materializer("zero_partition", module, ctx, sub, None) if on_meta else None
    if source is None:
        place_module("zero_partition", module, ctx)
        ctx.engine.broadcast_state([*module.parameters(), *module.buffers()], sub.group)
    options = PartitionOptions(
        stage=stage,
        config=completed,
        methods=methods,
        buffers=buffers == "broadcast",
        local_rank=ctx.local_rank,
        make_real=None if source is None else source.make_real,
        moved=lambda: exchange_parameters(module, old, (optimizer,)),
        peers=Ledger(sub.world, "zero_partition"),
    )
    mesh = None if ctx.mesh is None or not axes else mesh_along(ctx, axes[-1:])
    return partition(module, optimizer, sub.group, mesh, options)


def _load_async_io(ctx: DistContext) -> None:
    """One rank per node first: it compiles what the others find."""
    if ctx.is_local_main:
        load_async_io()
    ctx.agree("zero_partition: the extension for disks")
    load_async_io()


def _check_options(unused: str, buffers: str, units: object, bucket_bytes: int) -> None:
    for name, value, allowed, expected in (
        ("unused", unused, "error", "'error': DeepSpeed steps on all parameters of a group together"),
        ("units", units, None, "None: DeepSpeed gathers module by module"),
    ):
        if value != allowed:
            raise value_error(
                f"zero_partition: {name} = {value!r} cannot be used with DeepSpeed",
                found=f"{name}={value!r}, engine='deepspeed'",
                expected=expected,
                fix="engine='torch'",
            )
    check_choice("zero_partition", "buffers", buffers, ("broadcast", "local"))
    check_count("zero_partition", "bucket_bytes", bucket_bytes, fix="bucket_bytes=25 * 2**20")


def _check_trained(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise if DeepSpeed would train the parameters otherwise than torch."""
    held = set(map(id, parameters_of(optimizer)))
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    left_out = [name for name, p in trained.items() if id(p) not in held]
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in trained.values()})
    kind = type(optimizer)
    one = not isinstance(optimizer, CombinedOptimizer)  # DeepSpeed steps by one class
    known = (one and is_elementwise(optimizer)) or kind.__module__.startswith("deepspeed.")
    if any(offered(part, LossScale) for part in module.modules()):
        raise OrderError(
            "zero_partition: DeepSpeed cannot be combined with with_precision in fp16",
            found="with_precision(model, ctx, 'fp16'), which scales losses, before zero_partition",
            expected="bf16, then zero_partition: DeepSpeed averages gradients before they could be scaled back",
            fix="model, ctx = weft.with_precision(model, ctx, 'bf16')",
        )

    def refusal(found: str, expected: str, fix: str) -> ContractError:
        what = f"zero_partition: DeepSpeed cannot train this {type(module).__name__} with this {kind.__name__}"
        return ContractError(what, found=found, expected=expected, fix=fix)

    elsewhere = [name for name, p in module.named_parameters() if is_elsewhere(p)]
    if elsewhere:
        expected = "all parameters on every rank: DeepSpeed partitions neither stages of a pipeline nor single experts"
        raise refusal(f"on other ranks: {listed(elsewhere)}", expected, "engine='torch'")
    if not trained:
        raise refusal("no parameter with requires_grad", "something to train", "model.requires_grad_()")
    if left_out:
        expected = "every trained parameter in the optimizer: DeepSpeed averages the gradients of its own only"
        fix = "requires_grad_(False) on them before zero_partition"
        raise refusal(f"not in the optimizer: {listed(left_out)}", expected, fix)
    if dtypes not in (["float32"], ["bfloat16"]):
        expected = "float32, or bfloat16: DeepSpeed steps in float32"
        raise refusal(f"parameters of {listed(dtypes)}", expected, "model.float()  # or engine='torch'")
    if not known or kind is torch.optim.Adagrad:
        expected = "an optimizer that treats each element by itself: DeepSpeed steps on pieces of parameters"
        expected += ", and makes an Adagrad anew" if kind is torch.optim.Adagrad else ""
        raise refusal(kind.__name__, expected, "optimizer = torch.optim.AdamW(model.parameters())  # or engine='torch'")


def _places(offload: Offload, stage: int) -> dict[str, str]:
    """Where to offload to: "cpu" or a directory, for "optimizer" and "parameters"."""
    if offload is None:
        return {}
    given: Mapping[Any, Any] = offload if isinstance(offload, Mapping) else {"optimizer": offload}
    bad = [f"{key}: {value!r}" for key, value in given.items() if key not in ("optimizer", "parameters")]
    bad += [f"{key}: {value!r}" for key, value in given.items() if not isinstance(value, (str, os.PathLike))]
    bad += [f"{key}: 'nvme' (which directory?)" for key, value in given.items() if value == "nvme"]
    if bad or not given:
        raise value_error(
            f"zero_partition: offload = {offload!r} cannot be used",
            found=listed(bad) or "nothing",
            expected="'cpu', or a directory on a fast disk, for the optimizer; or a mapping for both",
            fix="offload='cpu'  # or '/local_nvme'; or {'optimizer': '/local_nvme', 'parameters': 'cpu'}",
        )
    places = {key: os.fspath(value) for key, value in given.items()}
    early = [key for key, place in places.items() if key == "parameters" or place != "cpu"]
    if early and stage < 3:
        raise value_error(
            f"zero_partition: stage {stage} does not support this kind of offload",
            found=listed(f"{key} to {places[key]!r}" for key in early),
            expected="stage 3 for parameters, and for a disk; the optimizer's state to 'cpu' in every stage",
            fix="stage=3",
        )
    return places
