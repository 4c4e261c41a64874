"""One window and how a loader is cut into windows.

[Note: position in windows] A position lies between two windows. Gradients of a window in progress are in no
checkpoint, and neither is what its forward passes changed (random states, statistics), so `save` refuses
such a moment, and `state_dict` gives the beginning of the window. What is carried over into the next epoch
stays unread in a sharded loader: it is a part of the position, read when its turn comes, by a run that
goes on as by one that was never interrupted. Other loaders cannot read it again, so it is kept in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NoReturn, TypeVar

import torch

from weft.collectives import reduce
from weft.context import DistContext
from weft.contract import GradSync
from weft.errors import ContractError, message

__all__ = ["Count", "Cutting", "Remainder", "Steps", "Window", "check_steps", "unfinished"]

B = TypeVar("B")
Steps = int | Callable[[int], int]
Count = int | float | torch.Tensor
Remainder = Literal["step", "drop", "carry"]


class Window(Generic[B]):
    """The micro-batches of one optimizer step: sized, and iterable once.

    While it is iterated, gradients are reduced over ranks in the backward of the last micro-batch
    only (`reduce="last"`), or in each one.
    """

    def __init__(self, source: Iterator[B], length: int, cutting: Cutting[B], *, ahead: int = 0) -> None:
        self._source = source
        self._length = length
        self._cutting = cutting
        self._number = cutting.handed_out
        self._read: list[B] = []  # read ahead for `denominator`
        self._given = 0
        self._ahead = ahead  # micro-batches that were taken from the loader before the window was made
        self._running = False

    def __len__(self) -> int:
        """Number of micro-batches, also of a short last window."""
        return self._length

    def __iter__(self) -> Iterator[B]:
        """Yield the micro-batches; after a `break`, those that are left.

        Raises:
            ContractError: There are none left: the window was used, or the loader went on.
        """
        if self._given == self._length:
            raise ContractError(
                message(
                    "accumulate_grads: a window was iterated a second time",
                    found=f"all {self._length} micro-batches were used, or skipped when the loader went on",
                    expected="each window iterated once, before the next one is taken from the loader",
                    fix="for window in loader:\n    batches = list(window)  # to go through them several times",
                )
            )
        return self._micro_batches()

    def _micro_batches(self) -> Iterator[B]:
        cutting = self._cutting
        self._running = True
        try:
            while self._given < self._length:
                batch = self._next()
                last = self._given == self._length
                cutting.synchronize(self._number, enabled=last or cutting.reduce == "every")
                yield batch
        finally:
            self._running = False
            cutting.synchronize(self._number, enabled=True)

    @property
    def used_up(self) -> bool:
        """Whether the inner loop over all micro-batches has ended."""
        return self._given == self._length and not self._running

    @property
    def taken(self) -> int:
        """Micro-batches that were taken from the loader so far."""
        return max(self._given, len(self._read), self._ahead)

    @property
    def begun(self) -> int:
        """Micro-batches that were used, or read by `denominator`."""
        return max(self._given, len(self._read))

    def denominator(self, count: Count | Callable[[B], Count]) -> float:
        """Add a count up over the window and all ranks, for exact means over ragged data.

        A loss that is a *sum* over samples or tokens, divided by this, has the gradient of the
        mean over all of them, however they are split into ranks and micro-batches; the factor by
        which averaging over ranks would be off is in it. Report the loss itself as
        `weft.reduce(loss_sum, ctx, "mean")` of these quotients.

        Changes: with a function, the micro-batches of the window are read now. Collectives: one
        all-reduce of one number over the data axes.

        Args:
            count: This rank's count in the whole window, or a function of one micro-batch.

        Returns:
            The count over all ranks, divided by the number of ranks gradients are averaged over;
            1 if it is zero, so that a window without tokens gives zero gradients.

        Raises:
            ValueError: A count that is negative or not finite.
            PeerError: A peer failed.
        """
        ctx = self._cutting.ctx
        # Counts are exact in float64 up to 2**53; some devices have none, so add on the CPU there.
        device = ctx.device if ctx.device.type != "mps" else torch.device("cpu")
        counts = [count] if not callable(count) else [count(batch) for batch in self._read_all()]
        mine = torch.stack([torch.as_tensor(c).detach().to(device).double().sum() for c in counts])
        # A bad count on one rank has to be seen by all: not-a-number survives the sum.
        part = torch.where((mine >= 0).all(), mine.sum(), torch.nan)
        total = float(reduce(part, ctx.on(ctx.data_axes), "sum"))
        if not 0 <= total < float("inf"):
            raise ValueError(
                message(
                    "denominator: a count is negative or not finite",
                    found=f"{mine.tolist()} on rank {ctx.rank}, {total} over all ranks",
                    expected="finite numbers >= 0 on all ranks",
                    fix="window.denominator(lambda batch: batch[1].numel())",
                )
            )
        return total / self._cutting.mean_over if total > 0 else 1.0

    def _next(self) -> B:
        if self._given < len(self._read):
            batch = self._read[self._given]
        else:
            batch = self._take()
        self._given += 1
        self._cutting.current = self
        return batch

    def _read_all(self) -> list[B]:
        missing = self._length - len(self._read)
        if missing and self._given:
            raise ContractError(
                message(
                    "denominator: a function was given after the window was begun",
                    found=f"{self._given} of {self._length} micro-batches used already",
                    expected="denominator(function) before the inner loop",
                    fix="tokens = window.denominator(count)\nfor batch in window: ...",
                )
            )
        self._read += [self._take() for _ in range(missing)]
        return self._read

    def _take(self) -> B:
        try:
            return next(self._source)
        except StopIteration:
            _raise_untrue_length("fewer", "ended in the middle of a window")

    def _finish(self) -> None:
        """Read past what the user left over, so that the next window begins where it should."""
        for _ in range(self._length - self.begun):
            self._take()
        self._given = self._length


@dataclass
class Cutting(Generic[B]):
    """How a stream of micro-batches is cut into windows, and how far that has come.

    Attributes:
        steps: As given by the user; the same for the next four.
        windows: Number of windows so far, over all epochs and runs.
        handed_out: The same, of this process.
        current: The window that was handed out last, in the running or last pass.
        carried: Micro-batches left over by the last epoch, for the first window of the next.
        began: `windows` and the number of carried micro-batches when the running epoch began.
    """

    steps: Steps
    remainder: Remainder
    reduce: Literal["last", "every"]
    syncs: list[GradSync]
    mean_over: int
    ctx: DistContext
    windows: int = 0
    handed_out: int = 0
    current: Window[B] | None = None
    carried: list[B] = field(default_factory=list)
    began: tuple[int, int] | None = None

    def size_of(self, window: int) -> int:
        """Micro-batches in a full window."""
        size = self.steps(window) if callable(self.steps) else self.steps
        check_steps(size, f"steps({window})" if callable(self.steps) else "steps")
        return size

    def count(self, batches: int) -> int:
        """Windows of an epoch of so many batches: the running one, or else the next."""
        first, carried = self.began or (self.windows, len(self.carried))
        number, left = self.fit(first, batches + carried)
        return number + (1 if left and self.remainder == "step" else 0)

    def fit(self, first: int, batches: int) -> tuple[int, int]:
        """Full windows in so many batches, from window number `first` on, and the batches left over."""
        if not callable(self.steps):
            return divmod(batches, self.steps)
        number, left = 0, batches
        while left >= (size := self.size_of(first + number)):
            left, number = left - size, number + 1
        return number, left

    def go_to(self, windows: int) -> None:
        """Let the next pass begin with this window, and with nothing carried over."""
        self.windows, self.carried, self.current, self.began = windows, [], None, None

    def state_between_windows(self, batches: Callable[[], Any]) -> dict[str, Any]:
        """A state made of that of the loader, which knows nothing of windows.

        Raises:
            ContractError: A window has begun, or micro-batches are carried over: they cannot be read again.
        """  # noqa: DOC501  (also an error made by a function)
        if self.current is not None and not self.current.used_up:
            raise unfinished(self.current)
        if self.carried:
            raise ContractError(
                message(
                    "accumulate_grads: micro-batches that are carried over cannot be saved",
                    found=f"{len(self.carried)} of the last epoch, in memory, of a loader that cannot read them again",
                    expected='a loader of weft.shard_data, or remainder="step"',
                    fix="loader, ctx = weft.shard_data(loader, ctx)  # before accumulate_grads",
                )
            )
        return {"loader": batches(), "windows": self.windows}

    def synchronize(self, window: int, *, enabled: bool) -> None:
        """Let backward passes communicate or not, unless a later window has taken over.

        What a user keeps of an earlier window may be collected at any time, on one rank only.
        """
        if window == self.handed_out:
            for sync in self.syncs:
                sync.set(enabled)

    def cut(self, batches: Iterator[B], length: int | None) -> Iterator[Window[B]]:
        """Yield the windows of one pass over `batches`."""
        carried, self.carried, self.current = self.carried, [], None
        self.began = began = (self.windows, len(carried))
        left = None if length is None else length + len(carried)
        source = itertools.chain(carried, batches)
        windows, number = self.windows, self.handed_out
        try:
            while True:
                size = self.size_of(windows)
                if left is None:  # no length: look ahead to know whether this window is a full one
                    ahead = list(itertools.islice(source, size))
                    have, stream = len(ahead), iter(ahead)
                else:
                    have, stream = min(size, left), source
                    left -= have
                if have == size or (have and self.remainder == "step"):
                    self.windows = windows = windows + 1
                    self.handed_out = number = self.handed_out + 1
                    self.current = window = Window(stream, have, self, ahead=have if left is None else 0)
                    yield window
                    window._finish()
                    self.synchronize(number, enabled=True)
                elif have:
                    rest = Window(stream, have, self)._read_all()
                    self.carried = rest if self.remainder == "carry" else []
                if have < size:
                    break
            for _ in source:  # asked once more, the loader notices that its epoch is over
                _raise_untrue_length("more", "went on after its last window")
        finally:
            self.synchronize(number, enabled=True)
            if self.began is began:
                self.began = None


def _raise_untrue_length(how_many: str, what: str) -> NoReturn:
    raise ContractError(
        message(
            f"accumulate_grads: the loader {what}",
            found=f"{how_many} batches than len(loader)",
            expected="a loader that yields as many batches as its length says, or has no length",
            fix="def __len__(self): return ...  # the true number of batches",
        )
    )


def unfinished(window: Window[Any]) -> ContractError:
    """What a save in the middle of a window raises."""
    return ContractError(
        message(
            "accumulate_grads: a window in progress cannot be saved, for its gradients cannot",
            found=f"{window.begun} of {len(window)} micro-batches were read, and the inner loop has not ended",
            expected="a save between two windows, after optimizer.step()",
            fix="leave `for batch in window` first; after a break: for _ in window: pass  # leaves the rest out",
        )
    )


def check_steps(steps: object, what: str) -> None:
    """Raise if this is no number of micro-batches.

    Raises:
        ValueError: The text says what it has to be.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(
            message(
                f"accumulate_grads: {what} = {steps!r} cannot be used",
                found=repr(steps),
                expected="a whole number >= 1",
                fix="weft.accumulate_grads(model, loader, ctx, steps=4)",
            )
        )
