"""Rows from every rank to every rank, and gradients back the same way.

The mean of the ranks' losses is what all strategies minimize. Its gradient by a tensor that another rank used is the
sum of what that rank's backward pass finds; so the backward pass of a collective is the collective that sends the
gradients back to the ranks that the rows came from, where they are added up. No scale is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.collectives.primitives import as_bytes, name_lost_peer, num_bytes, wait_for_collective
from weft.context import World
from weft.engines.torch.parallel.exchange import exchanged

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
        what = self.what if self.what.startswith("the backward") else f"the backward of {self.what}"
        sent, received = ([rows[index] for index in tensors] for rows in (self.received, self.sent))
        return self._replace(what=what, sent=sent, received=received)

    def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send the rows of all tensors in one message; gives the received rows of each, in rank order."""
        whole = [tensor.detach().contiguous() for tensor in tensors]
        pieces = [tensor.split(counts) for tensor, counts in zip(whole, self.sent, strict=True)]
        size = self.world.size
        rows = [num_bytes(list(tensor.shape[1:]), tensor.dtype) for tensor in whole]  # bytes of a row of each
        sent = [sum(counts[r] * row for counts, row in zip(self.sent, rows, strict=True)) for r in range(size)]
        received = [sum(counts[r] * row for counts, row in zip(self.received, rows, strict=True)) for r in range(size)]
        parts = [as_bytes(each[rank]) for rank in range(size) for each in pieces] if len(whole) > 1 else []
        packed = (torch.cat(parts) if parts else as_bytes(whole[0])).to(self.device)
        arrived = packed.new_empty(sum(received))
        with name_lost_peer(self.what, self.world):
            work = dist.all_to_all_single(arrived, packed, received, sent, group=self.world.group, async_op=True)
            wait_for_collective(work, self.world)
        if len(whole) == 1:
            return [_of_bytes(arrived, whole[0], sum(self.received[0]))]
        lengths = [counts[rank] * row for rank in range(size) for counts, row in zip(self.received, rows, strict=True)]
        found = arrived.split(lengths)
        return [
            _of_bytes(torch.cat(found[index :: len(whole)]), tensor, sum(self.received[index]))
            for index, tensor in enumerate(whole)
        ]

    def send_back(self, tracked: Sequence[int], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send the gradients of rows back."""
        return exchanged(self.back(tracked), gradients)


def add_up(routes: Routes, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Send rows; what came from the ranks, equally many each, is put into a first dimension of ranks."""
    received = exchanged(routes, tensors)
    return [t.view(routes.world.size, c[0], *t.shape[1:]) for t, c in zip(received, routes.received, strict=True)]


class Gathered(NamedTuple):
    """What an all-gather gave; on the way back each rank adds up what the others found for its rows.

    Attributes:
        tensors: That were gathered, of all ranks.
        shapes: Of this rank's.
        routes: Of rows that every rank gets.
    """

    tensors: Sequence[torch.Tensor]
    shapes: Sequence[torch.Size]
    routes: Routes

    def send(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """They have arrived."""
        return self.tensors

    def send_back(self, tracked: Sequence[int], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Add up the gradients of this rank's rows."""
        parts = add_up(self.routes.back(tracked), gradients)
        return [part.sum(0).view(self.shapes[index]) for index, part in zip(tracked, parts, strict=True)]


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


def _of_bytes(data: torch.Tensor, like: torch.Tensor, rows: int) -> torch.Tensor:
    shape = [rows, *like.shape[1:]]
    if not data.numel():
        return like.new_empty(shape)
    return data.view(like.dtype).view(shape).to(like.device)
