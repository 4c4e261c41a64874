"""What a sharded loader reads: settings that `shard_data` decides once, and what follows from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from torch.utils.data import BatchSampler, DataLoader

from weft.context import DistContext
from weft.data.loader_copy import Size
from weft.data.order.compare_order import compare_order
from weft.data.order.endless_order import EndlessOrder
from weft.data.order.epoch_order import EpochOrder
from weft.data.split.map_samples import BatchInfo, StreamMark
from weft.data.split.real_batches import ShareCheck
from weft.data.split.split_plan import UNKNOWN, Span, SplitPlan
from weft.data.split.stream_samples import StreamSteps
from weft.data.split.uneven_ranks import UnevenRanks

_KEPT_MARKS = 4096  # of a stream, one per batch: as far back as a window of accumulate_grads may reach


@dataclass(frozen=True, kw_only=True)
class DataPlan:
    """How data is shared out: what `shard_data` decided, as data: `offered(loader, DataPlan)[0]`.

    Attributes:
        source: "samples" or "batches" of a map-style dataset, "stream", "seekable stream", or "split already".
        mode: As given to `shard_data`.
        ranks: Number of ranks that see different batches.
        per_rank: Units (samples, or batches of a batch sampler) per rank and full step.
        per_step: The same of all ranks together.
        uneven: What happens to an incomplete last step.
        steps: Of the first epoch; None if the source does not tell its length.
        reads: How often a sample is read by all ranks and workers together, to be used once.
        resumes: What resuming in the middle of an epoch costs: "jumps" (nothing), "state" (the stream
            goes back to a state of its own) or "reads again" (what was used is read and dropped).
        any_ranks: Whether it can resume on another number of ranks.
    """

    source: Literal["samples", "batches", "stream", "seekable stream", "split already"]
    mode: str
    ranks: int
    per_rank: int
    per_step: int
    uneven: str
    steps: int | None
    reads: int
    resumes: Literal["jumps", "state", "reads again"]
    any_ranks: bool


@dataclass
class ReadPlan:
    """What is read, and how it is shared out.

    Attributes:
        plan: Of this rank.
        units: Of a map-style dataset.
        stream: Of an iterable one.
        seed: Of the order.
        single: `batch_size=None`: every unit is a batch.
        with_ids: Whether the user gets `SampleIds` with each batch.
        uneven_ranks: How ranks with different numbers of batches come together; None: they have the same.
        split_for: Ranks among which the data was split by somebody else; None: weft does.
        scattered: Rank 0 reads for all ranks, and sends.
        total: Units of an epoch, where that is always the same; None: see `units`, or unknown.
        whole: Units are batches of a batch sampler.
        marks: Places in a stream, one per batch that was given.
        shares: Whether shares that come from this plan hold for the batches that were read.
        keyed: Whether every sample is read with random states of its own.
        resized: What a position in a dataset of another length does.
        serial: Number of the loader among all that are made of its world, the same on all ranks.
        mixture: What the order of a mixture follows from; None: it is no mixture.
    """

    plan: SplitPlan
    units: EpochOrder | None
    seed: int
    single: bool
    with_ids: bool
    keyed: bool
    uneven_ranks: UnevenRanks | None
    split_for: int | None
    serial: int
    shares: ShareCheck
    stream: StreamSteps | None = None
    scattered: bool = False
    total: int | None = None
    whole: bool = False
    resized: Literal["error", "next_epoch"] = "error"
    mixture: str | None = None
    marks: deque[StreamMark] = field(default_factory=lambda: deque(maxlen=_KEPT_MARKS))

    @property
    def readers(self) -> Sequence[SplitPlan]:
        """The plans of all ranks that this one reads for: its own; where rank 0 reads for all, theirs, or none."""
        if not self.scattered:
            return (self.plan,)
        reads_here = self.units is not None or self.stream is not None
        return tuple(self.plan._replace(rank=each) for each in range(self.plan.size)) if reads_here else ()

    def order(self, epoch: int) -> Sequence[Any]:
        """The units of an epoch, where they have an order."""
        assert self.units is not None
        return self.units.order(self.seed, epoch)

    def samples_of_all(self, plan: SplitPlan, order: Sequence[Any], start: int, stop: int) -> int:
        """Samples that all ranks of a plan together are given in a step with these units."""
        if plan.within:
            return sum(plan.of_batch(len(order[unit])).used(len(order[unit])) for unit in range(start, stop))
        used = plan.used(stop - start)
        return sum(len(order[unit % len(order)]) for unit in range(start, start + used)) if self.whole else used

    def mark(self, place: Span) -> StreamMark | None:
        """What is known of the place where a part of a stream begins."""
        return next((each for each in reversed(self.marks) if each[:2] == place[:2]), None)

    def epoch(self, number: int, seed: int | None = None) -> Span:
        """All of an epoch, as far as it is known before its order is made; of that of another seed, if one is given."""
        known = self.total
        if self.units is not None:
            known = self.units.known_length(self.seed if seed is None else seed, number)
        return Span(number, 0, UNKNOWN if known is None else known)

    def measured(self, spans: tuple[Span, ...], seed: int | None = None) -> tuple[Span, ...]:
        """The same spans with their ends, for which a sampler that does not tell its length is run."""
        units, seed = self.units, self.seed if seed is None else seed
        if units is None:
            return spans
        return tuple(
            span._replace(stop=units.length(seed, span.epoch)) if span.stop == UNKNOWN else span for span in spans
        )

    def order_state(
        self, left: Sequence[Span], dispatched: tuple[int, Sequence[dict[str, Any]]] | None
    ) -> dict[str, Any]:
        """What a position says of the orders of what is left; where rank 0 reads for all, it came with the batch."""
        if self.scattered and dispatched is not None:
            epoch, orders = dispatched
            return orders[left[-1].epoch != epoch]
        if self.units is None or self.split_for is not None or self.scattered:
            return {}
        return self.units.state(self.seed, {span.epoch: span.start > 0 for span in left})

    def with_orders(self, given: BatchInfo) -> BatchInfo:
        """What is known of a batch that rank 0 has read for another rank, with what that does not know of the order."""
        if self.units is None:
            return given
        following = {given.epoch + 1: False}
        orders = self.units.state(self.seed, {given.epoch: True}), self.units.state(self.seed, following)
        return given._replace(orders=orders)

    def begin(self, todo: tuple[Span, ...], iteration: int, ctx: DistContext) -> tuple[Span, ...]:
        """Make the orders of what an iteration reads, and compare them with those of the other ranks.

        Args:
            todo: What it reads, as far as it was known before.
            iteration: Its number, counted from 1.
            ctx: Of the loader.

        Returns:
            What it reads.

        Raises:
            ContextError: Another rank has another order.
            ValueError: An epoch cannot be split as `uneven` asks.
        """
        if self.units is None:
            return todo
        self.units.keep([span.epoch for span in todo])
        found = tuple(span._replace(stop=len(self.order(span.epoch))) for span in todo)
        for span in found:
            if span.stop not in (UNKNOWN, self.total):  # which was checked at set-up
                self.plan.check(max(span.stop - span.start, 0), "batches" if self.whole else "samples")
        digests = [self.units.digest(self.seed, span.epoch) for span in found]
        if self.split_for is None and not self.scattered and any(digests):
            name = type(self.units.source).__name__
            compare_order(
                ctx.world,
                f"{self.serial}/{iteration}",
                f"{digests[-1]} in epoch {found[-1].epoch}" if len(found) == 1 else str(digests),
                f"shard_data: the ranks read what {name} yields in different orders",
                "rng = numpy.random.default_rng(ctx.seed)  # in the sampler: the same seed on all ranks; "
                "sorted(os.listdir(folder)) for files; or draw from random, numpy.random or torch, which are seeded",
                old=f"{self.serial}/{iteration - 2}",
            )
        for span in found if self.plan.within else ():
            for batch in () if span.stop == UNKNOWN else self.order(span.epoch)[span.start : span.stop]:
                self.plan.check_batch(len(batch))
        return found

    def steps_in(self, spans: tuple[Span, ...]) -> int:
        """Steps in which spans are used up, by all ranks."""
        own = self.plan.steps_in([each for each in spans if each.start < each.stop])
        return own if self.uneven_ranks is None else self.uneven_ranks.steps(own, spans[-1].start // self.plan.per_step)

    @property
    def is_sized(self) -> bool:
        """Whether this rank knows how many units an epoch has, and all ranks that read the same do."""
        return self.total is not None or (self.units is not None and not self.scattered)

    def used(self, left: Span) -> dict[str, int]:
        """How much of an epoch is used, of which this is left."""
        if not self.whole or self.units is None or self.scattered:
            return {"batches" if self.whole else "samples": left.start}
        order = self.order(left.epoch) if left.start else ()
        if isinstance(order, EndlessOrder):
            return {"batches": left.start}
        return {"samples": sum(map(len, order[: left.start])), "batches": left.start}

    @property
    def lone(self) -> bool:
        """Whether no other rank reads."""
        return self.plan.size == 1 and self.split_for in (None, 1)

    @property
    def alone(self) -> bool:
        """Whether what other ranks read is not known here."""
        return self.split_for is not None and self.split_for > 1

    def planned(self, todo: tuple[Span, ...]) -> Callable[[int], Size] | None:
        """The size of each batch of an iteration before it is read; None where only reading shows it, on all ranks."""
        if self.single or not self.is_sized or (self.scattered and self.whole) or todo[-1].stop == UNKNOWN:
            return None
        plan, alone = self.plan, self.alone

        def size(step: int) -> Size:
            part = plan.step_at(todo, step)
            if part is None:  # others have more
                return 0, None if alone else 0
            has_sizes = self.whole or plan.costs is not None
            order = self.order(part.epoch) if has_sizes else cast("Sequence[Any]", range(part.stop))
            ((piece, _),) = plan.pieces(order, part.start, part.stop)
            own = sum(map(len, piece)) if self.whole else len(piece)
            return own, None if alone else self.samples_of_all(plan, order, part.start, part.stop)

        return size


def takes_consecutive_samples(loader: DataLoader[Any]) -> bool:
    """Whether batches are just consecutive samples of a sampler, so that samples can be shared out."""
    return loader.batch_size is not None or type(loader.batch_sampler) is BatchSampler
