"""Meetings of ranks: `barrier`, `all_or_none`, `main_first`, `any_rank`; and work for one rank only."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch

from weft.collectives.primitives import enter_collective, refuse_two_threads
from weft.collectives.tensors import reduce
from weft.context import DistContext
from weft.peers.agreement import disagree, wait_for_key
from weft.peers.liveness import exception_text, peer_error
from weft.tensors.messages import control_device

P = ParamSpec("P")
R = TypeVar("R")


def barrier(ctx: DistContext) -> None:
    """Wait until every rank is here.

    Changes: nothing. Collectives: none; a meeting through the store, so that a missing rank is named.

    Args:
        ctx: The context whose ranks take part.

    Raises:
        PeerError: A rank failed, died, or did not come within `ctx.timeout_s`.

    Example:
        >>> import weft
        >>> barrier(weft.local())
    """
    with refuse_two_threads("barrier", enter_collective("barrier", ctx, None, {})):
        ctx.agree("barrier")


@contextlib.contextmanager
def all_or_none(ctx: DistContext, what: str = "all_or_none") -> Iterator[None]:
    """Let the body succeed on all ranks or fail on all.

    Put work that may fail on one rank only in it: reading files, building a dataset. If one rank
    raises, it keeps its own exception and the others raise `PeerError` with its rank and text at
    the end of the body. The body must not contain collectives that the failing rank would miss.

    Changes: nothing. Collectives: none; one meeting through the store at the end.

    Args:
        ctx: The context whose ranks take part.
        what: Name of the work, for the error text.

    Raises:
        PeerError: Another rank failed, died or did not come; `rank` and `text` tell.

    Example:
        >>> import weft
        >>> with all_or_none(weft.local(), "reading the data"):
        ...     data = [1, 2, 3]
    """
    world = ctx.require_collective(what)
    try:
        yield
    except BaseException as error:
        disagree(world, error)
        raise
    with refuse_two_threads(what, world):
        ctx.agree(what)


@contextlib.contextmanager
def main_first(ctx: DistContext, *, local: bool = False) -> Iterator[None]:
    """Let the main rank run the body first, and the others after it: download, then read.

    The others wait on the store and not in a collective: the main rank may take longer than any
    timeout of the group, as long as it lives.

    Changes: nothing. Collectives: none; one meeting through the store.

    Args:
        ctx: The context whose ranks take part.
        local: One main rank per node instead of one for all, for caches on a local disk.

    Raises:
        PeerError: On the other ranks, if the body failed on the main rank or that rank died.

    Example:
        >>> import weft
        >>> with main_first(weft.local()):
        ...     print("prepared")
        prepared
    """
    world = ctx.require_collective("main_first")
    if world.store is None or world.size == 1:
        yield
        return
    first = ctx.is_local_main if local else ctx.is_main
    main = ctx.rank - ctx.local_rank if local else 0
    key = f"first/{world.next_meeting()}/{main}"
    if not first:
        text = wait_for_key(world, key, "main_first", lambda: [main], patient=True)
        error = world.store.parsed(key, text)
        if error is not None:
            raise peer_error("main_first", world.ranks[main], error)
        yield
        return
    try:
        yield
    except BaseException as error:
        world.store.write(key, exception_text(error))
        raise
    world.store.write(key, None)


def any_rank(flag: bool, ctx: DistContext) -> bool:
    """Say whether any rank raised the flag: early stopping, a bad loss, a signal.

    Changes: nothing; there is no flag to clear. Collectives: one all-reduce of one byte.

    Args:
        flag: Of this rank.
        ctx: The context whose ranks take part.

    Returns:
        True on all ranks if `flag` is true on one of them.

    Raises:
        PeerError: Another rank failed, died or did not come.

    Example:
        >>> import weft
        >>> any_rank(True, weft.local())
        True
    """
    flags = torch.tensor(bool(flag), device=control_device(ctx.group, ctx.device))
    return bool(reduce(flags, ctx, "max").item())


def on_rank(fn: Callable[P, R], ctx: DistContext, rank: int | str = 0) -> Callable[P, R | None]:
    """Make a function do its work on one rank and return None on the others.

    Changes: nothing. Collectives: none, and none may be inside: see `DistContext.only`.

    Args:
        fn: Any function.
        ctx: The current context.
        rank: A rank, or "main", "last", "local_main".

    Returns:
        A function with the name and signature of `fn`.

    Raises:
        ContextError: No such rank.

    Example:
        >>> import weft
        >>> on_rank(len, weft.local())([1, 2])
        2
    """
    here = ctx.only(rank).here

    @functools.wraps(fn)
    def on_one(*args: P.args, **kwargs: P.kwargs) -> R | None:
        return fn(*args, **kwargs) if here else None

    return on_one
