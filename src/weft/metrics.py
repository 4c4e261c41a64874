"""Predictions, labels and means over all ranks, exactly: `gather_metrics`, `weighted_mean`, `denominator`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast, overload

import numpy as np
import torch

from weft.checks import as_number
from weft.collectives.packed_gather import exchange_columns
from weft.collectives.primitives import enter_collective, name_lost_peer
from weft.collectives.tensors import reduce
from weft.context import DistContext
from weft.contract import part_axes
from weft.engines.torch.probes.compare import differing_ranks
from weft.errors import ContractError, listed, type_error, value_error
from weft.tensors.nested import leaves, map_leaves

__all__ = [
    "Count",
    "SampleIds",
    "denominator",
    "gather_metrics",
    "per_rank",
    "samples_of_all",
    "total_count",
    "weighted_mean",
]

T = TypeVar("T")
Count = int | float | torch.Tensor | np.number[Any] | np.ndarray[Any, Any]
_UNKNOWN = -(2**40)  # samples: negative also when added to those of all others


@dataclass(frozen=True, kw_only=True)
class SampleIds:
    """Which samples a batch holds; what `shard_data(..., with_ids=True)` yields besides the batch.

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
def gather_metrics(values: T, ctx: DistContext, *, ids: SampleIds) -> T: ...
@overload
def gather_metrics(values: Sequence[T], ctx: DistContext, *, ids: Sequence[SampleIds]) -> T: ...
def gather_metrics(values: Any, ctx: DistContext, *, ids: SampleIds | Sequence[SampleIds]) -> Any:
    """Collect what belongs to the samples of all ranks: every sample once, in the order of the dataset.

    Which rows count is said by `ids`, which came with the batch; no state of a "last batch" is
    involved. Call it per batch, or once per epoch with the lists of all batches.

    Changes: nothing. Collectives: one small all-gather, and one for each tensor that does not fit into it; two more
    instead where ranks bring lists, or tensors of other shapes. Over the data axes: ranks that see the same batches
    count once. Under `context_parallel`, one small all-gather more, over its axis.

    Args:
        values: Tensors [rows, ...] and lists of one entry per row (strings, numbers, dicts, tensors of
            any shape), nested in dicts, tuples, named tuples and dataclasses. With a list of `ids`: a
            list of such values, one per batch.
        ctx: The current context.
        ids: Of the batch, or of every batch.

    Returns:
        The same structure on every rank, sorted by sample id; a sample that was drawn several times is
        there as often. A tensor whose rows differ in shape between batches or ranks comes back as a
        list of its rows. Of no batches at all, an empty list.

    Raises:
        TypeError: On all ranks, if an entry cannot be sent.
        ValueError: A leaf has another number of rows than `ids`.
        ContextError: The ranks pass different structures.
        ContractError: Under `context_parallel`, the values of the ranks are those of their parts of a sample.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> ids = weft.metrics.SampleIds(ids=torch.tensor([2, 0, 1]), valid=torch.tensor([True, True, False]))
        >>> weft.metrics.gather_metrics({"loss": torch.tensor([0.2, 0.0, 0.1])}, weft.local(), ids=ids)
        {'loss': tensor([0.0000, 0.2000])}
    """
    batches = [(values, ids)] if isinstance(ids, SampleIds) else list(zip(values, ids, strict=True))
    sub = ctx.on(ctx.data_axes)
    world = enter_collective("gather_metrics", sub, None, {})
    shape, structure, columns, everyone = _columns(batches)
    _check_whole(columns, ctx)
    if world.group is None:
        parts = [([column.clone() if isinstance(column, torch.Tensor) else column for column in columns], everyone)]
    else:
        with name_lost_peer("gather_metrics", world):
            parts = exchange_columns(structure, columns, everyone, sub)
    if not batches:
        return []
    return _ordered(shape, [part for part, _ in parts], [found for _, found in parts])


