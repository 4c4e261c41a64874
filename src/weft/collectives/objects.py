"""Values of any structure between ranks: `broadcast`, `gather_objects`; JSON and bytes, no pickle."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from weft.collectives.entry import all_gather_flat, all_gather_words, enter, finish, num_bytes, peers_named
from weft.context import DistContext, World
from weft.context.world import exception_text
from weft.errors import PeerError, message
from weft.nested import Path

__all__ = ["broadcast", "gather_objects", "scatter"]

T = TypeVar("T")


def broadcast(value: T, ctx: DistContext, *, source: int = 0) -> T:
    """Give every rank the value of one rank; the others need not know its structure.

    Changes: nothing. Collectives: two broadcasts, of the description and of the bytes.

    Args:
        value: On `source`: tensors, numbers, strings, None, and dicts, lists and tuples of them.
            On the other ranks it is ignored; pass None.
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
    if not 0 <= source < ctx.world_size:
        raise ValueError(
            message(
                f"broadcast: source = {source} is not a rank",
                found=str(source),
                expected=f"0 to {ctx.world_size - 1}",
                fix="weft.broadcast(value, ctx, source=0)",
            )
        )
    world = enter("broadcast", ctx, None, {"source": source})
    if world.group is None:
        _encode("broadcast", value)
        return value
    with peers_named("broadcast", world):
        return cast("T", _broadcast_encoded(value, ctx, world, source))


def _broadcast_encoded(value: Any, ctx: DistContext, world: World, source: int) -> Any:
    text: bytes = b""
    parts: list[torch.Tensor] = []
    failure: TypeError | None = None
    if ctx.rank == source:
        try:
            text, parts = _encode("broadcast", value)
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
        body.copy_(torch.cat([_bytes_tensor(text), *(p.cpu() for p in parts)]))
    finish(dist.broadcast(body, group=world.group, group_src=source, async_op=True), world)
    return value if ctx.rank == source else _decode(body, text_size, ctx.device)


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
        text, parts = _encode("gather_objects", value)
    except TypeError as error:
        if world.group is None:
            raise
        failure = error
    body = torch.cat([_bytes_tensor(text), *(p.cpu() for p in parts)]).to(ctx.device)
    if world.group is None:
        return [_decode(body, len(text), ctx.device)]
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
    return [_decode(row[: head[2]], head[1], ctx.device) for row, head in zip(rows, heads, strict=True)]


def _encode(what: str, value: object) -> tuple[bytes, list[torch.Tensor]]:
    """A value as JSON text and the bytes of its tensors."""
    parts: list[torch.Tensor] = []

    def encode(item: Any, path: Path) -> Any:
        if isinstance(item, torch.Tensor):
            data = item.detach().contiguous()
            parts.append(data.reshape(-1).view(torch.uint8) if data.numel() else data.new_empty(0, dtype=torch.uint8))
            return {"t": [str(item.dtype).removeprefix("torch."), list(item.shape)]}
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, bytes):
            return {"b": base64.b64encode(item).decode()}
        if type(item) in (list, tuple):
            return {"l" if type(item) is list else "u": [encode(x, (*path, str(i))) for i, x in enumerate(item)]}
        if type(item) is dict:
            return {"d": [[encode(k, path), encode(x, (*path, str(k)))] for k, x in item.items()]}
        raise TypeError(
            message(
                f"{what}: {'.'.join(path) or 'the value'} cannot be sent",
                found=f"{type(item).__name__}",
                expected="tensors, numbers, strings, bytes, None, and plain dicts, lists and tuples of them",
                fix="send its fields as a dict",
            )
        )

    return json.dumps(encode(value, ())).encode(), parts


