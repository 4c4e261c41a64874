"""`skip_nonfinite`: steps with a non-finite gradient are skipped, on all ranks alike."""

from __future__ import annotations

from typing import TypeVar

import torch

from weft.checks import check_optimizer
from weft.context import DistContext
from weft.contract import Part, Phase, applied_to, offered, transform
from weft.engines.torch.steps.skip import SkippingStep
from weft.errors import ContractError, OrderError, listed, value_error
from weft.grads.elements import scales_of, skipping_step

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


@transform(phase=Phase.PREPARE, changes=Part.STEP, collective=True)
def skip_nonfinite(optimizer: O, ctx: DistContext) -> tuple[O, DistContext]:
    """Let an optimizer skip the steps whose gradients are not finite, as fp16 with a moving scale needs.

    A step with an infinite or NaN gradient on any rank is skipped on all ranks, and the fp16 scale of the modules backs
    off; see `was_skipped`. Needed with "fp16": without it the second backward pass raises. It does nothing for modules
    in other precisions, so a program may call it always.

    Source: Micikevicius et al., "Mixed Precision Training", 2018; `torch.amp.GradScaler`.

    Changes: hooks on `optimizer`.
    Collectives: none here; with fp16 modules on several ranks, one all-reduce of a few numbers per step.

    Args:
        optimizer: Over parameters of modules that `with_precision` was applied to.
        ctx: The context that knows these modules.

    Returns:
        `optimizer` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: It was applied to `optimizer` before.
        OrderError: Before `with_precision` of its modules, or after a transform of its step.
        ValueError: LBFGS with an fp16 module: the loss is evaluated inside its step.
        TypeError: This is not an optimizer.
        ContextError: The ranks pass different optimizers.

    Example:
        >>> import weft
        >>> model, ctx = weft.with_precision(torch.nn.Linear(2, 2), weft.local(), "fp16")
        >>> optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD(model.parameters()), ctx)
    """
    check_optimizer("skip_nonfinite", optimizer)
    scales = scales_of(optimizer, ctx)
    if scales is None:
        raise OrderError(
            "skip_nonfinite: the context knows no module with a precision that holds these parameters",
            found=f"transforms so far: {listed(record.name for record in ctx.applied) or 'none'}",
            expected="with_precision on the module, then the optimizer, then skip_nonfinite on the optimizer",
            fix='model, ctx = weft.with_precision(model, ctx, "fp16")',
        )
    if scales and isinstance(optimizer, torch.optim.LBFGS):
        raise value_error(
            "skip_nonfinite: LBFGS evaluates the loss inside step, which cannot be skipped",
            found="LBFGS with an fp16 module",
            expected="an optimizer that is stepped after backward",
            fix='model, ctx = weft.with_precision(model, ctx, "bf16")',
        )
    ctx.agree("skip_nonfinite", {"optimizer": type(optimizer).__name__, "fp16 modules": len(scales)})
    return optimizer, ctx.offering(skipping_step(optimizer, ctx).attach(optimizer)) if scales else ctx


def was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether the last step of an optimizer was skipped because of a non-finite gradient.

    Changes: nothing. Collectives: none; the answer is the same on all ranks.

    Args:
        optimizer: One that `skip_nonfinite` was applied to, or that has it in its `grad_chain`.

    Returns:
        True after a skipped step, False after a good one and before the first.

    Raises:
        ContractError: `skip_nonfinite` was not applied to it.

    Example:
        >>> import weft
        >>> model, ctx = weft.with_precision(torch.nn.Linear(2, 2), weft.local(), "fp16")
        >>> optimizer, ctx = weft.skip_nonfinite(torch.optim.SGD(model.parameters()), ctx)
        >>> weft.was_skipped(optimizer)
        False
    """
    steps = offered(optimizer, SkippingStep)
    if not steps and not any(record.name == "skip_nonfinite" for record in applied_to(optimizer)):
        raise ContractError(
            "was_skipped: this optimizer never skips a step",
            found=type(optimizer).__name__,
            expected="an optimizer that skip_nonfinite was applied to",
            fix="optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)",
        )
    return any(step.skipped for step in steps)
