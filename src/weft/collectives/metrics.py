"""Predictions, labels and means over all ranks, exactly: `gather_metrics`, `weighted_mean`, `denominator`.

[Note: one message] What `gather_metrics` sends first is a message of a fixed size: sizes, and the sample ids and
values if they fit. Small metrics are one collective this way; large ones take a second.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, overload

import torch

from weft.collectives.entry import all_gather_flat, enter, num_bytes, peers_named
from weft.collectives.objects import _bytes_tensor, _decode, _encode
from weft.collectives.tensors import reduce
from weft.context import DistContext, World
from weft.context.world import compare, exchange
from weft.errors import listed, message
from weft.nested import leaves, map_leaves

__all__ = ["Rows", "denominator", "gather_metrics", "weighted_mean"]

T = TypeVar("T")
Count = int | float | torch.Tensor
_FIRST_BYTES = 2**13  # of all ranks together
_HEAD = 64  # bytes: eight words


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which samples a batch holds; what `shard_data(..., rows=True)` yields besides the batch.

    Attributes:
        ids: int64 [rows]: index into the dataset, or number in the stream.
        valid: bool [rows]; False: the row repeats a sample to fill the batch, and does not count.
        epoch: The epoch whose order it is a part of.
    """

    ids: torch.Tensor
    valid: torch.Tensor
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.ids)


@overload
def gather_metrics(values: T, ctx: DistContext, *, rows: Rows) -> T: ...
@overload
def gather_metrics(values: Sequence[T], ctx: DistContext, *, rows: Sequence[Rows]) -> T: ...
def gather_metrics(values: Any, ctx: DistContext, *, rows: Rows | Sequence[Rows]) -> Any:
    """Collect what belongs to the samples of all ranks: every sample once, in the order of the dataset.

    Which rows count is said by `rows`, that came with the batch; no state of a "last batch" is
    involved. Call it per batch, or once per epoch with the lists of all batches.

    Changes: nothing. Collectives: one small all-gather, and another one if the values do not fit into it, over
    the data axes: ranks that see the same batches count once.

    Args:
        values: Tensors [rows, ...] and lists of one entry per row (strings, numbers, dicts, tensors of
            any shape), nested in dicts, tuples, named tuples and dataclasses. With a list of `rows`: a
            list of such values, one per batch.
        ctx: Where we run.
        rows: Of the batch, or of every batch.

    Returns:
        The same structure on every rank, sorted by sample id; a sample that was drawn several times is
        there as often. A tensor whose rows differ in shape between batches or ranks comes back as a
        list of its rows.

    Raises:
        TypeError: On all ranks, if an entry cannot be sent.
        ValueError: A leaf has another number of rows than `rows`.
        ContextError: The ranks bring different structures.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> rows = weft.Rows(ids=torch.tensor([2, 0, 1]), valid=torch.tensor([True, True, False]))
        >>> weft.gather_metrics({"loss": torch.tensor([0.2, 0.0, 0.1])}, weft.local(), rows=rows)
        {'loss': tensor([0.0000, 0.2000])}
    """
    batches = [(values, rows)] if isinstance(rows, Rows) else list(zip(values, rows, strict=True))
    line = ctx if len(ctx.axes) == 1 else ctx.on(ctx.data_axes)
    world = enter("gather_metrics", line, None, {})
    shape, columns, ids = _columns(batches)
    if world.group is None:
        return _ordered(shape, [columns], [ids])
    with peers_named("gather_metrics", world):
        parts = _exchange(shape, columns, ids, line)
    return _ordered(shape, [part for part, _ in parts], [found for _, found in parts])


