"""What every collective does first and last: may it run here, do the ranks agree, who is to blame."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.context import DistContext, World
from weft.context.distcontext import line_outside
from weft.context.world import absent, compare, culprit, exchange, is_communication_error, late
from weft.engines.torch.exchange import in_pairs, pair_rounds
from weft.errors import PeerError, message
from weft.nested import leaves

__all__ = [
    "HEADER_WORDS",
    "all_gather_flat",
    "all_gather_rows",
    "all_gather_words",
    "enter",
    "finish",
    "num_bytes",
    "only_tensors",
    "peers_named",
    "row_gather",
]

_SLICE = timedelta(seconds=0.5)
HEADER_WORDS = 64  # of int64 in a first message: one size fits nearly all calls


def all_gather_words(words: list[int], world: World, ctx: DistContext, length: int = HEADER_WORDS) -> list[list[int]]:
    """Gather up to `length` integers from every rank; short rows are filled up with zeros."""
    mine = torch.zeros(length, dtype=torch.int64, device=ctx.device)
    mine[: len(words)] = torch.tensor(words, dtype=torch.int64)
    everyone = mine.new_empty(length * ctx.world_size)
    all_gather_flat(everyone, mine, world)
    rows: list[list[int]] = everyone.view(ctx.world_size, length).tolist()
    return rows


def num_bytes(shape: list[int], dtype: torch.dtype) -> int:
    """Size of a tensor of this shape and dtype."""
    total = dtype.itemsize
    for size in shape:
        total *= size
    return total


def only_tensors(what: str, value: object) -> list[torch.Tensor]:
    """The leaves of `value`, or `TypeError` if one is not a tensor."""
    found: list[torch.Tensor] = []
    for path, leaf in leaves(value):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                message(
                    f"{what}: {'.'.join(path) or 'the value'} is not a tensor",
                    found=f"{type(leaf).__name__} {leaf!r}",
                    expected="a nested value of tensors",
                    fix="weft.gather_objects(value, ctx) for other values",
                )
            )
        found.append(leaf)
    return found


def enter(what: str, ctx: DistContext, value: object, facts: dict[str, object]) -> World:
    """Check that a collective may run here; with `debug`, that all ranks mean the same one."""
    world = ctx.require_collective(what)
    if ctx.debug and world.store is not None and world.size > 1:
        described = {"value": _describe(what, value)} if value is not None else {}
        mine = {"call": what, **facts, **described, "at": line_outside()}
        compare(what, exchange(world, what, mine))
    return world


def _describe(what: str, value: object) -> str:
    # The number of rows may differ in a gather: that is what it is for.
    def shape(leaf: torch.Tensor) -> str:
        return f"[rows, {', '.join(map(str, leaf.shape[1:]))}]" if what == "gather" else str(list(leaf.shape))

    return "; ".join(f"{'.'.join(path) or 'value'}: {shape(leaf)} {leaf.dtype}" for path, leaf in leaves(value))


def all_gather_flat(everything: torch.Tensor, mine: torch.Tensor, world: World) -> None:
    """Fill `everything` [ranks * n] with every rank's `mine` [n]."""
    rows = everything.view(world.size, -1)
    rows[world.rank] = mine
    all_gather_rows(rows, world)


def all_gather_rows(rows: torch.Tensor, world: World) -> None:
    """Fill the rows [ranks, n] of the other ranks; this rank's own is there already."""
    row_gather(rows, world)()


def row_gather(rows: torch.Tensor, world: World) -> Callable[[], None]:
    """What `all_gather_rows` does, prepared for rows that are filled again and again."""
    group: Any = world.group
    if not rows.numel():
        return lambda: None
    if in_pairs(group, rows, world.size):  # a third of the cost of gloo's own
        rounds = [(*pair, pair[-1]) for pair in pair_rounds(rows, world.rank)]

        def exchange() -> None:
            for each in rounds:
                _wait_in_slices(group.alltoall_base(*each), world)

        return exchange
    # torch 2.13 gave `all_gather_into_tensor` a new name and deprecated the old one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    everything, mine = rows.view(-1), rows[world.rank]
    return lambda: finish(gather(everything, mine, group=group, async_op=True), world)


def finish(work: dist.Work | None, world: World) -> None:
    """Wait for a collective, and look after the peers meanwhile.

    A peer that failed elsewhere never comes; on gloo the wait is cut into slices to notice that. One that
    did its part and left looks the same for a moment: it takes two looks to blame a peer.
    On other backends this only orders the current stream after the collective, as `work.wait()`.

    Raises:
        PeerError: A peer failed or died.
        RuntimeError: torch's own error of the collective.
    """
    if work is None:
        return
    if dist.get_backend(world.group) != "gloo":
        work.wait()
        return
    _wait_in_slices(work, world)


def _wait_in_slices(work: dist.Work, world: World) -> None:
    suspect = None
    while True:
        try:
            work.wait(_SLICE)
            return
        except RuntimeError as error:
            if "Operation timed out!" not in str(error):
                raise
        if work.is_completed():  # right after the slice was over
            work.wait()
            return
        blamed = absent(world) or culprit(world.root)
        if blamed is not None and blamed == suspect:
            world.root.abandoned = True  # gloo still waits, and in the end closes its connections
            raise PeerError(f"rank {blamed[0]} failed: {blamed[1]}", rank=blamed[0], text=blamed[1])
        suspect = blamed


@contextlib.contextmanager
def peers_named(what: str, world: World) -> Iterator[None]:
    """Turn torch's error about a lost connection into one that names the rank to blame."""
    try:
        yield
    except RuntimeError as error:
        blamed = None
        if is_communication_error(error):
            blamed = late(world, what) if "imed out" in str(error) else culprit(world.root)
        if blamed is None:
            raise
        raise PeerError(f"{what}: rank {blamed[0]} failed: {blamed[1]}", rank=blamed[0], text=blamed[1]) from error
