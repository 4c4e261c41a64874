"""Values of any structure between ranks: `broadcast`, `scatter`, `gather_objects`; see encoding.py for how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from weft.checks import check_count
from weft.collectives.encoding import Packed, bytes_tensor, pack, unpack
from weft.collectives.primitives import (
    all_gather_bytes,
    all_gather_words,
    enter_collective,
    name_lost_peer,
    wait_for_collective,
)
from weft.context import DistContext, World
from weft.errors import value_error
from weft.peers.liveness import exception_text, peer_error
from weft.peers.pretended import PretendedGroup

T = TypeVar("T")
_NOTHING = Packed(torch.empty(0, dtype=torch.uint8), b"")


def broadcast(value: T, ctx: DistContext, *, source: int = 0) -> T:
    """Give every rank the value of one rank; the others need not know its structure.

    Changes: nothing. Collectives: two broadcasts, of the description and of the bytes. A `source` that comes for the
    first time is compared, in a meeting through the store.

    Args:
        value: On `source`: tensors, numpy arrays, numbers, strings, bytes, None, dates, paths, enums, and dicts,
            lists, tuples, sets and dataclasses of them. Classes of dataclasses, enums and named tuples must be
            imported on the other ranks. There the value is ignored; pass None.
        ctx: The context whose ranks take part.
        source: Rank of this context whose value counts.

    Returns:
        On `source` the value itself, elsewhere a copy with tensors on `ctx.device`.

    Raises:
        TypeError: On all ranks, if the value holds something else.
        ValueError: No such rank.
        ContextError: A `source` that is new on all ranks differs between them.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> broadcast({"step": 3}, weft.local())
        {'step': 3}
    """
    _check_source("broadcast", source, ctx)
    world = enter_collective("broadcast", ctx, None, {"source": source})
    if world.group is None:
        pack("broadcast", value, ctx.device)
        return value
    if isinstance(world.group, PretendedGroup):  # where the source is pretended, this rank does its part
        value, source = world.group.told(value, source), ctx.rank
    with name_lost_peer("broadcast", world):
        mine, failure = _packed("broadcast", value, ctx) if ctx.rank == source else (_NOTHING, None)
        # A negative size says that the value cannot be sent.
        sizes = torch.tensor([-1 if failure else mine.text_size, len(mine.body)], device=ctx.device)
        _send(sizes, world, source)
        if failure is not None:
            raise failure
        text_size, size = sizes.tolist()
        if text_size < 0:
            raise TypeError(f"broadcast: rank {source} brought a value that cannot be sent; see its error")
        body = mine.body if ctx.rank == source else torch.empty(size, dtype=torch.uint8, device=ctx.device)
        _send(body, world, source)
    return value if ctx.rank == source else cast("T", unpack(body, text_size, ctx.device))


def _packed(what: str, value: object, ctx: DistContext, *, grad: bool = False) -> tuple[Packed, TypeError | None]:
    """A value as bytes, or why it cannot be sent: the other ranks have to learn of it first."""
    try:
        return pack(what, value, ctx.device, grad=grad), None
    except TypeError as error:
        return _NOTHING, error


def _send(values: torch.Tensor, world: World, source: int) -> None:
    """Fill `values` with those of `source`."""
    wait_for_collective(dist.broadcast(values, group=world.group, group_src=source, async_op=True), world)


def gather_objects(value: T, ctx: DistContext) -> list[T]:
    """Collect one value per rank, of any structure; every rank gets the list in rank order.

    Changes: nothing. Collectives: two all-gathers.

    Args:
        value: As for `broadcast`; the ranks may bring different structures.
        ctx: The context whose ranks take part.

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
    world = enter_collective("gather_objects", ctx, None, {})
    if world.group is None:
        return [unpack(*pack("gather_objects", value, ctx.device), ctx.device)]
    with name_lost_peer("gather_objects", world):
        return gather_packed("gather_objects", value, ctx)


def gather_packed(what: str, value: Any, ctx: DistContext, *, grad: bool = False, each: str = "a value") -> list[Any]:
    """The messages of `gather_objects`.

    Raises:
        TypeError: On all ranks, if a rank's value cannot be sent.
    """
    mine, failure = _packed(what, value, ctx, grad=grad)
    heads = all_gather_words([int(failure is not None), mine.text_size, len(mine.body)], ctx, 3)
    if failure is not None:
        raise failure
    bad = [rank for rank, head in enumerate(heads) if head[0]]
    if bad:
        raise TypeError(f"{what}: rank {bad[0]} brought {each} that cannot be sent; see its error")
    bodies = all_gather_bytes(mine.body, [head[2] for head in heads], ctx)
    texts = [mine.text if ctx.world.pretended else head[1] for head in heads]
    return [unpack(body, text, ctx.device) for body, text in zip(bodies, texts, strict=True)]


