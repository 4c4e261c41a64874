"""Rank 0 reads and every rank is sent its batch: for data that one process alone can read."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from weft.collectives.objects import scatter_made
from weft.context import DistContext
from weft.data.split.map_samples import BatchInfo


def scatter_batches(
    read: Iterator[tuple[Any, BatchInfo]],
    ctx: DistContext,
    size: int,
    steps: int | None,
    complete: Callable[[BatchInfo], BatchInfo],
) -> Iterator[tuple[Any, BatchInfo]]:
    """Send what rank 0 reads, the batches of all ranks in turn: a broadcast of sizes and a scatter per step.

    Yields:
        This rank's batches, with what is known of them.
    """
    places = [ctx.data_rank_of(rank) for rank in range(ctx.world_size)]
    done = 0

    def following() -> list[Any] | None:
        parts = []
        for batch, given in itertools.islice(read, size):  # a step has a batch for every rank
            facts = complete(given)._replace(ids=list(given.ids), last=given.last or done + 1 == steps)
            parts.append((batch, list(facts)))
        return [parts[place] for place in places] if parts else None

    while True:
        part = scatter_made(following, ctx, "shard_data")
        if part is None:
            return
        done += 1
        yield part[0], BatchInfo(*part[1])
