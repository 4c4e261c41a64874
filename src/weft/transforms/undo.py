"""`undo`: take transforms back, so that a module is what it was before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from weft.checks import check_module
from weft.context import DistContext
from weft.contract import Undoable, applied_to, check_known, forget, offered
from weft.peers.agreement import disagree
from weft.sharding import check_optimizers, exchange_parameters, groups_of, optimizers_in
from weft.tensors.dtensor import is_sharded
from weft.tensors.remote_parameter import is_elsewhere

M = TypeVar("M", bound=nn.Module)


def undo(
    module: M, ctx: DistContext, *, rebind: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = ()
) -> tuple[M, DistContext]:
    """Undo every transform of a module and of its parts: plain class, plain full parameters, no hooks.

    For the end of training, and for continuing with another strategy in the same process: `undo`,
    then the next transforms, with the optimizer's state kept. Values are not changed: a precision
    that cast the parameters stays in them. A loader that yields windows continues to do so, but not
    for the next strategy: give that the loader from before `accumulate_grads`.

    Changes: `module` in place; the optimizers in `rebind`, and those partitioned with it, which are
    plain as well after it: theirs are the new parameters, and state is whole.
    Collectives: a meeting through the store; one all-gather per sharded parameter and tensor of state.

    Args:
        module: With or without transforms.
        ctx: The context the last transform returned.
        rebind: Optimizers over its parameters that are to continue with the plain ones.

    Returns:
        `module` itself, and `ctx` without the records of its transforms.

    Raises:
        OrderError: Parameters are sharded or on other ranks, and an optimizer that holds them is not in `rebind`.
        StaleContext: `ctx` does not know what was done to `module`, or to an optimizer.
        TypeError: `module` is not a module, or something in `rebind` not an optimizer.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> model, ctx = weft.with_precision(nn.Linear(2, 2), weft.local(), "bf16")
        >>> model, ctx = weft.undo(model, ctx)
        >>> ctx.applied, len(model._forward_hooks)
        ((), 0)
    """
    try:
        optimizers = _optimizers(module, ctx, rebind)
        inner = [part for part in module.modules() if part is not module and applied_to(part)]
        every = (*inner, module, *optimizers)
        undoable = list(dict.fromkeys(offer for one in every for offer in offered(one, Undoable)))
        for one in every:
            check_known(one, ctx)
    except Exception as error:
        disagree(ctx.world, error)
        raise
    ctx.agree("undo", {"transforms": [type(one).__name__ for one in undoable], "rebind": groups_of(module, optimizers)})
    for one in every:
        ctx = forget(one, ctx)
    for undo in reversed(undoable):
        old = dict(module.named_parameters())
        undo.undo()
        exchange_parameters(module, old, optimizers)  # at once: the next one asks optimizers for their parameters
    return module, ctx


def _optimizers(
    module: nn.Module, ctx: DistContext, rebind: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> tuple[torch.optim.Optimizer, ...]:
    """Those in `rebind`, and those that were partitioned together with the module."""
    given = optimizers_in("undo", rebind)
    check_module("undo", module, fix="model, ctx = weft.undo(model, ctx, rebind=optimizer)")
    together = [ref() for part in module.modules() for record in ctx.records(part) for ref in record.refs]
    found = (*given, *(one for one in together if isinstance(one, torch.optim.Optimizer)))
    if any(is_sharded(p) or is_elsewhere(p) for p in module.parameters()):
        check_optimizers("undo", module, found)
    return tuple({id(one): one for one in found}.values())
