"""Exchange parts of sequences for heads, and gather whole sequences; gradients come back the same way.

Everything that one attention sends travels in one message, and so does its gradient, so that the messages of a
backward pass have one order on all ranks. Memory is contiguous and flat: into other memory `all_to_all_single` writes
wrongly without an error, and gloo's reduce-scatter ends the process over shapes that it does not expect.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from weft import torch_internals
from weft.engines.torch.parallel.exchange import Exchange, exchanged
from weft.tensors.messages import gathered
from weft.tensors.sequence_order import Order, SequencePart, places, rank_order, sequence_order

Method = Literal["heads", "gather"]


class Collectives(NamedTuple):
    """Those that a compiler traces: it cannot trace that they are looked up."""

    all_to_all: Callable[..., torch.Tensor]
    all_gather: Callable[..., torch.Tensor]
    reduce_scatter: Callable[..., torch.Tensor]
    wait: Callable[[torch.Tensor], torch.Tensor]


def find_collectives() -> Collectives:
    """Look them up."""
    gather, scatter = torch_internals.all_gather_single, torch_internals.reduce_scatter_single
    if not gather.exists:
        gather, scatter = torch_internals.all_gather_tensor, torch_internals.reduce_scatter_tensor
    return Collectives(torch_internals.all_to_all.found, gather.found, scatter.found, torch_internals.wait_for.found)


class SequenceRanks(NamedTuple):
    """The ranks that hold the parts of one sequence.

    Attributes:
        group: Of these ranks.
        number: How many there are.
        rank: Which one this is.
        order: Of their parts.
        collectives: Of this torch.
    """

    group: dist.ProcessGroup
    number: int
    rank: int
    order: Order
    collectives: Collectives


def parts_to_heads(ranks: SequenceRanks, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Parts of all heads [batch, heads, part, width] to whole sequences of some [batch, heads / ranks, length, width].

    Collectives: one all-to-all of all tensors together; the same in backward.
    """
    n = ranks.number
    blocks = [x.unflatten(1, (n, x.shape[1] // n)).movedim(1, 0) for x in tensors]
    received = _exchange(ranks, blocks)
    return [sequence_order(x.movedim(0, 2), ranks.order) for x in received]  # [batch, heads, ranks, part, width]


def heads_to_parts(ranks: SequenceRanks, tensor: torch.Tensor) -> torch.Tensor:
    """Whole sequences of some heads to parts of all of them.

    Collectives: one all-to-all; the same in backward.
    """
    (received,) = _exchange(ranks, [rank_order(tensor, ranks.number, ranks.order).movedim(2, 0)])
    return received.movedim(0, 1).flatten(1, 2)


def gather_sequences(ranks: SequenceRanks, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Parts [batch, heads, part, width] to whole sequences [batch, heads, length, width].

    Collectives: one all-gather of all tensors together; one reduce-scatter in backward.
    """
    flat = _arrived(_Gathering(ranks), torch.cat([x.flatten() for x in tensors]))
    pieces = flat.view(ranks.number, -1).split([x.numel() for x in tensors], 1)
    gathered = [piece.unflatten(1, x.shape) for piece, x in zip(pieces, tensors, strict=True)]
    return [sequence_order(x.movedim(0, 2), ranks.order) for x in gathered]


def gather_places(ranks: SequenceRanks, tensor: torch.Tensor) -> torch.Tensor:
    """Parts [rows, part, ...] to whole sequences [rows, length, ...], without gradients.

    Collectives: one all-gather.
    """
    rows, part, *rest = tensor.shape
    parts = torch.stack(gathered(tensor.detach().contiguous(), ranks.group), 1)
    return sequence_order(parts.view(rows, ranks.number, part, -1), ranks.order).view(rows, -1, *rest)


def rows_of_rank(ranks: SequenceRanks, mask: torch.Tensor) -> torch.Tensor:
    """The rows of a mask [..., length, length] for the places of this rank, [..., part, length]."""
    part = SequencePart(ranks.order, ranks.number, ranks.rank)
    return mask.index_select(-2, places(mask.shape[-2], part, mask.device))


def _exchange(ranks: SequenceRanks, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Send block k of each tensor [ranks, ...] to rank k; gives as much, block k from rank k."""
    rows = [block.flatten(1) for block in blocks]
    flat = _arrived(AllToAll(ranks.group, ranks.collectives), torch.cat(rows, 1).flatten())
    pieces = flat.view(ranks.number, -1).split([row.shape[1] for row in rows], 1)
    return list(starmap(torch.Tensor.view_as, zip((p.contiguous() for p in pieces), blocks, strict=True)))


def _arrived(how: Exchange, flat: torch.Tensor) -> torch.Tensor:
    return exchanged(how, [flat])[0] if flat.numel() else flat


class AllToAll(NamedTuple):
    """Rows of a tensor: so many from each rank for so many to each, or equal blocks; back they go the other way."""

    group: dist.ProcessGroup
    collectives: Collectives
    arrives: list[int] | None = None
    sent: list[int] | None = None

    def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send rows of each; see `Exchange`."""
        send = self.collectives
        return [send.wait(send.all_to_all(x.contiguous(), self.arrives, self.sent, self.group)) for x in tensors]

    def send_back(self, tracked: Sequence[int], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send gradients back, in a node of the graph; see `Exchange`."""
        return exchanged(self._replace(arrives=self.sent, sent=self.arrives), gradients)


class _Gathering(NamedTuple):
    """Everything of all ranks, in rank order; back goes the sum of what all ranks made of this rank's part."""

    ranks: SequenceRanks

    def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        send = self.ranks.collectives
        return [send.wait(send.all_gather(flat.contiguous(), 0, self.ranks.group)) for flat in tensors]

    def send_back(self, tracked: Sequence[int], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        send = self.ranks.collectives
        return [send.wait(send.reduce_scatter(flat.contiguous(), "sum", 0, self.ranks.group)) for flat in gradients]
