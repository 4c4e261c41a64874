"""`shard_data`: every rank reads its own part of the data.

plan.py    which rank gets which samples: pure arithmetic
order.py   the order of an epoch, from (seed, epoch)
loader.py  the loader that comes back
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from weft.context import DistContext
from weft.contract import transform
from weft.errors import message
from weft.transforms.shard_data.loader import RankBatches, ShardedLoader, is_stock, length_of, sharded_copy
from weft.transforms.shard_data.plan import Plan, Uneven

__all__ = ["ShardedLoader", "shard_data"]

T = TypeVar("T")


@transform(before={"accumulate_grads"}, collective=True)
def shard_data(
    loader: DataLoader[T],
    ctx: DistContext,
    *,
    mode: Literal["batches", "split"] = "batches",
    uneven: Uneven = "balance",
    seed: int | None = None,
    already_sharded: bool = False,
) -> tuple[DataLoader[T], DistContext]:
    """Let every rank read its own part of a map-style dataset, and bring batches to the device.

    The order of an epoch is a pure function of (seed, epoch): `shuffle=True` and any sampler run
    with their random sources seeded from these, and restored. All ranks cut the same order into
    pieces, so the batches of all ranks, joined, are the batches of one process with the global
    batch size. The position is the number of samples used globally; it can be loaded at any
    number of ranks.

    Ranks that differ on tensor, context or pipeline axes only read the same batches.

    Changes: nothing; a copy of the loader comes back, an instance of its class with every
    attribute kept but `batch_sampler`. Iterating leaves the global random state alone.
    Collectives: none here (a meeting through the store) and none while iterating.

    Args:
        loader: Over a map-style dataset; with `batch_size`, any sampler, or a batch sampler, whose
            batches are then given to the ranks in turn.
        ctx: Where we run.
        mode: "batches": `batch_size` is per rank. "split": it is global, each batch is cut into
            one piece per rank and must be divisible.
        uneven: When the last step has too few samples for full batches (and not `drop_last`):
            "balance": they are shared out, ranks differ by at most one sample; raises if a rank
            would get none. "empty": the same, and a rank may get a batch whose tensors have no
            rows. "drop": as "balance", leaving out what does not give every rank the same number.
            "pad": samples from the beginning repeat, all batches are full. "error": raises unless
            all ranks get the same number.
        seed: Of the order; default: that of the sampler's generator, else `ctx.seed`.
        already_sharded: The loader reads this rank's part already (a `DistributedSampler`); its
            batches are only ordered by (seed, epoch) and brought to the device.

    Returns:
        The new loader, with `set_epoch`, `state_dict`, `load_state_dict`; and `ctx` with this
        transform in `applied`. Each full iteration moves on by one epoch.

    Raises:
        AlreadyApplied: It was sharded before.
        OrderError: After `accumulate_grads`.
        ValueError: A `DistributedSampler` without `already_sharded`, an indivisible batch, an
            iterable dataset, or samples that cannot be shared out as `uneven` asks.
        ContextError: The ranks bring different datasets or settings.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> loader = DataLoader(range(8), batch_size=2)
        >>> mine, ctx = weft.shard_data(loader, weft.testing.fake(rank=1, world_size=2))
        >>> [batch.tolist() for batch in mine]
        [[2, 3], [6, 7]]
    """
    _check_loader(loader, mode, uneven, already_sharded)
    size, rank = (1, 0) if already_sharded else (ctx.data_size, ctx.data_rank)
    batch_sampler: Any = loader.batch_sampler
    whole = not is_stock(batch_sampler)
    units = batch_sampler if whole else batch_sampler.sampler
    total = length_of(units)
    if total is None:
        raise ValueError(
            message(
                "shard_data: the sampler has no length",
                found=type(units).__name__,
                expected="a sampler with __len__, so that all ranks know how many steps there are",
                fix="def __len__(self): return ...",
            )
        )
    plan = Plan(
        rank=rank,
        size=size,
        per_rank=1 if whole else _per_rank(batch_sampler.batch_size, mode, size),
        drop_last=bool(batch_sampler.drop_last) if not whole else bool(getattr(batch_sampler, "drop_last", False)),
        uneven=uneven,
    )
    plan.check(total, "batches" if whole else "samples")
    chosen = _seed_of(units, ctx) if seed is None else seed
    ctx.agree(
        "shard_data",
        {"mode": mode, "uneven": uneven, "sampler": type(units).__name__, "drop_last": plan.drop_last}
        | ({} if already_sharded else {"length": total, "seed": chosen, "batch size per rank": plan.per_rank}),
    )
    batches = RankBatches(units, total, plan, chosen, whole=whole)
    return sharded_copy(loader, batches, ctx), ctx


def _per_rank(batch_size: int, mode: str, size: int) -> int:
    if mode == "batches":
        return batch_size
    if batch_size % size:
        raise ValueError(
            message(
                f"shard_data: a batch of {batch_size} cannot be split among {size} ranks",
                found=f"batch_size={batch_size}, {size} ranks",
                expected=f"a batch size divisible by {size}",
                fix=f"DataLoader(..., batch_size={-(-batch_size // size) * size})",
            )
        )
    return batch_size // size


def _seed_of(units: Any, ctx: DistContext) -> int:
    generator: object = getattr(units, "generator", None)
    return int(generator.initial_seed()) if isinstance(generator, torch.Generator) else ctx.seed


def _check_loader(loader: Any, mode: str, uneven: str, already_sharded: bool) -> None:
    """Raise if this is not a loader that can be shared out here."""
    problem = None
    if not isinstance(loader, DataLoader):
        problem = (
            type(loader).__name__,
            "a torch.utils.data.DataLoader",
            "loader = DataLoader(dataset, batch_size=32)",
        )
    elif isinstance(loader.dataset, IterableDataset):
        problem = (
            f"{type(loader.dataset).__name__}, an IterableDataset",
            "a map-style dataset: one with __getitem__ and __len__",
            "split the stream in its __iter__ by ctx.data_rank and ctx.data_size, and leave shard_data out",
        )
    elif loader.batch_sampler is None:
        problem = ("batch_size=None", "a loader that makes batches", "DataLoader(dataset, batch_size=1)")
    elif mode not in ("batches", "split"):
        problem = (f"mode={mode!r}", "'batches' or 'split'", 'weft.shard_data(loader, ctx, mode="batches")')
    elif uneven not in ("balance", "empty", "pad", "drop", "error"):
        problem = (f"uneven={uneven!r}", "'balance', 'empty', 'pad', 'drop' or 'error'", 'uneven="balance"')
    elif mode == "split" and not is_stock(loader.batch_sampler):
        problem = (
            f'mode="split" with {type(loader.batch_sampler).__name__}, whose batch size is unknown',
            "a loader with batch_size",
            'weft.shard_data(loader, ctx, mode="batches")',
        )
    elif _is_distributed(loader) and not already_sharded:
        problem = (
            f"{type(loader.sampler).__name__}: the data would be split twice",
            "a sampler over the whole dataset, or already_sharded=True",
            "weft.shard_data(loader, ctx, already_sharded=True)",
        )
    if problem is not None:
        found, expected, fix = problem
        raise (TypeError if not isinstance(loader, DataLoader) else ValueError)(
            message("shard_data: this loader cannot be shared out", found=found, expected=expected, fix=fix)
        )


def _is_distributed(loader: DataLoader[Any]) -> bool:
    inner = getattr(loader.batch_sampler, "sampler", None)
    return isinstance(loader.sampler, DistributedSampler) or isinstance(inner, DistributedSampler)
