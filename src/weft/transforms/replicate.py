"""`replicate`: one full copy of a module per rank, gradients averaged in backward.

Arguments and agreement of the ranks are here; the reduction itself is the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar

from torch import nn

from weft.checks import check_choice, check_module
from weft.context import DistContext
from weft.contract import (
    Layout,
    Phase,
    Stateful,
    check_data_axes,
    check_methods,
    check_strategy_module,
    gradient_axes,
    layouts,
    reduce_dtype,
    transform,
)
from weft.engines import Spmd
from weft.engines.options import Compress, ReduceOptions
from weft.engines.torch.reducing.buckets import sparse_gradients
from weft.engines.torch.reducing.power_sgd import PowerSgdHook
from weft.engines.torch.reducing.replica_average import ReplicaAverage
from weft.errors import listed, type_error, value_error
from weft.precision import PowerSGD
from weft.sharding import keep_state_on_cpu, reduce_module, stacked_over
from weft.tensors.dtensor import is_sharded

M = TypeVar("M", bound=nn.Module)


@transform(phase=Phase.STRATEGY, excludes={Phase.STRATEGY}, collective=True)
def replicate(
    module: M,
    ctx: DistContext,
    *,
    axis: str | Sequence[str] | None = None,
    bucket_bytes: int = 25 * 2**20,
    flat: bool = False,
    unused: Literal["error", "zero"] = "error",
    buffers: Literal["broadcast", "local"] = "broadcast",
    methods: Sequence[str] = (),
    compress: PowerSGD | Compress | None = None,
    offload: Literal["optimizer"] | None = None,
) -> tuple[M, DistContext]:
    """Keep one full copy of `module` per rank and average its gradients in backward.

    The strategy for models that fit on one device. The reduction is that of torch's
    DistributedDataParallel, without its wrapper: the module keeps class, attributes and keys.
    Whether a backward pass communicates is decided when it runs, so several forward passes may
    come before one backward or several. With one rank along `axis` nothing is done. In an elastic job
    (`start(elastic=...)`) gradients are averaged over the replicas that live, see `resilient`.

    Source: Li et al., "PyTorch Distributed", VLDB 2020; `torch.distributed.Reducer`.

    Changes: `module` in place: it is moved to `ctx.device`, gets rank 0's parameters and buffers,
    and hooks; names, class and keys stay. With `flat=True` parameters become views of one buffer.
    Collectives: here, one broadcast of all parameters and buffers; per backward, one all-reduce
    per bucket, together 1x the gradient bytes, while backward runs (with `flat=True`, and for 16
    gradients or more that fit into the first bucket, a single one at its end), and one broadcast
    of the buffers if there are any. None in forward or step.

    Args:
        module: Trained identically on all ranks; all parameters on the CPU or on `ctx.device`. Parameters may be
            DTensors over other axes: their gradients are averaged at the end of backward, one message per set of ranks.
        ctx: The current context.
        axis: Mesh axis, or axes, whose ranks hold the copies; default: all data axes, and those along which
            a batch is in parts (`context_parallel`).
        bucket_bytes: Gradient bytes per all-reduce, > 0; larger means fewer, later messages. The
            first bucket is at most 1 MiB, so that communication starts early.
        flat: Parameters and gradients as views of one buffer, and one all-reduce after backward:
            faster for models of many small tensors (see also `fuse_step`).
        unused: What it means when a parameter gets no gradient. "error": raises at the end of
            backward, naming it. "zero": ranks that did not use it count as zero; a parameter no
            rank used keeps `grad` None. Costs a walk over the graph per forward pass.
        buffers: "broadcast": after a reduced backward every rank gets rank 0's buffers (running
            statistics), in other tensors while a forward pass waits for its backward. "local": they may differ.
        methods: Methods besides forward through which gradients flow. A gradient that comes
            through another method or a submodule raises `NotSynchronized` in backward.
        compress: How the gradients of a bucket are averaged. A `weft.precision.PowerSGD`: as products of thin
            matrices, one bucket after the other. Or a function (group, bucket) that returns a future of the
            averaged `bucket.buffer()`, as torch's communication hooks (`bf16_compress_hook`); it has to send the
            same messages in the same order on every rank. What has `state_dict` and `load_state_dict` is saved in
            checkpoints with the module.
        offload: "optimizer": the optimizer's state is in the memory of the CPU between steps; it comes to the device
            for 64 MiB of parameters at a time, and steps are made there. On a CPU nothing changes.

    Returns:
        `module` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: `module`, a part of it, or a module around it is replicated already, by this or by torch.
        OrderError: `fully_shard` or `zero_partition` was applied, or a transform that comes later.
        ContextError: There is no such axis, a data axis is left out, or the ranks pass different models or options.
        ContractError: A parameter is cut over ranks that are no axis of the context.
        ValueError: An option is out of range, or the module lies on another device; or `compress` with `flat=True`,
            with `Precision(reduce=...)`, with sparse gradients, or over several axes; or `flat=True` with sparse ones.
        TypeError: `compress` is neither.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> model, ctx = weft.replicate(nn.Linear(2, 2), weft.local())
        >>> type(model).__name__, [record.name for record in ctx.applied]
        ('Linear', ['replicate'])
    """
    options = ReduceOptions(
        bucket_bytes=bucket_bytes,
        flat=flat,
        unused=unused,
        buffers=buffers,
        methods=tuple(methods),
        dtype=reduce_dtype(module),
    )
    check_module("replicate", module)
    check_choice("replicate", "offload", offload, (None, "optimizer"))
    names = gradient_axes(module, ctx) if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    found = layouts(module, ctx)
    check_data_axes("replicate", module, ctx, names)
    check_strategy_module("replicate", module, found, names)
    sub = ctx.on(names)
    check_methods("replicate", module, methods)
    wire = repr(compress) if isinstance(compress, PowerSGD) else compress is not None
    _check_compress(module, ctx, names, options, compress)
    if ctx.replicas is not None:
        _check_elastic(module, flat=flat, compress=compress is not None)
    if isinstance(compress, PowerSGD):
        wide = [axis for axis in names if ctx.axis_size(axis) > 1] or list(names)
        stacked = partial(stacked_over, ctx=ctx, axis=wide[0])
        compress = PowerSgdHook(compress, sub.rank, sub.world_size, stacked)
    kept: list[object] = [compress] if isinstance(compress, Stateful) else []  # for checkpoints
    if flat:
        _check_flat(module, found, names if sub.world_size > 1 else ())
    options = replace(options, compress=compress)
    reduced = reduce_module(module, found, ctx, names, options, {"compress": wire})
    ctx = ctx.offering(*kept) if reduced is None else ctx.offering(reduced, *kept)
    if ctx.replicas is not None:
        ctx = ctx.offering(ReplicaAverage(module, ctx.replicas, options, alone=reduced is None))
    if offload == "optimizer":
        ctx = ctx.offering(*keep_state_on_cpu("replicate", module, ctx))
    return module, ctx


def _check_compress(
    module: nn.Module, ctx: DistContext, names: Sequence[str], options: ReduceOptions, compress: object
) -> None:
    """Raise if gradients cannot travel as the user wants; the module may be one that is not sent at all."""
    if compress is None:
        return
    if not isinstance(compress, PowerSGD) and not callable(compress):
        raise type_error(
            f"replicate: compress = {compress!r} averages nothing",
            found=type(compress).__name__,
            expected="a weft.precision.PowerSGD, or a function (group, bucket) that returns a future",
            fix="weft.replicate(model, ctx, compress=weft.precision.PowerSGD(rank=2))",
        )
    wide = [axis for axis in names if ctx.axis_size(axis) > 1]
    reasons = {
        "flat=True, which has no buckets": options.flat,
        f"Precision(reduce={options.dtype}), which rounds them": options.dtype is not None,
        f"sparse gradients of {listed(sparse_gradients(module))}": sparse_gradients(module),
        "an engine that sends gradients by itself": isinstance(ctx.engine, Spmd),
        "an elastic job": ctx.replicas is not None,
        f"PowerSGD over the axes {listed(wide)}": isinstance(compress, PowerSGD) and len(wide) > 1,
        "complex parameters with PowerSGD": isinstance(compress, PowerSGD)
        and any(p.is_complex() for p in module.parameters()),
    }
    found = [reason for reason, holds in reasons.items() if holds]
    if found:
        raise value_error(
            "replicate: gradients cannot be compressed on their way here",
            found=listed(found),
            expected="dense gradients in buckets, in their own dtype, averaged along one axis",
            fix="weft.replicate(model, ctx)  # without compress, or without the other",
        )


def _check_elastic(module: nn.Module, *, flat: bool, compress: bool) -> None:
    unfit = [name for name, p in module.named_parameters() if is_sharded(p) or p.is_complex()]
    found = ["flat=True"] * flat + ["compress="] * compress + [f"sharded or complex: {name}" for name in unfit]
    if found:
        raise value_error(
            "replicate: not supported in an elastic job",
            found=listed(found),
            expected="neither flat=True nor compress=, and whole real parameters on every replica",
            fix="ctx = weft.start()  # without elastic=, and weft launch without --min-replicas"
            if unfit
            else "model, ctx = weft.replicate(model, ctx)",
        )


def _check_flat(module: nn.Module, found: Mapping[str, Layout], names: Sequence[str]) -> None:
    if sparse := sparse_gradients(module):
        raise value_error(
            "replicate: flat=True makes gradients dense",
            found=f"sparse gradients of {listed(sparse)}",
            expected="dense gradients: SparseAdam steps on no others, and another optimizer on all rows",
            fix="model, ctx = weft.replicate(model, ctx)",
        )
    usual = set(names)
    apart = [
        name
        for name, p in module.named_parameters()
        if names and (is_sharded(p) or not usual.issuperset(found[name].reduce_over) or set(found[name].cut) & usual)
    ]
    if apart:
        raise value_error(
            "replicate: flat=True keeps plain parameters only, whose gradients travel together",
            found=f"{listed(apart)}, sharded or reduced over other axes",
            expected="flat=False with them",
            fix="model, ctx = weft.replicate(model, ctx)",
        )
