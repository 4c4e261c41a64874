"""How a stream of micro-batches is split into windows, and how far that has come; see [Note: position in windows]."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from weft.checks import check_count
from weft.data.loader_copy import Size
from weft.data.windows.micro_batches import Planned, WindowBatches, raise_untrue_length
from weft.data.windows.sync import WindowSync
from weft.data.windows.window import Window
from weft.errors import ContractError

B = TypeVar("B")
Steps = int | Callable[[int], int]
Remainder = Literal["step", "drop", "carry"]


@dataclass
class WindowSplitter(Generic[B]):
    """How a stream of micro-batches is split into windows, and how far that has come.

    Attributes:
        steps: As given by the user; the same for the next one.
        sync: What the windows announce to the modules.
        windows: Number of windows so far, over all epochs and runs.
        carried: Micro-batches left over by the last epoch, with their sizes, for the first window of the next.
        first: `windows` when the epoch began in which a run resumes; None: with the next window.
        began: `windows` and the number of carried micro-batches when the running epoch began.
    """

    steps: Steps
    remainder: Remainder
    sync: WindowSync
    windows: int = 0
    carried: list[tuple[B, Size | None]] = field(default_factory=list)
    first: int | None = None
    began: tuple[int, int] | None = None

    def size_of(self, window: int) -> int:
        """Micro-batches in a full window."""
        size = self.steps(window) if callable(self.steps) else self.steps
        check_steps(size, f"steps({window})" if callable(self.steps) else "steps")
        return size

    @property
    def done(self) -> int:
        """Windows of the running epoch that were given."""
        return self.windows - self._begin()[0]

    def _begin(self) -> tuple[int, int]:
        return self.began or (self.windows if self.first is None else self.first, len(self.carried))

    def count(self, batches: int) -> int:
        """Windows of an epoch of so many batches: the running one, or else the next."""
        first, carried = self._begin()
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

    def go_to(self, windows: int, first: int | None = None) -> None:
        """Let the next pass begin with this window, and with nothing carried over; its epoch began with the first."""
        self.windows, self.carried, self.sync.current, self.began = windows, [], None, None
        self.first = first

    def state_between_windows(self, batches: Callable[[], Any]) -> dict[str, Any]:
        """A state made of that of the loader, which knows nothing of windows.

        Raises:
            ContractError: A window has begun, or micro-batches are carried over: they cannot be read again.
        """
        if self.sync.current is not None and not self.sync.current.used_up:
            raise unfinished_window_error(self.sync.current)
        if self.carried:
            raise ContractError(
                "accumulate_grads: micro-batches that are carried over cannot be saved",
                found=f"{len(self.carried)} of the last epoch, in memory, of a loader that cannot read them again",
                expected='a loader of weft.shard_data, or remainder="step"',
                fix='model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=4, remainder="step")',
            )
        return {"loader": batches(), "windows": self.windows}

    def split(
        self,
        batches: Iterator[B],
        length: int | None,
        measure: Callable[[B], Size],
        planned: Planned = None,
        ask: Callable[[], None] | None = None,
    ) -> Iterator[Window[B]]:
        """Yield the windows of one pass over `batches`.

        Args:
            batches: What is split.
            length: How many there are; None: unknown.
            measure: The size of the batch that was read last.
            planned: The size of a batch by its number in this pass, if that is known for all ranks beforehand.
            ask: Called before a share is computed.
        """
        sync = self.sync
        began = self.began = self._begin()
        self.first = None
        carried, self.carried, sync.current = self.carried, [], None
        left = None if length is None else length + len(carried)
        if left is None or carried:
            planned = None
        sized = ((batch, None if planned is not None else measure(batch)) for batch in batches)
        source = itertools.chain(carried, sized)
        windows, number, done = self.windows, sync.handed_out, 0
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
                    sync.handed_out = number = sync.handed_out + 1
                    looked_at = have if left is None else 0
                    micro_batches = WindowBatches(stream, have, planned, ask, first=first, looked_at=looked_at)
                    sync.current = micro_batches
                    yield Window(micro_batches, sync)
                    micro_batches.skip()
                    sync.end_window(number, left=True)
                elif have:
                    rest: list[tuple[B, Size | None]] = list(itertools.islice(stream, have))
                    if len(rest) < have:
                        raise_untrue_length("fewer", "ended in the middle of a window")
                    if planned is not None:
                        rest = [(batch, planned(at)) for at, (batch, _) in enumerate(rest, first)]
                    self.carried = rest if self.remainder == "carry" else []
                if have < size:
                    break
            for _ in source:  # asked once more, the loader notices that its epoch is over
                raise_untrue_length("more", "yielded batches after its last window")
        finally:
            sync.end_window(number, left=True)
            if self.began is began:
                self.began = None


def unfinished_window_error(window: WindowBatches[Any]) -> ContractError:
    """What a save in the middle of a window raises."""
    return ContractError(
        "accumulate_grads: a window in progress cannot be saved, for its gradients cannot",
        found=f"{window.begun} of {window.length} micro-batches were read, and the inner loop has not ended",
        expected="a save between two windows, after optimizer.step()",
        fix="leave `for batch in window` first; after a break: for _ in window: pass  # leaves the rest out",
    )


def check_steps(steps: object, what: str) -> None:
    """Raise if this is no number of micro-batches.

    Raises:
        ValueError: The text says what it has to be.
    """
    fix = "model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=4)"
    check_count("accumulate_grads", what, steps, fix=fix)
