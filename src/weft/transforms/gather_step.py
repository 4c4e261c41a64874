"""`gather_step`: let an optimizer that cannot step on DTensors step on a sharded module."""

from __future__ import annotations

from typing import TypeVar

import torch

from weft.checks import check_optimizer
from weft.context import DistContext
from weft.contract import transform
from weft.engines.torch.optim.flat_step import is_elementwise
from weft.errors import ContractError

__all__ = ["gather_step"]

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


@transform(after={"skip_nonfinite"}, excludes={"fuse_step", "zero_partition"})
def gather_step(optimizer: O, ctx: DistContext) -> tuple[O, DistContext]:
    """Step on plain tensors where the module is sharded: on whole parameters if the optimizer needs them.

    For optimizers whose update of an element depends on others, such as Adafactor and Muon, after
    `fully_shard`: each parameter and its gradient are made whole on every rank, stepped as in one
    process, and cut again. State of the parameter's shape is kept in shards, other state whole.
    Optimizers of single elements (SGD, Adam, AdamW, ...) step on the shards, as plain tensors and
    without communication. Most of them can do so without this transform; those that use an operation
    torch does not have for DTensors need it: Rprop, and SGD and Adagrad with `fused=True`.
    Where nothing is sharded, an optimizer of the first kind steps parameter by parameter.

    Changes: hooks on `optimizer`.
    Collectives: none here. In `step`, none for optimizers of single elements, and all-gathers of 2x the
    parameter bytes, and of the state's, for others.

    Args:
        optimizer: One that updates each parameter by itself; without closures if it needs whole parameters.
        ctx: Where we run.

    Returns:
        `optimizer` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: It was applied before.
        ContractError: LBFGS, which looks at all parameters at once.
        TypeError: Not an optimizer.

    Example:
        >>> import weft
        >>> optimizer = torch.optim.Adafactor(torch.nn.Linear(2, 2).parameters())
        >>> optimizer, ctx = weft.gather_step(optimizer, weft.local())
        >>> [record.name for record in ctx.applied]
        ['gather_step']
    """
    check_optimizer("gather_step", optimizer)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ContractError(
            "gather_step: LBFGS looks at all parameters at once",
            found="LBFGS",
            expected="an optimizer that updates each parameter by itself",
            fix="model, ctx = weft.replicate(model, ctx)  # instead of sharding",
        )
    if ctx.world_size == 1:
        return optimizer, ctx
    if is_elementwise(optimizer):
        return optimizer, ctx.offering(ctx.engine.partition_step(optimizer, None))
    return optimizer, ctx.offering(ctx.engine.whole_step(optimizer, None))
