"""`plain`: take transforms back, so that a module is what it was before them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from weft.context import DistContext
from weft.contract import Undoable, forget, offered
from weft.errors import message

__all__ = ["plain"]

M = TypeVar("M", bound=nn.Module)


def plain(
    module: M, ctx: DistContext, *, rebind: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = ()
) -> tuple[M, DistContext]:
    """Take back every transform of a module: plain class, plain whole parameters, no hooks.

    For the end of training, and for going on with another strategy in the same process: `plain`,
    then the next transforms, with the optimizer's state kept. Values are not changed: a precision
    that cast the parameters stays in them.

    Changes: `module` in place; the optimizers in `rebind`, and those partitioned with it.
    Collectives: a meeting through the store; one all-gather per sharded parameter and tensor of state.

    Args:
        module: With or without transforms.
        ctx: The context the last transform returned.
        rebind: Optimizers over its parameters that are to go on with the plain ones.

    Returns:
        `module` itself, and `ctx` without the records of its transforms.

    Raises:
        StaleContext: `ctx` does not know what was done to `module`.
        TypeError: `module` is not a module, or something in `rebind` not an optimizer.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> model, ctx = weft.with_precision(nn.Linear(2, 2), weft.local(), "bf16")
        >>> model, ctx = weft.plain(model, ctx)
        >>> ctx.applied, len(model._forward_hooks)
        ((), 0)
    """
    optimizers = (rebind,) if isinstance(rebind, torch.optim.Optimizer) else tuple(rebind)
    if not isinstance(module, nn.Module) or not all(isinstance(one, torch.optim.Optimizer) for one in optimizers):
        raise TypeError(
            message(
                "plain: it takes a module, and optimizers",
                found=f"{type(module).__name__}, rebind of {[type(one).__name__ for one in optimizers]}",
                expected="an nn.Module, and torch.optim.Optimizer in rebind",
                fix="model, ctx = weft.plain(model, ctx, rebind=optimizer)",
            )
        )
    undoable = list(dict.fromkeys(offered(module, Undoable)))
    after = forget(module, ctx)
    if undoable:
        ctx.agree("plain", {"transforms": [type(one).__name__ for one in undoable]})
    old = dict(module.named_parameters())
    for one in reversed(undoable):
        one.undo()
    new = dict(module.named_parameters())
    ctx.engine.rebind(optimizers, {old[name]: new[name] for name in old if old[name] is not new[name]})
    return module, after
