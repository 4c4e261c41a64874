"""Losses of routers that a model adds to its own: over the local batch they are not those of the global one.

The loss of load balancing is a product of two means over all tokens. The mean of the ranks' losses is another number,
however the model is divided.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.errors import ContractError, value_error

_EXPECTED = "no product of two means over the batch of one rank: it is not that over all batches"
_FIX = "model.router_aux_loss_coef = 0.0  # and: loss + coefficient * weft.balance_loss(probs, chosen, ctx)"


def check_local_losses(what: str, module: nn.Module) -> None:
    """Raise if a model of transformers is configured to add its routers' loss.

    Raises:
        ValueError: One is.
    """
    for part in _models(module):
        if part.config.output_router_logits and _factor(part):
            raise value_error(
                f"{what}: {type(part).__name__} adds the load balancing loss of its routers, over the local batch",
                found=f"config.output_router_logits=True, router_aux_loss_coef={_factor(part)}",
                expected=_EXPECTED,
                fix=_FIX,
            )


def refuse_local_losses(what: str, module: nn.Module, removable: Removable) -> None:
    """Let calls raise that ask for such a loss; see `check_local_losses`."""
    for part in _models(module):
        attach(part, removable, before=partial(_refuse, what))


def _refuse(what: str, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
    asked = kwargs.get("output_router_logits")
    asked = model.config.output_router_logits if asked is None else asked
    if asked and _factor(model) and kwargs.get("labels") is not None and torch.is_grad_enabled():
        raise ContractError(
            f"{what}: {type(model).__name__} would add the load balancing loss of its routers, over the local batch",
            found=f"output_router_logits=True with labels, router_aux_loss_coef={_factor(model)}",
            expected=_EXPECTED,
            fix=_FIX,
        )


def _models(module: nn.Module) -> list[Any]:
    return [
        part
        for part in module.modules()
        if hasattr(getattr(part, "config", None), "output_router_logits")
        and "labels" in inspect.signature(type(part).forward).parameters
    ]


def _factor(model: Any) -> float:
    config = model.config
    return float(getattr(model, "router_aux_loss_coef", getattr(config, "router_aux_loss_coef", 1.0)))
