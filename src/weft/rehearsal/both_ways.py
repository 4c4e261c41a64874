"""Rehearse with small numbers and with large ones: does what a program reads decide what it does?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.errors import ContextError, listed
from weft.rehearsal.distinct_ranks import facts
from weft.rehearsal.result import Rehearsal
from weft.rehearsal.simulation.numbers import Endless, Numbers, read_about
from weft.rehearsal.table import error_line, size_text

Run = Callable[[Numbers], Rehearsal]
_TIMES = 10  # as many operations may a run with other numbers do as the first one; more is a loop that does not end


@dataclass(frozen=True)
class _Way:
    """One run, and what came of it: a result or an error."""

    numbers: Numbers
    found: Rehearsal | None = None
    error: BaseException | None = None

    @property
    def sizes(self) -> dict[str, str]:
        """What the rank holds and sends, as text."""
        one = self.found
        if one is None:
            return {}
        numbers = {"at rest": one.at_rest.total, "in a step": one.step_peak.total, "sent": one.sent, "saved": one.saved}
        return {name: size_text(number) for name, number in numbers.items()}

    def __str__(self) -> str:
        if self.found is not None:
            return ", ".join(f"{size} {name}" for name, size in self.sizes.items())
        if isinstance(self.error, Endless):
            return str(self.error)
        return error_line(self.error)


def both_ways(run: Run) -> Rehearsal:
    """The result of a run, if the numbers that it reads decide nothing; see [Note: small and large].

    A run that ends or fails where another one trains, such as with an error about a large loss, is not the one to
    rehearse. Of two that send the same and differ in memory, such as one that copies the best model and one that finds
    no better one, it is the one that needs more. `assumed` of the result says so, for each line that reads a number.

    Args:
        run: Rehearses, with these numbers.

    Raises:
        ContextError: Numbers decide what runs, at the lines in the text.
        BaseException: What the program raises, whatever it reads.
    """
    way = _trains(run)
    lines = tuple(way.numbers.lines)
    others = _others(run, way, lines)
    deciding = {line: other for line, other in others.items() if _decides(way, other, line)}
    if deciding:
        raise _undecided(way, deciding)
    trained = [each.found for each in (way, *others.values()) if each.found is not None and not _ends(way, each)]
    found = max(trained, key=lambda each: each.step_peak.total)
    assumed = (*found.assumed, *(_assumed(way, line, others.get(line)) for line in lines))
    return dataclasses.replace(found, saved=max(each.saved for each in trained), assumed=assumed)


def _tried(run: Run, numbers: Numbers) -> _Way:
    try:
        return _Way(numbers, run(numbers))
    except (Exception, SystemExit, Endless) as error:  # noqa: BLE001  (a way that fails is a result, too)
        return _Way(numbers, error=error)


def _trains(run: Run) -> _Way:
    """The first way that trains: the number that is read last before a program fails may be the reason."""
    way = first = _tried(run, Numbers())
    while way.found is None:
        last = next(reversed(way.numbers.lines), None)
        if last is not None and isinstance(way.error, Endless):
            raise _undecided(way, {last: _tried(run, Numbers(way.numbers.large ^ {last}))})
        if last is None or last in way.numbers.large:
            assert first.error is not None
            if first.numbers.lines:
                read = listed(first.numbers.lines)
                first.error.add_note(f"weft: after reads of numbers that are not known, at {read}")
            raise first.error
        way = _tried(run, Numbers(way.numbers.large | {last}))
    return way


def _others(run: Run, way: _Way, lines: tuple[str, ...]) -> dict[str, _Way]:
    """Lines that lead elsewhere if they read the other numbers, small or large, and where."""
    if not lines:
        return {}
    other = _tried(run, Numbers(way.numbers.large ^ set(lines), _TIMES * way.numbers.operations))
    assert way.found is not None
    if other.found is not None and (facts(other.found), other.found.saved) == (facts(way.found), way.found.saved):
        return {}
    if len(lines) == 1:
        return {lines[0]: other}
    half = len(lines) // 2
    return _others(run, way, lines[:half]) | _others(run, way, lines[half:])


def _ends(way: _Way, other: _Way) -> bool:
    """Whether the other one makes fewer steps."""
    return way.found is not None and other.found is not None and other.found.steps < way.found.steps


def _decides(way: _Way, other: _Way, line: str) -> bool:
    """Whether both train and send something else. An integer may be a size, which decides in any case, or an index."""
    is_size = way.numbers.lines[line] is int
    if way.found is None or other.found is None:
        return (is_size and not isinstance(other.error, LookupError)) or isinstance(other.error, Endless)
    return not _ends(way, other) and (is_size or facts(way.found)[2] != facts(other.found)[2])


def _assumed(way: _Way, line: str, other: _Way | None) -> str:
    mine, others = read_about(way.numbers, line)
    text = f"{line}: a number that is read is {mine}"
    if other is not None and (other.found is None or _ends(way, other)):
        return f"{text}; with {others}, {'training ends' if other.error is None else other}"
    pairs = [] if other is None else [(size, other.sizes[name], name) for name, size in way.sizes.items()]
    differ = ", ".join(f"{one} or {another} {name}" for one, another, name in pairs if one != another)
    return f"{text} or {others}, with {f'{differ}: the larger is in the table' if differ else 'the same result'}"


def _undecided(way: _Way, deciding: Mapping[str, _Way]) -> ContextError:
    found, (first, *_) = [], deciding
    for line, other in deciding.items():
        mine, others = read_about(way.numbers, line)
        found.append(f"{line} reads a number: with {mine}, {way}; with {others}, {other}")
    value = read_about(way.numbers, first)[0]
    return ContextError(
        "rehearse: a number that the program reads decides what it does, and is not known",
        found="\n".join(found),
        expected="numbers that do not change what is sent, or one that is provided",
        fix=f'weft.rehearse(..., assume={{"{first}": {value}}}), or --assume {first}={value}',
    )
