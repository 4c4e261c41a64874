"""A `DataLoader` that reads this rank's part: a copy of the user's, with another batch sampler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from weft.context import DistContext
from weft.errors import ContractError, message
from weft.loaders import Extension, extended_copy
from weft.nested import map_tensors
from weft.transforms.shard_data.order import epoch_order, mix, tell_epoch
from weft.transforms.shard_data.plan import Plan

__all__ = ["Cursor", "RankBatches", "ShardedLoader"]

T = TypeVar("T")


@dataclass
class Cursor:
    """Where the reading stands; the one mutable thing of a sharded loader.

    Attributes:
        epoch: Number of the epoch.
        samples: Units of it that all ranks together have been given.
        start: Value of `samples` at which the running iteration began.
        fresh: The next iteration begins here, and not with the next epoch.
    """

    epoch: int = 0
    samples: int = 0
    start: int = 0
    fresh: bool = True


class RankBatches(Sampler[list[int]]):
    """Batch sampler that yields the indices of one rank, in the order of the current epoch."""

    def __init__(self, units: Iterable[Any], total: int, plan: Plan, seed: int, cursor: Cursor, whole: bool) -> None:
        self.units = units
        self.total = total
        self.plan = plan
        self.seed = seed
        self.cursor = cursor
        self.whole_batches = whole

    def __len__(self) -> int:
        return self.plan.num_steps(self.total - self.cursor.start)

    def __iter__(self) -> Iterator[list[int]]:
        order = epoch_order(self.units, self.seed, self.cursor.epoch)
        if len(order) != self.total:
            raise ContractError(
                message(
                    "shard_data: the sampler does not yield what its length says",
                    found=f"{len(order)} in epoch {self.cursor.epoch}, {self.total} at set-up",
                    expected="the same number in every epoch",
                    fix="give the sampler a __len__ that is true",
                )
            )
        left = order[self.cursor.start :]
        for piece in self.plan.pieces(left):
            # A rank without a sample reads one, of which no row is used: collating needs something.
            indices = piece if len(piece) else [left[0]]
            yield [index for batch in indices for index in batch] if self.whole_batches else list(indices)


class ShardedLoader(Extension[T]):
    """What `shard_data` adds to a loader: `state_dict`, `load_state_dict`, `set_epoch`."""

    weft_cursor: Cursor
    weft_ctx: DistContext

    def __len__(self) -> int:
        return len(self.batch_sampler) if isinstance(self.batch_sampler, RankBatches) else super().__len__()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._begin()  # not only at the first batch: from here on `len` is that of this iteration
        return self._epoch()

    def _epoch(self) -> Iterator[Any]:
        ctx = self.weft_ctx
        yield from ctx.engine.prefetch(self._batches(), ctx.device) if ctx.device.type != "cpu" else self._batches()
        cursor = self.weft_cursor
        cursor.epoch, cursor.samples, cursor.start, cursor.fresh = cursor.epoch + 1, 0, 0, True

    def _begin(self) -> None:
        cursor = self.weft_cursor
        batches = self.batch_sampler
        total = batches.total if isinstance(batches, RankBatches) else 0
        if not cursor.fresh or (total and cursor.samples >= total):
            cursor.epoch, cursor.samples = cursor.epoch + 1, 0  # the last iteration was left early
        cursor.start, cursor.fresh = cursor.samples, False
        tell_epoch(self.dataset, cursor.epoch)

    def _batches(self) -> Iterator[Any]:
        cursor, batches = self.weft_cursor, self.batch_sampler
        assert isinstance(batches, RankBatches)
        left = batches.total - cursor.start
        last = batches.plan.num_steps(left) - 1
        empty = batches.plan.ends_empty(left)
        for step, batch in enumerate(self._worker_batches()):
            cursor.samples = cursor.start + batches.plan.used_after(step + 1, left)
            yield map_tensors(lambda t: t[:0] if t.dim() else t, batch) if empty and step == last else batch

    def _worker_batches(self) -> Iterator[Any]:
        """Torch's own iterator, made without drawing from the global generator."""
        before = self.__dict__["generator"]
        if before is None:
            seed = mix(self.weft_ctx.seed, self.weft_cursor.epoch, self.weft_ctx.data_rank, "workers")
            self.__dict__["generator"] = torch.Generator().manual_seed(seed)
        try:
            return iter(super().__iter__())
        finally:
            self.__dict__["generator"] = before

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its beginning."""
        cursor = self.weft_cursor
        cursor.epoch, cursor.samples, cursor.start, cursor.fresh = epoch, 0, 0, True

    def state_dict(self) -> dict[str, int]:
        """The position: seed, epoch, and samples used by all ranks together. Free of world size."""
        assert isinstance(self.batch_sampler, RankBatches)
        return {"seed": self.batch_sampler.seed, "epoch": self.weft_cursor.epoch, "samples": self.weft_cursor.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go to a position saved at any world size; the next iteration goes on there.

        Raises:
            ValueError: The state is not one of this loader's dataset.
        """
        batches = self.batch_sampler
        assert isinstance(batches, RankBatches)
        if set(state) != {"seed", "epoch", "samples"} or not 0 <= state["samples"] <= batches.total:
            raise ValueError(
                message(
                    "load_state_dict: this is not a position in this loader",
                    found=repr(state),
                    expected=f"seed, epoch, and 0 <= samples <= {batches.total}",
                    fix="loader.load_state_dict(saved_loader.state_dict())",
                )
            )
        batches.plan.check(batches.total - state["samples"], "the rest of the epoch")
        batches.seed = state["seed"]
        self.set_epoch(state["epoch"])
        self.weft_cursor.samples = self.weft_cursor.start = state["samples"]


def sharded_copy(loader: DataLoader[T], batches: RankBatches, ctx: DistContext) -> DataLoader[T]:
    """A copy of `loader` that reads `batches`; the original is left alone."""
    new: DataLoader[T] = extended_copy(
        loader, ShardedLoader, batch_sampler=batches, weft_cursor=batches.cursor, weft_ctx=ctx
    )
    return new


def is_stock(batch_sampler: object) -> bool:
    """Whether batches are just consecutive samples of a sampler, so that samples can be shared out."""
    return type(batch_sampler) is BatchSampler


def length_of(units: Sequence[Any] | Iterable[Any]) -> int | None:
    """Length of a sampler, or None if it does not tell."""
    try:
        return len(units)  # type: ignore[arg-type]
    except TypeError:
        return None
