"""A `DataLoader` that reads this rank's part: a copy of the user's, with another batch sampler."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from weft.context import DistContext
from weft.errors import ContractError, message
from weft.loaders import Extension, extended_copy
from weft.nested import map_tensors
from weft.transforms.shard_data.order import epoch_order, mix, tell_epoch
from weft.transforms.shard_data.plan import Plan, Stretch

__all__ = ["RankBatches", "ShardedLoader", "is_stock", "length_of", "sharded_copy"]

T = TypeVar("T")


@dataclass
class Cursor:
    """Where the reading stands; the one mutable thing of a sharded loader.

    Attributes:
        epoch: Number of the epoch.
        todo: What the running iteration reads, or the next one: what is left of earlier epochs, then of this.
        steps: Batches of it that were given.
        held: Batches at its end that the iteration leaves for the one after it.
        fresh: The next iteration reads `todo`, and not the next epoch.
    """

    epoch: int
    todo: tuple[Stretch, ...]
    steps: int = 0
    held: int = 0
    fresh: bool = True


class RankBatches(Sampler[list[int]]):
    """Batch sampler that yields the indices of one rank, in the order of the epochs.

    Attributes:
        cursor: Where the reading stands.
        reading: What an iterator that is made now yields.
    """

    def __init__(self, units: Iterable[Any], total: int, plan: Plan, seed: int, *, whole: bool) -> None:
        self.units = units
        self.total = total
        self.plan = plan
        self.seed = seed
        self.whole_batches = whole
        self.cursor = Cursor(0, (self.epoch(0),))
        self.reading = self.cursor.todo

    def epoch(self, number: int) -> Stretch:
        """All of an epoch."""
        return Stretch(number, 0, self.total)

    def __len__(self) -> int:
        return self.plan.steps_in(self.cursor.todo)

    def __iter__(self) -> Iterator[list[int]]:
        return self._indices(self.reading)  # of now, not of the moment when the first is asked for

    def _indices(self, stretches: Sequence[Stretch]) -> Iterator[list[int]]:
        for stretch in stretches:
            order = epoch_order(self.units, self.seed, stretch.epoch)
            if len(order) != self.total:
                raise ContractError(
                    message(
                        "shard_data: the sampler does not yield what its length says",
                        found=f"{len(order)} in epoch {stretch.epoch}, {self.total} at set-up",
                        expected="the same number in every epoch",
                        fix="give the sampler a __len__ that is true",
                    )
                )
            for piece in self.plan.pieces(order, stretch.start, stretch.stop):
                # A rank without a sample reads one, of which no row is used: collating needs something.
                indices = piece if len(piece) else [order[stretch.start]]
                yield [index for batch in indices for index in batch] if self.whole_batches else list(indices)


class ShardedLoader(Extension[T]):
    """What `shard_data` adds to a loader: `state_dict`, `load_state_dict`, `set_epoch`."""

    weft_batches: RankBatches
    weft_ctx: DistContext

    def __len__(self) -> int:
        return len(self.batch_sampler) if isinstance(self.batch_sampler, RankBatches) else super().__len__()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._begin()  # not only at the first batch: from here on `len` is that of this iteration
        return self._iteration()

    def _begin(self) -> None:
        batches, cursor = self.weft_batches, self.weft_batches.cursor
        used_up = cursor.todo[-1].start > 0 and len(batches) == 0
        if used_up or not cursor.fresh:  # the last iteration was left early
            self.set_epoch(cursor.epoch + 1)
        cursor.steps, cursor.held, cursor.fresh = 0, 0, False
        tell_epoch(self.dataset, cursor.epoch)

    def _iteration(self) -> Iterator[Any]:
        batches, cursor, device = self.weft_batches, self.weft_batches.cursor, self.weft_ctx.device
        epoch, todo, held = cursor.epoch, cursor.todo, cursor.held
        now, later = batches.plan.split(todo, batches.plan.steps_in(todo) - held)
        read = self._batches(now)
        # Counted when they are given, not when they are read: on an accelerator one is read ahead.
        for steps, batch in enumerate(read if device.type == "cpu" else self._on_device(read), start=1):
            cursor.epoch, cursor.todo, cursor.steps, cursor.held = epoch, todo, steps, held
            yield batch
        cursor.epoch, cursor.todo = epoch + 1, (*later, batches.epoch(epoch + 1))
        cursor.steps, cursor.held, cursor.fresh = 0, 0, True

    def _on_device(self, read: Iterator[Any]) -> Iterator[Any]:
        return self.weft_ctx.engine.prefetch(read, self.weft_ctx.device)

    def _batches(self, stretches: tuple[Stretch, ...]) -> Iterator[Any]:
        # A dataset that knows of epochs has to be told before its workers start.
        apart = len(stretches) > 1 and callable(getattr(self.dataset, "set_epoch", None))
        groups: list[tuple[Stretch, ...]] = [(stretch,) for stretch in stretches] if apart else [stretches]
        for group in groups:
            if apart:
                tell_epoch(self.dataset, group[-1].epoch)
            empty = self.weft_batches.plan.empty_steps(group)
            for step, batch in enumerate(self._worker_batches(group)):
                yield map_tensors(lambda t: t[:0] if t.dim() else t, batch) if step in empty else batch

    def _worker_batches(self, stretches: tuple[Stretch, ...]) -> Iterator[Any]:
        """Torch's own iterator, made without drawing from the global generator."""
        before = self.__dict__["generator"]
        if before is None:
            seed = mix(self.weft_ctx.seed, self.weft_batches.cursor.epoch, self.weft_ctx.data_rank, "workers")
            self.__dict__["generator"] = torch.Generator().manual_seed(seed)
        self.weft_batches.reading = stretches
        try:
            return iter(super().__iter__())
        finally:
            self.__dict__["generator"] = before

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its beginning."""
        self._go_to(epoch, (self.weft_batches.epoch(epoch),))

    def _go_to(self, epoch: int, todo: tuple[Stretch, ...]) -> None:
        cursor = self.weft_batches.cursor
        cursor.epoch, cursor.todo, cursor.steps, cursor.held, cursor.fresh = epoch, todo, 0, 0, True

    def state_dict(self) -> dict[str, Any]:
        """The position: seed, epoch, and samples used by all ranks together. Free of world size.

        After the last batch of an epoch it is the beginning of the next. If batches were carried over
        from earlier epochs and are not used yet, it has their samples too, as `[epoch, start, stop]`.
        """
        return self.weft_position(0)

    def weft_position(self, back: int) -> dict[str, Any]:
        """The position as it was so many batches ago, in the running iteration; see `Seekable`."""
        batches, cursor = self.weft_batches, self.weft_batches.cursor
        epoch, steps = cursor.epoch, cursor.steps - back
        left = batches.plan.split(cursor.todo, steps)[1]
        if steps and steps == len(batches) - cursor.held:
            epoch, left = epoch + 1, (*left, batches.epoch(epoch + 1))
        position = {"seed": batches.seed, "epoch": epoch, "samples": left[-1].start}
        return position | ({"carried": [list(stretch) for stretch in left[:-1]]} if left[1:] else {})

    def weft_hold_back(self, count: int) -> None:
        """Leave the last batches of the iteration that was just begun for the next one; see `Seekable`."""
        self.weft_batches.cursor.held = count

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position saved at any world size; the next iteration goes on there.

        Raises:
            ValueError: The state is not one of this loader's dataset.
        """
        batches = self.weft_batches
        todo = _stretches(state, batches.total)
        if todo is None:
            raise ValueError(
                message(
                    "load_state_dict: this is not a position in this loader",
                    found=repr(state),
                    expected=f"seed, epoch, and 0 <= samples <= {batches.total}",
                    fix="loader.load_state_dict(saved_loader.state_dict())",
                )
            )
        for stretch in todo:
            batches.plan.check(stretch.stop - stretch.start, "the rest of the epoch")
        batches.seed = state["seed"]
        self._go_to(state["epoch"], todo)


def _stretches(state: Mapping[str, Any], total: int) -> tuple[Stretch, ...] | None:
    """What is left to be read from a position on; None if it is none in so many units."""
    named = {"seed", "epoch", "samples"}
    if not named <= set(state) <= named | {"carried", "windows"}:
        return None
    try:
        carried = [Stretch(*stretch) for stretch in state.get("carried", ())]
        todo = (*carried, Stretch(state["epoch"], state["samples"], total))
    except TypeError:
        return None
    whole = all(type(number) is int for number in (state["seed"], *itertools.chain(*todo)))
    return todo if whole and all(0 <= each.start <= each.stop <= total for each in todo) else None


def sharded_copy(loader: DataLoader[T], batches: RankBatches, ctx: DistContext) -> DataLoader[T]:
    """A copy of `loader` that reads `batches`; the original is left alone."""
    new: DataLoader[T] = extended_copy(loader, ShardedLoader, batch_sampler=batches, weft_batches=batches, weft_ctx=ctx)
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
