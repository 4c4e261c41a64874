"""`pipeline`: the layers of a module on several ranks, one after the other, and the loop as it was.

Arguments, agreement of the ranks and who keeps which parameters are here; schedules and calls are the engine's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from weft.checks import check_count, check_module
from weft.collectives import broadcast
from weft.collectives.primitives import name_lost_peer
from weft.context import DistContext
from weft.context.placement import check_place, check_ranks_send, place_module
from weft.contract import EndsBackward, Phase, agree_on_parameters, offered, transform
from weft.engines.options import PipelineOptions
from weft.engines.torch.pipeline.batch_parts import check_flags
from weft.engines.torch.pipeline.losses import SingleStage
from weft.engines.torch.pipeline.schedules import check_schedule, owners, stages_per_rank
from weft.engines.torch.reducing.trained import is_reduced
from weft.errors import AlreadyApplied, ContextError, ContractError, listed, type_error
from weft.peers.ledger import Ledger
from weft.peers.world import World
from weft.precision import PrecisionOffer
from weft.sharding import WeightSource, check_optimizers, exchange_parameters, groups_of, optimizers_in
from weft.sharding.meta import Materializer, is_meta
from weft.sharding.stage_tensors import StageTensors, forget_state
from weft.sharding.stages import PipelinePlan, plan_of, plan_pipeline
from weft.tensors.dtensor import is_fsdp

M = TypeVar("M", bound=nn.Module)
Schedule = Literal[
    "1f1b", "gpipe", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"
]


@transform(phase=Phase.GROUPS, excludes={"sync_batch_norm"}, collective=True)
def pipeline(
    module: M,
    ctx: DistContext,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    axis: str = "pipeline",
    stages: PipelinePlan | Sequence[Sequence[str | nn.Module]] | None = None,
    micro_batches: int = 8,
    schedule: Schedule = "1f1b",
    rebind: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    weights: WeightSource = None,
) -> tuple[M, DistContext]:
    """Put the layers of `module` on the ranks along `axis`, one stage after the other; the loop stays as it is.

    Each call cuts its batch into micro-batches and sends what the last layer of a stage gives to the next rank.
    All ranks along `axis` get the same batch, and the same loss back:

        loss = model(input_ids, labels=labels).loss     # or: loss = model(x, y), with loss=fn(output, target)
        (loss * window.share).backward()

    The call runs the forwards and backwards of the schedule and sets the gradients aside; `backward()` multiplies them
    by the incoming gradient and adds them to the parameters. So each loss allows one backward pass, through any
    function of it. Without gradients (`torch.no_grad()`) a call gives every rank along `axis` what the module returns.

    Source: Huang et al., "GPipe", 2019; Narayanan et al., "PipeDream", 2019; `torch.distributed.pipelining`, whose
    schedules run here.

    Changes: `module` in place: rank 0's values; parameters and buffers of other stages are on meta under their own
    names, without gradients; of weights that stages share, each of their ranks has a copy. Calls of its layers are
    routed. Names, class and keys stay.
    Collectives: here, one broadcast of all parameters along `axis`; per call and micro-batch, one message forward and
    one back between neighbors, and one broadcast of the loss. The gradient of weights that stages share goes from each
    of their ranks to each other one, and before a step once more from the first one. The first call with inputs of new
    shapes also sends the first micro-batch once more, to learn the shapes. Without gradients, one message forward per
    micro-batch, and a broadcast of the outputs; with a cache, one all-reduce of shapes besides. Probes send two
    micro-batches twice more, forward and back, in calls that are measured, and in the first one the parameters of each
    layer once to all ranks along `axis`.

    Args:
        module: Whose layers forward calls one after the other, each once; on the CPU, on `ctx.device` or on meta.
            Rows may not depend on each other, as with batch norm, which is measured. Dropout draws for each
            micro-batch, so that it drops other elements than in one process.
        ctx: The current context.
        loss: A function of output and target, if forward does not return the loss; the call then takes the target
            last, or as `target=`. It gives the mean over the rows, or a sum and the number of its terms.
        axis: Mesh axis of the stages.
        stages: For each stage the names of its layers, or a plan; default: `plan_pipeline`, which balances the bytes
            of parameters.
        micro_batches: Into how many parts a batch is cut; it has to divide the rows.
        schedule: "1f1b", "gpipe": one stage per rank. "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble",
            "zbv_zero_bubble", "dualpipe_v": two, or with `stages` and the first three more.
        rebind: Optimizers over the parameters of `module`, which continue with those of this rank's stages.
        weights: For a module on meta: tensors by name, a function that gives them, or None: `reset_parameters()`.
            Each rank makes its own stages only.

    Returns:
        `module` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: `module` is replicated or sharded already.
        ContextError: There is no such axis, the ranks pass different models or options, or torch is older than 2.13.
        ContractError: Fewer blocks than stages, or fp16 on a part of the module. In a call, `ProbeFailed`: rows depend
            on each other, or the mean over the micro-batches is not the loss of the batch.
        OrderError: A living optimizer holds parameters and is not in `rebind`.
        TypeError: Not a module, or an option of another kind.
        ValueError: An option is out of range, or the schedule does not fit the number of stages or micro-batches.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> model, ctx = weft.pipeline(nn.Linear(2, 1), weft.local(), loss=nn.functional.mse_loss)
        >>> loss = model(torch.ones(8, 2), torch.ones(8, 1))
        >>> loss.dim()
        0
    """
    check_module("pipeline", module)
    check_count("pipeline", "micro_batches", micro_batches, fix="weft.pipeline(model, ctx, micro_batches=8)")
    per_rank = stages_per_rank(schedule)
    _check_loss(loss)
    ranks = ctx.axis_size(axis) if ctx.world_size > 1 else 1
    if ranks > 1 or loss is not None:
        sends = "an engine whose ranks send tensors to each other"
        check_ranks_send("pipeline", ctx, sends, fix="model, ctx = weft.fully_shard(model, ctx)")
    optimizers = optimizers_in("pipeline", rebind)
    _check_module(module)
    given = stages.stages if isinstance(stages, PipelinePlan) else stages
    number = ranks * per_rank if given is None else len(given)
    if ranks > 1:
        check_schedule(schedule, ranks, number, micro_batches)
        plan = plan_pipeline(module, number) if given is None else plan_of(module, given, number)
    else:
        plan = PipelinePlan((), ())
    options = PipelineOptions(plan.stages, micro_batches, schedule, loss, ctx.probes)
    if weights == "later":
        raise ContextError(
            'pipeline: weights = "later" cannot be used',
            found="'later'",
            expected="tensors by name, a function that returns them, or None: each rank makes its own stages at once",
            fix="weft.pipeline(model, ctx, weights=lambda: load_file(path))  # of safetensors.torch",
        )
    on_meta, old = is_meta(module), dict(module.named_parameters())
    if ranks == 1:
        if on_meta:
            Materializer("pipeline", module, ctx, ctx.on(_others(ctx, axis)), weights).make_real(module)
            exchange_parameters(module, old, optimizers)
        else:
            place_module("pipeline", module, ctx)
        return module, ctx if loss is None else ctx.offering(SingleStage(module, loss))
    if not on_meta:
        check_place("pipeline", module, ctx)
    check_optimizers("pipeline", module, optimizers)
    ctx.require_collective("pipeline")
    line = ctx.on(axis)
    facts = {"stages": plan.stages, "micro_batches": micro_batches, "schedule": schedule, "axis": axis, "meta": on_meta}
    agree_on_parameters("pipeline", module, ctx, {**facts, "rebind": groups_of(module, optimizers)})
    source = Materializer("pipeline", module, ctx, ctx.on(_others(ctx, axis)), weights) if on_meta else None
    tensors = StageTensors(module, ctx, axis, plan, owners(schedule, ranks, number))
    tensors.keep(source)
    exchange_parameters(module, old, optimizers)
    forget_state(module, optimizers)
    assert line.group is not None
    from weft.engines.torch.pipeline.pipelined import PipelinedModule  # noqa: PLC0415  (half a second of imports in torch)

    peers, guard = Ledger(line.world, "pipeline"), partial(_in_call, line.world, offered(module, EndsBackward))
    calls = PipelinedModule(
        module,
        line.group,
        ctx.device,
        options,
        peers,
        guard,
        lambda value, rank: broadcast(value, line, source=rank),
        tensors.copies,
        next((offer.precise.scale for offer in offered(module, PrecisionOffer) if offer.precise is not None), None),
    )
    return module, ctx.offering(tensors, calls)


@contextlib.contextmanager
def _in_call(world: World, others: Sequence[EndsBackward]) -> Iterator[None]:
    """Around the passes of a call: failures name the rank, and other transforms leave backward passes alone."""
    with contextlib.ExitStack() as stack:
        for other in others:
            stack.enter_context(other.without_backward())
        stack.enter_context(name_lost_peer("pipeline", world))
        stack.enter_context(world.between_pairs())
        yield


# -- what can be wrong -------------------------------------------------------------------------------


def _others(ctx: DistContext, axis: str) -> tuple[str, ...]:
    return tuple(name for name, _ in ctx.axes if name != axis)


def _check_loss(loss: object) -> None:
    if loss is not None and not callable(loss):
        raise type_error(
            f"pipeline: loss = {loss!r} is not a function",
            found=type(loss).__name__,
            expected="a function of output and target, or None if forward returns the loss",
            fix="weft.pipeline(model, ctx, loss=torch.nn.functional.cross_entropy)",
        )


def _check_module(module: nn.Module) -> None:
    """Raise if a pipeline of this module could not compute what one process does."""
    if is_fsdp(module) or any(is_reduced(p) for p in module.parameters()):
        raise AlreadyApplied(
            f"pipeline: parameters of {type(module).__name__} are replicated or sharded already",
            found="a strategy on the module or a part of it",
            expected="pipeline, then the strategy",
            fix="model, ctx = weft.pipeline(model, ctx); model, ctx = weft.fully_shard(model, ctx)",
        )
    inside = {name: part for name, part in module.named_modules() if name}
    scaled = [n for n, part in inside.items() if any(o.precision.scaling for o in offered(part, PrecisionOffer))]
    if scaled:
        raise ContractError(
            "pipeline: a part of the module has a loss scale of its own",
            found=f"with_precision with fp16 on {listed(scaled)}",
            expected="one scale for the whole module, by which the losses of micro-batches are multiplied",
            fix='model, ctx = weft.with_precision(model, ctx, "fp16")',
        )
    check_flags(module, {})