def _check_whole(columns: list[Any], ctx: DistContext) -> None:
    """Raise if ranks that have parts of the same samples bring other values: they are those of the parts."""
    axes = part_axes(ctx)
    group = ctx.on(axes).group if axes and not ctx.world.pretended else None
    if group is not None and (others := differing_ranks(columns, group, ctx.device)):
        raise ContractError(
            "gather_metrics: a value is that of a part of a sample, and not of the whole one",
            found=f"other values on {len(others)} of the {group.size()} ranks along {listed(map(repr, axes))}",
            expected="the same ones: sums over all positions of a sample, and what is computed from them",
            fix=f'values = weft.reduce(values, ctx.on({axes[0]!r}), "sum")  # of sums over positions, before a mean',
        )


def _columns(batches: Sequence[tuple[Any, SampleIds]]) -> tuple[Any, str, list[Any], torch.Tensor]:
    """An example of the structure, also as text; one tensor or list per leaf, of the rows that count; and their ids."""
    found: list[list[Any]] = []  # by batch
    structure = "no batches"
    ids: list[torch.Tensor] = []
    for value, rows in batches:
        every = bool(rows.valid.all())
        ids.append(rows.ids if every else rows.ids[rows.valid])
        keep = None if every else rows.valid.nonzero().flatten().tolist()
        leaf_list = _entries(value)
        wrong = [
            f"{'.'.join(path) or 'value'}: {len(leaf) if isinstance(leaf, list) else list(leaf.shape)}"
            for path, leaf in leaf_list
            if not (isinstance(leaf, list) or leaf.dim()) or len(leaf) != len(rows)
        ]
        if wrong:
            raise value_error(
                "gather_metrics: leaves do not have one entry per row",
                found=f"{listed(wrong)}; {len(rows)} rows",
                expected="tensors [rows, ...] and lists of one entry per row, also per row that is not valid",
                fix="weft.metrics.gather_metrics({'loss': losses}, ctx, ids=ids)  # losses: one per sample",
            )
        if not found:
            structure = "; ".join([".".join(path) for path, _ in leaf_list])
        found.append([leaf if keep is None else _pick(leaf, keep) for _, leaf in leaf_list])
    columns = [_joined(list(column)) for column in zip(*found, strict=True)]
    return batches[0][0] if batches else None, structure, columns, _joined(ids or [torch.zeros(0, dtype=torch.int64)])


def _entries(value: Any) -> list[tuple[tuple[str, ...], Any]]:
    """The leaves: tensors, and lists as they are."""
    items = _plain_items(value)
    if items is not None:
        return [((str(key),), item.detach()) for key, item in items]
    held: list[tuple[tuple[str, ...], Any]] = []
    for where, leaf in leaves(value, whole=_is_list):
        if isinstance(leaf, list):
            held.append((where, leaf))
        elif isinstance(leaf, torch.Tensor):
            held.append((where, list(leaf.unbind()) if leaf.is_nested else leaf.detach()))
        else:
            raise type_error(
                f"gather_metrics: {'.'.join(where) or 'the value'} is neither a tensor nor a list",
                found=f"{type(leaf).__name__} {leaf!r:.60}",
                expected="tensors [rows, ...] and lists of one entry per row",
                fix="weft.metrics.weighted_mean(value, ctx, weight=len(ids))  # for a number per batch",
            )
    return held


def _plain_items(value: Any) -> Iterable[tuple[Any, torch.Tensor]] | None:
    """The most frequent case, a dict or tuple of tensors alone: found without a walk."""
    kind = type(value)
    items = value.items() if kind is dict else list(enumerate(value)) if kind is tuple else None
    if items is None or any(type(item) is not torch.Tensor or item.is_nested for _, item in items):
        return None
    return items


def _is_list(value: object) -> bool:
    """Whether this is a list of one entry per row, which is a leaf."""
    return isinstance(value, list)


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


