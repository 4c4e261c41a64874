"""Send rows of tensors to the ranks they are for; gradients come back the same way.

All of the tensors go in one node of the graph, so that the messages of a backward pass have one order on all ranks,
whatever is computed with the rows in between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.errors import ContextError


class Line:
    """The ranks of an axis on the line through this one.

    Attributes:
        size: How many they are.
        place: Of this rank among them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group
        self.size = dist.get_world_size(group)
        self.place = dist.get_rank(group)

    @property
    def group(self) -> dist.ProcessGroup:
        """Their process group.

        Raises:
            ContextError: The context was closed.
        """
        if self._group is None:
            raise ContextError(
                "expert_parallel: the ranks of the experts are gone",
                found="a call after the context was closed",
                expected="calls of the module while its context is open",
                fix="model, ctx = weft.undo(model, ctx)  # before the context is closed",
            )
        return self._group

    def release(self) -> None:
        """Let the process group go."""
        self._group = None


class RowRoute(NamedTuple):
    """How many rows go where.

    Attributes:
        group: Between whom.
        sent: Rows for each rank; those for the first rank come first.
        received: Rows from each rank.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    def back(self) -> RowRoute:
        """The way back."""
        return RowRoute(self.group, self.received, self.sent)


def send_rows(route: RowRoute, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Send the rows of tensors [rows sent, ...] on a route; gives [rows received, ...] of each.

    Collectives: one all-to-all per tensor; in backward one per tensor that requires a gradient. All ranks
    of the group call it with as many tensors, and the same ones require a gradient.
    """
    received: tuple[torch.Tensor, ...] = _Send.apply(route, *tensors)  # type: ignore[no-untyped-call]
    return received


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, route: RowRoute, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.route = route
        outputs = tuple(_all_to_all(route, tensor) for tensor in tensors)
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(out for out, one in zip(outputs, needed, strict=True) if not one))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        needed = ctx.needs_input_grad[1:]
        asked = [gradient for gradient, one in zip(gradients, needed, strict=True) if one]
        back = iter(_Send.apply(ctx.route.back(), *asked))  # type: ignore[no-untyped-call]
        return None, *(next(back) if one else None for one in needed)


def _all_to_all(route: RowRoute, tensor: torch.Tensor) -> torch.Tensor:
    # As bytes, which every backend knows; and contiguous: into other memory torch would write without an error.
    sent = tensor.contiguous()
    received = tensor.new_empty([sum(route.received), *tensor.shape[1:]])
    dist.all_to_all_single(_as_bytes(received), _as_bytes(sent), route.received, route.sent, group=route.group)
    return received


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(len(tensor), -1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
