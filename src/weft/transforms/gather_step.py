"""`gather_step`: let an optimizer that cannot step on DTensors step on a sharded module."""

from __future__ import annotations

from typing import Literal, TypeVar

import torch

from weft.checks import check_choice, check_optimizer
from weft.context import DistContext
from weft.contract import Part, Phase, transform
from weft.errors import ContractError
from weft.sharding import check_who_steps, step_in_parts

O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741


@transform(phase=Phase.STRATEGY, changes=Part.STEP, excludes={Phase.STRATEGY}, collective=True)
def gather_step(optimizer: O, ctx: DistContext, *, by: Literal["all", "owner"] = "all") -> tuple[O, DistContext]:
    """Step on plain tensors although the module is sharded: on full parameters if the optimizer needs them.

    For optimizers whose update of an element depends on others, such as Adafactor and Muon, after `fully_shard`: each
    parameter and its gradient are gathered on every rank, stepped as in one process, and sharded again. State with the
    parameter's shape is kept in shards; other state is kept whole. Torch's optimizers of single elements (SGD, Adam,
    AdamW, ...) step on the shards, as plain tensors and without communication, and do so without this transform, too.
    Where nothing is sharded, an optimizer of the first kind steps parameter by parameter. Of what `optimizers` has made
    one, each group is treated by its own kind.

    With `by="owner"` each parameter is made whole on one rank only, which steps on it: N ranks do
    1/N of the work each, and keep 1/N of the state, of any shape. Owners are chosen by the work, the
    elements times the shorter side of a matrix, so that no rank holds more than 1.25 times its share
    of the parameters and one matrix. It also divides the work where parameters are whole on every
    rank, after `replicate`. `optimizer.state` and `state_dict()` then hold what this rank owns;
    `weft.save` writes all of it, and `weft.restore` reads it at any number of ranks.

    Source: "Muon is Scalable for LLM Training", Liu et al. 2025, section 3.2, gathers as `by="all"`; owners and
    all-to-alls as in Dion, Ahn et al. 2025.

    Changes: hooks on `optimizer`, and where its state lies.
    Collectives: here, a meeting through the store, and with `by="owner"` all-gathers of state that is there in
    shards. In `step`, none for optimizers of single elements; for others all-gathers of 2x the parameter bytes, and
    of the state's, or by owners two all-to-alls per 4 MiB of parameters of an owner, of 3x the parameter bytes in all.

    Args:
        optimizer: One that updates each parameter independently; without closures if it needs whole parameters.
        ctx: The current context.
        by: "all" steps on every rank, on one whole parameter after the other; "owner" on one rank each.

    Returns:
        `optimizer` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: It was applied before.
        ContractError: LBFGS, which looks at all parameters at once; one of torchao, whose state cannot be cut, but by
            owners. By owners: one that changes parameters outside of `step`; and in `step`, if it got other parameters.
        OrderError: By owners: not all ranks hold the parameters alike, as with `pipeline` and `local_steps`.
        TypeError: Not an optimizer.
        ValueError: `by` is unknown, or "owner" for an optimizer of single elements.
        PeerError: Another rank failed.

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
            "gather_step: LBFGS uses all parameters at once",
            found="LBFGS",
            expected="an optimizer that updates each parameter independently",
            fix="model, ctx = weft.replicate(model, ctx)  # instead of sharding",
        )
    check_choice("gather_step", "by", by, ("all", "owner"))
    check_who_steps("gather_step", optimizer, by)
    if ctx.world_size == 1:
        return optimizer, ctx
    shapes = [[list(p.shape) for p in entry["params"]] for entry in optimizer.param_groups]
    ctx.agree("gather_step", {"by": by, **({"parameters": shapes} if by == "owner" else {})})
    return optimizer, ctx.offering(*step_in_parts(optimizer, ctx, by))