def _ordered(shape: Any, parts: list[list[Any]], ids: list[torch.Tensor]) -> Any:
    """Join the columns of all ranks and sort the rows by sample id; the columns may be returned themselves."""
    every, columns = _joined(ids), [_joined(list(pieces)) for pieces in zip(*parts, strict=True)]
    if not _is_sorted(every):
        order = torch.argsort(every, stable=True)
        columns = [
            column[order.to(column.device)] if isinstance(column, torch.Tensor) else _pick(column, order.tolist())
            for column in columns
        ]
    if _plain_items(shape) is not None:
        return dict(zip(shape, columns, strict=True)) if isinstance(shape, dict) else tuple(columns)
    found = iter(columns)
    return map_leaves(lambda *_: next(found), shape, whole=_is_list)


def _is_sorted(ids: torch.Tensor) -> bool:
    if ids.device.type == "cpu":
        numbers = ids.numpy()  # comparing in numpy is the cheaper for a batch
        return bool((numbers[1:] >= numbers[:-1]).all())
    return bool((ids[1:] >= ids[:-1]).all())


# -- means -------------------------------------------------------------------------------------------


def weighted_mean(value: T, ctx: DistContext, *, weight: Count) -> T:
    """Average over all ranks what each averaged over a number of samples or tokens of its own.

    The mean of the ranks' means is not the mean over the samples when they have different numbers.

    Changes: nothing. Collectives: one all-reduce over the data axes, and those over which `context_parallel`
    splits sequences: ranks that see the same samples count once.

    Args:
        value: A nested value of tensors and numbers, each a mean over this rank's samples or tokens.
        ctx: The current context.
        weight: How many there were; >= 0. A rank with none may bring anything, also not-a-number.

    Returns:
        The same structure of tensors, in float64 where there is such; not-a-number if all weights are 0.

    Raises:
        TypeError: A leaf is neither a tensor nor a number.
        ValueError: On all ranks, if a weight is negative, not finite or no number.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> weft.metrics.weighted_mean({"loss": torch.tensor(0.5)}, weft.local(), weight=3)
        {'loss': tensor(0.5000, dtype=torch.float64)}
    """
    wide = torch.float32 if ctx.device.type == "mps" else torch.float64
    weights = _as_tensor(weight).to(ctx.device, wide).sum()
    usable = bool((weights >= 0) & torch.isfinite(weights))
    factor = weights if usable else torch.full_like(weights, torch.nan)

    def scaled(path: tuple[str, ...], leaf: Any) -> Any:
        number = None if isinstance(leaf, torch.Tensor) else as_number(leaf)
        tensor = leaf if number is None else torch.tensor(number, dtype=wide)
        if not isinstance(tensor, torch.Tensor):
            return leaf
        here = tensor.detach().to(ctx.device, wide)
        return here * factor if not usable or factor > 0 else torch.zeros_like(here)

    total: Any = reduce(
        {"value": map_leaves(scaled, value), "weight": factor}, ctx.on((*ctx.data_axes, *part_axes(ctx))), "sum"
    )
    if not bool(torch.isfinite(total["weight"])):
        raise value_error(
            "weighted_mean: a weight is negative, not finite or no number",
            found=f"{weight!r:.60} on rank {ctx.rank}",
            expected="a finite number >= 0 on every rank",
            fix="weft.metrics.weighted_mean(loss, ctx, weight=len(batch))",
        )
    return cast("T", map_leaves(lambda _, leaf: leaf / total["weight"], total["value"]))


