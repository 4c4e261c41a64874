"""What a program reads of tensors without values.

[Note: small and large] A number that is read is not known, so a program is rehearsed twice: with small numbers and with
large ones. Small ones fall from one read to the next, 0.01, 0.0099, ...; large ones rise, 99, 99.5, ..., up to 100. So
each new loss is the best in one run and no improvement in the other, and it is on both sides of a usual limit. Truths
are False or True, integers 1, or 2, 3, ...
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

_MOST_READS = 10_000  # at one line, in the few steps of a rehearsal


class Endless(BaseException):
    """A program does not end, as far as can be seen. Not an Exception, which it may catch."""


class Numbers:
    """The numbers that are read in one run; see [Note: small and large].

    Attributes:
        large: Lines that read large numbers; the others read small ones.
        lines: Every line that read a number, the last one at the end, and its kind: int if any is, else float or bool.
        operations: How many there were.
    """

    def __init__(self, large: Iterable[str] = (), most_operations: float = math.inf) -> None:
        self.large = frozenset(large)
        self.lines: dict[str, type[float]] = {}
        self.operations = 0
        self._most_operations = most_operations
        self._reads: Counter[str] = Counter()

    def operation(self) -> None:
        """The program computes.

        Raises:
            Endless: More often than it may.
        """
        self.operations += 1
        if self.operations > self._most_operations:
            raise Endless(f"no end after {self._most_operations:,} operations")

    def read(self, line: str, kind: type[float]) -> float:
        """The next number that a line reads.

        Raises:
            Endless: It reads again and again.
        """
        count = self._reads.total()
        self._reads[line] += 1
        if self._reads[line] > _MOST_READS:
            raise Endless(f"no end after {_MOST_READS:,} reads")
        self.lines[line] = int if self.lines.pop(line, None) is int else kind
        if kind is bool:
            return line in self.large
        if kind is int:
            return 2 + count if line in self.large else 1
        return 100 - 1 / (1 + count) if line in self.large else 1 / (100 + count)


def read_about(numbers: Numbers, line: str) -> tuple[float, float]:
    """About what a line reads in this run, and what it reads in the other one."""
    small, large = {bool: (0, 1), int: (1, 2)}.get(numbers.lines[line], (0.01, 100))
    return (large, small) if line in numbers.large else (small, large)
