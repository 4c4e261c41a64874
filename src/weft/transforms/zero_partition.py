"""`zero_partition`: optimizer state, then gradients, then parameters divided among the ranks (ZeRO)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from weft.checks import check_choice, check_module, check_optimizer, other_parameters
from weft.context import DistContext
from weft.context.sub_contexts import mesh_along
from weft.contract import Phase, check_methods, check_strategy_module, layouts, reduce_dtype, transform
from weft.engines.options import Offload, ReduceOptions, ShardOptions
from weft.engines.torch.reducing.buckets import sparse_gradients
from weft.errors import ContractError, listed, value_error
from weft.sharding import (
    UnitChoice,
    check_who_steps,
    groups_of,
    keep_state_on_cpu,
    reduce_module,
    shard_module,
    sharding_axes,
    step_in_parts,
    step_meshes,
)

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741

_CALL = "model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=1)"


@transform(phase=Phase.STRATEGY, excludes={Phase.STRATEGY}, collective=True)
def zero_partition(
    module: M,
    optimizer: O,
    ctx: DistContext,
    *,
    stage: Literal[1, 2, 3],
    by: Literal["all", "owner"] = "all",
    engine: Literal["torch", "deepspeed"] = "torch",
    axis: str | Sequence[str] | None = None,
    units: UnitChoice | None = None,
    unused: Literal["error", "zero"] = "error",
    buffers: Literal["broadcast", "local"] = "broadcast",
    bucket_bytes: int = 25 * 2**20,
    methods: Sequence[str] = (),
    offload: Offload = None,
    config: Mapping[str, Any] | str | Path | None = None,
) -> tuple[M, O, DistContext]:
    """Partition optimizer state (stage 1), plus gradients (2), plus parameters (3) over the ranks.

    One copy of the training state is spread over the memory of N ranks, for any optimizer, with the numbers of one
    process. Bytes per parameter in float32 with Adam: stage 1 holds 8 + 8/N, stage 2 at most 4 + 12/N, stage 3 16/N and
    the unit that is in use. Stage 0 would be `replicate`. With one rank along `axis` nothing is done.

    Stage 1 averages gradients as `replicate` does; then each rank steps on its rows of every
    parameter, and the rows are gathered. Stages 2 and 3 are FSDP2, which in stage 2 keeps the
    parameters it gathered in forward until backward. The state is held as DTensors, so
    `optimizer.state_dict()` needs no call before it. An optimizer whose update of an element
    depends on others (Adafactor, Muon, one that is not torch's) steps on whole parameters, one
    after the other, on every rank, and so does one over sparse gradients in stage 1; its state of the
    parameters' shape is divided all the same. With `by="owner"` each parameter is stepped on by one
    rank, which keeps its state: 1/N of the work; see `gather_step`.

    With `engine="deepspeed"`, DeepSpeed itself does the work, under the same loop and with the same numbers in float32.
    It can keep the optimizer's state, and in stage 3 the parameters, in the memory of the CPU or on a disk (`offload`),
    and takes its own configuration (`config`). It steps on all parameters of a group together, so each must get a
    gradient; gradients lie in pieces, so they are clipped by `weft.clip_grads` and read by `weft.full_grads`; and one
    forward pass allows one backward pass. Nothing of it is imported otherwise. Its collectives are its own.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models", SC 2020; `torch.distributed.optim.ZeroRedundancyOptimizer`, `torch.distributed.fsdp`.

    Changes: `module` and `optimizer` in place; names, keys, groups and existing state stay. Stages
    2 and 3 exchange the parameters for DTensors, in both.
    Collectives: here, one broadcast of parameters and buffers. Stage 1, per step: all-reduces of
    1x the gradient bytes in backward, all-gathers of 1x the parameter bytes in `step`. Stages 2
    and 3: as `fully_shard`, with one all-gather per unit in stage 2, and two in stage 3 but for what
    backward needs first.

    Args:
        module: All parameters on the CPU or on `ctx.device`; with torch's engine they may be DTensors over other axes.
        optimizer: Over parameters of `module`, with or without state.
        ctx: The current context.
        stage: 1, 2 or 3.
        by: For optimizers of whole tensors: who steps on one, "all" ranks or its "owner"; as for `gather_step`.
        engine: Who does it: "torch", or "deepspeed", which is an extra to install.
        axis: Mesh axis to divide over, or (replica, shard). Default: as for `fully_shard`.
        units: For stages 2 and 3; as for `fully_shard`.
        unused: What it means when a parameter gets no gradient; as for `replicate`.
        buffers: As for `replicate`.
        bucket_bytes: For stage 1; as for `replicate`.
        methods: Methods besides forward through which gradients flow.
        offload: With torch, "cpu" in stages 2 and 3: as `fully_shard(offload=True)`; "optimizer" in all stages: the
            optimizer's state alone, as `fully_shard(offload="optimizer")`. With DeepSpeed: where the
            optimizer's state lies between steps: "cpu", or a directory on a fast disk (stage 3). Or a mapping,
            of "optimizer" and "parameters" (stage 3).
        config: With DeepSpeed: its configuration, a dict or a JSON file. What weft decides may be left
            out or "auto"; everything else reaches DeepSpeed as it is.

    Returns:
        `module` and `optimizer` themselves, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: A part of `module` is sharded or replicated already.
        OrderError: Another optimizer holds its parameters, or a transform that comes later was applied.
        ContractError: The optimizer holds parameters of something else; or LBFGS, which couples all parameters; or, in
            stage 1, one that changes parameters in `eval()`; or DeepSpeed cannot train this module with this optimizer.
        ContextError: There is no such axis, or the ranks pass different models or options.
        ValueError: An option is out of range, or a configuration contradicts the pipeline; the text
            lists all keys that do.
        MissingExtra: DeepSpeed is asked for and not installed.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer, ctx = weft.zero_partition(model, optimizer, weft.local(), stage=1)
        >>> [record.name for record in ctx.applied]
        ['zero_partition']
    """
    check_optimizer("zero_partition", optimizer, fix=_CALL)
    check_module("zero_partition", module, fix=_CALL)
    check_choice("zero_partition", "stage", stage, (1, 2, 3), fix="weft.replicate(model, ctx)" if not stage else _CALL)
    check_choice("zero_partition", "engine", engine, ("torch", "deepspeed"))
    check_choice("zero_partition", "by", by, ("all", "owner"))
    _check_trainable(module, optimizer, stage, engine)
    if by == "owner" or engine == "torch":
        check_who_steps("zero_partition", optimizer, by)
    methods = tuple(methods)
    if engine == "deepspeed":
        if offload == "optimizer":
            raise value_error(
                'zero_partition: with DeepSpeed, steps are made where the state lies; offload="optimizer" is torch\'s',
                found='offload="optimizer" with engine="deepspeed"',
                expected='"cpu", or a directory on a fast disk',
                fix='model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=2, offload="optimizer")',
            )
        partitioned = importlib.import_module("weft.interop.deepspeed_partition").zero_partition(
            module,
            optimizer,
            ctx,
            stage=stage,
            by=by,
            axis=axis,
            units=units,
            unused=unused,
            buffers=buffers,
            bucket_bytes=bucket_bytes,
            methods=methods,
            offload=offload,
            config=config,
        )
        return module, optimizer, ctx if partitioned is None else ctx.offering(partitioned)
    _check_for_deepspeed_alone(stage, offload, config)
    # Offered last, so undone first: state is on the device when it is put together.
    on_cpu = keep_state_on_cpu("zero_partition", module, ctx) if offload == "optimizer" else ()
    found = layouts(module, ctx)
    axes = sharding_axes("zero_partition", module, found, ctx, axis)
    if stage > 1:
        shard_options = ShardOptions(
            reshard_after_forward=stage == 3,
            unused=unused,
            buffers=buffers,
            methods=methods,
            offload=offload == "cpu",
            strategy="zero_partition",
        )
        sharded = shard_module(
            "zero_partition", module, found, ctx, axes, shard_options, rebind=(optimizer,), units=units
        )
        if sharded is None:
            return module, optimizer, ctx.offering(*on_cpu)
        return module, optimizer, ctx.offering(sharded, *step_in_parts(optimizer, ctx, by), *on_cpu)
    if units is not None:
        raise value_error(
            "zero_partition: units have no effect in stage 1",
            found="stage=1 with units",
            expected="units with stage=2 or 3, which gather parameters unit by unit",
            fix=_CALL,
        )
    flat = [name for together in axes for name in together]
    check_strategy_module("zero_partition", module, found, flat)
    check_methods("zero_partition", module, methods)
    options = ReduceOptions(
        bucket_bytes=bucket_bytes,
        unused=unused,
        buffers=buffers,
        methods=methods,
        dtype=reduce_dtype(module),
        strategy="zero_partition",
    )
    facts = {"stage": stage, "axes": list(map(list, axes)), "optimizer": groups_of(module, [optimizer])}
    reduced = reduce_module(module, found, ctx, flat, options, facts, cut="state")
    ctx = ctx if reduced is None else ctx.offering(reduced)
    if ctx.on(flat).world_size == 1:
        return module, optimizer, ctx.offering(*on_cpu)
    mesh, others = mesh_along(ctx, axes[-1:]), step_meshes(module, found, ctx, axes[-1:])
    sparse = bool(sparse_gradients(module))
    parts = step_in_parts(optimizer, ctx, by, mesh, others, sparse=sparse)
    return module, optimizer, ctx.offering(*parts, *on_cpu)


def _check_for_deepspeed_alone(stage: int, offload: Offload, config: object) -> None:
    there = offload is None or offload == "optimizer" or (offload == "cpu" and stage > 1)
    given = [f"offload = {offload!r}"] * (not there) + [f"config = {config!r}"] * (config is not None)
    if given:
        raise value_error(
            f"zero_partition: engine='torch' does not support this in stage {stage}",
            found=listed(given),
            expected="offload='optimizer', or 'cpu' in stages 2 and 3, where the whole shard lies on the CPU; else "
            "engine='deepspeed'",
            fix="weft.zero_partition(model, optimizer, ctx, stage=2, offload='cpu')",
        )


def _check_trainable(module: nn.Module, optimizer: torch.optim.Optimizer, stage: int, engine: str) -> None:
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ContractError(
            "zero_partition: LBFGS uses all parameters at once",
            found="LBFGS",
            expected="an optimizer that updates each parameter independently",
            fix="model, ctx = weft.replicate(model, ctx)",
        )
    if stage == 1 and engine == "torch" and callable(getattr(optimizer, "eval", None)):
        raise ContractError(
            f"zero_partition: {type(optimizer).__name__} changes parameters outside step, by its whole state",
            found="an optimizer with eval(), as those of schedulefree; in stage 1 its state is sharded and its "
            "parameters are whole",
            expected="parameters and state sharded the same way, as in stages 2 and 3",
            fix="weft.zero_partition(model, optimizer, ctx, stage=2)",
        )
    strange = other_parameters(optimizer, {id(p) for p in module.parameters()})
    if strange:
        raise ContractError(
            f"zero_partition: the optimizer holds parameters that are not {type(module).__name__}'s",
            found=listed(strange),
            expected="an optimizer over parameters of the module",
            fix="optimizer = torch.optim.AdamW(model.parameters())",
        )
