"""Rows from every rank to every rank, and gradients back the same way.

The mean of the ranks' losses is what all strategies minimize. Its gradient by a tensor that another rank used is the
sum of what that rank's backward pass finds; so the backward pass of a collective is the collective that sends the
gradients back to the ranks that the rows came from, where they are added up. No scale is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.collectives.primitives import as_bytes, name_lost_peer, num_bytes, wait_for_collective
from weft.context import World

Counts = list[list[int]]  # of rows, by tensor and rank


class Routes(NamedTuple):
    """How many rows of each tensor this rank sends to each rank, and how many it receives from each.

    Attributes:
        what: The collective, for the texts of errors.
        world: Whose ranks.
        sent: By tensor and rank.
        received: By tensor and rank.
        device: Where messages are.
    """

    what: str
    world: World
    sent: Counts
    received: Counts
    device: torch.device

    def back(self, tensors: Sequence[int]) -> Routes:
        """The way back, for some of the tensors."""
        return Routes(
            self.what if self.what.startswith("the backward") else f"the backward of {self.what}",
            self.world,
            [self.received[index] for index in tensors],
            [self.sent[index] for index in tensors],
            self.device,
        )


def swap(routes: Routes, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Send the rows of tensors to where they belong; gives the received rows of each, in rank order.

    A gradient flows back if a tensor requires one.
    """
    return list(_Swap.apply(routes, *tensors)) if tensors else []  # type: ignore[no-untyped-call]


def add_up(routes: Routes, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """As `swap`, but what came from the ranks, equally many rows each, is put into a first dimension of ranks."""
    received = swap(routes, tensors)
    return [t.view(routes.world.size, c[0], *t.shape[1:]) for t, c in zip(received, routes.received, strict=True)]


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, routes: Routes, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.routes = routes
        return _mark_tracked(ctx, 1, _swapped(routes, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        back = _Swap.apply(ctx.routes.back(ctx.tracked), *(gradients[index] for index in ctx.tracked))  # type: ignore[no-untyped-call]
        return None, *_gradients_for(ctx, back)


class Gathering(torch.autograd.Function):
    """What an all-gather gave; backward adds up on each rank what the others found for its rows."""

    @staticmethod
    def forward(
        ctx: Any, gathered: list[torch.Tensor], routes: Routes, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """`gathered` was made of `tensors`; `routes` are those of rows that every rank gets."""
        ctx.routes, ctx.shapes = routes, [tensor.shape for tensor in tensors]
        return _mark_tracked(ctx, 2, gathered)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Add up the gradients of this rank's rows."""
        parts = add_up(ctx.routes.back(ctx.tracked), [gradients[index] for index in ctx.tracked])
        shapes = [ctx.shapes[index] for index in ctx.tracked]
        return (
            None,
            None,
            *_gradients_for(ctx, [part.sum(0).view(shape) for part, shape in zip(parts, shapes, strict=True)]),
        )


def _mark_tracked(ctx: Any, others: int, outputs: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Note which tensors, the arguments after so many others, are tracked; the outputs of the rest are constants."""
    ctx.tracked = [index for index, needed in enumerate(ctx.needs_input_grad[others:]) if needed]
    ctx.mark_non_differentiable(*(one for index, one in enumerate(outputs) if index not in ctx.tracked))
    return tuple(outputs)


def _gradients_for(ctx: Any, gradients: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients of the tracked tensors, and None for the others."""
    found = dict(zip(ctx.tracked, gradients, strict=True))
    return [found.get(index) for index in range(len(ctx.routes.sent))]


class Summing(torch.autograd.Function):
    """An all-reduce; each rank's gradient is the sum of those of all."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[list[torch.Tensor]], list[torch.Tensor]], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Run it."""
        ctx.run = run
        return tuple(run(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Sum the gradients."""
        return None, *Summing.apply(ctx.run, *gradients)  # type: ignore[no-untyped-call]


def _swapped(routes: Routes, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    whole = [tensor.detach().contiguous() for tensor in tensors]
    pieces = [tensor.split(counts) for tensor, counts in zip(whole, routes.sent, strict=True)]
    size = routes.world.size
    rows = [num_bytes(list(tensor.shape[1:]), tensor.dtype) for tensor in whole]  # bytes of a row of each
    sent = [sum(counts[r] * row for counts, row in zip(routes.sent, rows, strict=True)) for r in range(size)]
    received = [sum(counts[r] * row for counts, row in zip(routes.received, rows, strict=True)) for r in range(size)]
    parts = [as_bytes(each[rank]) for rank in range(size) for each in pieces] if len(whole) > 1 else []
    packed = (torch.cat(parts) if parts else as_bytes(whole[0])).to(routes.device)
    arrived = packed.new_empty(sum(received))
    with name_lost_peer(routes.what, routes.world):
        work = dist.all_to_all_single(arrived, packed, received, sent, group=routes.world.group, async_op=True)
        wait_for_collective(work, routes.world)
    if len(whole) == 1:
        return [_of_bytes(arrived, whole[0], sum(routes.received[0]))]
    lengths = [counts[rank] * row for rank in range(size) for counts, row in zip(routes.received, rows, strict=True)]
    found = arrived.split(lengths)
    return [
        _of_bytes(torch.cat(found[index :: len(whole)]), tensor, sum(routes.received[index]))
        for index, tensor in enumerate(whole)
    ]


def _of_bytes(data: torch.Tensor, like: torch.Tensor, rows: int) -> torch.Tensor:
    shape = [rows, *like.shape[1:]]
    if not data.numel():
        return like.new_empty(shape)
    return data.view(like.dtype).view(shape).to(like.device)
