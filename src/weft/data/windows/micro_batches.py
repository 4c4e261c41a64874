"""The micro-batches of one window: read one after the other, or ahead, and their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NoReturn, TypeVar

from weft.data.loader_copy import Size
from weft.errors import ContractError

B = TypeVar("B")
Planned = Callable[[int], Size] | None


@dataclass(eq=False)
class WindowBatches(Generic[B]):
    """What a window reads from.

    Attributes:
        source: The micro-batches, each with its size; None: see `planned`.
        length: How many there are.
        planned: The size of a batch by its number in the pass, if that is known for all ranks beforehand.
        ask: Raises if the sizes of all ranks' batches are not what a share is computed from.
        first: Number of the first one in the pass.
        looked_at: How many were taken from the loader before the window was made.
        given: How many were handed out, or skipped.
        running: Whether the loop over them is running.
    """

    source: Iterator[tuple[B, Size | None]]
    length: int
    planned: Planned = None
    ask: Callable[[], None] | None = None
    first: int = 0
    looked_at: int = 0
    given: int = 0
    running: bool = False
    _ahead: list[B] = field(default_factory=list)
    _ahead_from: int = 0  # number of the one that was read ahead first
    _sizes: list[Size | None] = field(default_factory=list)  # of what was read

    @property
    def used_up(self) -> bool:
        """Whether the loop over all of them has ended."""
        return self.given == self.length and not self.running

    @property
    def taken(self) -> int:
        """How many were taken from the loader."""
        return max(len(self._sizes), self.looked_at)

    @property
    def begun(self) -> int:
        """How many were used, or read ahead."""
        return len(self._sizes)

    @property
    def kept_all(self) -> bool:
        """Whether all of them were read ahead, and are kept."""
        return len(self._ahead) == self.length

    def next(self) -> B:
        """Hand out the next one."""
        at = self.given - self._ahead_from
        batch = self._ahead[at] if 0 <= at < len(self._ahead) else self._read()
        self.given += 1
        self._let_go()
        return batch

    def read_all(self) -> list[B]:
        """Read those that are left, and keep them; all that were read ahead."""
        if not self._ahead:
            self._ahead_from = self.given
        self._ahead += [self._read() for _ in range(self.length - self.begun)]
        return self._ahead

    def skip(self) -> None:
        """Read past those that are left."""
        for _ in range(self.length - self.begun):
            self._read()
        self.given = self.length
        self._let_go()

    def _let_go(self) -> None:
        """Keep the loader's iterator no longer than needed: that it is gone shows that the loop over it was left."""
        if self.begun == self.length:
            self.source = iter(())

    def size(self, number: int) -> Size:
        """Samples of one micro-batch, on this rank and on all."""
        return (self.planned(self.first + number) if self.planned else None) or self._sizes[number] or (0, None)

    def sizes(self) -> list[Size]:
        """Of all micro-batches; reads them if the sizes are not known beforehand."""
        if self.planned is None:
            self.read_all()
        return [self.size(number) for number in range(self.length)]

    def _read(self) -> B:
        try:
            batch, size = next(self.source)
        except StopIteration:
            raise_untrue_length("fewer", "ended in the middle of a window")
        self._sizes.append(size)
        return batch


def raise_untrue_length(how_many: str, what: str) -> NoReturn:
    """Raise: the loader yields fewer or more batches than it says.

    Raises:
        ContractError: Always.
    """
    raise ContractError(
        f"accumulate_grads: the loader {what}",
        found=f"{how_many} batches than len(loader)",
        expected="a loader that yields as many batches as its length says, or has no length",
        fix="def __len__(self): return ...  # the true number of batches",
    )