def denominator(count: Count, ctx: DistContext, *, mean_over: int | None = None) -> float:
    """What a summed loss is divided by, so that its gradient is that of the mean over all ranks' samples.

    Gradients are averaged over ranks. Ranks with different numbers of samples, or with none, get the
    exact mean by `loss_sum / denominator`; in windows use `window.denominator`.

    Changes: nothing. Collectives: one all-reduce of one number over the data axes, and those over which
    `context_parallel` splits sequences.

    Args:
        count: Samples or tokens of this rank's batch; >= 0. Of its part, where sequences are split.
        ctx: The current context.
        mean_over: Ranks over which gradients are averaged; default: all that see different batches, or
            parts of them. 1 for a module that is not replicated.

    Returns:
        The count over all ranks, or 1 if that is zero, divided by `mean_over`. It may be below 1: clamping it, as in
        `max(1, denominator)`, would weigh rows by the number of ranks.

    Raises:
        ValueError: On all ranks, if a count is negative, not finite or no number.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> weft.metrics.denominator(8, weft.local())
        8.0
    """
    parts = part_axes(ctx)
    total = total_count([count], ctx, parts=parts, fix="weft.metrics.denominator(len(batch), ctx)")
    ranks = ctx.data_size * math.prod(map(ctx.axis_size, parts))
    return per_rank(total, ranks if mean_over is None else mean_over)


def total_count(counts: Sequence[Count], ctx: DistContext, *, parts: Sequence[str] = (), fix: str) -> float:
    """Add counts up over the ranks that see different batches, or other parts of them; one all-reduce of one number.

    Raises:
        ValueError: On all ranks, if a count is negative or not finite.
        ContractError: In an elastic job.
    """
    if ctx.replicas is not None:
        raise ContractError(
            "denominator: counts cannot be added up over the replicas of an elastic job",
            found=f"{ctx.num_replicas} replicas, any of which may be lost at any time",
            expected="mean losses over samples",
            fix="loss = cross_entropy(model(x), y) * loader.share  # or window.share",
        )
    # Counts are exact in float64 up to 2**53; some devices have none, so add on the CPU there.
    device = ctx.device if ctx.device.type != "mps" else torch.device("cpu")
    mine = torch.stack([_as_tensor(count).to(device).double().sum() for count in counts])
    # A bad count on one rank has to be seen by all: not-a-number survives the sum.
    part = torch.where((mine >= 0).all(), mine.sum(), torch.nan)
    total = float(reduce(part, ctx.on((*ctx.data_axes, *parts)), "sum"))
    ctx.world.root.next_number("total")  # a loop that divides by it needs no `share`
    if not 0 <= total < float("inf"):
        raise value_error(
            "denominator: a count is negative, not finite or no number",
            found=f"{listed(f'{count!r:.60}' for count in counts)} on rank {ctx.rank}, {total} over all ranks",
            expected="finite numbers >= 0 on all ranks",
            fix=fix,
        )
    return total


def _as_tensor(count: Count) -> torch.Tensor:
    """A count as it is; not-a-number for what is none, as all ranks have to learn of it."""
    number = None if isinstance(count, torch.Tensor) else as_number(count)
    try:
        # A number by itself: torch would round a Python float to 32 bits.
        found = torch.tensor(number, dtype=torch.float64) if number is not None else torch.as_tensor(count).detach()
    except (TypeError, ValueError, RuntimeError):
        return torch.tensor(torch.nan)
    return torch.tensor(torch.nan) if found.is_complex() else found


def per_rank(total: float, mean_over: int) -> float:
    """A count over the number of ranks gradients are averaged over. Of zero: what one process divides by is 1."""
    return (total or 1.0) / mean_over


def samples_of_all(counts: Sequence[int | None], ctx: DistContext) -> int:
    """How many samples the ranks that see different batches have together; one all-reduce of one number.

    Raises:
        ValueError: On all ranks, if a count is None: the samples of a batch could not be counted.
    """
    mine = sum(_UNKNOWN if count is None else count for count in counts)
    total = int(reduce(torch.tensor(mine, dtype=torch.int64, device=ctx.device), ctx.on(ctx.data_axes), "sum"))
    if total < 0:
        raise value_error(
            "share: the samples of a batch cannot be counted",
            found="tensors that do not agree about the number of rows, or objects without them"
            if mine < 0
            else "a batch of another rank",
            expected="tensors [samples, ...] in each batch, or a count of your own",
            fix="loss = loss_sum / weft.metrics.denominator(count, ctx)  # or window.denominator(fn), before its loop",
        )
    return total
