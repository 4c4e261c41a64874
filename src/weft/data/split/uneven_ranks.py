"""Data that somebody else split: ranks may have different numbers of batches, and still make the same steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from weft.collectives import broadcast, reduce
from weft.context import DistContext
from weft.data.split.map_samples import BatchInfo
from weft.data.split.split_plan import Span
from weft.errors import ContextError, PeerError, listed
from weft.peers.agreement import exchange
from weft.tensors.nested import without_rows

Batches = Iterator[tuple[Any, BatchInfo]]


@dataclass(frozen=True)
class UnevenRanks:
    """How ranks come together.

    Attributes:
        uneven: "error" raises, "drop" ends with the shortest rank, "join" continues to the longest.
        counts: Batches per epoch of each rank; None where that is unknown.
        per_step: Units of a full batch.
    """

    uneven: Literal["error", "drop", "join"]
    counts: tuple[int, ...] | None
    per_step: int

    def steps(self, own: int, done: int) -> int:
        """Steps that all ranks make, of which so many are done and this rank has so many left."""
        if self.counts is None or self.uneven == "error":
            return own
        return max((min if self.uneven == "drop" else max)(self.counts) - done, 0)

    def batches(self, read: Batches, span: Span, ctx: DistContext) -> Batches:
        """This rank's batches, as many as all ranks make steps."""
        sub = ctx.on(ctx.data_axes)
        if self.counts is None:
            return self._checked(read, span, sub) if self.uneven == "error" else self._counted(read, span, sub)
        if self.uneven == "error":
            return read
        left = [max(count - span.start // self.per_step, 0) for count in self.counts]
        return itertools.islice(read, min(left)) if self.uneven == "drop" else self._joined(read, span, sub, left)

    def _checked(self, read: Batches, span: Span, sub: DistContext) -> Batches:
        """Raise on all ranks if one ends before the others; nothing is sent before the end of the epoch."""
        number = span.start // self.per_step
        for pair in read:
            number += 1
            yield pair
        if sub.world.store is None or sub.world_size == 1:
            return
        try:
            counts = exchange(sub.world, "the end of an epoch", number)
        except PeerError as error:
            if "waits in a collective" not in error.text:
                raise
            raise _uneven(f"rank {sub.rank} ended after {number} batches, while rank {error.rank} has more") from error
        if len(set(counts)) > 1:
            raise uneven_counts_error(counts)

    def _joined(self, read: Batches, span: Span, sub: DistContext, left: Sequence[int]) -> Batches:
        """With numbers known beforehand nothing has to be sent, but to a rank that never had a batch."""
        source = next((rank for rank, count in enumerate(left) if count), 0)
        last: Any = None
        for step in range(max(left)):
            if step < left[sub.rank]:
                pair = next(read)
                last = pair
            if step == 0 and not all(left):
                last = _shown(last, source, sub)
            yield last if step < left[sub.rank] else (last[0], _nothing(span, last[1]))

    def _counted(self, read: Batches, span: Span, sub: DistContext) -> Batches:
        """One all-reduce of three numbers per step: who continues, who ends, who needs to see a batch."""
        last: Any = None
        while True:
            pair = next(read, None)
            last = pair or last
            has = pair is not None
            lowest = sub.world_size - sub.rank if has else 0
            flags = torch.tensor([has, not has, last is None, lowest], dtype=torch.int64, device=sub.device)
            going, ended, needs, lowest = reduce(flags, sub, "max").tolist()
            if not going or (ended and self.uneven == "drop"):
                return
            if needs:
                last = _shown(last, sub.world_size - lowest, sub)
            yield pair if pair is not None else (last[0], _nothing(span, last[1]))


def _shown(last: Any, source: int, sub: DistContext) -> Any:
    """Give a rank that never had a batch one without rows."""
    shape: Any = None if sub.rank != source else (without_rows(last[0], len(last[1].ids)), [])
    sent: Any = broadcast(shape, sub, source=source)
    return last if last is not None else (sent[0], BatchInfo(0, [], 0))


def _nothing(span: Span, given: BatchInfo) -> BatchInfo:
    return BatchInfo(span.epoch, given.ids, 0, empty=True)


def uneven_counts_error(counts: Sequence[int]) -> ContextError:
    """The error for ranks with so many batches each."""
    return _uneven(listed(f"{count} batches on rank {rank}" for rank, count in enumerate(counts)))


def _uneven(found: str) -> ContextError:
    return ContextError(
        "shard_data: the ranks have different numbers of batches",
        found=found,
        expected="the same number on every rank, or a choice what to do",
        fix='loader, ctx = weft.shard_data(loader, ctx, ..., uneven="join")  # or "drop"',
    )
