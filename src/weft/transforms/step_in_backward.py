"""`step_in_backward`: the optimizer's step inside backward, gradient by gradient."""

from __future__ import annotations

from typing import TypeVar

import torch

from weft.checks import check_optimizer, check_torch
from weft.context import DistContext
from weft.context.placement import check_ranks_send
from weft.contract import GradSync, Part, Phase, applied_to, offered, transform
from weft.contract.marks import known_modules
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.reducing.strategy import Strategy
from weft.engines.torch.steps.in_backward import BackwardStep, is_stepped_in_backward
from weft.engines.torch.steps.swapped import check_elementwise
from weft.errors import OrderError
from weft.precision import PrecisionOffer
from weft.sharding.stage_tensors import StageTensors
from weft.tensors.dtensor import resting_parameters

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


@transform(phase=Phase.STRATEGY, changes=Part.STEP, excludes={*Phase, "local_steps"}, collective=True)
def step_in_backward(optimizer: O, ctx: DistContext) -> tuple[O, DistContext]:
    """Step on each parameter inside backward, as soon as its gradient is reduced, and free the gradient.

    The memory of all gradients is that of the largest unit. For `fully_shard`, where units are reduced one after
    the other while backward runs, and for one rank. The loop stays as it is: `optimizer.step()` ends the step,
    and steps on what FSDP2 does not shard (single numbers, ignored parts). Steps are those of the plain loop.
    What needs all gradients at once is refused: accumulation over micro-batches, clipping by the norm of all,
    skipping steps, loss scales. `torch.nn.utils.clip_grad_norm_` finds no gradients either, and does nothing: use
    `weft.clip_grads`, which says so.

    Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (LOMO), ACL 2024;
    `torch.distributed.optim._apply_optimizer_in_backward`.

    Changes: hooks on the parameters and on `optimizer`; after backward, their gradients are None.
    Collectives: here, a meeting through the store. None in backward or step.

    Args:
        optimizer: One that updates each element independently: SGD, Adam, AdamW, RMSprop and the like.
        ctx: The current context, after `fully_shard`.

    Returns:
        `optimizer` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: It was applied before.
        ContextError: Several ranks, and torch is older than 2.13.
        OrderError: No gradients of its parameters are reduced unit by unit (`replicate`, `zero_partition`,
            `unused="zero"`), or with `accumulate_grads`, `skip_nonfinite`, a loss scale, or on parameters of
            another optimizer that does the same; later, `clip_grads` and `accumulate_grads` raise it.
        ValueError: An optimizer that looks at whole tensors (Adafactor, LBFGS, Muon), or a subclass.
        ContractError: In backward: a second gradient of one parameter before `optimizer.step()`.
        TypeError: Not an optimizer.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer, ctx = weft.step_in_backward(torch.optim.AdamW(model.parameters()), weft.local())
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> model.weight.grad is None
        True
    """
    check_optimizer("step_in_backward", optimizer)
    if ctx.world_size > 1:
        check_torch("step_in_backward", "2.13", "its FSDP2 calls the hook of a gradient more than once")
    check_ranks_send(
        "step_in_backward", ctx, "an engine that runs backward operation by operation", fix="optimizer.step()"
    )
    check_elementwise("step_in_backward", optimizer, "cannot step on one shard after the other")
    parameters = _reduced_in_backward(optimizer, ctx)
    ctx.agree("step_in_backward")
    return optimizer, ctx.offering(BackwardStep(optimizer, parameters))


def _reduced_in_backward(optimizer: torch.optim.Optimizer, ctx: DistContext) -> list[torch.Tensor]:
    """The parameters whose gradients arrive reduced, once per step; raises where there are none."""
    own = {id(p): p for p in parameters_of(optimizer)}
    if ctx.replicas is not None:
        _refuse("replicas, which average when backward has ended", "elastic= of weft.start")
    if any(map(is_stepped_in_backward, own.values())):
        _refuse("another optimizer, which frees the gradients of the same parameters", "the other optimizer")
    found: list[torch.Tensor] = []
    for module in known_modules(ctx):
        if own.keys().isdisjoint(map(id, resting_parameters(module))):
            continue
        if any(record.name == "accumulate_grads" for record in applied_to(module)):
            _refuse("accumulate_grads, which keeps gradients over micro-batches", "accumulate_grads")
        if any(offer.precision.scaling is not None for offer in offered(module, PrecisionOffer)):
            _refuse("a loss scale, by which gradients are divided when backward has ended", "the policy of fp16")
        if any(tensors.copies for tensors in offered(module, StageTensors)):
            _refuse("weights that are tied over stages, whose gradients are made equal before a step", "pipeline")
        for sync in offered(module, GradSync):
            if isinstance(sync, Strategy):
                found += [p for p in sync.reduced_in_backward() if id(p) in own]
    if ctx.world_size > 1 and not found:
        raise OrderError(
            "step_in_backward: gradients are not reduced unit by unit while backward runs",
            found=f"{len(own)} parameters, with replicate, zero_partition or unused='zero', or before a strategy",
            expected="fully_shard, then the optimizer, then step_in_backward",
            fix="model, ctx = weft.fully_shard(model, ctx)  # in place of another strategy, before the optimizer",
        )
    return list(own.values()) if ctx.world_size == 1 else found


def _refuse(found: str, other: str) -> None:
    raise OrderError(
        "step_in_backward: needs gradients that are complete as soon as they are computed",
        found=found,
        expected=f"either step_in_backward or {other}",
        fix=f"leave step_in_backward or {other} out",
    )
