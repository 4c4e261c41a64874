"""One window and how a loader is cut into windows.

[Note: position in windows] A position lies between two windows. Gradients of a window in progress are in no
checkpoint, and neither is what its forward passes changed (random states, statistics), so `save` refuses
such a moment, and `state_dict` gives the beginning of the window. What is carried over into the next epoch
stays unread in a sharded loader: it is a part of the position, read when its turn comes, by a run that
goes on as by one that was never interrupted. Other loaders cannot read it again, so it is kept in memory.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeVar

import torch

from weft.collectives import reduce
from weft.context import DistContext
from weft.contract import GradSync
from weft.data.loader_copy import Size
from weft.errors import ContractError, listed, message, value_error
from weft.metrics import samples_of_all

__all__ = ["Count", "Cutting", "Remainder", "Steps", "Window", "check_steps", "unfinished"]

B = TypeVar("B")
Steps = int | Callable[[int], int]
Count = int | float | torch.Tensor
Remainder = Literal["step", "drop", "carry"]
Planned = Callable[[int], Size] | None


def _not_a_batch(kind: type[Exception], what: str) -> Exception:
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

    def __init__(
        self,
        source: Iterator[tuple[B, Size | None]],
        length: int,
        cutting: Cutting[B],
        planned: Planned = None,
        *,
        ahead: int = 0,
    ) -> None:
        self._source = source
        self._length = length
        self._cutting = cutting
        self._number = cutting.handed_out
        self._planned = planned
        self._read: list[B] = []  # read ahead for `denominator` or `share`
        self._first = 0  # number of the micro-batch that was read ahead first
        self._sizes: list[Size | None] = []  # of what was taken from the loader; None: see `_planned`
        self._samples: int | None = None  # of all micro-batches on all ranks, once it is known
        self._given = 0
        self._ahead = ahead  # micro-batches that were taken from the loader before the window was made
        self._running = self._iterated = self._counted = self._normalised = False

    def __len__(self) -> int:
        """Number of micro-batches, also of a short last window."""
        self._counted |= self._running or not self._iterated  # not by `list`, which asks in between
        return self._length

    if not TYPE_CHECKING:  # a window has no other attributes: for type checkers it should have none

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
            """Refuse to be a tensor: what torch is given here was meant to be a batch."""
            raise _not_a_batch(TypeError, f"passed to {getattr(func, '__name__', func)}")

        def __getitem__(self, index: object) -> NoReturn:
            raise _not_a_batch(TypeError, f"asked for its item {index!r}")

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("__"):
                raise AttributeError(name)
            raise _not_a_batch(AttributeError, f"asked for its attribute {name!r}")

    def __iter__(self) -> Iterator[B]:
        """Yield the micro-batches; after a `break`, those that are left.

        Raises:
            ContractError: There are none left: the window was used, or the loader went on.
        """
        if self._given == self._length:
            raise ContractError(
                "accumulate_grads: a window was iterated a second time",
                found=f"all {self._length} micro-batches were used, or skipped when the loader went on",
                expected="each window iterated once, before the next one is taken from the loader",
                fix="for window in loader:\n    batches = list(window)  # to go through them several times",
            )
        self._iterated = True
        return self._micro_batches()

    def _micro_batches(self) -> Iterator[B]:
        cutting, number = self._cutting, self._number
        every = cutting.reduce == "every"
        self._running = True
        try:
            while self._given < self._length:
                batch = self._next()
                if every or self._given == 1 or not cutting.is_open:
                    cutting.begin_window(number)
                if every or self._given == self._length:
                    cutting.last_backward(number)
                yield batch
                if every:
                    cutting.end_window(number)
            self._running = False
            cutting.end_window(number)
            if self._counted and not self._normalised and not cutting.told:
                self._tell_unequal()
        finally:
            self._running = False
            cutting.end_window(number, left=True)  # does nothing after the one above

    @property
    def used_up(self) -> bool:
        """Whether the inner loop over all micro-batches has ended."""
        return self._given == self._length and not self._running

    @property
    def taken(self) -> int:
        """Micro-batches that were taken from the loader so far."""
        return max(len(self._sizes), self._ahead)

    @property
    def begun(self) -> int:
        """Micro-batches that were used, or read by `denominator` or `share`."""
        return len(self._sizes)

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
            ContractError: No micro-batch is being processed.
            PeerError: A peer failed.
        """
        if not self._running:
            raise ContractError(
                "share: it is that of the micro-batch that is being processed",
                found=f"{self._given} of {self._length} micro-batches given, and the inner loop is not running",
                expected="window.share inside of the loop over the window",
                fix="for x, y in window:\n    loss = cross_entropy(model(x), y) * window.share",
            )
        self._normalised = True
        if self._samples is None:
            sizes, ctx = self._all_sizes(), self._cutting.ctx
            everyone = [total for _, total in sizes if total is not None]
            known = len(everyone) == len(sizes)
            self._samples = sum(everyone) if known else samples_of_all([own for own, _ in sizes], ctx)
        own, _ = self._size(self._given - 1)
        return own * self._cutting.mean_over / self._samples if own else 0.0

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
        ctx, self._normalised = self._cutting.ctx, True
        # Counts are exact in float64 up to 2**53; some devices have none, so add on the CPU there.
        device = ctx.device if ctx.device.type != "mps" else torch.device("cpu")
        counts = [count] if not callable(count) else [count(batch) for batch in self._read_all()]
        mine = torch.stack([torch.as_tensor(c).detach().to(device).double().sum() for c in counts])
        # A bad count on one rank has to be seen by all: not-a-number survives the sum.
        part = torch.where((mine >= 0).all(), mine.sum(), torch.nan)
        total = float(reduce(part, ctx.on(ctx.data_axes), "sum"))
        if not 0 <= total < float("inf"):
            raise value_error(
                "denominator: a count is negative or not finite",
                found=f"{mine.tolist()} on rank {ctx.rank}, {total} over all ranks",
                expected="finite numbers >= 0 on all ranks",
                fix="window.denominator(lambda batch: batch[1].numel())",
            )
        return total / self._cutting.mean_over if total > 0 else 1.0

    def _next(self) -> B:
        ahead = self._given - self._first
        batch = self._read[ahead] if 0 <= ahead < len(self._read) else self._take()
        self._given += 1
        self._cutting.current = self
        return batch

    def _read_all(self) -> list[B]:
        if self._given and len(self._read) < self._length:
            raise ContractError(
                "denominator: a function was given after the window was begun",
                found=f"{self._given} of {self._length} micro-batches used already",
                expected="denominator(function) before the inner loop",
                fix="tokens = window.denominator(count)\nfor batch in window: ...",
            )
        self._read_ahead()
        return self._read

    def _read_ahead(self) -> None:
        """Read the micro-batches that are left, and keep them."""
        if not self._read:
            self._first = self._given
        self._read += [self._take() for _ in range(self._length - len(self._sizes))]

    def _take(self) -> B:
        try:
            batch, size = next(self._source)
        except StopIteration:
            _raise_untrue_length("fewer", "ended in the middle of a window")
        self._sizes.append(size)
        return batch

    def _size(self, number: int) -> Size:
        size = None if self._planned is None else self._planned(number)
        return size or self._sizes[number] or (0, None)

    def _all_sizes(self) -> list[Size]:
        if self._planned is None:
            self._read_ahead()
        return [self._size(number) for number in range(self._length)]

    def _tell_unequal(self) -> None:
        """Warn, once, if the micro-batches that were used up are not of one size on all ranks."""
        sizes, ranks = self._all_sizes(), self._cutting.ctx.data_size
        own = [mine for mine, _ in sizes if mine is not None]
        equal = len(set(own)) == 1 and all(total in (None, own[0] * ranks) for _, total in sizes)
        if equal or len(own) < len(sizes):
            return
        self._cutting.told = True
        everyone = listed(total for _, total in sizes if total is not None)
        warnings.warn(
            message(
                "accumulate_grads: mean losses divided by len(window) are not the mean over the samples of this window",
                found=f"samples per micro-batch: {listed(own)} on rank {self._cutting.ctx.rank}"
                + (f"; {everyone} on all ranks" if everyone else ""),
                expected="a factor that counts samples, where batches differ in size",
                fix="loss = cross_entropy(model(x), y) * window.share",
            ),
            stacklevel=3,
        )

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
        is_open: Whether the modules are in the middle of it.
        carried: Micro-batches left over by the last epoch, with their sizes, for the first window of the next.
        began: `windows` and the number of carried micro-batches when the running epoch began.
        told: Whether the user was told that `len(window)` is no normaliser for batches of different sizes.
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
    is_open: bool = False
    carried: list[tuple[B, Size | None]] = field(default_factory=list)
    began: tuple[int, int] | None = None
    told: bool = False

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
        """
        if self.current is not None and not self.current.used_up:
            raise unfinished(self.current)
        if self.carried:
            raise ContractError(
                "accumulate_grads: micro-batches that are carried over cannot be saved",
                found=f"{len(self.carried)} of the last epoch, in memory, of a loader that cannot read them again",
                expected='a loader of weft.shard_data, or remainder="step"',
                fix="loader, ctx = weft.shard_data(loader, ctx)  # before accumulate_grads",
            )
        return {"loader": batches(), "windows": self.windows}

    def begin_window(self, window: int) -> None:
        """Tell the modules that gradients are kept from now on."""
        if window == self.handed_out:
            self.is_open = True
            for sync in self.syncs:
                sync.begin_window()

    def last_backward(self, window: int) -> None:
        """Tell the modules that the next backward pass is the window's last."""
        if window == self.handed_out:
            for sync in self.syncs:
                sync.last_backward()

    def end_window(self, window: int, *, left: bool = False) -> None:
        """Tell the modules that the window is over, unless they know, or a later window has taken over.

        What a user keeps of an earlier window may be collected at any time, on one rank only.
        """
        if window == self.handed_out and self.is_open:
            self.is_open = False
            # Several modules are reduced in the order of their backward passes, which a rank that skipped them does not
            # know; so all ranks have to have skipped the same ones.
            owing = [number for number, sync in enumerate(self.syncs) if getattr(sync, "owes", False)]
            if len(self.syncs) > 1 and owing and not left:
                self.ctx.agree(
                    "accumulate_grads: modules without a backward pass in the last micro-batch", {"modules": owing}
                )
            for sync in self.syncs:
                sync.end_window(left=left)

    def cut(
        self, batches: Iterator[B], length: int | None, measure: Callable[[B], Size], planned: Planned = None
    ) -> Iterator[Window[B]]:
        """Yield the windows of one pass over `batches`.

        Args:
            batches: What is cut.
            length: How many there are; None: nobody knows.
            measure: The size of the batch that was read last.
            planned: The size of a batch by its number in this pass, if that is known for all ranks beforehand.
        """
        carried, self.carried, self.current = self.carried, [], None
        self.began = began = (self.windows, len(carried))
        left = None if length is None else length + len(carried)
        if left is None or carried:
            planned = None
        sized = ((batch, None if planned is not None else measure(batch)) for batch in batches)
        source = itertools.chain(carried, sized)
        windows, number, done = self.windows, self.handed_out, 0
        try:
            while True:
                size = self.size_of(windows)
                if left is None:  # no length: look ahead to know whether this window is a full one
                    ahead = list(itertools.islice(source, size))
                    have, stream = len(ahead), iter(ahead)
                else:
                    have, stream = min(size, left), source
                    left -= have
                first, done = done, done + have
                if have == size or (have and self.remainder == "step"):
                    self.windows = windows = windows + 1
                    self.handed_out = number = self.handed_out + 1
                    known = None if planned is None else _from(first, planned)
                    self.current = window = Window(stream, have, self, known, ahead=have if left is None else 0)
                    yield window
                    window._finish()
                    self.end_window(number, left=True)
                elif have:
                    rest: list[tuple[B, Size | None]] = list(itertools.islice(stream, have))
                    if len(rest) < have:
                        _raise_untrue_length("fewer", "ended in the middle of a window")
                    if planned is not None:
                        rest = [(batch, planned(at)) for at, (batch, _) in enumerate(rest, first)]
                    self.carried = rest if self.remainder == "carry" else []
                if have < size:
                    break
            for _ in source:  # asked once more, the loader notices that its epoch is over
                _raise_untrue_length("more", "went on after its last window")
        finally:
            self.end_window(number, left=True)
            if self.began is began:
                self.began = None


