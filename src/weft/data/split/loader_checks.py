"""What `shard_data` refuses, before anything is changed."""

from __future__ import annotations

import copy
from typing import Any, cast

from torch.utils.data import DataLoader, Dataset, IterableDataset

from weft import torch_internals
from weft.checks import check_choice
from weft.context import DistContext
from weft.data.loader_copy import is_torch_iterator, length_of, split_already
from weft.data.split.read_plan import DataPlan, takes_consecutive_samples
from weft.data.split.split_plan import warn_of_no_step
from weft.data.split.stream_samples import shards_of
from weft.errors import type_error, value_error

_MODES = ("batches", "split", "dispatch", "shards")
_UNEVEN = ("empty", "balance", "pad", "drop", "error", "join")


def check_loader(loader: Any, mode: str, uneven: str | None, resized: str, *, already_sharded: bool) -> None:
    """Raise if this is not a loader that can be shared out here.

    Raises:
        TypeError: It is no `DataLoader`.
        ValueError: It cannot be shared out; the text says why.
    """
    if not isinstance(loader, DataLoader):
        raise type_error(
            "shard_data: this is not a loader",
            found=type(loader).__name__,
            expected="a torch.utils.data.DataLoader",
            fix="loader = DataLoader(dataset, batch_size=32)",
        )
    for name, value, allowed in (
        ("mode", mode, _MODES),
        ("uneven", uneven, (*_UNEVEN, None)),
        ("resized", resized, ("next_epoch", "error")),
    ):
        fix = f"loader, ctx = weft.shard_data(loader, ctx, {name}={allowed[0]!r})"
        check_choice("shard_data", name, value, allowed, fix=fix)
    _check_mode(loader, mode)
    _check_split(loader, mode, uneven, already_sharded=already_sharded)


