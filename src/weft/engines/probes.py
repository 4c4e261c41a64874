"""`Probe`: a promise of a transform that is measured while the program runs; and which calls are measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn

Args = tuple[Any, ...]  # of a call: by position
Kwargs = Mapping[str, Any]  # and by name
ProbeMode = Literal["auto", "every", "off"]
PROBE_MODES: tuple[ProbeMode, ...] = get_args(ProbeMode)
_OFTEN = 1024  # calls are probed at each power of two up to it, and then at each multiple of it


class Compared(NamedTuple):
    """Two values that have to be equal but for rounding.

    Attributes:
        what: In words, as in "the gradient of argument 1".
        found: As the ranks compute it together.
        expected: As one process does.
        floor: Differences are relative to the norm of `expected`, or to this if that is smaller.
        limit: The largest relative difference of sound work.
        fix: The line to write if this differs; empty: that of the probe.
        trained: Where the probe is `outside`: the number of an output of the call that is measured. It may differ if
            this output of it needs no gradient.
    """

    what: str
    found: torch.Tensor
    expected: torch.Tensor
    floor: float = 0.0
    limit: float = 1e-5
    fix: str = ""
    trained: int | None = None


class OnlyInParts(RuntimeError):
    """A unit raised in parts, with what one process can compute."""


@runtime_checkable
class Probe(Protocol):
    """Offered by transforms that promise that ranks compute together what one process would.

    In some calls of the units (see `weft.start(probes=...)`) `measure` does the same work twice, and what it returns is
    compared. It may change what a call changes: random states, buffers and plain attributes are put back.

    Attributes:
        units: Parts of the module that are measured, by name.
        group: The ranks that compute a unit together; None: this one.
        spare: The whole module, if it can be measured in place of units whose own forward was not called; else None.
        outside: Whether a unit is measured before its call, and from outside of all its hooks; else after it, where
            strategies that were applied later have gathered its parameters.
        cause: What a difference is likely to come from.
        fix: The line to write then.
    """

    units: Mapping[str, nn.Module]
    group: dist.ProcessGroup | None
    spare: nn.Module | None
    outside: bool
    cause: str
    fix: str

    def equal_inputs(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """What has to be equal on the ranks of the group before a unit computes with it: a nested value."""
        ...

    def alone(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """What one process would return for a call of a unit."""
        ...

    def measure(self, name: str, args: Args, kwargs: Kwargs, *, gradients: bool) -> Iterable[Compared]:
        """Compute as the ranks do together, and as one process would; on all ranks of the group.

        Args:
            name: Of the unit.
            args: Copies of what it was called with.
            kwargs: Likewise.
            gradients: Whether to compare gradients, too.
        """
        ...


@runtime_checkable
class StagesProbe(Probe, Protocol):
    """A probe from outside of a module that works where other ranks have some of its layers, as in a pipeline.

    Attributes:
        in_stages: Calls of the module, without gradients, are all it makes.
    """

    in_stages: bool


@runtime_checkable
class WatchingProbe(Probe, Protocol):
    """A probe that also looks at backward passes, in which something may come from outside of the units."""

    def watching(self, refuse: Callable[[str], None]) -> AbstractContextManager[None]:
        """Around a call of the whole module whose gradients are looked at.

        Args:
            refuse: Raises, with what was found.
        """
        ...


class Schedule:
    """Which calls are measured, and which units in them: the same ones on all ranks that make the same calls.

    Attributes:
        measured: How many calls of each unit have been measured.
        differences: The largest difference of each value that this rank has compared, relative to its limit.
    """

    def __init__(self, mode: ProbeMode, units: Sequence[str]) -> None:
        self.measured: Counter[str] = Counter()
        self.differences: dict[str, float] = {}
        self._mode = mode
        self._turns = {name: number for number, name in enumerate(units)}
        self._calls: Counter[Hashable] = Counter()

    def is_due(self, unit: str, kind: Hashable = None) -> int:
        """Count one more call of a unit: its number if it is measured, else 0.

        All units are in their first call of a kind; later on, one in turn at each call that is probed.
        """
        if self._mode == "off":
            return 0
        self._calls[unit, kind] += 1
        number = self._calls[unit, kind]
        if number == 1 or self._mode == "every":
            return number
        if number & (number - 1) and number % _OFTEN:
            return 0
        probe = number.bit_length() if number <= _OFTEN else 10 + number // _OFTEN
        return number if probe % len(self._turns) == self._turns[unit] else 0

    def note(self, unit: str, differences: Iterable[tuple[str, float]]) -> None:
        """A call of a unit has been measured.

        Args:
            unit: Its name.
            differences: What was compared, and by how many times its limit it differs.
        """
        self.measured[unit] += 1
        for what, times in differences:
            self.differences[what] = max(times, self.differences.get(what, 0.0))
