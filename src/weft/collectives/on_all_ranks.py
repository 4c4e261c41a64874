"""Work that may fail on one rank, and then fails on all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from weft.context import DistContext
from weft.environments import cores_here
from weft.peers.agreement import agree, disagree, exchange
from weft.peers.liveness import find_absent_rank, peer_error

R = TypeVar("R")


def on_all(what: str, ctx: DistContext, work: Callable[[], R], facts: Mapping[str, object] | None = None) -> R:
    """Do work on every rank; if it fails on one, the peers, which are at the next meeting, learn of it.

    Raises:
        PeerError: It failed on another rank.
        ContextError: The ranks came with different `facts`.
    """
    result = _tried(what, ctx, work)
    agree(ctx.world, what, facts)
    return result


def gathered(what: str, ctx: DistContext, work: Callable[[], Any]) -> list[Any]:
    """Do work on every rank; every rank gets the results of all, which have to be JSON.

    Raises:
        PeerError: It failed on another rank.
    """
    return exchange(ctx.world, what, _tried(what, ctx, work))


def gathered_on_main(what: str, ctx: DistContext, work: Callable[[], Any]) -> list[Any]:
    """Do work on every rank; the main rank gets the results, which have to be JSON, and the others none.

    Raises:
        PeerError: It failed on another rank.
    """
    return exchange(ctx.world, what, _tried(what, ctx, work), to=0)


def from_main(what: str, ctx: DistContext, work: Callable[[], R]) -> R:
    """Do work on the main rank; every rank gets its result, which has to be JSON.

    Raises:
        PeerError: It failed on the main rank.
    """
    result: Any = _tried(what, ctx, work) if ctx.is_main or ctx.world.pretended else None
    return result if ctx.world_size == 1 else exchange(ctx.world, what, result)[0]  # type: ignore[no-any-return]


def num_threads(ctx: DistContext) -> int:
    """How many threads of this rank may move bytes: its share of the cores of the node, of which a few are enough."""
    return min(max(len(cores_here()) // ctx.local_world_size, 1), 4)


def _tried(what: str, ctx: DistContext, work: Callable[[], R]) -> R:
    try:
        return work()
    except BaseException as error:
        blamed = find_absent_rank(ctx.world) if isinstance(error, OSError) else None
        disagree(ctx.world, error)
        if blamed is not None:  # it gave up first, and took the folder away
            raise peer_error(what, *blamed) from error
        raise
