"""Every error weft raises, all in one form: what is wrong, what was found, what is expected, and a line that fixes it.

    WeftError
    |-- ContextError            facts contradict each other, or a context is used where it may not be
    |   `-- CollectiveRefused   a collective on a context that speaks for one rank only
    |-- ContractError           a transform was used against its rules
    |   |-- AlreadyApplied      ... a second time on the same object
    |   |-- OrderError          ... in an order that would change the numbers
    |   |-- ProbeFailed         ... which probes have measured
    |   |-- StaleContext        ... with a context that misses what was done to the object
    |   |-- NameChanged         ... and changed names, keys or the class of a module
    |   |-- NotSynchronized     gradients that should be reduced over ranks were not
    |   `-- UnusedParameters    parameters that got no gradient although they should
    |-- PeerError               another rank failed, died or did not arrive
    |-- CheckpointError         a checkpoint cannot be written, read or trusted
    `-- MissingExtra            an optional package is not installed

Wrong arguments are plain `ValueError` and `TypeError` with a text of the same form: `value_error`, `type_error`. So are
warnings, which are rare: `warn`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

__all__ = [
    "AlreadyApplied",
    "CheckpointError",
    "CollectiveRefused",
    "ContextError",
    "ContractError",
    "MissingExtra",
    "NameChanged",
    "NotSynchronized",
    "OrderError",
    "PeerError",
    "ProbeFailed",
    "StaleContext",
    "UnusedParameters",
    "WeftError",
    "listed",
    "message",
    "type_error",
    "value_error",
    "warn",
]

_MAX_OFFENDERS = 5


def listed(offenders: Iterable[object]) -> str:
    """Join up to five offenders, then say how many more there are.

    Example:
        >>> listed(["a", "b"])
        'a, b'
        >>> listed(range(8))
        '0, 1, 2, 3, 4 and 3 more'
    """
    items = [str(offender) for offender in offenders]
    shown = ", ".join(items[:_MAX_OFFENDERS])
    hidden = len(items) - _MAX_OFFENDERS
    return f"{shown} and {hidden} more" if hidden > 0 else shown


def message(problem: str, *, found: str, expected: str, fix: str) -> str:
    """Build the text of an error: what is wrong, what was found, the rule, and a line to paste.

    Example:
        >>> print(message("f: n = -1 cannot be used", found="n = -1", expected="n >= 0", fix="f(0)"))
        f: n = -1 cannot be used
          found:    n = -1
          expected: n >= 0
          fix:      f(0)
    """
    return f"{problem}\n  found:    {found}\n  expected: {expected}\n  fix:      {fix}"


def value_error(problem: str, *, found: str, expected: str, fix: str) -> ValueError:
    """A `ValueError` whose text is a `message`."""
    return ValueError(message(problem, found=found, expected=expected, fix=fix))


def type_error(problem: str, *, found: str, expected: str, fix: str) -> TypeError:
    """A `TypeError` whose text is a `message`."""
    return TypeError(message(problem, found=found, expected=expected, fix=fix))


def warn(problem: str, *, found: str, expected: str, fix: str) -> None:
    """Warn at the line of the program that led here, outside weft and torch; the text is a `message`."""
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("weft", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message(problem, found=found, expected=expected, fix=fix), stacklevel=level)


class WeftError(Exception):
    """Base of all errors of this package; the text is a `message` where the three lines are given."""

    def __init__(self, problem: str, *, found: str = "", expected: str = "", fix: str = "") -> None:
        super().__init__(message(problem, found=found, expected=expected, fix=fix) if expected else problem)


class ContextError(WeftError):
    """The context is contradictory, closed, or lacks what was asked of it."""


class CollectiveRefused(ContextError):
    """A collective was called on a context that speaks for some ranks only."""


class ContractError(WeftError):
    """A transform was used against its rules."""


class AlreadyApplied(ContractError):
    """The same transform was applied to the same object before."""


class OrderError(ContractError):
    """Two transforms were applied in an order that would change the numbers."""


class StaleContext(ContractError):
    """The context does not know of a transform that was applied to the object."""


class NameChanged(ContractError):
    """A transform changed parameter names, their order, state_dict keys or the class."""


class NotSynchronized(ContractError):
    """Gradients that should have been reduced over the ranks were not."""


class UnusedParameters(ContractError):
    """Parameters that take part in the reduction got no gradient."""


class ProbeFailed(ContractError):
    """What the ranks compute together is not what one process computes, as a probe has measured."""


class PeerError(WeftError):
    """Another rank failed, died, or did not arrive.

    Attributes:
        rank: The rank of the job to look at first; -1 when it is not known.
        text: What that rank said, or how it was found missing.
    """

    def __init__(
        self, problem: str, *, found: str = "", expected: str = "", fix: str = "", rank: int = -1, text: str = ""
    ) -> None:
        super().__init__(problem, found=found, expected=expected, fix=fix)
        self.rank = rank
        self.text = text


class CheckpointError(WeftError):
    """A checkpoint cannot be written, read or trusted."""


class MissingExtra(WeftError, ImportError):
    """An optional package is needed and not installed; the text names the extra."""
