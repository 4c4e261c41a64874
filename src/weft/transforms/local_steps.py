"""`local_steps`: ranks step on gradients of their own, and exchange parameters now and then.

Arguments and agreement of the ranks are here; the exchange itself is the engine's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from weft.checks import check_module, check_optimizer
from weft.context import DistContext
from weft.context.placement import place_module
from weft.contract import Layout, Part, Phase, agree_on_parameters, layouts, offered, transform
from weft.engines.torch.steps.local import LocalStepOptions, LocalSteps, check_same_parameters
from weft.errors import ContextError, ContractError, listed
from weft.peers.ledger import Ledger
from weft.sharding import broadcast_state, groups_of, stacked_over

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


@transform(
    phase=Phase.GROUPS,
    changes=Part.PARAMETERS,
    after={"sync_batch_norm"},
    before={"accumulate_grads"},
    excludes={Phase.GROUPS, "average_weights"},
    collective=True,
)
def local_steps(
    module: M,
    optimizer: O,
    ctx: DistContext,
    *,
    every: int,
    outer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    fragments: int = 1,
    axis: str | None = None,
) -> tuple[M, O, DistContext]:
    """Let the ranks along an axis step on gradients of their own, and exchange parameters every few steps.

    For slow networks: `1 / every` of the bytes of `replicate`. `every=1` with SGD is data parallelism, to rounding.
    Everything else is another algorithm than the loop in one process: local SGD, which takes the mean of the
    parameters, or with `outer` DiLoCo, where an optimizer steps on the mean change since the last exchange.

    The loop stays as it is, and so does `loss * window.share`. On a mesh {"replica": r, "shard": s} a strategy that
    follows works along the other axes, inside each replica: `zero_partition`, or `fully_shard` and `replicate`,
    which then leave this axis alone. Between exchanges the replicas differ: evaluate inside
    `with averaged(model, ctx):`, from this module. Checkpoints may be saved at any step. As the model, they hold the
    values of the last exchange; they also hold the parameters and the optimizer state of each replica. So a run on the
    same number of replicas resumes bit for bit, and a run on a different number resumes from the last exchange and the
    mean of the states.

    Source: Stich, "Local SGD Converges Fast and Communicates Little", 2019; Douillard et al., "DiLoCo", 2023
    (`outer`: SGD with Nesterov momentum), and "Streaming DiLoCo", 2025 (`fragments`).

    Changes: `module` is moved to `ctx.device` and gets the values of the first rank along the axis; hooks on
    `optimizer`. Memory for one more copy of this rank's parameters, and the outer optimizer's state.
    Collectives: here, one broadcast of parameters and buffers. Every `every` steps, in `step`, one all-reduce of
    1x the parameter bytes (of each fragment at its step), a broadcast of the buffers, and a meeting through the store.

    Args:
        module: Trained by `optimizer` alone.
        optimizer: Over all trained parameters of `module`; its state stays local to every rank.
        ctx: The current context.
        every: Steps between two exchanges, >= 1.
        outer: Makes the optimizer of the exchange, of the list of parameters it is given:
            `lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)`. Their gradient is the last
            exchanged value minus the mean of the present ones. Default: the mean is taken as it is.
        fragments: Number of parts into which the parameters are divided, 1 to `every`. Part i holds every
            `fragments`-th parameter starting at i, and is exchanged after the steps with
            `step % every == i * every // fragments`: the same number of bytes, in smaller bursts.
        axis: The data axis along which ranks step apart; default: the first one.

    Returns:
        `module` and `optimizer` themselves, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: It was applied before.
        OrderError: A strategy was applied before, or with `average_weights`, `pipeline`.
        ContextError: There is no such data axis, or the ranks pass different models or options.
        ContractError: `optimizer` does not hold exactly the trained parameters; or it evaluates with other parameters
            than it trains with (schedule-free ones); or a parameter is cut along the axis, or on some ranks only, as
            experts of a list.
        TypeError: An argument is of another kind.
        ValueError: A number is out of range.
        PeerError: Another rank failed; also in `step`, if one comes to another number of steps.

    Example:
        >>> import weft
        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> model, optimizer, ctx = weft.local_steps(model, optimizer, weft.local(), every=16)
        >>> [record.name for record in ctx.applied]
        ['local_steps']
    """
    call = "model, optimizer, ctx = weft.local_steps(model, optimizer, ctx, every=16)"
    check_module("local_steps", module, fix=call)
    check_optimizer("local_steps", optimizer, fix=call)
    chosen = _axis(ctx, axis)
    options = LocalStepOptions(axis=chosen, every=every, fragments=fragments, outer=outer)
    check_same_parameters(module, optimizer)
    where = layouts(module, ctx)
    _check_states(optimizer, where, chosen)
    place_module("local_steps", module, ctx)
    sub = ctx.on(chosen)
    if sub.world_size > 1:
        ctx.require_collective("local_steps")
        facts = {
            "every": every,
            "fragments": fragments,
            "outer": None if outer is None else "a function",
            "axis": chosen,
            "optimizer": groups_of(module, [optimizer]),
        }
        agree_on_parameters("local_steps", module, ctx, facts)
        broadcast_state(module, where, ctx, (chosen,))
    peers = Ledger(sub.world, "local_steps") if sub.world_size > 1 else None
    stacked = partial(stacked_over, ctx=ctx, axis=chosen)
    group = sub.group if sub.world_size > 1 else None
    return module, optimizer, ctx.offering(LocalSteps(module, optimizer, group, options, peers, stacked))


@contextlib.contextmanager
def averaged(module: nn.Module, ctx: DistContext) -> Iterator[None]:
    """Let a module compute with the mean over the ranks that step apart, inside the body.

    Changes: values of the module's parameters; given back bit for bit, also after an error. Memory for one more copy
    of this rank's parameters. Collectives: one all-reduce of 1x the parameter bytes, and a meeting.

    Args:
        module: One that `local_steps` was applied to.
        ctx: The current context; all ranks come here.

    Yields:
        Nothing.

    Raises:
        ContractError: `local_steps` was not applied to it; or a step or a save inside the body.
        PeerError: Another rank failed, or did not come.

    Example:
        >>> import weft
        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model, optimizer, ctx = weft.local_steps(model, optimizer, weft.local(), every=4)
        >>> with averaged(model, ctx):
        ...     _ = model(torch.ones(1, 2))
    """
    found = offered(module, LocalSteps)
    if not found:
        raise ContractError(
            "averaged: local_steps was not applied to this module",
            found=type(module).__name__,
            expected="a module with local_steps; for averages over time, use average_weights",
            fix="model, optimizer, ctx = weft.local_steps(model, optimizer, ctx, every=16)",
        )
    ctx.agree("averaged")
    with found[-1].averaged():
        yield


def _axis(ctx: DistContext, axis: str | None) -> str:
    data_axes = [name for name, _ in ctx.axes if name in ctx.data_axes]
    chosen = data_axes[0] if axis is None and data_axes else axis
    if not isinstance(chosen, str) or chosen not in data_axes:
        mesh = {"data": -1, **dict(ctx.axes)}
        raise ContextError(
            f"local_steps: axis = {axis!r} cannot be used",
            found=f"{axis!r}, with the data axes {listed(map(repr, data_axes)) or 'none'}",
            expected="one data axis, along which the batches differ",
            fix=f"weft.local_steps(model, optimizer, ctx, every=16, axis={data_axes[0]!r})"
            if data_axes
            else f"ctx = weft.start(mesh={mesh})",
        )
    return chosen


def _check_states(optimizer: torch.optim.Optimizer, where: Mapping[str, Layout], axis: str) -> None:
    if callable(getattr(optimizer, "eval", None)):
        raise ContractError(
            f"local_steps: {type(optimizer).__name__} keeps a second set of parameters in its state",
            found="an optimizer with train() and eval(), as those of schedulefree",
            expected="one set of parameters, which the ranks can average",
            fix="torch.optim.AdamW with a schedule; or weft.replicate instead of local_steps",
        )
    owned = [name for name, one in where.items() if one.owner]
    if owned:
        raise ContractError(
            "local_steps: some ranks have no values of parameters, which nobody would exchange",
            found=listed(owned),
            expected="parameters that every rank has, whole or in shards",
            fix="weft.replicate(model, ctx)  # in place of local_steps",
        )
    cut = [name for name, one in where.items() if axis in one.cut]
    if cut:
        raise ContractError(
            f"local_steps: parameters are cut along {axis!r}, so that there is no mean of them",
            found=listed(cut),
            expected="every rank along the axis has a copy",
            fix='weft.start(mesh={"data": 2, "expert": -1}), with the experts along an axis of their own',
        )
