"""Whether a collective may run on a context here, and the line of the user's code that asks."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from weft.context.rank_facts import RankFacts
from weft.errors import CollectiveRefused, ContextError
from weft.peers.world import World


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


@dataclass(frozen=True, kw_only=True)
class Guarded(RankFacts):
    """The part of a `DistContext` that a collective needs: the ranks, their device, and the live world behind them."""

    device: torch.device = torch.device("cpu")  # noqa: RUF009  (torch.device is immutable)
    restricted: Restriction | None = field(default=None, compare=False)
    world: World = field(compare=False, repr=False)

    @property
    def here(self) -> bool:
        """Whether this process is one of the ranks this context speaks for."""
        return self.rank >= 0 and (self.restricted is None or self.restricted.global_rank == self.ranks[self.rank])

    def check_unrestricted(self, what: str) -> None:
        """Raise if this context speaks for one rank only.

        Raises:
            CollectiveRefused: It came from `only`; `what` names the operation.
        """
        if self.restricted is not None:
            raise CollectiveRefused(
                f"{what}: refused on a context for rank {self.restricted.rank} only, at {line_outside()}",
                found=f"ctx.only({self.restricted.rank}) at {self.restricted.where}",
                expected="a collective is called by all ranks, on the full context",
                fix="call it on the full context, outside the code for one rank",
            )

    def require_collective(self, what: str) -> World:
        """Return the live world, if a collective may run on this context here; `what` names the operation.

        Raises:
            CollectiveRefused: The context came from `only`, or this rank is not one of its ranks.
            ContextError: The context is closed, was unpickled, or is only pretended.
        """
        self.check_unrestricted(what)
        if self.rank < 0:
            raise CollectiveRefused(
                f"{what}: refused, this process is not one of the ranks of the context",
                found=f"ranks {self.ranks}",
                expected="only members call collectives of a subset",
                fix="if sub.here: ...",
            )
        if self.world_size > 1 and (self.world.group is None or self.world.root.closed):
            closed = self.world.root.closed
            state = "is closed" if closed else "has no process group (a fake or an unpickled one)"
            raise ContextError(
                f"{what}: the context {state}",
                found=f"rank {self.rank} of {self.world_size}",
                expected="a context from weft.start or weft.adopt, before close",
                fix="call it inside of `with weft.start() as ctx:`, before ctx.close()"
                if closed
                else "with weft.start() as ctx: ...",
            )
        return self.world


def line_outside() -> str:
    """`file:line` of the innermost caller outside this package (tests of weft count as outside)."""
    package = __name__.partition(".")[0]
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] != package and name != "contextlib":
            break
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
