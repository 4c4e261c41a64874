"""Tensors that travel between ranks in one node of the graph, and gradients that come back.

Why not torch's `all_to_all_single_autograd`: before 2.13, second gradients through it are zero, without an error. And
it takes one tensor: where ranks have other graphs, messages of a backward pass need one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch


class Exchange(Protocol):
    """What is sent where."""

    def send(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Send tensors; gives one that has arrived for each. Collectives, without gradients."""
        ...

    def send_back(self, tracked: Sequence[int], gradients: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Send the gradients of what has arrived back; gives those of what was sent. Collectives.

        Args:
            tracked: The places among the tensors of those that require a gradient.
            gradients: One for each of these.
        """
        ...


def exchanged(how: Exchange, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What has arrived for each tensor; all ranks call it with as many, of which the same ones require a gradient."""
    return list(_Exchanged.apply(how, *tensors)) if tensors else []  # type: ignore[no-untyped-call]


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: Exchange, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.how = how
        ctx.tracked = [place for place, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        arrived = tuple(how.send(tensors))
        ctx.mark_non_differentiable(*(one for place, one in enumerate(arrived) if place not in ctx.tracked))
        return arrived

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        back = iter(ctx.how.send_back(ctx.tracked, [gradients[place] for place in ctx.tracked]))
        return None, *(next(back) if place in ctx.tracked else None for place in range(len(gradients)))
