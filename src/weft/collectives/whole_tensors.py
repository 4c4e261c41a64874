"""Tensors that lie in parts on the ranks, whole on all of them, many in a message.

[Note: in parts] Every tensor is on its way in at most two kinds of messages. Where it is cut, the ranks of each
dimension of its mesh that cuts it gather their chunks: one message for all tensors that are cut over the same
dimensions. What some ranks do not have then, one rank sends to all: one message for all tensors of that rank. What has
arrived in a message is made a tensor when it is asked for, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from weft.collectives.on_all_ranks import on_all
from weft.collectives.primitives import aligned, begin_gathering, name_lost_peer, num_bytes, wait_for_collective
from weft.context import DistContext
from weft.tensors.blocks import chunk


class Gather(NamedTuple):
    """One step to a whole tensor: its chunks from the ranks of a group, put together along a dimension.

    Attributes:
        group: Of the ranks, in the order of the chunks.
        dim: Of the tensor.
        shape: What comes of it.
    """

    group: dist.ProcessGroup
    dim: int
    shape: tuple[int, ...]


Step: TypeAlias = Gather | tuple[int, ...]  # or a tensor of this shape that one rank sends to all


class InParts(NamedTuple):
    """A tensor that all ranks are to get.

    Attributes:
        name: For errors.
        read: What this rank has of it, in the dtype in which it is sent; may raise. None: nothing.
        dtype: That dtype.
        shape: Of the whole tensor.
        gathers: What makes it whole where it is cut, one after the other.
        source: The rank that sends it to all; None: all have it, or have gathered it.
    """

    name: str
    read: Callable[[], torch.Tensor] | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    gathers: tuple[Gather, ...] = ()
    source: int | None = None


def brought(what: str, wanted: Sequence[InParts], ctx: DistContext, *, meets: bool) -> list[Callable[[], torch.Tensor]]:
    """Send tensors, see [Note: in parts]; `meets` if some of them, or of those before and after, are sent.

    Collectives: a meeting; then an all-gather for each set of dimensions that cuts some of them, and a broadcast for
    each source.

    Returns:
        What makes each of them, on `ctx.device`; one that was not cut or sent may be in the memory of what was read.

    Raises:
        PeerError: A rank failed, or did not come.
    """

    def read() -> list[Callable[[], torch.Tensor] | None]:
        return [None if one.read is None else partial(one.read().to, ctx.device) for one in wanted]

    made = on_all(what, ctx, read) if meets else read()
    with name_lost_peer(what, ctx.world):
        routes: dict[tuple[Any, ...], list[int]] = {}
        for number, one in enumerate(wanted):
            if one.gathers:
                routes.setdefault(tuple(id(step.group) for step in one.gathers), []).append(number)
        for route, numbers in routes.items():
            for turn in range(len(route)):
                steps = [wanted[number].gathers[turn] for number in numbers]
                _Message([wanted[number].dtype for number in numbers], steps, ctx).pass_on(numbers, made)
        sources: dict[int, list[int]] = {}
        for number, one in enumerate(wanted):
            if one.source is not None:
                sources.setdefault(one.source, []).append(number)
        for source, numbers in sources.items():
            shapes = [wanted[number].shape for number in numbers]
            _Message([wanted[number].dtype for number in numbers], shapes, ctx, source).pass_on(numbers, made)
    return [one for one in made if one is not None]


class _Message:
    """Memory for tensors on their way: a row of bytes from each rank of a group, or one row from one rank."""

    def __init__(
        self, dtypes: Sequence[torch.dtype], steps: Sequence[Step], ctx: DistContext, source: int | None = None
    ) -> None:
        self._world, self._source = ctx.world, source
        first: Any = steps[0]
        self._group: Any = first.group if source is None else ctx.group
        self._rank = dist.get_rank(self._group)
        self._ranks = dist.get_world_size(self._group) if source is None else 1
        self._places: list[tuple[int, tuple[int, ...], torch.dtype, Gather | None]] = []
        end = 0
        for dtype, step in zip(dtypes, steps, strict=True):
            shape = _padded_chunk(step, self._ranks) if isinstance(step, Gather) else step
            self._places.append((end, shape, dtype, step if isinstance(step, Gather) else None))
            end += aligned(num_bytes(shape, dtype))
        self._rows = torch.empty(self._ranks, end, dtype=torch.uint8, device=ctx.device)

    def pass_on(self, numbers: Sequence[int], made: list[Callable[[], torch.Tensor] | None]) -> None:
        """Fill it with some of the tensors, send it, and let them be made of it from now on."""
        for place, number in enumerate(numbers):
            make, made[number] = made[number], partial(self._made, place)
            if make is not None and self._source in (None, self._rank):
                self._fill(place, make())
        self._send()

    def _fill(self, place: int, tensor: torch.Tensor) -> None:
        """Put in what this rank sends of a tensor."""
        row = self._chunks(place)[0 if self._source is not None else self._rank]
        step = self._places[place][-1]
        own = tensor if step is None else tensor.movedim(step.dim, 0)
        (row if step is None else row[: len(own)]).copy_(own)

    def _send(self) -> None:
        """Send it, or receive it."""
        if not self._rows.numel():
            return
        if self._source is None:
            work = begin_gathering(self._rows, self._rank, self._group)
        else:
            work = dist.broadcast(self._rows, group=self._group, group_src=self._source, async_op=True)
        wait_for_collective(work, self._world)

    def _chunks(self, place: int) -> torch.Tensor:
        """What the ranks send of a tensor, [ranks, *chunk]."""
        start, shape, dtype, _ = self._places[place]
        sent = self._rows[:, start : start + num_bytes(shape, dtype)]
        return sent.view(dtype).view(self._ranks, *shape)

    def _made(self, place: int) -> torch.Tensor:
        """A tensor of what has arrived, in memory of its own."""
        chunks, alone = self._chunks(place), len(self._places) == 1
        step = self._places[place][-1]
        if step is None:
            return chunks[0] if alone else chunks[0].clone()
        if alone and step.dim == 0 and chunks.is_contiguous():  # as for one that is larger than a bucket
            return chunks.flatten(0, 1)[: step.shape[0]]
        whole = chunks.new_empty(step.shape)
        rows, length = whole.movedim(step.dim, 0), chunks.shape[1]
        full, rest = divmod(len(rows), length) if length else (0, 0)
        rows[: full * length].unflatten(0, (full, length)).copy_(chunks[:full])
        if rest:
            rows[full * length :].copy_(chunks[full, :rest])
        return whole


def _padded_chunk(step: Gather, ranks: int) -> tuple[int, ...]:
    """What each rank sends: the longest chunk, its cut dimension first."""
    rest = [size for dim, size in enumerate(step.shape) if dim != step.dim]
    return (chunk(step.shape[step.dim], ranks, 0)[1], *rest)
