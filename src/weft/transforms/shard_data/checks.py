"""What `shard_data` refuses, before anything is changed."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from weft.context import DistContext
from weft.errors import message
from weft.transforms.shard_data.loader import is_stock

__all__ = ["check_divisible", "check_loader", "check_uneven"]

_MODES = ("batches", "split", "dispatch")
_UNEVEN = ("balance", "empty", "pad", "drop", "error", "join")
# Who splits data says so in one of these pairs: DistributedSampler and its likes; Accelerate's; Hugging Face's.
_SPLIT_BY = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))


def check_loader(loader: Any, mode: str, uneven: str | None, *, already_sharded: bool) -> None:
    """Raise if this is not a loader that can be shared out here.

    Raises:
        TypeError: It is no `DataLoader`.
        ValueError: It cannot be shared out; the text says why.
    """
    problem = None
    if not isinstance(loader, DataLoader):
        problem = (
            type(loader).__name__,
            "a torch.utils.data.DataLoader",
            "loader = DataLoader(dataset, batch_size=32)",
        )
    elif mode not in _MODES:
        problem = (f"mode={mode!r}", "'batches', 'split' or 'dispatch'", 'weft.shard_data(loader, ctx, mode="batches")')
    elif uneven is not None and uneven not in _UNEVEN:
        problem = (f"uneven={uneven!r}", ", ".join(map(repr, _UNEVEN)), 'uneven="balance"')
    else:
        problem = _mode_problem(loader, mode) or _split_problem(loader, mode, uneven, already_sharded=already_sharded)
    if problem is not None:
        found, expected, fix = problem
        raise (TypeError if not isinstance(loader, DataLoader) else ValueError)(
            message("shard_data: this loader cannot be shared out", found=found, expected=expected, fix=fix)
        )


def _mode_problem(loader: DataLoader[Any], mode: str) -> tuple[str, str, str] | None:
    fix = 'weft.shard_data(loader, ctx, mode="batches")'
    if mode != "split":
        return None
    if loader.batch_sampler is None and loader.batch_size is None:
        return 'mode="split" with batch_size=None', "a loader with batch_size", fix
    if not isinstance(loader.dataset, IterableDataset) and not is_stock(loader):
        kind = type(loader.batch_sampler).__name__
        return f'mode="split" with {kind}, whose batch size is unknown', "a loader with batch_size", fix
    return None


def _split_problem(
    loader: DataLoader[Any], mode: str, uneven: str | None, *, already_sharded: bool
) -> tuple[str, str, str] | None:
    who = _split_already(loader)
    if who is not None and not already_sharded:
        return (
            f"{who}: the data would be split twice",
            "a source of the whole data, or already_sharded=True",
            "weft.shard_data(loader, ctx, already_sharded=True)",
        )
    if already_sharded and mode != "batches":
        return (
            f"already_sharded=True with mode={mode!r}",
            "a source of the whole data for it",
            "weft.shard_data(loader, ctx, already_sharded=True)",
        )
    if already_sharded and uneven == "pad":
        return (
            'already_sharded=True with uneven="pad"',
            "'error', 'drop' or 'join': the samples of other ranks are not known here",
            'weft.shard_data(loader, ctx, already_sharded=True, uneven="join")',
        )
    return None


def _split_already(loader: DataLoader[Any]) -> str | None:
    """Who splits the data among ranks, if somebody does."""
    batch_sampler: Any = loader.batch_sampler
    for source in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None), loader.dataset):
        config = getattr(source, "_distributed", None)  # datasets: split_dataset_by_node
        if config is not None and source is loader.dataset:
            return f"{type(source).__name__}, which split_dataset_by_node has split"
        names = vars(source) if hasattr(source, "__dict__") else {}
        if isinstance(source, DistributedSampler) or any(a in names and b in names for a, b in _SPLIT_BY):
            return type(source).__name__
    return None


def check_divisible(batch_size: int, size: int) -> None:
    """Raise if a batch cannot be cut into equal pieces.

    Raises:
        ValueError: It cannot.
    """
    if batch_size % size:
        raise ValueError(
            message(
                f"shard_data: a batch of {batch_size} cannot be split among {size} ranks",
                found=f"batch_size={batch_size}, {size} ranks",
                expected=f"a batch size divisible by {size}",
                fix=f"DataLoader(..., batch_size={-(-batch_size // size) * size})",
            )
        )


def check_uneven(uneven: str | None, total: int | None, ctx: DistContext, *, already_sharded: bool) -> None:
    """Raise if nobody said what happens at the end of a stream whose end nobody knows.

    Raises:
        ValueError: The text names the choices.
    """
    if uneven is None and total is None and ctx.data_size > 1 and not already_sharded:
        raise ValueError(
            message(
                "shard_data: the end of a stream of unknown length needs a choice",
                found=f"no __len__, {ctx.data_size} ranks, and no uneven=",
                expected='uneven="drop", "pad", "empty", "balance" or "error", or a __len__ that is true',
                fix='weft.shard_data(loader, ctx, uneven="empty")',
            )
        )
