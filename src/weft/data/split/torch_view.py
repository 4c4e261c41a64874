"""What torch sees of a sharded loader: a view of it whose dataset and sampler yield this rank's part."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from weft import torch_internals
from weft.data.loader_copy import torch_iterator
from weft.data.order.endless_order import EndlessOrder, parts_of
from weft.data.split.map_samples import BatchInfo, BatchRequest, KeyedCollate, MapSamples, WorkerStart
from weft.data.split.read_plan import ReadPlan
from weft.data.split.real_batches import CountedCollate, keeps_all
from weft.data.split.split_plan import Span
from weft.data.split.stream_samples import CollateSteps, StreamSteps
from weft.rng import mix


def torch_view(loader: Any) -> tuple[DataLoader[Any], deque[BatchInfo]]:
    """The loader as torch is to see it for the iteration that begins, and where notes of what came go."""
    reading = loader.weft_reading
    spans, arrivals = loader.__dict__["weft_now"]
    arrivals.asked = deque()  # of this iterator, if the user's class makes another one
    epoch, start = spans[-1].epoch, spans[-1].start
    view: Any = object.__new__(DataLoader)
    fields = dict(loader.__dict__)
    elastic = loader.weft_ctx.replicas is not None
    rank = reading.plan.rank if elastic else loader.weft_ctx.data_rank
    seed = loader.weft_cursor.place.worker_seed(loader.weft_ctx.seed)
    fields["in_order"] = True  # what is known of a batch is found by its number
    # Torch draws the seeds of workers from the loader's generator, or from the global one.
    fields["generator"] = torch.Generator().manual_seed(mix(seed, epoch, rank, "loader"))
    if loader.num_workers:
        fields["worker_init_fn"] = WorkerStart(loader.worker_init_fn, seed, epoch, rank, os.getpid() if elastic else 0)
    if reading.stream is not None:
        stream = copy.copy(reading.stream)
        stream.dataset, stream.plans, stream.seed = loader.dataset, reading.readers, reading.seed
        stream.resumed = reading.mark(spans[-1]) if start else None
        stream.worker_start = fields["worker_init_fn"] if loader.num_workers else None
        fields |= {"dataset": stream, "batch_sampler": None, "drop_last": False}
        fields["collate_fn"] = CollateSteps(loader.collate_fn, single=reading.single, names=reading.with_ids)
    else:
        keyed, starts = reading.seed if reading.keyed else None, (seed, rank)
        fields["dataset"] = MapSamples(loader.dataset, loader.weft_ctx.rank, keyed, epoch=epoch, worker_seed=starts)
        indices = StepIndices(reading, spans, arrivals.asked)
        loader.__dict__["weft_indices"] = indices
        if not reading.single and not (keeps_all(loader.collate_fn) and fields["dataset"].fetch is None):
            fields["dataset"].counts = "by name" if reading.with_ids else "yes"
            fields["collate_fn"] = CountedCollate(loader.collate_fn, names=reading.with_ids)
        fields["sampler" if reading.single else "batch_sampler"] = indices
    if reading.keyed and not keeps_all(loader.collate_fn):
        fields["collate_fn"] = KeyedCollate(fields["collate_fn"], getattr(loader.collate_fn, "generator", None))
    view.__dict__.update(fields)
    return view, arrivals.asked


@dataclass(eq=False)
class StepIndices(Sampler[Any]):
    """Yields the requests of one rank (or, for dispatch, of all in turn), in the order of the epochs.

    Attributes:
        spans: What an iterator that is made now yields.
        given: Where it notes what it asked for.
        iteration: Number of the iteration that begins now, among those of one set of workers.
    """

    reading: ReadPlan
    spans: Sequence[Span]
    given: deque[BatchInfo]
    iteration: int = 0

    def __iter__(self) -> Iterator[Any]:
        return self._requests(self.spans, self.given)  # of now, not of the moment when the first is asked for

    def _requests(self, spans: Sequence[Span], given: deque[BatchInfo]) -> Iterator[BatchRequest]:
        reading, iteration, note = self.reading, (self.iteration, spans[-1].epoch), given.append
        plans, whole, single = reading.readers, reading.whole, reading.single
        per_step = plans[0].per_step
        for whole_span in spans:
            order = reading.order(whole_span.epoch)
            endless = isinstance(order, EndlessOrder)
            counted = endless or len(plans) > 1  # elsewhere the plan says how many samples all ranks get
            for epoch, start, stop in parts_of(order, whole_span, per_step):
                if endless:
                    plans[0].check(stop - start, "batches" if whole else "samples")
                pieces = [each.pieces(order, start, stop) for each in plans]
                everyone: int | None = None
                for number, step in enumerate(zip(*pieces, strict=True)):
                    if counted:
                        first = start + number * per_step
                        everyone = reading.samples_of_all(plans[0], order, first, min(stop, first + per_step))
                    for piece, valid in step:
                        # A rank without a sample reads one, of which no row is used: collating needs something.
                        units = piece if len(piece) else [[*order[start]][:1] if plans[0].within else order[start]]
                        ids, kept, asked = units, valid, units[0] if single else units
                        if whole:
                            ids = [index for batch in units for index in batch]
                            kept = valid if plans[0].within else sum(map(len, units[:valid]))
                            asked = units[0] if len(units) == 1 else ids  # one is left as the user's sampler made it
                        note(BatchInfo(epoch, ids, kept, units is not piece, everyone))
                        yield BatchRequest(iteration, epoch, asked)


class StreamIterator:
    """Torch's iterator over a view of the loader, made new or reset, that notes what it gives."""

    def __init__(self, loader: Any) -> None:
        self._inner = torch_iterator(self._begun(loader))

    def _reset(self, loader: Any) -> None:
        torch_internals.RESET.of(self._inner)(self._begun(loader))

    def _begun(self, loader: Any) -> DataLoader[Any]:
        view, self._given = torch_view(loader)
        self._note = loader.weft_noting()
        self._ready: deque[Any] = deque()
        reading = loader.weft_reading
        self._stream: StreamSteps = reading.stream
        self._seen: dict[int, str] = {}
        self._stream.visits[loader.__dict__["weft_now"][0][-1].epoch] += 1
        self._world = None if reading.alone or reading.scattered else loader.weft_ctx.world
        return view

    def __iter__(self) -> StreamIterator:
        return self

    def __next__(self) -> Any:
        if not self._ready:
            parts, given = next(self._inner)
            if given[0].mark is not None and given[0].mark.new:
                self._stream.compare(given[0].mark, self._seen, self._world)
            self._given.extend(given)
            self._ready.extend(parts)
        return self._note(self._ready.popleft())