def _columns(batches: Sequence[tuple[Any, Rows]]) -> tuple[Any, list[Any], torch.Tensor]:
    """One tensor or list per leaf, of the rows that count; and an example of the structure."""
    found: list[list[Any]] = []
    shape: Any = None
    ids: list[torch.Tensor] = []
    for number, (value, rows) in enumerate(batches):
        every = bool(rows.valid.all())
        ids.append(rows.ids if every else rows.ids[rows.valid])
        keep = None if every else rows.valid.nonzero().flatten().tolist()
        leaf_list: list[tuple[tuple[str, ...], Any]] = list(_entries(value))
        wrong = [
            f"{'.'.join(path) or 'value'}: {len(leaf) if isinstance(leaf, list) else list(leaf.shape)}"
            for path, leaf in leaf_list
            if not (isinstance(leaf, list) or leaf.dim()) or len(leaf) != len(rows)
        ]
        if wrong:
            raise ValueError(
                message(
                    "gather_metrics: leaves do not have one entry per row",
                    found=f"{listed(wrong)}; {len(rows)} rows",
                    expected="tensors [rows, ...] and lists of one entry per row",
                    fix="weft.gather_metrics({'loss': losses}, ctx, rows=rows)  # losses: one per sample",
                )
            )
        picked = [leaf if keep is None else _pick(leaf, keep) for _, leaf in leaf_list]
        if number == 0:
            shape, found = value, [[leaf] for leaf in picked]
        else:
            for column, leaf in zip(found, picked, strict=True):
                column.append(leaf)
    return shape, [_joined(column) for column in found], _joined_ids(ids)


def _joined_ids(ids: list[torch.Tensor]) -> torch.Tensor:
    if len(ids) == 1:
        return ids[0]
    return torch.cat(ids) if ids else torch.zeros(0, dtype=torch.int64)


