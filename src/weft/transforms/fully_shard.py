"""`fully_shard`: parameters, gradients and optimizer state cut into shards, one per rank.

Arguments, the choice of units and the agreement of the ranks are here; FSDP2 is laid on by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import torch
from torch import nn

from weft.checks import check_choice, check_module
from weft.context import DistContext
from weft.contract import Phase, layouts, transform
from weft.contract.select_modules import Selection
from weft.engines.options import ShardOptions
from weft.engines.torch.reducing.replica_average import ReplicaAverage
from weft.sharding import UnitChoice, WeightSource, keep_state_on_cpu, optimizers_in, shard_module, sharding_axes

M = TypeVar("M", bound=nn.Module)


@transform(phase=Phase.STRATEGY, excludes={Phase.STRATEGY}, collective=True)
def fully_shard(
    module: M,
    ctx: DistContext,
    *,
    units: UnitChoice | None = None,
    axis: str | Sequence[str] | None = None,
    reshard_after_forward: bool | int = True,
    rebind: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    ignored: Selection | None = None,
    weights: WeightSource = None,
    unused: Literal["error", "zero"] = "error",
    buffers: Literal["broadcast", "local"] = "broadcast",
    methods: Sequence[str] = (),
    offload: bool | Literal["optimizer"] = False,
) -> tuple[M, DistContext]:
    """Shard parameters, gradients and optimizer state over the ranks.

    For models that do not fit on one device. A unit is gathered before its forward and backward,
    and freed after, so that at most a few units are whole at a time. With one rank along `axis`
    nothing is done.

    Source: Rajbhandari et al., "ZeRO", SC 2020; Zhao et al., "PyTorch FSDP", VLDB 2023;
    `torch.distributed.fsdp.fully_shard`.

    Changes: `module` in place: its parameters are replaced by DTensors (so pass an existing optimizer as `rebind`), and
    classes of units by subclasses that FSDP2 creates; `isinstance`, names and keys stay. The optimizers in `rebind`, in
    place.
    Collectives: here, one broadcast of parameters and buffers. Per step and unit, one all-gather
    of its parameters in forward, one in backward (none with `reshard_after_forward=False`, and for
    the module's own unit and the one that forward ends with, which backward needs first), one
    reduce-scatter of its gradients; on a hybrid mesh one all-reduce of the shard's gradients. With
    ignored parameters or single numbers one all-reduce of theirs; with `unused="zero"` one of a byte
    per parameter.

    In an elastic job (`start(elastic=...)`), the shards of a replica are on its own ranks, and gradients are averaged
    over the live replicas; see `resilient`.

    Args:
        module: On the CPU, on `ctx.device`, or on meta: then it is materialized unit by unit, so no rank holds more
            than one unsharded unit. Parameters may be DTensors over other axes; that sharding stays.
        ctx: The current context.
        units: What is gathered together: a class, a pattern of names ("blocks.*"), the smallest
            parts with so many parameters, a function of name and module, modules, or several of
            these. Parts that share a parameter become one unit. Default: the blocks that stand in
            a `ModuleList` or `Sequential`, and large single layers outside them. What is in no
            unit belongs to the module's own. All ranks have to call the same units, in one order. Or a table of what
            `reshard_after_forward` is in each, `{"blocks.0": False, "blocks.*": True}`; None: no unit, "*": the
            module's own; see `weft.contract.name_table`.
        axis: Mesh axis to shard over; two axes (replica, shard): shard over the second and replicate over the first.
            Default: the data axes, at most two; axes along which a batch is split (`context_parallel`), or along which
            some parameters are already sharded (`expert_parallel`), are joined to the last one.
        reshard_after_forward: True keeps, of what was gathered in forward, only what backward needs first: the module's
            own unit, and the one that forward ends with, unless it is called several times in a forward. False keeps
            everything: less traffic, more memory. A number: reshard it over that many ranks. What is kept is freed by
            backward, by the next call, which gathers anew, or by an optimizer step.
        rebind: Optimizers that hold parameters of `module`: groups and state are carried over.
        ignored: Parts whose parameters stay whole on every rank; gradients are averaged. The same
            is done with parameters that are a single number, which cannot be cut.
        weights: For a module on meta: all of its state by name, or a function that reads it; only asked on the first
            rank, and sent from there. Without it, and for buffers that are not saved, each part's `reset_parameters()`
            is called, with random numbers of `ctx.seed`. The first rank may also pass a module with values, and the
            others theirs on meta. "later": what is on meta stays there, sharded, until `weft.load_weights` reads each
            rank's part.
        unused: What it means when a parameter gets no gradient. "error": raises at the end of
            backward, naming it. "zero": ranks that did not use it count as zero; a parameter no
            rank used keeps `grad` None.
        buffers: "broadcast": after a reduced backward every rank gets the first rank's buffers
            (running statistics). "local": they may differ.
        methods: Methods of `module` besides forward that use its parameters.
        offload: Keep shards, their gradients and the optimizer's state in the memory of the CPU, where the optimizer
            steps; units are copied to the device when they are gathered. "optimizer": only the optimizer's state is
            there between steps; it comes to the device for 64 MiB of parameters at a time, and steps are made there.
            On a CPU nothing changes.

    Returns:
        `module` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: `module` or a part of it is sharded or replicated already.
        OrderError: An optimizer holds its parameters and is not in `rebind`; or a transform that
            comes later was applied.
        ContextError: There is no such axis, a data axis is left out, or the ranks pass different models or options.
        ContractError: A parameter is cut over ranks that are no axis of the context; or parameters of one part are
            to be sharded over different ranks.
        TypeError: `module` is not a module.
        ValueError: `units` or `ignored` match nothing; an option is out of range; the trained
            parameters of a unit have several dtypes, or hooks, which shards would not call; or
            something on meta has no value. Adafactor and Muon without `gather_step` raise
            `OrderError` in the first backward pass.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> model, ctx = weft.fully_shard(model, weft.local(), units=nn.Linear)
        >>> [record.name for record in ctx.applied]
        ['fully_shard']
    """
    options = ShardOptions(
        reshard_after_forward=reshard_after_forward,
        unused=unused,
        buffers=buffers,
        methods=tuple(methods),
        offload=offload is True,
    )
    check_choice("fully_shard", "offload", offload, (False, True, "optimizer"))
    optimizers = optimizers_in("fully_shard", rebind)
    check_module("fully_shard", module)
    found = layouts(module, ctx)
    sharded = shard_module(
        "fully_shard",
        module,
        found,
        ctx,
        sharding_axes("fully_shard", module, found, ctx, axis),
        options,
        rebind=optimizers,
        units=units,
        ignored=ignored,
        weights=weights,
    )
    ctx = ctx if sharded is None else ctx.offering(sharded)
    if offload == "optimizer":
        ctx = ctx.offering(*keep_state_on_cpu("fully_shard", module, ctx))
    if ctx.replicas is not None:
        averaged = ReplicaAverage(module, ctx.replicas, options, alone=sharded is None)
        ctx = ctx.offering(averaged)
    return module, ctx
