"""The first step that differs between two ledgers, and what is different in it.

[Note: exact or not] Two programs on the same mesh of ranks, with the same transforms, versions, device and number of
threads compute the same bits, so all that was recorded has to be equal. Between others, random states and exact sums
are left out, and losses and norms may differ by rounding: relative to the largest so far, by 64 units of the coarsest
dtype for each step, and norms of parameters by 1,024, at most by a tenth. Samples, sizes and rates have to be equal
always.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import listed, value_error
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
        raise value_error(
            "ledger: two runs have no step in common",
            found=f"{_extent(ours)}; {_extent(theirs)}",
            expected="runs whose steps are numbered alike",
            fix="record(step, loss=loss)  # the number of the optimizer's step, which continues in a resumed run",
        )
    largest: dict[str, float] = {}
    found: list[str] = []
    exact, step, number, before, after = True, 0, 0, ours.starts[steps[0]], theirs.starts[steps[0]]
    for number, step in enumerate(steps, 1):
        before, after = ours.starts[step], theirs.starts[step]
        exact = not rounding and all(before.get(name) == after.get(name) for name in _SAME)
        unit = 0.0 if exact else max(before["rounding"], after["rounding"]) * (1 + number)
        units = before["units"] if before["units"] == after["units"] else []
        found = list(_differences(ours.steps[step], theirs.steps[step], units, unit, largest))
        if found:
            break
    notes = [f"{name}: {_against(before, after, name)}" for name in _TOLD if before.get(name) != after.get(name)]
    options = _options(before), _options(after)
    differing = {name: (text, options[1][name]) for name, text in options[0].items() if name in options[1]}
    notes += [f"options of {name}: {a} against {b}" for name, (a, b) in differing.items() if a != b]
    if before["units"] != after["units"]:
        notes.append("parameters: not compared, they have other names")
    if not ("digest" in ours.steps[step] and "digest" in theirs.steps[step]):
        notes.append("samples: not compared, a ledger had neither a loader of weft nor record.saw(batch)")
    return Comparison(number, exact, step if found else None, tuple(found), tuple(notes))


def _differences(one: Entry, two: Entry, units: Sequence[str], unit: float, largest: dict[str, float]) -> Iterator[str]:
    """What differs between two runs in one step, in the order of causes.

    Args:
        one: What the first one recorded.
        two: What the other one recorded.
        units: Names of the units of parameters.
        unit: Relative rounding that is allowed, in units of the coarsest dtype; 0: all has to be equal.
        largest: The largest value of each kind so far, which is updated.

    Yields:
        A text for each thing that differs.
    """

    def near(a: Any, b: Any, name: str, times: int) -> bool:
        if a == b or isinstance(a, str) or isinstance(b, str):  # a text is a number that is not finite
            return bool(a == b)
        largest[name] = max(largest.get(name, 0.0), abs(a), abs(b))
        return bool(abs(a - b) <= min(times * unit, _MOST) * largest[name])

    exactly = {"digest": "digest of the samples", "samples": "number of samples"}
    if not unit or one.get("shapes") == two.get("shapes"):  # on other ranks, batches may be padded to other lengths
        exactly["content"] = "contents of the samples"
    exactly |= {"tokens": "number of tokens", "skipped": "skipped by the optimizer"}
    exactly |= {} if unit else {"random": "random state"}
    for name, text in exactly.items():
        if name in one and name in two and one[name] != two[name]:
            yield f"{text}: {_against(one, two, name)}"
    rates = one["rates"], two["rates"]
    for name in dict.fromkeys([*rates[0], *rates[1]]):
        if rates[0].get(name) != rates[1].get(name):
            yield f"{name.replace('lr of', 'learning rate of', 1)}: {_against(*rates, name)}"
    for name, text in {"loss": "loss", "grad_norm": "norm of the gradients"}.items():
        if name in one and name in two and not near(one[name], two[name], name, _UNITS_OF_LOSS):
            yield f"{text}: {_against(one, two, name)}"
    norms = one["norms"], two["norms"] if units else {}
    both = norms[0].keys() & norms[1].keys()
    wrong = {int(at) for at in both if not near(norms[0][at], norms[1][at], f"norm {at}", _UNITS_OF_NORM)}
    if not unit:
        wrong |= {at for at, (a, b) in enumerate(zip(one["sums"], two["sums"], strict=False)) if a != b}
    if wrong:
        which = listed(units[at] for at in sorted(wrong))
        yield f"parameters of {len(wrong)} of {len(units)} units: {which}"


def _options(start: Entry) -> dict[str, str]:
    """The options of the transforms that were recorded, by transform and what it was applied to."""
    halves = (text.removesuffix(")").partition("; ") for text in start["applied"])
    return {f"{what})": options for what, _, options in halves}


def _extent(run: Recorded) -> str:
    return f"{run.folder} has steps {min(run.steps)} to {max(run.steps)}" if run.steps else f"{run.folder} has no step"


def _against(one: Entry, two: Entry, name: str) -> str:
    return f"{one.get(name, _MISSING)} against {two.get(name, _MISSING)}"