def _from(first: int, planned: Callable[[int], Size]) -> Callable[[int], Size]:
    return lambda number: planned(first + number)


def _raise_untrue_length(how_many: str, what: str) -> NoReturn:
    raise ContractError(
        f"accumulate_grads: the loader {what}",
        found=f"{how_many} batches than len(loader)",
        expected="a loader that yields as many batches as its length says, or has no length",
        fix="def __len__(self): return ...  # the true number of batches",
    )


def unfinished(window: Window[Any]) -> ContractError:
    """What a save in the middle of a window raises."""
    return ContractError(
        "accumulate_grads: a window in progress cannot be saved, for its gradients cannot",
        found=f"{window.begun} of {len(window)} micro-batches were read, and the inner loop has not ended",
        expected="a save between two windows, after optimizer.step()",
        fix="leave `for batch in window` first; after a break: for _ in window: pass  # leaves the rest out",
    )


def check_steps(steps: object, what: str) -> None:
    """Raise if this is no number of micro-batches.

    Raises:
        ValueError: The text says what it has to be.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise value_error(
            f"accumulate_grads: {what} = {steps!r} cannot be used",
            found=repr(steps),
            expected="a whole number >= 1",
            fix="weft.accumulate_grads(model, loader, ctx, steps=4)",
        )
