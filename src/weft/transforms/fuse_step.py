"""`fuse_step`: the optimizer's step as one kernel over a flat buffer."""

from __future__ import annotations

from typing import TypeVar

import torch

from weft.context import DistContext
from weft.contract import GradSync, Part, Phase, offered, transform
from weft.engines.torch.reducing.flat_step import FlatStep, flat_buffer_of
from weft.engines.torch.steps.swapped import check_elementwise

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


@transform(phase=Phase.STRATEGY, changes=Part.STEP, excludes={Phase.STRATEGY})
def fuse_step(optimizer: O, ctx: DistContext) -> tuple[O, DistContext]:
    """Step on the flat buffer of `replicate(..., flat=True)`: one kernel per group instead of one per tensor.

    For models of many small tensors, where a step costs calls and not arithmetic. The optimizer
    stays the user's: its groups hold the same parameters, schedulers and `state_dict` work, the
    numbers are those of the plain step. With one rank nothing is done.

    Changes: hooks on `optimizer`; the parameters are laid out anew, group by group.
    Collectives: none.

    Args:
        optimizer: One that updates each element independently: SGD, Adam, AdamW, RMSprop and the like.
        ctx: The current context; `replicate(..., flat=True)` was applied to the parameters' module.

    Returns:
        `optimizer` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: It was applied before.
        OrderError: No module of `ctx` holds these parameters in a flat buffer.
        ValueError: An optimizer that looks at whole tensors (Adafactor, LBFGS, Muon), or a subclass.
        ContractError: Parameters may be without gradient (`unused="zero"`).

    Example:
        >>> import weft
        >>> model = torch.nn.Linear(2, 2)
        >>> model, ctx = weft.replicate(model, weft.local(), flat=True)
        >>> optimizer, ctx = weft.fuse_step(torch.optim.AdamW(model.parameters()), ctx)
    """
    check_elementwise("fuse_step", optimizer, "cannot step on a flat buffer")
    if ctx.on(ctx.data_axes).world_size == 1:
        return optimizer, ctx
    modules = [ref() for record in ctx.applied if record.name == "replicate" for ref in record.refs]
    reducers = [sync for module in modules for sync in offered(module, GradSync)]
    return optimizer, ctx.offering(FlatStep(optimizer, flat_buffer_of(optimizer, reducers)))
