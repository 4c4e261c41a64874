"""Who steps on what: all ranks on what they hold, or the owner of each parameter on all of it.

Which block of a parameter every rank holds is told without a collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.checks import is_of
from weft.collectives import broadcast
from weft.context import DistContext
from weft.context.placement import check_ranks_send
from weft.contract import StepsApart, offered
from weft.contract.layout import axes_of_dims
from weft.engines import Spmd
from weft.engines.options import StepMeshes
from weft.engines.results import Undoable
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.steps.swapped import elementwise_groups, is_elementwise
from weft.errors import ContractError, OrderError, value_error
from weft.tensors.blocks import Block, block_at, flat_index
from weft.tensors.dtensor import is_sharded, local
from weft.tensors.remote_parameter import is_elsewhere


def check_who_steps(what: str, optimizer: torch.optim.Optimizer, by: str) -> None:
    """Raise if an optimizer cannot step "all" ranks together, or by the "owner" of each parameter.

    Raises:
        ValueError: Owners, and it steps on single elements.
        OrderError: Owners, and ranks step apart, or have parameters that others have not.
        ContractError: Owners, and it changes parameters outside of `step`; or all, and its state can be neither cut
            nor sent, as that of torchao, in tensors of its own classes.
    """
    if by == "all":
        _check_divides_state(what, optimizer)
        return
    kind = type(optimizer).__name__
    parameters = parameters_of(optimizer)
    if is_elementwise(optimizer):
        raise value_error(
            f"{what}: by='owner' has no effect on {kind}, which steps on shards as they are",
            found=f"{kind}, whose update of an element depends on that element alone",
            expected="by='owner' with optimizers of whole tensors, such as Muon, Shampoo, SOAP, Adafactor",
            fix=f'leave by="owner" out of the call of {what}',
        )
    if offered(optimizer, StepsApart) or any(is_elsewhere(p) for p in parameters):
        raise OrderError(
            f"{what}: parameters cannot have one owner each",
            found="local_steps, with which ranks hold parameters of their own"
            if offered(optimizer, StepsApart)
            else "parameters that only some ranks have, as with pipeline and divided lists of experts",
            expected="ranks that hold the same parameters, full or sharded",
            fix=f'leave by="owner" out of the call of {what}',
        )
    if callable(getattr(optimizer, "eval", None)):
        raise ContractError(
            f"{what}: {kind} changes parameters outside step, by its state, which only owners would have",
            found="an optimizer with eval(), as those of schedulefree",
            expected="one that changes parameters in step() alone",
            fix=f'leave by="owner" out of the call of {what}',
        )


def _check_divides_state(what: str, optimizer: torch.optim.Optimizer) -> None:
    if is_of(type(optimizer), "torchao"):
        raise ContractError(
            f"{what}: the state of {type(optimizer).__name__} cannot be divided among ranks",
            found="an optimizer of torchao, which keeps state in tensors of its own classes",
            expected='by="owner", with which the state of a parameter lies whole on one rank',
            fix='optimizer, ctx = weft.gather_step(optimizer, ctx, by="owner")'
            if what == "gather_step"
            else f'model, optimizer, ctx = weft.{what}(model, optimizer, ctx, stage=2, by="owner")',
        )


def _step_by_owners(optimizer: torch.optim.Optimizer, ctx: DistContext, places: Sequence[int]) -> Undoable:
    fix = "optimizer, ctx = weft.gather_step(optimizer, ctx)"
    check_ranks_send("gather_step: by='owner'", ctx, "an engine whose ranks send tensors to each other", fix=fix)
    parameters = [p for place in places for p in optimizer.param_groups[place]["params"]]
    world = ctx.require_collective("gather_step")
    assert world.group is not None

    from weft.engines.torch.sharded_step.by_owner import OwnerStep  # noqa: PLC0415  (half a second of imports in torch)

    return OwnerStep(optimizer, world.group, _blocks_of_ranks(parameters, ctx), partial(broadcast, ctx=ctx), places)


def step_in_parts(
    optimizer: torch.optim.Optimizer,
    ctx: DistContext,
    by: str,
    mesh: DeviceMesh | None = None,
    others: StepMeshes | None = None,
    *,
    sparse: bool = False,
) -> Sequence[Undoable]:
    """Let an optimizer step on parameters in shards; by an engine that sees them whole, it does anyway.

    Args:
        optimizer: Over them.
        ctx: Its context.
        by: Who steps on whole parameters, where an update of an element may depend on others: "all" ranks, on one
            after the other, or "owner", each on its own; see `check_who_steps`. Other groups are stepped on by what
            each rank holds.
        mesh: Over which the rows of whole parameters, and their state, are divided; None: they are not.
        others: The meshes of parameters that are sharded over other axes.
        sparse: There are sparse gradients, of which no rank can take its rows.
    """
    if isinstance(ctx.engine, Spmd) and by == "all":
        return ()
    parts = [] if sparse else elementwise_groups(optimizer)
    whole = [place for place in range(len(optimizer.param_groups)) if place not in parts]
    from weft.engines.torch.sharded_step.full_params import WholeStep  # noqa: PLC0415  (half a second of imports in torch)
    from weft.engines.torch.sharded_step.shards import PartitionedStep  # noqa: PLC0415  (as above)

    others = others or {}
    found: list[Undoable] = []
    if whole:  # comes first: in the step of the others, which is the optimizer's own, it hides the gradients of these
        by_owner = by == "owner"
        found.append(_step_by_owners(optimizer, ctx, whole) if by_owner else WholeStep(optimizer, mesh, others, whole))
    if parts:
        found.append(PartitionedStep(optimizer, mesh, others, parts))
    return found


def keep_state_on_cpu(what: str, module: nn.Module, ctx: DistContext) -> Sequence[Undoable]:
    """Let the optimizers of a module keep their state on the CPU between steps, where the module computes elsewhere."""
    fix = f"leave offload out of the call of {what}"
    check_ranks_send(f'{what}: offload="optimizer"', ctx, "an engine whose ranks step by themselves", fix=fix)
    if ctx.device.type == "cpu":
        return ()
    from weft.engines.torch.device.state_offload import StateOffload  # noqa: PLC0415  (half a second of imports in torch)

    return (StateOffload(what, module, ctx.device),)


def _blocks_of_ranks(parameters: Iterable[torch.Tensor], ctx: DistContext) -> list[tuple[Block, ...]]:
    """The block of each parameter on each rank of a context.

    Raises:
        ContractError: A parameter is cut over ranks that are no axis of `ctx`, or not in chunks.
    """
    known: dict[Any, tuple[Block, ...]] = {}
    found = []
    for parameter in parameters:
        shape = tuple(parameter.shape)
        placed: Any = parameter
        key: Any = (shape, placed.device_mesh, tuple(placed.placements)) if is_sharded(parameter) else shape
        if key not in known:
            known[key] = _of_all(placed, ctx) if is_sharded(parameter) else (block_at(shape),) * ctx.world_size
        mine, held = known[key][ctx.rank].shape, local(parameter).shape
        if mine != tuple(held) and (held.numel() or math.prod(mine)):
            raise ContractError(
                f"a parameter of shape {shape} is not cut in chunks",
                found=f"{tuple(held)} on rank {ctx.rank}, by {placed.placements}",
                expected=f"{mine}, as FSDP2 and torch.chunk split",
                fix="model, ctx = weft.fully_shard(model, ctx)",
            )
        found.append(known[key])
    return found


def _of_all(parameter: Any, ctx: DistContext) -> tuple[Block, ...]:
    mesh, dims = parameter.device_mesh, axes_of_dims(parameter.device_mesh, ctx)
    found = []
    for rank in range(ctx.world_size):
        at = ctx.coordinates_of(rank)
        place = [flat_index([at[axis] for axis in axes], [ctx.axis_size(axis) for axis in axes]) for axes in dims]
        found.append(block_at(tuple(parameter.shape), tuple(mesh.shape), place, parameter.placements))
    return tuple(found)
