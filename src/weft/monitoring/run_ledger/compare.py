"""The first step that differs between two ledgers, and what is different in it.

[Note: exact or not] Two programs on the same mesh of ranks, with the same transforms, versions, device and number of
threads compute the same bits, so all that was recorded has to be equal. Between others, random states and exact sums
are left out, and losses and norms may differ by rounding: relative to the largest so far, by 64 units of the coarsest
dtype for each step, and norms of parameters by 1,024, at most by a tenth. Samples, sizes and rates have to be equal
always.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from weft.errors import listed
from weft.monitoring.run_ledger.file import Entry, Recorded, read_ledger

_SAME = ("versions", "device", "threads", "ranks", "mesh", "applied", "units")  # then results are equal
_TOLD = ("versions", "commit", "device", "threads", "ranks", "mesh", "transforms", "seed")
_UNITS_OF_LOSS, _UNITS_OF_NORM, _MOST = 64, 1024, 0.1
_MISSING = "not recorded"


@dataclass(frozen=True)
class Comparison:
    """What `compare_ledgers` found.

    Attributes:
        steps: How many steps were compared.
        exact: Whether the last of them had to be equal bit for bit.
        first: The first step that differs; None if there is none.
        differences: What differs in it, a line for each thing, in the order of causes.
        notes: What is different in the programs, and what could not be compared.
    """

    steps: int
    exact: bool
    first: int | None
    differences: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line, and a line for each thing that differs."""
        how = f"compared {'bit for bit' if self.exact else 'within rounding'}"
        if self.first is None:
            return f"no difference in {self.steps:,} steps, {how}"
        return "\n  ".join([f"first difference: step {self.first}, {how}", *self.differences])


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
    return compare_recorded(read_ledger(one), read_ledger(two), rounding=rounding)


def compare_recorded(ours: Recorded, theirs: Recorded, *, rounding: bool = False) -> Comparison:
    """As `compare_ledgers`, of what was read."""
    steps = sorted(ours.steps.keys() & theirs.steps.keys())
    if not steps:
        raise ValueError(f"no step is in both ledgers: {_extent(ours)}; {_extent(theirs)}")
    largest: dict[str, float] = {}
    exact, step, number = True, 0, 0
    found: tuple[str, ...] = ()
    for number, step in enumerate(steps, 1):
        starts = ours.starts[step], theirs.starts[step]
        exact = not rounding and all(starts[0].get(name) == starts[1].get(name) for name in _SAME)
        unit = 0.0 if exact else max(start["rounding"] for start in starts) * (1 + number)
        found = tuple(_Pair(ours.steps[step], theirs.steps[step], unit, largest).differences(*starts))
        if found:
            break
    notes = [f"{name}: {_against(*starts, name)}" for name in _TOLD if starts[0].get(name) != starts[1].get(name)]
    if starts[0]["units"] != starts[1]["units"]:
        notes.append("parameters: not compared, they have other names")
    if not ("digest" in ours.steps[step] and "digest" in theirs.steps[step]):
        notes.append("samples: not compared, a ledger had neither a loader of weft nor record.saw(batch)")
    return Comparison(number, exact, step if found else None, found, tuple(notes))


class _Pair(NamedTuple):
    """What two runs recorded of one step.

    Attributes:
        one: Of the first run.
        two: Of the other one.
        unit: Relative rounding that is allowed, in units of the coarsest dtype; 0: all has to be equal.
        largest: The largest value of each kind so far, which is updated.
    """

    one: Entry
    two: Entry
    unit: float
    largest: dict[str, float]

    def differences(self, before: Entry, after: Entry) -> Iterator[str]:
        """What differs, in the order of causes."""
        one, two = self.one, self.two
        exactly = {"digest": "digest of the samples", "samples": "number of samples", "tokens": "number of tokens"}
        exactly |= {"skipped": "skipped by the optimizer"} | ({} if self.unit else {"random": "random state"})
        for name, text in exactly.items():
            if name in one and name in two and one[name] != two[name]:
                yield f"{text}: {_against(one, two, name)}"
        rates = one["rates"], two["rates"]
        for name in dict.fromkeys([*rates[0], *rates[1]]):
            if rates[0].get(name) != rates[1].get(name):
                yield f"{name.replace('lr of', 'learning rate of', 1)}: {_against(*rates, name)}"
        for name, text in {"loss": "loss", "grad_norm": "norm of the gradients"}.items():
            if name in one and name in two and not self._near(one[name], two[name], name, _UNITS_OF_LOSS):
                yield f"{text}: {_against(one, two, name)}"
        if before["units"] == after["units"]:
            sums = enumerate(zip(one["sums"], two["sums"], strict=False))
            wrong = set() if self.unit else {at for at, (a, b) in sums if a != b}
            norms = one["norms"], two["norms"]
            for at in norms[0].keys() & norms[1].keys():
                if not self._near(norms[0][at], norms[1][at], f"norm {at}", _UNITS_OF_NORM):
                    wrong.add(int(at))
            if wrong:
                which = listed(before["units"][at] for at in sorted(wrong))
                yield f"parameters of {len(wrong)} of {len(before['units'])} units: {which}"

    def _near(self, one: Any, two: Any, name: str, units: int) -> bool:
        """Whether two values are equal, or as near to each other as rounding lets them be; a text is not finite."""
        if one == two or isinstance(one, str) or isinstance(two, str):
            return bool(one == two)
        self.largest[name] = max(self.largest.get(name, 0.0), abs(one), abs(two))
        return bool(abs(one - two) <= min(units * self.unit, _MOST) * self.largest[name])


def _extent(run: Recorded) -> str:
    return f"{run.folder} has steps {min(run.steps)} to {max(run.steps)}" if run.steps else f"{run.folder} has no step"


def _against(one: Entry, two: Entry, name: str) -> str:
    return f"{one.get(name, _MISSING)} against {two.get(name, _MISSING)}"