def _decode(body: torch.Tensor, text_size: int, device: torch.device) -> Any:
    text = bytes(body[:text_size].cpu().numpy())
    place = text_size

    def decode(item: Any) -> Any:
        nonlocal place
        if not isinstance(item, dict):
            return item
        ((kind, content),) = item.items()
        if kind == "t":
            dtype, shape = getattr(torch, content[0]), content[1]
            size = num_bytes(shape, dtype)
            data, place = body[place : place + size].clone(), place + size
            return (data.view(dtype) if size else torch.empty(0, dtype=dtype, device=device)).view(shape).to(device)
        if kind == "b":
            return base64.b64decode(content)
        if kind == "d":
            return {decode(k): decode(x) for k, x in content}
        items = [decode(x) for x in content]
        return items if kind == "l" else tuple(items)

    return decode(json.loads(text))


def _bytes_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def scatter(make: Callable[[], list[Any] | None], ctx: DistContext, what: str) -> Any:
    """Give every rank its own of the values that rank 0 makes; None on all ranks if it makes none.

    What `make` raises is raised on rank 0, and told to the others.

    Changes: nothing. Collectives: a broadcast of sizes, and a scatter of the bytes.

    Raises:
        TypeError: On all ranks, if a value cannot be sent.
        PeerError: Making the values failed, or a peer.
    """
    if ctx.world_size == 1:
        values = make()
        return None if values is None else values[0]
    world = ctx.require_collective(what)
    if ctx.rank:
        return _receive(ctx, world, what)
    try:
        values = make()
        encoded = [_encode(what, value) for value in values or ()]
    except Exception as error:
        text = exception_text(error).encode()
        _send_sizes([2, len(text), *[0] * (2 * ctx.world_size - 1)], ctx, world)
        body = _bytes_tensor(text).to(ctx.device)
        finish(dist.broadcast(body, group=world.group, group_src=0, async_op=True), world)
        raise
    sizes = [number for text, parts in encoded for number in (len(text), sum(p.numel() for p in parts))]
    _send_sizes([int(values is None), *(sizes or [0] * (2 * ctx.world_size))], ctx, world)
    if values is None:
        return None
    longest = max(sum(pair) for pair in zip(sizes[::2], sizes[1::2], strict=True))
    bodies = [torch.zeros(longest, dtype=torch.uint8, device=ctx.device) for _ in encoded]
    for body, (text, parts) in zip(bodies, encoded, strict=True):
        packed = torch.cat([_bytes_tensor(text), *(p.cpu() for p in parts)])
        body[: packed.numel()] = packed
    with peers_named(what, world):
        mine = torch.empty_like(bodies[0])
        finish(dist.scatter(mine, bodies, group=world.group, group_src=0, async_op=True), world)
    return _decode(mine[: sizes[0] + sizes[1]], sizes[0], ctx.device)


def _send_sizes(sizes: list[int], ctx: DistContext, world: World) -> None:
    head = torch.tensor(sizes, dtype=torch.int64, device=ctx.device)
    with peers_named("scatter", world):
        finish(dist.broadcast(head, group=world.group, group_src=0, async_op=True), world)


def _receive(ctx: DistContext, world: World, what: str) -> Any:
    head = torch.zeros(1 + 2 * ctx.world_size, dtype=torch.int64, device=ctx.device)
    with peers_named(what, world):
        finish(dist.broadcast(head, group=world.group, group_src=0, async_op=True), world)
        kind, *sizes = head.tolist()
        if kind == 1:
            return None
        if kind == 2:
            told = torch.empty(sizes[0], dtype=torch.uint8, device=ctx.device)
            finish(dist.broadcast(told, group=world.group, group_src=0, async_op=True), world)
            text = bytes(told.cpu().numpy()).decode()
            raise PeerError(f"{what}: rank 0 failed: {text}", rank=0, text=text)
        longest = max(sum(pair) for pair in zip(sizes[::2], sizes[1::2], strict=True))
        mine = torch.empty(longest, dtype=torch.uint8, device=ctx.device)
        finish(dist.scatter(mine, None, group=world.group, group_src=0, async_op=True), world)
    text_size, data_size = sizes[2 * ctx.rank : 2 * ctx.rank + 2]
    return _decode(mine[: text_size + data_size], text_size, ctx.device)
