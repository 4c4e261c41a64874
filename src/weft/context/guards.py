"""Whether a collective may run on a context here, and the line of the user's code that asks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, NamedTuple

from weft.errors import CollectiveRefused, ContextError

if TYPE_CHECKING:
    from weft.context.distcontext import DistContext
    from weft.peers.world import World

__all__ = ["Restriction", "check_unrestricted", "line_outside", "require_collective"]


class Restriction(NamedTuple):
    """That a context speaks for one rank only, and which line said so.

    Attributes:
        rank: In the context that `only` was called on.
        global_rank: The same one; holds in smaller contexts too.
        where: `file:line`.
    """

    rank: int
    global_rank: int
    where: str


def check_unrestricted(ctx: DistContext, what: str) -> None:
    """See `DistContext.check_unrestricted`.

    Raises:
        CollectiveRefused: The context came from `only`.
    """
    if ctx.restricted is not None:
        raise CollectiveRefused(
            f"{what}: refused on a context for rank {ctx.restricted.rank} only, at {line_outside()}",
            found=f"ctx.only({ctx.restricted.rank}) at {ctx.restricted.where}",
            expected="a collective is called by all ranks, on the full context",
            fix="call it on the full context, outside of the code for one rank",
        )


def require_collective(ctx: DistContext, what: str) -> World:
    """See `DistContext.require_collective`.

    Raises:
        CollectiveRefused: The context came from `only`, or this rank is not one of its ranks.
        ContextError: The context is closed, was unpickled, or is only pretended.
    """
    check_unrestricted(ctx, what)
    if ctx.rank < 0:
        raise CollectiveRefused(
            f"{what}: refused, this process is not one of the ranks of the context",
            found=f"ranks {ctx.ranks}",
            expected="only members call collectives of a subset",
            fix="if sub.here: ...",
        )
    if ctx.world_size > 1 and (ctx.world.group is None or ctx.world.root.closed):
        state = "is closed" if ctx.world.root.closed else "has no process group (a fake or an unpickled one)"
        raise ContextError(
            f"{what}: the context {state}",
            found=f"rank {ctx.rank} of {ctx.world_size}",
            expected="a context from weft.start or weft.adopt, before close",
            fix="with weft.start() as ctx: ...",
        )
    return ctx.world


def line_outside() -> str:
    """`file:line` of the innermost caller outside of this package (tests of weft count as outside)."""
    package = __name__.partition(".")[0]
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] != package and name != "contextlib":
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
