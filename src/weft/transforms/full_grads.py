"""`full_grads`: whole gradients by name, wherever they lie."""

from __future__ import annotations

import torch
from torch import nn

from weft.checks import check_module
from weft.context import DistContext
from weft.contract import KeepsParameters, offered
from weft.engines.torch.parts.left_gathered import drop_gathered
from weft.tensors.blocks import full_tensor
from weft.tensors.remote_parameter import is_elsewhere


def full_grads(module: nn.Module, ctx: DistContext) -> dict[str, torch.Tensor]:
    """Return the full gradients of a module by name, for inspection.

    Between backward and `optimizer.step()`. A parameter without gradient is left out. Every rank
    calls it, and needs the memory of all gradients.

    Changes: nothing. Collectives: one message per gradient that is cut.

    Args:
        module: With or without transforms.
        ctx: The current context.

    Returns:
        Plain tensors, the same on all ranks if gradients are averaged; where they are whole anyway,
        the gradients themselves.

    Raises:
        TypeError: `module` is not a module.
        ContractError: The gradients were used by a step.
        CollectiveRefused: The context speaks for some ranks only.

    Example:
        >>> import weft
        >>> model, ctx = nn.Linear(1, 1), weft.local()
        >>> (3 * model.weight).sum().backward()
        >>> weft.full_grads(model, ctx)
        {'weight': tensor([[3.]])}
    """
    check_module("full_grads", module, fix="gradients = weft.full_grads(model, ctx)")
    ctx.require_collective("full_grads")
    drop_gathered(module)
    kept = {
        id(p): offer.full_gradient(name)
        for part in module.modules()
        for offer in offered(part, KeepsParameters)
        for name, p in part.named_parameters()
    }
    found = {name: kept.get(id(p), None if is_elsewhere(p) else p.grad) for name, p in module.named_parameters()}
    return {name: full_tensor(gradient) for name, gradient in found.items() if gradient is not None}
