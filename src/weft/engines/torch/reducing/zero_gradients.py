"""Gradients of zeros that arrive by a backward pass, for the hooks that wait for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def zeros_for(parameters: Sequence[torch.Tensor], anchor: torch.Tensor, enter: Callable[[], None]) -> torch.Tensor:
    """A number whose backward brings parameters gradients of zeros.

    Args:
        parameters: They get them.
        anchor: The number leads to it too, but brings it no gradient unless it is one of `parameters`.
        enter: Called when backward comes through.
    """
    others = [p for p in (anchor,) if not any(p is one for one in parameters)]
    number: torch.Tensor = _Zeros.apply(enter, len(parameters), *parameters, *others)  # type: ignore[no-untyped-call]
    return number


def bring_zeros(parameters: Sequence[torch.Tensor], flag: bytearray) -> None:
    """Bring parameters gradients of zeros in a backward pass inside the one that is ending.

    Args:
        parameters: At least one.
        flag: Of the `BackwardSession` that is ending, of which this pass is a part.
    """
    with torch.enable_grad():
        number = zeros_for(parameters, parameters[0], lambda: None)
    flag[0] = 1
    number.backward()
    flag[0] = 0


class _Zeros(torch.autograd.Function):
    """A number that depends on parameters, and brings them gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, enter: Callable[[], None], given: int, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.enter, ctx.given, ctx.parameters = enter, given, parameters
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        del gradient
        ctx.enter()
        zeros = [_zeros(p) if i < ctx.given else None for i, p in enumerate(ctx.parameters)]
        return None, None, *zeros


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is not None and parameter.grad.is_sparse:
        return torch.zeros_like(parameter.grad)
    return torch.zeros_like(parameter)