def _entries(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """The leaves: tensors, and lists as they are."""
    held: list[tuple[tuple[str, ...], Any]] = []
    for where, leaf in leaves(map_lists(value)):
        if isinstance(leaf, _Listed):
            held.append((where, leaf.items))
        elif isinstance(leaf, torch.Tensor):
            held.append((where, list(leaf.unbind()) if leaf.is_nested else leaf.detach()))
        else:
            raise TypeError(
                message(
                    f"gather_metrics: {'.'.join(where) or 'the value'} is neither a tensor nor a list",
                    found=f"{type(leaf).__name__} {leaf!r:.60}",
                    expected="tensors [rows, ...] and lists of one entry per row",
                    fix="weft.weighted_mean(value, ctx, weight=len(rows)) for a number per batch",
                )
            )
    return held


class _Listed:
    """A list that is a leaf: one entry per row."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items


def map_lists(value: Any) -> Any:
    """Put plain lists into boxes, so that what walks nested values leaves them whole."""
    if isinstance(value, list):
        return _Listed(value)
    if isinstance(value, dict):
        return {key: map_lists(item) for key, item in value.items()}
    if isinstance(value, tuple):
        parts = [map_lists(item) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def _pick(leaf: Any, keep: list[int]) -> Any:
    return [leaf[i] for i in keep] if isinstance(leaf, list) else leaf[keep]


def _joined(parts: list[Any]) -> Any:
    """One column of several batches: a tensor if all rows have one shape, else a list of rows."""
    if len(parts) == 1:
        return parts[0]
    full = [part for part in parts if len(part)] or parts[:1]
    if all(isinstance(part, torch.Tensor) for part in full) and len({(p.shape[1:], p.dtype) for p in full}) == 1:
        return torch.cat(full)
    return [row for part in full for row in part]


def _exchange(shape: Any, columns: list[Any], ids: torch.Tensor, ctx: DistContext) -> list[tuple[list[Any], Any]]:
    """Columns and ids of every rank; see [Note: one message]."""
    world = ctx.require_collective("gather_metrics")
    device, size = ctx.device, ctx.world_size
    objects = {str(index): column for index, column in enumerate(columns) if not isinstance(column, torch.Tensor)}
    kinds = [[str(c.dtype), c.dim()] if isinstance(c, torch.Tensor) else None for c in columns]
    structure = _structure(shape)
    text = json.dumps(kinds).encode()  # the ranks may differ: a column of rows of one shape here, of several there
    parts: list[torch.Tensor] = []
    failed: TypeError | None = None
    if objects:
        try:
            text, parts = _encode("gather_metrics", [kinds, objects])
        except TypeError as error:
            failed = error
    dims = [number for column in columns if isinstance(column, torch.Tensor) for number in column.shape]
    pieces = [torch.tensor(dims, dtype=torch.int64), ids.contiguous()]
    pieces += [c.contiguous().reshape(-1) for c in columns if isinstance(c, torch.Tensor) and c.numel()]
    payload = torch.cat([piece.view(torch.uint8).to(device) for piece in (*pieces, _bytes_tensor(text), *parts)])
    alike = zlib.crc32(f"{structure} {kinds}".encode())
    words = [zlib.crc32(structure.encode()), alike, len(ids), len(dims), len(text), payload.numel()]
    words += [2 * (failed is not None) + bool(objects), sum(p.numel() for p in parts)]
    first = max(_FIRST_BYTES // size, 1024)
    mine = torch.zeros(first, dtype=torch.uint8, device=device)
    mine[:_HEAD] = torch.tensor(words, dtype=torch.int64).view(torch.uint8).to(device)
    if _HEAD + payload.numel() <= first:
        mine[_HEAD : _HEAD + payload.numel()] = payload
    whole = mine.new_empty(first * size)
    all_gather_flat(whole, mine, world)
    rows = whole.view(size, first)
    heads = rows[:, :_HEAD].contiguous().view(torch.int64).tolist()
    _check_heads(heads, failed, f"{structure}: {kinds}", world)
    longest = max(head[5] for head in heads)
    if _HEAD + longest > first:
        if payload.numel() < longest:
            payload = torch.cat([payload, payload.new_zeros(longest - payload.numel())])
        everything = payload.new_empty(longest * size)
        all_gather_flat(everything, payload, world)
        bodies = everything.view(size, longest)
    else:
        bodies = rows[:, _HEAD:]
    start = 8 * len(dims)
    if (
        not objects
        and all(head == heads[0] for head in heads)
        and bool((bodies[:, :start] == bodies[:1, :start]).all())
    ):
        return [_all_alike(bodies, columns, start, len(ids))]
    return [_unpacked(body, head) for body, head in zip(bodies, heads, strict=True)]


def _check_heads(heads: list[list[int]], failed: TypeError | None, described: str, world: World) -> None:
    """Raise on all ranks if a value cannot be sent, or if the values do not fit together."""
    if failed is not None:
        raise failed
    bad = [rank for rank, head in enumerate(heads) if head[6] >= 2]
    if bad:
        raise TypeError(f"gather_metrics: rank {bad[0]} brought an entry that cannot be sent; see its error")
    what = 0 if any(head[6] for head in heads) else 1  # dtypes and dimensions count where all columns are tensors
    if any(head[what] != heads[0][what] for head in heads):
        compare("gather_metrics", [{"value": text} for text in exchange(world, "gather_metrics", described)])


def _all_alike(bodies: torch.Tensor, columns: list[Any], start: int, count: int) -> tuple[list[Any], Any]:
    """Columns and ids of all ranks together, which bring as many rows each."""
    place = start + 8 * count
    ids = bodies[:, start:place].contiguous().view(torch.int64).view(-1)
    found: list[Any] = []
    for column in columns:
        stop = place + column.numel() * column.element_size()
        joined = [len(bodies) * len(column), *column.shape[1:]]
        found.append(bodies[:, place:stop].contiguous().view(column.dtype).view(joined) if stop > place else column)
        place = stop
    return found, ids


def _unpacked(body: torch.Tensor, words: list[int]) -> tuple[list[Any], Any]:
    """Columns and ids of one rank, from its bytes."""
    _, _, count, num_dims, text_size, total, flags, sent = words
    dims: list[int] = body[: 8 * num_dims].clone().view(torch.int64).tolist()
    place = 8 * num_dims
    ids = body[place : place + 8 * count].clone().view(torch.int64)
    place += 8 * count
    text = body[total - sent - text_size : total]
    objects: dict[str, Any] = {}
    if flags:
        kinds, objects = _decode(text, text_size, body.device)
    else:
        kinds = json.loads(bytes(text.cpu().numpy()))
    found: list[Any] = []
    for index, kind in enumerate(kinds):
        if kind is None:
            found.append(objects[str(index)])
            continue
        dtype = getattr(torch, kind[0].removeprefix("torch."))
        shape, dims = dims[: kind[1]], dims[kind[1] :]
        stop = place + num_bytes(shape, dtype)
        # Slices start anywhere; a dtype's view wants its own alignment.
        piece = body[place:stop].clone().view(dtype).view(shape) if stop > place else None
        found.append(body.new_empty(shape, dtype=dtype) if piece is None else piece)
        place = stop
    return found, ids


def _structure(value: Any) -> str:
    return "; ".join(".".join(path) for path, _ in leaves(map_lists(value)))


def _ordered(shape: Any, parts: list[list[Any]], ids: list[torch.Tensor]) -> Any:
    """Join the columns of all ranks and sort the rows by sample id."""
    every = torch.cat(ids)
    in_order = bool((every[1:] >= every[:-1]).all()) if len(every) > 1 else True
    order = None if in_order else torch.argsort(every, stable=True)
    numbers = None if order is None else order.tolist()
    columns = []
    for pieces in zip(*parts, strict=True):
        column = _joined(list(pieces))
        if numbers is None:
            columns.append(column.clone() if isinstance(column, torch.Tensor) and len(parts) == 1 else column)
        else:
            assert order is not None
            columns.append(
                column[order.to(column.device)] if isinstance(column, torch.Tensor) else _pick(column, numbers)
            )
    found = iter(columns)
    return map_leaves(lambda *_: next(found), map_lists(shape))


# -- means -------------------------------------------------------------------------------------------


def weighted_mean(value: T, ctx: DistContext, *, weight: Count) -> T:
    """Average over all ranks what each averaged over a number of samples or tokens of its own.

    The mean of the ranks' means is not the mean over the samples when they have different numbers.

    Changes: nothing. Collectives: one all-reduce over the data axes: ranks that see the same batches
    count once.

    Args:
        value: A nested value of tensors, each a mean over this rank's samples or tokens.
        ctx: Where we run.
        weight: How many there were; >= 0. A rank with none may bring anything, also not-a-number.

    Returns:
        The same structure, in float64 where there is such; not-a-number if all weights are 0.

    Raises:
        TypeError: A leaf is not a tensor.
        ValueError: A weight is negative or not finite.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> weft.weighted_mean({"loss": torch.tensor(0.5)}, weft.local(), weight=3)
        {'loss': tensor(0.5000, dtype=torch.float64)}
    """
    wide = torch.float32 if ctx.device.type == "mps" else torch.float64
    weights = torch.as_tensor(weight).detach().to(ctx.device, wide).sum()
    usable = bool((weights >= 0) & torch.isfinite(weights))
    factor = weights if usable else torch.full_like(weights, torch.nan)

    def scaled(path: tuple[str, ...], leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        here = leaf.detach().to(ctx.device, wide)
        return here * factor if not usable or factor > 0 else torch.zeros_like(here)

    total: Any = reduce({"value": map_leaves(scaled, value), "weight": factor}, ctx.on(ctx.data_axes), "sum")
    if not bool(torch.isfinite(total["weight"])):
        raise ValueError(
            message(
                "weighted_mean: a weight is negative or not finite",
                found=f"{weight!r} on rank {ctx.rank}",
                expected="a finite number >= 0 on every rank",
                fix="weft.weighted_mean(loss, ctx, weight=len(batch))",
            )
        )
    return cast("T", map_leaves(lambda _, leaf: leaf / total["weight"], total["value"]))


def denominator(count: Count, ctx: DistContext, *, mean_over: int | None = None) -> float:
    """What a summed loss is divided by, so that its gradient is that of the mean over all ranks' samples.

    Gradients are averaged over ranks. Ranks with different numbers of samples, or with none, get the
    exact mean by `loss_sum / denominator`; in windows use `window.denominator`.

    Changes: nothing. Collectives: one all-reduce of one number over the data axes.

    Args:
        count: Samples or tokens of this rank's batch; >= 0.
        ctx: Where we run.
        mean_over: Ranks over which gradients are averaged; default: all that see different batches.
            1 for a module that is not replicated.

    Returns:
        The count over all ranks, divided by `mean_over`; 1 if it is zero.

    Raises:
        ValueError: A count is negative or not finite.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> weft.denominator(8, weft.local())
        8.0
    """
    device = ctx.device if ctx.device.type != "mps" else torch.device("cpu")
    mine = torch.as_tensor(count).detach().to(device).double().sum()
    total = float(reduce(torch.where(mine >= 0, mine, torch.nan), ctx.on(ctx.data_axes), "sum"))
    if not 0 <= total < float("inf"):
        raise ValueError(
            message(
                "denominator: a count is negative or not finite",
                found=f"{count!r} on rank {ctx.rank}, {total} over all ranks",
                expected="finite numbers >= 0 on all ranks",
                fix="weft.denominator(len(batch), ctx)",
            )
        )
    return total / (ctx.data_size if mean_over is None else mean_over) if total > 0 else 1.0
