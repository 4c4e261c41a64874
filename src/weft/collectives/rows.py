"""Collectives that give every rank rows of its own: `all_to_all`, `reduce_scatter`."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from weft.collectives.exchange import Counts, Routes, add_up
from weft.collectives.primitives import (
    HEADER_WORDS,
    all_gather_words,
    enter_collective,
    name_lost_peer,
    rebuilt,
    tensors_of,
    wait_for_collective,
)
from weft.collectives.tensors import ReduceOp, check_op, mean_dtype
from weft.context import DistContext
from weft.engines.torch.parallel.exchange import exchanged
from weft.errors import listed, value_error
from weft.peers.agreement import compare_values
from weft.tensors.nested import leaves

T = TypeVar("T")


def all_to_all(value: T, ctx: DistContext, *, splits: Sequence[int] | None = None, grad: bool = False) -> T:
    """Send rows of tensors to every rank, and join what the ranks sent to this one, in rank order.

    What tokens need on their way to experts. How many rows come from which rank is found out by sending the
    numbers first: `all_to_all(torch.tensor(splits), ctx)`.

    Changes: nothing. Collectives: one small all-to-all of sizes, one all-to-all of the bytes; with `grad`, one more in
    backward.

    Args:
        value: A nested value of tensors [rows, ...], the same structure, dtypes and inner shapes on all ranks.
        ctx: The context whose ranks take part.
        splits: How many rows go to each rank, zero included. Default: as equal as possible, the first ranks
            get one more.
        grad: Whether gradients flow back to the ranks that the rows came from. All ranks then take part in the
            backward pass through the result.

    Returns:
        The same structure; each tensor [rows for this rank, ...], on the device it came from.

    Raises:
        TypeError: A leaf is not a tensor, or requires grad without `grad=True`.
        ValueError: A tensor has no rows, or not as many as `splits` says.
        ContextError: Structures, dtypes or inner shapes differ between ranks.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> all_to_all(torch.tensor([1, 2]), weft.local())
        tensor([1, 2])
    """
    found, tracked = tensors_of("all_to_all", value, grad=grad)
    counts = _splits("all_to_all", found, splits, ctx)
    world = enter_collective("all_to_all", ctx, value, {})
    if world.group is None:
        return rebuilt(value, [tensor.clone() for tensor in found])
    described = "; ".join(
        f"{'.'.join(path) or 'value'}: {leaf.dtype}, rows of {list(leaf.shape[1:])}" for path, leaf in leaves(value)
    )
    with name_lost_peer("all_to_all", world):
        received = _exchange_counts(counts, described + tracked, ctx)
    return rebuilt(value, exchanged(Routes("all_to_all", world, counts, received, ctx.device), found))


def reduce_scatter(
    value: T, ctx: DistContext, op: ReduceOp = "sum", *, splits: Sequence[int] | None = None, grad: bool = False
) -> T:
    """Combine tensors over the ranks; every rank gets some rows of the result.

    `gather` of what it returns is what `reduce` returns.

    Changes: nothing. Collectives: one small all-gather, one all-to-all of the bytes; with `grad`, one more in backward.

    Args:
        value: A nested value of tensors [rows, ...], the same shapes and dtypes on all ranks.
        ctx: The context whose ranks take part.
        op: As for `reduce`.
        splits: How many rows each rank gets, the same numbers on all ranks. Default: as equal as possible, the first
            ranks get one more.
        grad: As for `all_to_all`.

    Returns:
        The same structure; each tensor [rows of this rank, ...].

    Raises:
        TypeError: A leaf is not a tensor, or requires grad without `grad=True`.
        ValueError: Unknown `op`; a tensor has no rows, or not as many as `splits` says.
        ContextError: Structures, shapes, dtypes or `splits` differ between ranks.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> reduce_scatter(torch.tensor([1.0, 2.0]), weft.local(), "mean")
        tensor([1., 2.])
    """
    check_op("reduce_scatter", op)
    found, tracked = tensors_of("reduce_scatter", value, grad=grad)
    counts = _splits("reduce_scatter", found, splits, ctx)
    world = enter_collective("reduce_scatter", ctx, value, {"op": op})
    if world.group is None:
        return rebuilt(value, [_combined(tensor[None], op) for tensor in found])
    described = f"{op} of " + "; ".join(
        f"{'.'.join(path) or 'value'}: {leaf.dtype} {list(leaf.shape)} cut into {each}"
        for (path, leaf), each in zip(leaves(value), counts, strict=True)
    )
    with name_lost_peer("reduce_scatter", world):
        words = all_gather_words([zlib.crc32((described + tracked).encode())], ctx, 1)
    if any(word != words[0] for word in words):
        compare_values(world, "reduce_scatter", described + tracked)
    mine = [[each[ctx.rank]] * ctx.world_size for each in counts]
    parts = add_up(Routes("reduce_scatter", world, counts, mine, ctx.device), found)
    return rebuilt(value, [_combined(part, op) for part in parts])


def _splits(what: str, found: Sequence[torch.Tensor], splits: Sequence[int] | None, ctx: DistContext) -> Counts:
    """How many rows of each tensor go to each rank."""
    given = None if splits is None else [int(count) for count in splits]
    if given is not None and (len(given) != ctx.world_size or min(given) < 0):
        raise value_error(
            f"{what}: splits = {given} cannot be used",
            found=f"{len(given)} numbers, the smallest {min(given, default=0)}",
            expected=f"one number of rows >= 0 for each of the {ctx.world_size} ranks",
            fix=f"weft.collectives.{what}(value, ctx)",
        )
    wrong = [t for t in found if not t.dim() or (given is not None and t.shape[0] != sum(given))]
    if wrong:
        raise value_error(
            f"{what}: a tensor cannot be split into rows for the ranks",
            found=listed(str(tuple(tensor.shape)) for tensor in wrong),
            expected="tensors [rows, ...]" + ("" if given is None else f" of {sum(given)} rows, as splits says"),
            fix=f"weft.collectives.{what}(value{'[None]' if given is None else ''}, ctx)",
        )
    size = ctx.world_size
    return [given or [len(one) // size + (rank < len(one) % size) for rank in range(size)] for one in found]


def _exchange_counts(counts: Counts, text: str, ctx: DistContext) -> Counts:
    """How many rows of each tensor come from each rank; raises on every rank if the values do not fit together."""
    sent = torch.zeros(ctx.world_size, 1 + len(counts), dtype=torch.int64)
    sent[:, 0] = zlib.crc32(text.encode())
    sent[:, 1:] = torch.tensor(counts, dtype=torch.int64).view(len(counts), ctx.world_size).t()
    rows = torch.zeros(ctx.world_size, max(HEADER_WORDS, sent.shape[1]), dtype=torch.int64)
    rows[:, : sent.shape[1]] = sent
    # The first words alone tell whether all ranks bring as many tensors.
    heads = [_all_to_all_words(rows[:, :HEADER_WORDS], ctx)]
    if bool((heads[0][:, 0] != sent[0, 0]).any()):
        compare_values(ctx.world, "all_to_all", text)
    if rows.shape[1] > HEADER_WORDS:
        heads.append(_all_to_all_words(rows[:, HEADER_WORDS:], ctx))
    received: Counts = torch.cat(heads, 1)[:, 1 : 1 + len(counts)].t().tolist()
    return received


def _all_to_all_words(rows: torch.Tensor, ctx: DistContext) -> torch.Tensor:
    sent = rows.contiguous().to(ctx.device)
    received = torch.empty_like(sent)
    wait_for_collective(dist.all_to_all_single(received, sent, group=ctx.group, async_op=True), ctx.world)
    return received.cpu()


def _combined(parts: torch.Tensor, op: str) -> torch.Tensor:
    """What `reduce` makes of the tensors along the first dimension, which is that of ranks."""
    if op == "mean":
        exact = parts.is_floating_point() or parts.is_complex()
        return parts.mean(0, dtype=parts.dtype if exact else mean_dtype(parts.dtype))
    if op == "sum":
        return parts.sum(0, dtype=torch.int64 if parts.dtype == torch.bool else parts.dtype)
    return parts.amax(0) if op == "max" else parts.amin(0)