def without_persistent_iterator(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A loader that keeps one iterator for all epochs, over a sampler without end, as one that is read by epochs.

    Such loaders, of several vision libraries, were made so that workers stay; in the one returned they do.

    Raises:
        ValueError: It keeps an iterator, and what an epoch is cannot be told.
    """
    torchs = torch_internals.LOADER_ITERATOR.name
    kept = [name for name, value in vars(loader).items() if name != torchs and is_torch_iterator(value)]
    if not kept:
        return loader
    new = copy.copy(loader)
    new.__dict__.update(dict.fromkeys(kept), weft_kept=kept)  # the iterator stays with the original
    for name in ("sampler", "batch_sampler"):
        source = getattr(loader, name)
        if source is None or length_of(source) is not None:
            continue
        parts = getattr(source, "__dict__", {}).values()
        inner = [one for one in parts if hasattr(one, "__iter__") and length_of(one) is not None]
        if len(inner) != 1 or isinstance(inner[0], (str, bytes, Dataset)):
            found = f"{type(loader).__name__}, which keeps an iterator over a {type(source).__name__} without a length"
            fix = "loader = DataLoader(dataset, batch_size=32, num_workers=2, persistent_workers=True)"
            raise _refusal(found, "a loader that is read by epochs", fix)
        new.__dict__[name] = inner[0]
    new.__dict__["persistent_workers"] = loader.num_workers > 0
    return new


def _refusal(found: str, expected: str, fix: str) -> ValueError:
    return value_error(
        "shard_data: this loader cannot be split over the ranks", found=found, expected=expected, fix=fix
    )


def _check_mode(loader: DataLoader[Any], mode: str) -> None:
    fix = 'loader, ctx = weft.shard_data(loader, ctx, mode="batches", uneven="empty")'
    if mode == "shards" and shards_of(loader.dataset) is None:
        found = f'mode="shards" with {type(loader.dataset).__name__}, which has no shards'
        raise _refusal(found, "an iterable dataset with `num_shards` and `shard(num_shards=, index=)`", fix)
    if mode == "split" and loader.batch_sampler is None and loader.batch_size is None:
        raise _refusal('mode="split" with batch_size=None', "a loader with batch_size", fix)


def _check_split(loader: DataLoader[Any], mode: str, uneven: str | None, *, already_sharded: bool) -> None:
    fix, who = "loader, ctx = weft.shard_data(loader, ctx, already_sharded=True)", split_already(loader)
    if who is not None and not already_sharded:
        expected = "a source of the whole data, or already_sharded=True"
        raise _refusal(f"{who}: the data would be split twice", expected, fix)
    if already_sharded and mode != "batches":
        raise _refusal(f"already_sharded=True with mode={mode!r}", "a source of the whole data for it", fix)
    if (already_sharded or mode == "shards") and uneven == "pad":
        how = "already_sharded=True" if already_sharded else 'mode="shards"'
        expected = "'error', 'drop' or 'join': the samples of other ranks are not known here"
        fix = f'loader, ctx = weft.shard_data(loader, ctx, {how}, uneven="join")'
        raise _refusal(f'{how} with uneven="pad"', expected, fix)


def check_balance(loader: DataLoader[Any], balance: str, cost: object, mode: str, uneven: str | None) -> None:
    """Raise if the samples of a loader cannot be balanced by cost.

    Raises:
        ValueError: The text says why.
    """
    fix = 'loader, ctx = weft.shard_data(loader, ctx, cost=lengths, balance="tokens")'
    check_choice("shard_data", "balance", balance, ("samples", "tokens"), fix=fix)
    if (balance == "tokens") != (cost is not None):
        raise value_error(
            f"shard_data: balance={balance!r} {'needs costs' if cost is None else 'reads no costs'}",
            found=f"cost={'None' if cost is None else type(cost).__name__}, balance={balance!r}",
            expected="both, or none of them",
            fix=fix,
        )
    if cost is None:
        return
    without = "loader, ctx = weft.shard_data(loader, ctx, ...)  # without cost and balance"
    if isinstance(loader.dataset, IterableDataset) or not takes_consecutive_samples(loader):
        found = f"{type(loader.dataset).__name__}, with {type(loader.batch_sampler).__name__}"
        raise _refusal(found, 'a dataset with an index and a batch_size, with balance="tokens"', without)
    if mode not in ("batches", "split") or split_already(loader) is not None or uneven == "pad":
        found = f'balance="tokens" with mode={mode!r}, uneven={uneven!r}'
        raise _refusal(found, "samples that weft divides, each used once", without)


def samples_per_rank(loader: DataLoader[Any], mode: str, size: int) -> int:
    """Samples that each of so many ranks gets in a full step.

    Raises:
        ValueError: A batch that is to be split cannot be cut into equal pieces.
    """
    batch_size = int(loader.batch_size or cast("Any", loader.batch_sampler).batch_size)
    if mode != "split":
        return batch_size
    if batch_size % size:
        raise value_error(
            f"shard_data: a batch of {batch_size} cannot be split among {size} ranks",
            found=f"batch_size={batch_size}, {size} ranks",
            expected=f"a batch size divisible by {size}, or a number of ranks that divides {batch_size}",
            fix=f"loader = DataLoader(..., batch_size={-(-batch_size // size) * size})",
        )
    return batch_size // size


def check_uneven(uneven: str | None, total: int | None, ctx: DistContext, *, already_sharded: bool) -> None:
    """Raise if the caller did not say what happens at the end of a stream whose length is unknown.

    Raises:
        ValueError: The text names the choices.
    """
    if uneven is None and total is None and ctx.data_size > 1 and not already_sharded:
        raise value_error(
            "shard_data: the end of a stream of unknown length needs a choice",
            found=f"no __len__, {ctx.data_size} ranks, and no uneven=",
            expected='uneven="drop", "pad", "empty", "balance" or "error", or a __len__ that is true',
            fix='loader, ctx = weft.shard_data(loader, ctx, uneven="empty")',
        )


def warn_of_no_steps(units: int | None, plan: DataPlan) -> None:
    """Warn that an epoch of data has no step; of no data at all it is clear."""
    if units:
        what = "batches" if plan.source in ("batches", "split already") else "samples"
        found = f"{units} {what} for {plan.ranks} ranks x {plan.per_rank}, of which too small steps are left out"
        warn_of_no_step("an epoch has no step", found)
