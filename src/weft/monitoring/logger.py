"""`logger`: Python's logging, with the rank in it."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any, Literal

from weft.collectives import barrier
from weft.context import DistContext


def logger(
    name: str, ctx: DistContext, *, ranks: Literal["main", "all", "in_order"] = "main"
) -> logging.LoggerAdapter[logging.Logger]:
    """Give Python's logger of a name: silent off the main rank, or with the rank before each message.

    Levels, handlers and formats are those of `logging`, which you set up as ever. The place of the call in the
    message is that of the caller.

    Changes: nothing. Collectives: none; with `ranks="in_order"`, meetings of all ranks at each message.

    Args:
        name: Of the logger, as in `logging.getLogger(name)`.
        ctx: Whose rank.
        ranks: "main" lets other ranks say nothing below WARNING; "all" lets them. "in_order" lets them one after
            the other, by rank: all ranks make the same calls, also of messages that a level leaves out.

    Returns:
        An adapter: `log.info("...")`, and `log.once("...")` for what is to be said once per program.

    Example:
        >>> import weft
        >>> log = weft.monitoring.logger("train", weft.local())
        >>> log.isEnabledFor(logging.WARNING)
        True
    """
    return _RankLogger(logging.getLogger(name), ctx, ranks)


class _RankLogger(logging.LoggerAdapter[logging.Logger]):
    def __init__(self, base: logging.Logger, ctx: DistContext, ranks: str) -> None:
        super().__init__(base, {"rank": ctx.rank})
        self._ctx = ctx
        self._in_order = ranks == "in_order"
        self._mark = f"[rank {ctx.rank}] " if ctx.world_size > 1 and (ranks != "main" or ctx.rank > 0) else ""
        self._quiet = ranks == "main" and ctx.rank > 0
        self._said: set[tuple[int, str]] = set()

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  (of logging)
        return (level >= logging.WARNING or not self._quiet) and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        text, found = super().process(msg, kwargs)
        return f"{self._mark}{text}", found

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Say something; the others wait until this rank has."""
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1  # past this function
        for rank in range(self._ctx.world_size if self._in_order else 1):
            if not self._in_order or rank == self._ctx.rank:
                super().log(level, msg, *args, **kwargs)
            if self._in_order:
                barrier(self._ctx)

    def once(self, msg: str, *args: object, level: int = logging.WARNING) -> None:
        """Say something the first time only."""
        if (level, msg) not in self._said:
            self._said.add((level, msg))
            self.log(level, msg, *args, stacklevel=2)
