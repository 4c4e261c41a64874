"""`logger`: Python's logging, with the rank in it."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any, Literal

from weft.context import DistContext

__all__ = ["logger"]


def logger(
    name: str, ctx: DistContext, *, ranks: Literal["main", "all"] = "main"
) -> logging.LoggerAdapter[logging.Logger]:
    """Give Python's logger of a name: silent off the main rank, or with the rank before each message.

    Levels, handlers and formats are those of `logging`, which you set up as ever. The place of the call in the
    message is that of the caller.

    Changes: nothing. Collectives: none.

    Args:
        name: Of the logger, as in `logging.getLogger(name)`.
        ctx: Whose rank.
        ranks: "main" lets other ranks say nothing below WARNING; "all" lets them.

    Returns:
        An adapter: `log.info("...")`, and `log.once("...")` for what is to be said once per program.

    Example:
        >>> import weft
        >>> log = weft.logger("train", weft.local())
        >>> log.isEnabledFor(logging.WARNING)
        True
    """
    return _RankLogger(logging.getLogger(name), ctx.rank, ctx.world_size, ranks)


class _RankLogger(logging.LoggerAdapter[logging.Logger]):
    def __init__(self, base: logging.Logger, rank: int, world_size: int, ranks: str) -> None:
        super().__init__(base, {"rank": rank})
        self._mark = f"[rank {rank}] " if world_size > 1 and (ranks == "all" or rank > 0) else ""
        self._quiet = ranks == "main" and rank > 0
        self._said: set[tuple[int, str]] = set()

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  (of logging)
        return (level >= logging.WARNING or not self._quiet) and super().isEnabledFor(level)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        text, found = super().process(msg, kwargs)
        return f"{self._mark}{text}", found

    def once(self, msg: str, *args: object, level: int = logging.WARNING) -> None:
        """Say something the first time only."""
        if (level, msg) not in self._said:
            self._said.add((level, msg))
            self.log(level, msg, *args, stacklevel=2)