def scatter(values: Sequence[T] | None, ctx: DistContext, *, source: int = 0) -> T:
    """Give every rank its own of the values of one rank; `gather_objects` is the way back.

    Of rows of a tensor: `scatter(rows.tensor_split(ctx.world_size), ctx)`.

    Changes: nothing. Collectives: a broadcast of sizes, and a scatter of the bytes; `source` is compared as in
    `broadcast`.

    Args:
        values: On `source`: one value per rank, each as for `broadcast`; they may differ in structure and size.
            On the other ranks it is ignored; pass None.
        ctx: The context whose ranks take part.
        source: Rank of this context whose values count.

    Returns:
        A copy of this rank's value, with tensors on `ctx.device`.

    Raises:
        TypeError: On `source`, if a value cannot be sent.
        ValueError: No such rank; on `source`, if there is not one value per rank.
        ContextError: As for `broadcast`.
        PeerError: `source` could not send, or a peer failed or died.

    Example:
        >>> import weft
        >>> scatter(["a"], weft.local())
        'a'
    """
    _check_source("scatter", source, ctx)
    enter_collective("scatter", ctx, None, {"source": source})

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
        return cast("T", unpack(*pack("scatter", make()[0], ctx.device), ctx.device))
    return cast("T", scatter_made(make, ctx, "scatter", source))


def scatter_made(make: Callable[[], list[Any] | None], ctx: DistContext, what: str, source: int = 0) -> Any:
    """Give every rank its own of the values that `source` makes; None on all ranks if it makes none.

    What `make` raises is raised on that rank, and reported to the others.

    Changes: nothing. Collectives: a broadcast of sizes, and a scatter of the bytes.

    Raises:
        TypeError: On `source`, if a value cannot be sent.
        PeerError: Making or sending the values failed, or a peer.
    """
    if ctx.world_size == 1:
        made = make()
        return None if made is None else made[0]
    world = ctx.require_collective(what)
    if isinstance(world.group, PretendedGroup):  # likewise
        known = world.group.told(make() if ctx.rank == source else None, source)
        make, source = lambda: known, ctx.rank
    values: list[Any] | None = None
    packed: list[Packed] = []
    failure: Exception | None = None
    text = mine = torch.empty(0, dtype=torch.uint8)
    if ctx.rank == source:
        try:
            values = make()
            packed = [pack(what, value, ctx.device) for value in values or ()]
        except Exception as error:  # noqa: BLE001  (raised once the others know)
            failure, text = error, bytes_tensor(exception_text(error).encode())
    head = torch.zeros(2 + 2 * ctx.world_size, dtype=torch.int64)
    head[:2] = torch.tensor([len(text), int(values is not None and failure is None)])
    head[2 : 2 + 2 * len(packed)] = torch.tensor([size for each in packed for size in (each.text_size, len(each.body))])
    head = head.to(ctx.device)
    with name_lost_peer(what, world):
        _send(head, world, source)
        text_length, there, *sizes = head.tolist()
        if text_length:
            text = text.to(ctx.device) if failure else torch.empty(text_length, dtype=torch.uint8, device=ctx.device)
            _send(text, world, source)
        elif there:
            mine = torch.empty(max(sizes[1::2]), dtype=torch.uint8, device=ctx.device)
            rows = [nn.functional.pad(each.body, (0, len(mine) - len(each.body))) for each in packed]
            work = dist.scatter(mine, rows or None, group=world.group, group_src=source, async_op=True)
            wait_for_collective(work, world)
    if failure is not None:
        raise failure
    if text_length:
        raise peer_error(what, source, bytes(text.cpu().numpy()).decode())
    if not there:
        return None
    text_size, size = sizes[2 * ctx.rank : 2 * ctx.rank + 2]
    return unpack(mine[:size], packed[ctx.rank].text if world.pretended else text_size, ctx.device)


def _check_source(what: str, source: int, ctx: DistContext) -> None:
    check_count(
        what, "source", source, least=0, below=ctx.world_size, fix=f"weft.collectives.{what}(value, ctx, source=0)"
    )
