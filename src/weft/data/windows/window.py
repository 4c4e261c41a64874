"""One window: the micro-batches of one optimizer step.

[Note: position in windows] A position lies between two windows. Gradients of a window in progress are in no
checkpoint, and neither is what its forward passes changed (random states, statistics), so `save` refuses
such a moment, and `state_dict` returns the beginning of the window. What is carried over into the next epoch
stays unread in a sharded loader: it is a part of the position, read when its turn comes, by a resumed run
as by one that was never interrupted. Other loaders cannot read it again, so it is kept in memory.
"""

from __future__ import annotations

import dis
import math
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from weft.data.windows.micro_batches import WindowBatches
from weft.data.windows.sync import WindowSync
from weft.errors import ContractError, listed, message, warn
from weft.metrics import Count, per_rank, samples_of_all, total_count
from weft.tensors.nested import tensors
from weft.tensors.sequence_order import part_of

B = TypeVar("B")


def _not_a_batch_error(kind: type[Exception], what: str) -> Exception:
    return kind(
        message(
            f"a window was {what}",
            found="the group of micro-batches of one step, which the loader of accumulate_grads yields",
            expected="its micro-batches, one after the other",
            fix="for window in loader:\n                for batch in window: ...",
        )
    )


class Window(Generic[B]):
    """The micro-batches of one optimizer step: sized, and iterable once.

    While it is iterated, gradients are reduced over ranks in the backward of the last micro-batch
    only (`reduce="last"`), or in each one.
    """

    def __init__(self, batches: WindowBatches[B], sync: WindowSync) -> None:
        self._batches = batches
        self._sync = sync
        self._number = sync.handed_out
        self._samples: int | None = None  # of all micro-batches on all ranks, once it is known
        self.weighed = False  # by `share` or `denominator`
        self._iterated = self._counted = False

    def __len__(self) -> int:
        """Number of micro-batches, also of a short last window."""
        self._counted |= self._batches.running or not self._iterated  # not by `list`, which asks in between
        return self._batches.length

    if not TYPE_CHECKING:  # a window has no other attributes: for type checkers it should have none

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
            """Refuse to be a tensor: what torch is given here was meant to be a batch."""
            raise _not_a_batch_error(TypeError, f"passed to {getattr(func, '__name__', func)}")

        def __getitem__(self, index: object) -> NoReturn:
            raise _not_a_batch_error(TypeError, f"asked for its item {index!r}")

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("__"):
                raise AttributeError(name)
            raise _not_a_batch_error(AttributeError, f"asked for its attribute {name!r}")

    def __iter__(self) -> Iterator[B]:
        """Yield the micro-batches; after a `break`, those that are left.

        Raises:
            ContractError: There are none left: the window was used, or the loader has yielded the next one.
        """
        if self._batches.given == self._batches.length:
            raise ContractError(
                "accumulate_grads: a window was iterated a second time",
                found=f"all {self._batches.length} micro-batches were used, or skipped by taking the next window",
                expected="each window iterated once, before the next one is taken from the loader",
                fix="for window in loader:\n    batches = list(window)  # to go through them several times",
            )
        caller = sys._getframe(1)
        if dis.opname[caller.f_code.co_code[caller.f_lasti]] == "UNPACK_SEQUENCE":
            raise _not_a_batch_error(TypeError, "unpacked like a batch")
        self._iterated = True
        return self._micro_batches()

    def _micro_batches(self) -> Iterator[B]:
        sync, number, batches = self._sync, self._number, self._batches
        every = sync.reduce == "every"
        self._batches.running = True
        try:
            while batches.given < batches.length:
                batch = batches.next()
                sync.current = batches
                if every or batches.given == 1 or not sync.is_open:
                    sync.begin_window(number)
                if every or batches.given == batches.length:
                    sync.last_backward(number)
                yield batch
                if every:
                    sync.end_window(number)
            self._batches.running = False
            reduced = any(not getattr(one, "owes", True) for one in sync.syncs)
            sync.end_window(number)
            if not (self.weighed or sync.warned or sync.ctx.world.root.numbers["total"]):  # of `metrics.denominator`
                if self._counted:
                    self._warn_unequal()
                elif reduced and batches.length > 1:
                    self._warn_sum()
        finally:
            self._batches.running = False
            sync.end_window(number, left=True)  # does nothing after the one above

    @property
    def share(self) -> float:
        """What to multiply the mean loss of the running micro-batch by, so that the window's gradient is exact.

        The samples of this micro-batch times the number of ranks gradients are averaged over, over the samples
        of the whole window on all ranks; `1 / len(window)` if all batches are equal, 0 for a batch without rows.
        Mean losses times their shares have the gradient of the mean over all samples of the window, however
        they are split into ranks and micro-batches; and their sum, averaged over the ranks, is that mean.

            for x, y in window:
                (cross_entropy(model(x), y) * window.share).backward()

        For means over something else than samples, such as tokens, use `denominator`.

        Collectives: none after `shard_data`, where the sizes of all batches are known. Where they are not (data
        that was split already, `batch_size=None`, other loaders), the first use in a window is one all-reduce of
        one number over the data axes, so ask on all ranks alike; the samples of a batch are the rows of its
        first tensor then, and the window's micro-batches are read now.

        Raises:
            ContractError: No micro-batch is being processed. Or, on several ranks, a batch does not hold the samples
                that were read for it; see `loader.share`.
            PeerError: A peer failed.
        """
        if not self._batches.running:
            raise ContractError(
                "share: there is no current micro-batch",
                found=f"{self._batches.given} of {self._batches.length} micro-batches given, no inner loop is running",
                expected="window.share inside the loop over the window",
                fix="for x, y in window:\n    loss = cross_entropy(model(x), y) * window.share",
            )
        if self._batches.ask is not None:
            self._batches.ask()
        self.weighed = True
        if self._samples is None:
            sizes, ctx = self._batches.sizes(), self._sync.ctx
            everyone = [total for _, total in sizes if total is not None]
            known = len(everyone) == len(sizes)
            self._samples = sum(everyone) if known else samples_of_all([own for own, _ in sizes], ctx)
        own, _ = self._batches.size(self._batches.given - 1)
        # The ranks along the axes of `parts` have the same samples, which count once.
        ranks = self._sync.mean_over / math.prod(map(self._sync.ctx.axis_size, self._sync.parts))
        ranks *= self._sync.ctx.num_replicas
        return own * ranks / self._samples if own else 0.0

    def denominator(self, count: Count | Callable[[B], Count]) -> float:
        """Add a count up over the window and all ranks, for exact means over ragged data.

        A loss that is a *sum* over samples or tokens, divided by this, has the gradient of the
        mean over all of them, however they are split into ranks and micro-batches; the factor by
        which averaging over ranks would be off is in it. Report the loss itself as
        `weft.reduce(loss_sum, ctx, "mean")` of these quotients.

        Changes: with a function, the micro-batches of the window are read now. Collectives: one
        all-reduce of one number over the data axes, and those along which a batch is in parts.

        Args:
            count: This rank's count in the whole window; where `split_sequence` splits sequences, that of its
                parts. Or a function of one micro-batch as the loader yields it, where sequences are still whole.

        Returns:
            The count over all ranks, or 1 if that is zero, divided by the number of ranks gradients are averaged over.

        Raises:
            ValueError: A count that is negative or not finite.
            PeerError: A peer failed.
        """
        self.weighed = True
        parts = self._sync.parts
        if callable(count):
            batches = self._read_all()
            counts = [count(batch) for batch in batches]
            if not any(part_of(x) for x in tensors(batches)):  # whole sequences: the same along the axes of `parts`
                parts = ()
        else:
            counts = [count]
        fix = "window.denominator(lambda batch: batch[1].numel())"
        return per_rank(total_count(counts, self._sync.ctx, parts=parts, fix=fix), self._sync.mean_over)

    def _read_all(self) -> list[B]:
        batches = self._batches
        if batches.given and not batches.kept_all:
            raise ContractError(
                "denominator: a function was given after the window was begun",
                found=f"{batches.given} of {batches.length} micro-batches used already",
                expected="denominator(function) before the inner loop",
                fix="tokens = window.denominator(count)\nfor batch in window: ...",
            )
        return batches.read_all()

    def _warn_sum(self) -> None:
        """Warn, once, that losses were added up over the micro-batches without a factor."""
        self._sync.warned = True
        warn(
            "accumulate_grads: the losses of the micro-batches of this window are not weighted",
            found=f"a backward pass, and neither window.share nor window.denominator nor len(window) was used: "
            f"gradients of {self._batches.length} mean losses are added up, or divided by a number that does not "
            "fit a shorter window",
            expected="mean losses times their share, or sums divided by window.denominator",
            fix="loss = cross_entropy(model(x), y) * window.share",
        )

    def _warn_unequal(self) -> None:
        """Warn, once, if the micro-batches that were used up are not of one size on all ranks."""
        sizes, ranks = self._batches.sizes(), self._sync.ctx.data_size
        own = [mine for mine, _ in sizes if mine is not None]
        equal = len(set(own)) == 1 and all(total in (None, own[0] * ranks) for _, total in sizes)
        if equal or len(own) < len(sizes):
            return
        self._sync.warned = True
        everyone = listed(total for _, total in sizes if total is not None)
        warn(
            "accumulate_grads: mean losses divided by len(window) are not the mean over the samples of this window",
            found=f"samples per micro-batch: {listed(own)} on rank {self._sync.ctx.rank}"
            + (f"; {everyone} on all ranks" if everyone else ""),
            expected="a factor that counts what the loss is a mean over, where batches differ in size",
            fix="loss = cross_entropy(model(x), y) * window.share"
            "  # of a mean over samples; over tokens: loss_sum / window.denominator(count)",
        )
