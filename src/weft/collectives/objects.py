"""Values of any structure between ranks: `broadcast`, `scatter`, `gather_objects`; see encoding.py for how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from weft.checks import check_count
from weft.collectives.encoding import bytes_tensor, decode, encode
from weft.collectives.primitives import all_gather_flat, all_gather_words, enter, finish, peers_named
from weft.context import DistContext, World
from weft.errors import PeerError, value_error
from weft.peers.liveness import exception_text

__all__ = ["broadcast", "gather_objects", "scatter", "scatter_made"]

T = TypeVar("T")


def broadcast(value: T, ctx: DistContext, *, source: int = 0) -> T:
    """Give every rank the value of one rank; the others need not know its structure.

    Changes: nothing. Collectives: two broadcasts, of the description and of the bytes.

    Args:
        value: On `source`: tensors, numpy arrays, numbers, strings, bytes, None, dates, paths, enums, and dicts,
            lists, tuples, sets and dataclasses of them. Classes of dataclasses, enums and named tuples must be
            imported on the other ranks. There the value is ignored; pass None.
        ctx: Whose ranks.
        source: Rank of this context whose value counts.

    Returns:
        On `source` the value itself, elsewhere a copy with tensors on `ctx.device`.

    Raises:
        TypeError: On all ranks, if the value holds something else.
        ValueError: No such rank.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> broadcast({"step": 3}, weft.local())
        {'step': 3}
    """
    _check_source("broadcast", source, ctx)
    world = enter("broadcast", ctx, None, {"source": source})
    if world.group is None:
        encode("broadcast", value)
        return value
    with peers_named("broadcast", world):
        return cast("T", _broadcast_encoded(value, ctx, world, source))


def _broadcast_encoded(value: Any, ctx: DistContext, world: World, source: int) -> Any:
    text: bytes = b""
    parts: list[torch.Tensor] = []
    failure: TypeError | None = None
    if ctx.rank == source:
        try:
            text, parts = encode("broadcast", value)
        except TypeError as error:
            failure = error
    sizes = torch.tensor([len(text), sum(p.numel() for p in parts)], dtype=torch.int64, device=ctx.device)
    sizes = sizes - 1 if failure is not None else sizes
    finish(dist.broadcast(sizes, group=world.group, group_src=source, async_op=True), world)
    if failure is not None:
        raise failure
    text_size, data_size = sizes.tolist()
    if text_size < 0:
        raise TypeError(f"broadcast: rank {source} brought a value that cannot be sent; see its error")
    body = torch.empty(text_size + data_size, dtype=torch.uint8, device=ctx.device)
    if ctx.rank == source:
        body.copy_(torch.cat([bytes_tensor(text), *(p.cpu() for p in parts)]))
    finish(dist.broadcast(body, group=world.group, group_src=source, async_op=True), world)
    return value if ctx.rank == source else decode(body, text_size, ctx.device)


def gather_objects(value: T, ctx: DistContext) -> list[T]:
    """Collect one value per rank, of any structure; every rank gets the list in rank order.

    Changes: nothing. Collectives: two all-gathers.

    Args:
        value: As for `broadcast`; the ranks may bring different structures.
        ctx: Whose ranks.

    Returns:
        One value per rank; this rank's own is a copy too.

    Raises:
        TypeError: On all ranks, if a rank's value cannot be sent.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> gather_objects("a", weft.local())
        ['a']
    """
    world = enter("gather_objects", ctx, None, {})
    text: bytes = b""
    parts: list[torch.Tensor] = []
    failure: TypeError | None = None
    try:
        text, parts = encode("gather_objects", value)
    except TypeError as error:
        if world.group is None:
            raise
        failure = error
    body = torch.cat([bytes_tensor(text), *(p.cpu() for p in parts)]).to(ctx.device)
    if world.group is None:
        return [decode(body, len(text), ctx.device)]
    with peers_named("gather_objects", world):
        heads = all_gather_words([0 if failure is None else 1, len(text), body.numel()], world, ctx, 3)
        if failure is not None:
            raise failure
        bad = [rank for rank, head in enumerate(heads) if head[0]]
        if bad:
            raise TypeError(f"gather_objects: rank {bad[0]} brought a value that cannot be sent; see its error")
        longest = max(head[2] for head in heads)
        padded = torch.zeros(longest, dtype=torch.uint8, device=ctx.device)
        padded[: body.numel()] = body
        everything = padded.new_empty(longest * ctx.world_size)
        all_gather_flat(everything, padded, world)
    rows = everything.view(ctx.world_size, longest)
    return [decode(row[: head[2]], head[1], ctx.device) for row, head in zip(rows, heads, strict=True)]


def scatter(values: Sequence[T] | None, ctx: DistContext, *, source: int = 0) -> T:
    """Give every rank its own of the values of one rank; `gather_objects` is the way back.

    Of rows of a tensor: `scatter(rows.tensor_split(ctx.world_size), ctx)`.

    Changes: nothing. Collectives: a broadcast of sizes, and a scatter of the bytes.

    Args:
        values: On `source`: one value per rank, each as for `broadcast`; they may differ in structure and size.
            On the other ranks it is ignored; pass None.
        ctx: Whose ranks.
        source: Rank of this context whose values count.

    Returns:
        A copy of this rank's value, with tensors on `ctx.device`.

    Raises:
        TypeError: On `source`, if a value cannot be sent.
        ValueError: No such rank; on `source`, if there is not one value per rank.
        PeerError: `source` could not send, or a peer failed or died.

    Example:
        >>> import weft
        >>> scatter(["a"], weft.local())
        'a'
    """
    _check_source("scatter", source, ctx)
    enter("scatter", ctx, None, {"source": source})

    def make() -> list[T]:
        given = [] if values is None else list(values)
        if len(given) != ctx.world_size:
            raise value_error(
                "scatter: there is not one value for each rank",
                found="None" if values is None else f"{len(given)} values",
                expected=f"{ctx.world_size} values on rank {source}",
                fix="weft.collectives.scatter(rows.tensor_split(ctx.world_size), ctx)",
            )
        return given

    if ctx.world_size == 1:
        text, parts = encode("scatter", make()[0])
        return cast("T", decode(torch.cat([bytes_tensor(text), *(p.cpu() for p in parts)]), len(text), ctx.device))
    return cast("T", scatter_made(make, ctx, "scatter", source))


def scatter_made(make: Callable[[], list[Any] | None], ctx: DistContext, what: str, source: int = 0) -> Any:
    """Give every rank its own of the values that `source` makes; None on all ranks if it makes none.

    What `make` raises is raised on that rank, and told to the others.

    Changes: nothing. Collectives: a broadcast of sizes, and a scatter of the bytes.

    Raises:
        TypeError: On `source`, if a value cannot be sent.
        PeerError: Making or sending the values failed, or a peer.
    """
    if ctx.world_size == 1:
        made = make()
        return None if made is None else made[0]
    world = ctx.require_collective(what)
    if ctx.rank != source:
        return _receive(ctx, world, what, source)
    try:
        values = make()
        encoded = [encode(what, value) for value in values or ()]
    except Exception as error:
        text = exception_text(error).encode()
        _send(torch.tensor([2, len(text), *[0] * (2 * ctx.world_size - 1)]), ctx, world, what)
        _send(bytes_tensor(text), ctx, world, what)
        raise
    sizes = [number for text, parts in encoded for number in (len(text), sum(p.numel() for p in parts))]
    _send(torch.tensor([int(values is None), *(sizes or [0] * (2 * ctx.world_size))]), ctx, world, what)
    if values is None:
        return None
    longest = max(sum(pair) for pair in zip(sizes[::2], sizes[1::2], strict=True))
    bodies = [torch.zeros(longest, dtype=torch.uint8, device=ctx.device) for _ in encoded]
    for body, (text, parts) in zip(bodies, encoded, strict=True):
        packed = torch.cat([bytes_tensor(text), *(p.cpu() for p in parts)])
        body[: packed.numel()] = packed
    with peers_named(what, world):
        mine = torch.empty_like(bodies[source])
        finish(dist.scatter(mine, bodies, group=world.group, group_src=source, async_op=True), world)
    text_size, data_size = sizes[2 * source : 2 * source + 2]
    return decode(mine[: text_size + data_size], text_size, ctx.device)


def _send(values: torch.Tensor, ctx: DistContext, world: World, what: str) -> None:
    with peers_named(what, world):
        work = dist.broadcast(values.to(ctx.device), group=world.group, group_src=ctx.rank, async_op=True)
        finish(work, world)


def _receive(ctx: DistContext, world: World, what: str, source: int) -> Any:
    head = torch.zeros(1 + 2 * ctx.world_size, dtype=torch.int64, device=ctx.device)
    with peers_named(what, world):
        finish(dist.broadcast(head, group=world.group, group_src=source, async_op=True), world)
        kind, *sizes = head.tolist()
        if kind == 1:
            return None
        if kind == 2:
            told = torch.empty(sizes[0], dtype=torch.uint8, device=ctx.device)
            finish(dist.broadcast(told, group=world.group, group_src=source, async_op=True), world)
            text = bytes(told.cpu().numpy()).decode()
            raise PeerError(f"{what}: rank {source} failed: {text}", rank=source, text=text)
        longest = max(sum(pair) for pair in zip(sizes[::2], sizes[1::2], strict=True))
        mine = torch.empty(longest, dtype=torch.uint8, device=ctx.device)
        finish(dist.scatter(mine, None, group=world.group, group_src=source, async_op=True), world)
    text_size, data_size = sizes[2 * ctx.rank : 2 * ctx.rank + 2]
    return decode(mine[: text_size + data_size], text_size, ctx.device)


def _check_source(what: str, source: int, ctx: DistContext) -> None:
    check_count(what, "source", source, least=0, below=ctx.world_size, fix=f"weft.{what}(value, ctx, source=0)")
