"""The first step that differs between two ledgers, and what is different in it.

[Note: exact or not] Two programs on the same number and mesh of ranks, with the same transforms, versions, device and
threads compute the same bits, so all that was recorded has to be equal. Between others, random states and exact sums
are left out, and losses and norms may differ by rounding: relative to the largest so far, by 64 units of the coarsest
dtype for each step, and norms of parameters by 1,024, at most by a tenth. Samples, sizes and rates have to be equal
always.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.errors import listed
from weft.monitoring.run_ledger.file import Entry, Recorded, read_ledger

_SAME = ("weft", "torch", "device", "threads", "ranks", "axes", "transforms", "units")  # then results are equal
_TOLD = ("weft", "torch", "python", "commit", "device", "threads", "ranks", "axes", "transforms", "seed")
_NOT_SEEDED = ("numpy", "python")  # by torch's programs, often: then they differ from the first step on
_UNITS_OF_LOSS, _UNITS_OF_NORM, _MOST = 64, 1024, 0.1


@dataclass(frozen=True)
class Comparison:
    """What `compare_ledgers` found.

    Attributes:
        steps: How many steps were compared.
        exact: Whether the last of them had to be equal bit for bit.
        first: The first step that differs; None if there is none.
        differences: What differs in it, a line for each thing, the first of them first.
        notes: What is different in the programs, and what could not be compared.
    """

    steps: int
    exact: bool
    first: int | None
    differences: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        """Lines for people."""
        how = "bit for bit" if self.exact else "within rounding"
        lines = [f"note: {note}" for note in self.notes]
        if self.first is None:
            lines.append(f"no difference in {self.steps:,} steps, compared {how}")
        else:
            lines.append(f"first difference: step {self.first}, compared {how}")
            lines += [f"  {each}" for each in self.differences]
        return "\n".join(lines)


def compare_ledgers(one: str | Path, two: str | Path, *, rounding: bool = False) -> Comparison:
    """Find the first step that differs between two runs; what `weft ledger compare` does.

    Args:
        one: The folder of a run, or its ledger.
        two: That of the other one.
        rounding: Let results differ by rounding although the programs are the same, as for operations that add up in
            any order.

    Raises:
        OSError: There is no ledger.
        ValueError: They have no step in common.
    """
    ours, theirs = read_ledger(one), read_ledger(two)
    found = compare_recorded(ours, theirs, rounding=rounding)
    alone = ours.steps.keys() ^ theirs.steps.keys()
    if not alone:
        return found
    note = f"{len(alone):,} steps are in one of them alone: {_extent(ours)}; {_extent(theirs)}"
    return replace(found, notes=(*found.notes, note))


def compare_recorded(ours: Recorded, theirs: Recorded, *, rounding: bool = False) -> Comparison:
    """As `compare_ledgers`, of what was read; steps that only one has are left out.

    Raises:
        ValueError: They have no step in common.
    """
    steps = sorted(ours.steps.keys() & theirs.steps.keys())
    if not steps:
        raise ValueError(f"no step is in both ledgers: {_extent(ours)}; {_extent(theirs)}")
    largest: dict[str, float] = {}
    states = [run.steps[steps[0]].get("random", {}) for run in (ours, theirs)]
    unseeded = [name for name in _NOT_SEEDED if states[0].get(name) != states[1].get(name)]
    alike = all(ours.starts[steps[0]].get(name) == theirs.starts[steps[0]].get(name) for name in ("ranks", "axes"))
    text = "random states of {} differ from the first step on, as where nobody seeds them: not compared"
    seeds = [text.format(listed(unseeded))] if unseeded and alike else []
    exact, step, found = True, 0, ()
    for number, step in enumerate(steps, 1):
        starts = ours.starts[step], theirs.starts[step]
        exact = not rounding and all(starts[0].get(name) == starts[1].get(name) for name in _SAME)
        unit = max(_float(start.get("rounding")) for start in starts) * (1 + number)
        pair = ours.steps[step], theirs.steps[step]
        found = tuple(_differences(*pair, starts, largest, None if exact else unit, unseeded))
        if found:
            break
    return Comparison(number, exact, step if found else None, found, (*_notes(ours, theirs, step), *seeds))


def _differences(
    one: Entry,
    two: Entry,
    starts: tuple[Entry, Entry],
    largest: dict[str, float],
    least: float | None,
    unseeded: Sequence[str],
) -> Iterator[str]:
    """What differs in a step, in the order of causes.

    Args:
        one: What was recorded of it.
        two: The same of the other run.
        starts: The facts of the programs.
        largest: The largest value of each kind so far, which is updated.
        least: Relative rounding of one unit; None: nothing may differ.
        unseeded: Random states that are not compared.
    """
    if one.get("digest") != two.get("digest") and "digest" in one and "digest" in two:
        yield f"samples: other ones ({_words(one, two, 'samples')})"
    for name in ("samples", "tokens"):
        if one.get(name) != two.get(name) and name in one and name in two:
            yield f"number of {name}: {_words(one, two, name)}"
    yield from _rates(one.get("rates", {}), two.get("rates", {}))
    if one.get("skipped") != two.get("skipped"):
        yield f"skipped by the optimizer: {_words(one, two, 'skipped')}"
    if least is None:
        states = one.get("random", {}), two.get("random", {})
        other = [name for name in states[0] if states[0][name] != states[1].get(name) and name not in unseeded]
        if other:
            yield f"random state: of {listed(other)}"
    for name, text in (("loss", "loss"), ("grad_norm", "norm of the gradients")):
        if name in one and name in two and not _near(one[name], two[name], name, largest, least, _UNITS_OF_LOSS):
            yield f"{text}: {_words(one, two, name)}{_relative(one[name], two[name])}"
    yield from _units(one, two, starts, largest, least)


def _rates(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[str]:
    for group in dict.fromkeys([*one, *two]):
        before, after = one.get(group, {}), two.get(group, {})
        for name in dict.fromkeys([*before, *after]):
            if before.get(name) != after.get(name):
                spoken = "learning rate" if name == "lr" else name
                yield f"{spoken} of group {group}: {before.get(name)} against {after.get(name)}"


def _units(
    one: Entry, two: Entry, starts: tuple[Entry, Entry], largest: dict[str, float], least: float | None
) -> Iterator[str]:
    names: Sequence[str] = starts[0].get("units", [])
    if names != starts[1].get("units", []):
        return
    if least is None:
        sums = one.get("sums", []), two.get("sums", [])
        wrong = {at for at, (a, b) in enumerate(zip(*sums, strict=False)) if a != b}
    else:
        wrong = set()
    norms = one.get("norms", {}), two.get("norms", {})
    for at in norms[0].keys() & norms[1].keys():
        if not _near(norms[0][at], norms[1][at], f"norm {at}", largest, least, _UNITS_OF_NORM):
            wrong.add(int(at))
    if wrong:
        which = listed(names[at] for at in sorted(wrong))
        yield f"parameters: of {len(wrong)} of {len(names)} units: {which}"


def _near(one: Any, two: Any, name: str, largest: dict[str, float], least: float | None, units: int) -> bool:
    """Whether two values are equal, or as near to each other as rounding lets them be."""
    if one == two or least is None or not (isinstance(one, float) and isinstance(two, float)):
        return bool(one == two)
    largest[name] = max(largest.get(name, 0.0), abs(one), abs(two))
    return abs(one - two) <= min(units * least, _MOST) * largest[name]


def _notes(one: Recorded, two: Recorded, step: int) -> tuple[str, ...]:
    """What is different in the programs that recorded a step, and what was not compared."""
    before, after = one.starts[step], two.starts[step]
    notes = [
        f"{name}: {before.get(name)} against {after.get(name)}"
        for name in _TOLD
        if before.get(name) != after.get(name) and name != "transforms"
    ]
    ours, theirs = before.get("transforms", []), after.get("transforms", [])
    names = [", ".join(each.partition("(")[0] for each in these) or "none" for these in (ours, theirs)]
    if names[0] != names[1]:
        notes.append(f"transforms: {names[0]} against {names[1]}")
    else:
        notes += [f"transform: {a} against {b}" for a, b in zip(ours, theirs, strict=True) if a != b]
    if before.get("units") != after.get("units"):
        notes.append("parameters have other names, and were not compared")
    if not ("digest" in one.steps[step] and "digest" in two.steps[step]):
        notes.append("samples were not recorded by both: give the ledger the loader of weft, or call record.saw(batch)")
    return tuple(notes)


def _extent(run: Recorded) -> str:
    return f"{run.folder} has steps {min(run.steps)} to {max(run.steps)}" if run.steps else f"{run.folder} has no step"


def _words(one: Entry, two: Entry, name: str) -> str:
    return f"{one.get(name)} against {two.get(name)}"


def _relative(one: Any, two: Any) -> str:
    if not (isinstance(one, float) and isinstance(two, float)) or not max(abs(one), abs(two)):
        return ""
    return f" ({abs(one - two) / max(abs(one), abs(two)):.1e} of it)"


def _float(value: object) -> float:
    return value if isinstance(value, float) and math.isfinite(value) else 1.2e-7
