"""`replicate`: one full copy of a module per rank, gradients averaged in backward.

Arguments and agreement of the ranks are here; the reduction itself is the engine's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

from torch import nn

from weft.context import DistContext
from weft.context.placement import place_module
from weft.contract import (
    ReducesIn,
    agree_on_parameters,
    check_data_axes,
    check_methods,
    check_not_wrapped,
    check_whole,
    offered,
    transform,
)
from weft.engines.options import ReduceOptions
from weft.errors import AlreadyApplied, listed, type_error, value_error
from weft.peers.ledger import Ledger

__all__ = ["replicate"]

M = TypeVar("M", bound=nn.Module)


@transform(
    after={"with_precision", "sync_batch_norm", "recompute"},
    before={"accumulate_grads", "compile"},
    excludes={"fully_shard", "zero_partition"},
    collective=True,
)
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
) -> tuple[M, DistContext]:
    """Keep one full copy of `module` per rank and average its gradients in backward.

    The strategy for models that fit on one device. The reduction is that of torch's
    DistributedDataParallel, without its wrapper: the module keeps class, attributes and keys.
    Whether a backward pass communicates is decided when it runs, so several forward passes may
    come before one backward or several. With one rank along `axis` nothing is done.

    Source: Li et al., "PyTorch Distributed", VLDB 2020; `torch.distributed.Reducer`.

    Changes: `module` in place: it is moved to `ctx.device`, gets rank 0's parameters and buffers,
    and hooks; names, class and keys stay. With `flat=True` parameters become views of one buffer.
    Collectives: here, one broadcast of all parameters and buffers; per backward, one all-reduce
    per bucket, together 1x the gradient bytes, while backward runs (with `flat=True` a single one
    at its end), and one broadcast of the buffers if there are any. None in forward or step.

    Args:
        module: Trained alike on all ranks; all parameters on the CPU or on `ctx.device`.
        ctx: Where we run.
        axis: Mesh axis, or axes, whose ranks hold the copies; default: all data axes.
        bucket_bytes: Gradient bytes per all-reduce, > 0; larger means fewer, later messages. The
            first bucket is at most 1 MiB, so that communication starts early.
        flat: Parameters and gradients as views of one buffer, and one all-reduce after backward:
            faster for models of many small tensors (see also `fuse_step`).
        unused: What it means when a parameter gets no gradient. "error": raises at the end of
            backward, naming it. "zero": ranks that did not use it count as zero; a parameter no
            rank used keeps `grad` None. Costs a walk over the graph per forward pass.
        buffers: "broadcast": after a reduced backward every rank gets rank 0's buffers (running
            statistics). "local": they may differ.
        methods: Methods besides forward through which gradients flow. A gradient that comes
            through another method or a submodule raises `NotSynchronized` in backward.

    Returns:
        `module` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: `module`, a part of it, or a module around it is replicated already, by this or by torch.
        OrderError: `fully_shard` or `zero_partition` was applied, or a transform that comes later.
        ContextError: There is no such axis, a data axis is left out, or the ranks bring different models or options.
        ContractError: Parameters are DTensors, cut over another axis.
        ValueError: An option is out of range, or the module lies on another device.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> model, ctx = weft.replicate(nn.Linear(2, 2), weft.local())
        >>> type(model).__name__, [record.name for record in ctx.applied]
        ('Linear', ['replicate'])
    """
    options = _options(module, bucket_bytes, flat, unused, buffers, methods)
    names = ctx.data_axes if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
    check_data_axes("replicate", ctx, names)
    line = ctx.on(names)
    _check_module(module, ctx)
    if line.world_size == 1:
        place_module("replicate", module, ctx)
        laid = ctx.engine.lay_out(module, [name for name, _ in line.axes], "no")
        return module, ctx if laid is None else ctx.offering(laid)
    world = ctx.require_collective("replicate")
    ctx.engine.check_hooks("replicate", module)
    facts = {"bucket_bytes": bucket_bytes, "flat": flat, "unused": unused, "buffers": buffers, "methods": list(methods)}
    agree_on_parameters("replicate", module, ctx, facts)
    place_module("replicate", module, ctx)
    assert world is not None
    assert line.group is not None
    ctx.engine.broadcast_state(module, line.group)
    peers = Ledger(line.world, "replicate")
    return module, ctx.offering(ctx.engine.reduce_gradients(module, line.group, options, peers))


def _options(
    module: nn.Module,
    bucket_bytes: int,
    flat: bool,
    unused: Literal["error", "zero"],
    buffers: Literal["broadcast", "local"],
    methods: Sequence[str],
) -> ReduceOptions:
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int) or bucket_bytes <= 0:
        raise value_error(
            f"replicate: bucket_bytes = {bucket_bytes!r} cannot be used",
            found=repr(bucket_bytes),
            expected="a whole number of bytes > 0",
            fix="weft.replicate(model, ctx, bucket_bytes=25 * 2**20)",
        )
    for name, value, allowed in (("unused", unused, ("error", "zero")), ("buffers", buffers, ("broadcast", "local"))):
        if value not in allowed:
            raise value_error(
                f"replicate: {name} = {value!r} is unknown",
                found=repr(value),
                expected=" or ".join(repr(choice) for choice in allowed),
                fix=f"weft.replicate(model, ctx, {name}={allowed[0]!r})",
            )
    check_methods("replicate", module, methods)
    dtypes = [offer.reduce_dtype for offer in offered(module, ReducesIn)]
    return ReduceOptions(
        bucket_bytes=bucket_bytes,
        flat=flat,
        unused=unused,
        buffers=buffers,
        dtype=dtypes[-1] if dtypes else None,
        methods=tuple(methods),
    )


def _check_module(module: nn.Module, ctx: DistContext) -> None:
    if not isinstance(module, nn.Module):
        raise type_error(
            "replicate: this is not a module",
            found=type(module).__name__,
            expected="a torch.nn.Module",
            fix="model, ctx = weft.replicate(model, ctx)",
        )
    check_not_wrapped("replicate", module)
    check_whole("replicate", module, ctx)
    shared = [name for name, parameter in module.named_parameters() if ctx.engine.is_reduced(parameter)]
    if shared:
        raise AlreadyApplied(
            f"replicate: parameters of {type(module).__name__} are replicated already",
            found=listed(shared),
            expected="each parameter in one replicated module: the outermost",
            fix="replicate the whole model once, and not its parts",
        )
    lazy = [name for name, p in module.named_parameters() if isinstance(p, nn.parameter.UninitializedParameter)]
    if lazy:
        raise value_error(
            f"replicate: parameters of {type(module).__name__} have no shape yet",
            found=listed(lazy),
            expected="a module that has been called once (lazy modules get their shapes then)",
            fix="model(example_batch)  # before replicate",
        )
