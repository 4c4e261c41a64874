"""`shard_data`: every rank reads its own part of the data.

The machinery is in `weft.data.split`, the order of an epoch in `weft.data.order`.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, TypeVar, Unpack, cast, overload

import torch
from torch.utils.data import DataLoader, IterableDataset

from weft.context import DistContext
from weft.contract import Phase, transform
from weft.data.equal_cost import Cost, Costs
from weft.data.loader_copy import length_of
from weft.data.mixture import Mixture
from weft.data.order.epoch_order import EpochOrder
from weft.data.order.loader_place import place_of
from weft.data.split.loader_checks import (
    check_balance,
    check_loader,
    check_uneven,
    samples_per_rank,
    warn_of_no_steps,
    without_persistent_iterator,
)
from weft.data.split.read_plan import DataPlan, ReadPlan, takes_consecutive_samples
from weft.data.split.real_batches import ShareCheck
from weft.data.split.sharded_loader import ShardedLoader, sharded_copy
from weft.data.split.split_plan import UNKNOWN, SplitPlan, Uneven
from weft.data.split.stream_samples import SeekableStream, StreamSteps, has_state, never_ends, with_own_shards
from weft.data.split.uneven_ranks import UnevenRanks, uneven_counts_error
from weft.loop_watch import watch_loop
from weft.metrics import SampleIds
from weft.peers.agreement import exchange

T = TypeVar("T")
Mode = Literal["batches", "split", "dispatch", "shards"]
Resized = Literal["error", "next_epoch"]


class _ShardOptions(TypedDict, total=False):
    """What any call may give besides `with_ids`, by which the type of the batches is told."""

    mode: Mode
    uneven: Uneven | None
    seed: int | None
    already_sharded: bool
    resized: Resized
    keyed: bool
    cost: Cost | None
    balance: Literal["samples", "tokens"]


@overload
def shard_data(
    loader: DataLoader[T], ctx: DistContext, *, with_ids: Literal[False] = False, **options: Unpack[_ShardOptions]
) -> tuple[ShardedLoader[T], DistContext]: ...
@overload
def shard_data(
    loader: DataLoader[T], ctx: DistContext, *, with_ids: Literal[True], **options: Unpack[_ShardOptions]
) -> tuple[ShardedLoader[tuple[T, SampleIds]], DistContext]: ...
@overload
def shard_data(
    loader: DataLoader[T], ctx: DistContext, *, with_ids: bool, **options: Unpack[_ShardOptions]
) -> tuple[ShardedLoader[Any], DistContext]: ...
@transform(phase=Phase.PREPARE, collective=True)
def shard_data(
    loader: DataLoader[Any],
    ctx: DistContext,
    *,
    mode: Mode = "batches",
    uneven: Uneven | None = None,
    seed: int | None = None,
    already_sharded: bool = False,
    resized: Resized = "error",
    with_ids: bool = False,
    keyed: bool = False,
    cost: Cost | None = None,
    balance: Literal["samples", "tokens"] = "samples",
) -> tuple[ShardedLoader[Any], DistContext]:
    """Let every rank read its own part of a dataset or stream, and bring batches to the device.

    The order of an epoch is a function of (seed, epoch): `shuffle=True`, any sampler and any
    stream run with their random sources seeded from these, and restored. That all ranks have the same
    order is checked in each epoch through the store, and on resuming. All ranks cut the same
    order into pieces, so the batches of all ranks, joined, are the batches of one process with the
    global batch size. The position is the number of samples used globally; it can be loaded at any
    number of ranks.

    In an elastic job (`start(elastic=...)`), a step always has as many samples as with all replicas; they are
    redistributed when a replica is lost or joins. Pass the loader to `resilient`; on its own, it yields the batches of
    all replicas.

    Ranks that differ only on tensor, context or pipeline axes read the same batches. The resulting plan is
    `weft.contract.offered(loader, weft.data.DataPlan)[0]`.

    Changes: nothing; a copy of the loader comes back, an instance of its class with every
    attribute kept. Iterating leaves the global random state alone.
    Collectives: none here (a meeting through the store) and none while iterating (but a rank that has no sample in
    the last step may wait for another one to end it), except with mode="dispatch" (two per step) and with
    `already_sharded` streams of unknown length and uneven="join" or "drop" (one per step).

    Args:
        loader: A `DataLoader` or an instance of a subclass, over a map-style or iterable dataset; with
            `batch_size`, with `batch_size=None`, or with a batch sampler.
        ctx: The current context.
        mode: "batches": `batch_size` is per rank, and batches of a batch sampler are given to the ranks in turn.
            "split": it is global, each batch is cut into one piece per rank and must be divisible; those of a batch
            sampler are cut as `uneven` says. "dispatch": as "batches", but rank 0 alone
            reads and sends the others theirs. "shards": each rank reads some of the shards of a stream that
            has `num_shards` and `shard` (an `IterableDataset` of `datasets`), and nothing else; then the data
            are `already_sharded`.
        uneven: When the last step has too few samples for full batches (and not `drop_last`):
            "balance" (default): they are split evenly, ranks differ by at most one sample; raises if a
            rank would get none. "empty" or "join": the same, and a rank that would get none gets a batch whose
            tensors have no rows if others wait for it in a collective of the step; else its loop ends before it.
            "drop": as "balance", leaving out what does not give every rank the same number. "pad": samples from the
            beginning repeat, all batches are full. "error": raises unless all ranks get the same number. Has
            to be chosen for streams of unknown length without `drop_last`. With `already_sharded` it is about the
            number of batches, see there.
        seed: Of the order; default: that of the sampler's generator, else `ctx.seed`, for all but the first loader
            of the program mixed with its number. A loader over the same dataset as one before continues its epochs.
        already_sharded: The loader reads this rank's part already (a `DistributedSampler`, a stream
            split by node). If ranks have different numbers of batches: "error" (default) raises on all,
            "drop" ends with the shortest, "join" continues to the longest with batches without rows, as above.
        resized: What `load_state_dict` does with a position in the middle of an epoch of a dataset that had another
            length, another mixture, or a sampler with another order: "error", or "next_epoch": the epoch after it
            begins, in the new order.
        with_ids: Yield pairs of the batch and its `SampleIds`: sample ids and which of them are valid.
        keyed: Read every sample with random states that are a function of (seed, epoch, sample id), so
            that random augmentation in the dataset is the same at any number of ranks and workers. A `collate_fn`
            cannot draw then: what it draws depends on the other samples of the batch.
        cost: What a sample costs, for `balance`: a number above 0 per index of the dataset, or a function of the
            index. Lengths, or what attention costs: `lambda i: lengths[i] ** 2`.
        balance: "samples": all ranks get equally many. "tokens": the samples of each step are divided into pieces of
            nearly equal cost, so ranks get different numbers of samples, about `batch_size`. For that, samples of
            like cost come in groups of four in the order of an epoch. `share` and `window.share` stay exact.

    Returns:
        The new loader, with `share`, `epoch`, `remaining`, `set_epoch`, `state_dict`, `load_state_dict`; and `ctx` with
        this transform in `applied`. Each full iteration moves on by one epoch.

    Raises:
        AlreadyApplied: It was sharded before.
        OrderError: After `accumulate_grads`.
        TypeError: It is no `DataLoader`.
        ValueError: Data that was split already, without `already_sharded`; an indivisible batch; fewer shards
            than ranks; samples that cannot be split as `uneven` asks.
        ContextError: The ranks pass different datasets or settings.
        ContractError: In the loop: `collate_fn` draws random numbers, with `keyed`.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> loader = DataLoader(range(8), batch_size=2)
        >>> mine, ctx = weft.shard_data(loader, weft.testing.fake(rank=1, world_size=2))
        >>> [batch.tolist() for batch in mine]
        [[2, 3], [6, 7]]
    """
    check_loader(loader, mode, uneven, resized, already_sharded=already_sharded)
    loader = without_persistent_iterator(loader)
    check_balance(loader, balance, cost, mode, uneven)
    if mode == "shards":
        loader, already_sharded = with_own_shards(loader, ctx), True
    iterable, dispatched = isinstance(loader.dataset, IterableDataset), mode == "dispatch"
    single = loader.batch_sampler is None
    whole = not single and not iterable and not takes_consecutive_samples(loader)
    batches: Any = loader.batch_sampler
    source = loader.dataset if iterable else loader.sampler if single else batches if whole else batches.sampler
    total, drop_last = length_of(source), bool(getattr(batches, "drop_last", False))
    size, rank = (1, 0) if already_sharded else (ctx.data_size, ctx.data_rank)
    replicas = 1 if ctx.replicas is None else ctx.replicas.most
    own_seed = _seed_of(source, loader, ctx) if seed is None else seed
    place = place_of(ctx.world, loader.dataset, source, seed=own_seed, given=seed is not None)
    chosen = place.seed
    per_rank = 1 if whole or single else samples_per_rank(loader, mode, size * replicas)
    alike = not dispatched and not already_sharded
    mixture = loader.dataset.fingerprint if alike and isinstance(loader.dataset, Mixture) else None
    if dispatched:  # rank 0 alone reads the data
        first = exchange(ctx.world, "shard_data", [total, chosen, per_rank])[0]
        total, chosen, per_rank = cast("tuple[int | None, int, int]", first)
    if iterable or dispatched:  # what a sampler yields is seen before it is read
        ends_whole = drop_last or never_ends(loader.dataset)
        check_uneven(uneven, UNKNOWN if ends_whole else total, ctx, already_sharded=already_sharded)
    costs = None if cost is None else Costs(cost)
    within = whole and mode == "split"
    step_units = 1 if within else None
    plan = SplitPlan(rank, size, per_rank, drop_last, uneven or "balance", costs, step_units, within)
    if ctx.replicas is not None and not within:  # a step has as many units as with all replicas, however many live
        plan = plan._replace(step_units=plan.per_step * replicas)
    if total is not None:
        plan._replace(size=size * replicas).check(total, "batches" if whole else "samples")
    units = None if iterable else EpochOrder(source, total, loader.dataset, costs)
    facts: dict[str, object] = {"mode": mode, "uneven": uneven, "resized": resized, "with_ids": with_ids}
    facts |= {"keyed": keyed, "already sharded": already_sharded, "mixture": mixture}
    if not already_sharded:
        facts |= {"length": total, "seed": chosen, "batch size per rank": per_rank, "drop_last": drop_last}
        facts["epoch"] = place.epoch
    if alike:
        facts["dataset" if iterable else "sampler"] = type(source).__name__
    if costs is not None:
        facts["costs"] = costs.digest(EpochOrder(source, total, loader.dataset).peek(chosen, place.epoch))
    uneven_ranks = _meeting(plan, total, uneven, ctx, facts) if already_sharded else None
    if uneven_ranks is None or uneven_ranks.counts is None or ctx.data_size == 1:
        ctx.agree("shard_data", facts)
    serial, reads_here = ctx.world.next_number("loader"), not dispatched or ctx.rank == 0
    reading = ReadPlan(
        plan=plan,
        units=units if reads_here else None,
        seed=chosen,
        single=single,
        with_ids=with_ids,
        keyed=keyed,
        uneven_ranks=uneven_ranks,
        serial=serial,
        shares=ShareCheck(ctx.rank, elastic=ctx.replicas is not None),
        split_for=ctx.data_size if already_sharded else None,
        scattered=dispatched,
        total=total,
        whole=whole,
        resized=resized,
        mixture=mixture,
    )
    if iterable and reads_here:
        stays = loader.persistent_workers and loader.num_workers > 0
        reading.stream = StreamSteps(loader.dataset, total, ctx.rank, serial, keyed=keyed, workers_stay=stays)
    copied = sharded_copy(loader, reading, place, ctx)
    offer = _plan_of(loader, reading, mode, uneven, iterable=iterable)
    if offer.steps == 0:
        warn_of_no_steps(total if uneven_ranks is None or not uneven_ranks.counts else max(uneven_ranks.counts), offer)
    watch_loop(copied, ctx)
    return copied, ctx.offering(offer)


def _seed_of(source: Any, loader: DataLoader[Any], ctx: DistContext) -> int:
    generator: object = getattr(source, "generator", None)
    if loader.generator is None and type(source).__module__.startswith("torchdata."):
        return ctx.seed  # torchdata's sampler has made itself one, another on each rank
    return int(generator.initial_seed()) if isinstance(generator, torch.Generator) else ctx.seed


def _meeting(
    plan: SplitPlan, total: int | None, uneven: Uneven | None, ctx: DistContext, facts: dict[str, Any]
) -> UnevenRanks:
    """How the ranks come together that may have different numbers of batches."""
    steps = None if total is None else plan.num_steps(total)
    chosen: Any = {None: "error", "balance": "error", "empty": "join"}.get(uneven, uneven)
    sub, counts = ctx.on(ctx.data_axes), [steps]
    if sub.world_size == 1 or (sub.world.store is None and not sub.world.pretended):  # alone, or pretending not to be
        chosen = chosen if sub.world.group is not None else "error"
    else:
        everyone = exchange(sub.world, "shard_data", {"facts": facts, "steps": steps})
        counts = [entry["steps"] for entry in everyone]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts):
        return UnevenRanks(chosen, None, plan.per_step)
    if chosen == "error" and len(set(known)) > 1:
        raise uneven_counts_error(known)
    return UnevenRanks(chosen, tuple(known), plan.per_step)


def _plan_of(loader: DataLoader[Any], reading: ReadPlan, mode: str, uneven: str | None, *, iterable: bool) -> DataPlan:
    plan, split_for, first = reading.plan, reading.split_for, reading.epoch(0)
    seekable = iterable and isinstance(loader.dataset, SeekableStream)
    whole_stream = iterable and not (seekable and (reading.total is not None or never_ends(loader.dataset)))
    copies = max(loader.num_workers, 1) * (1 if reading.scattered else plan.size)
    kind: Any = "batches" if reading.whole else "seekable stream" if seekable else "stream" if iterable else "samples"
    jumps = seekable or not iterable
    return DataPlan(
        source=kind if split_for is None else "split already",
        mode=mode,
        ranks=split_for or plan.size,
        per_rank=plan.per_rank,
        per_step=1 if plan.within else plan.per_rank * (split_for or plan.size),
        uneven=uneven or ("balance" if split_for is None else "error"),
        steps=None if first.stop == UNKNOWN else reading.steps_in((first,)),
        reads=copies if whole_stream else 1,
        resumes="jumps" if jumps else "state" if has_state(loader.dataset) else "reads again",
        any_ranks=split_for is None,
    )
