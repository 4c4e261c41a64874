"""Many rehearsals of one script: its meshes and options, side by side in one table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from weft.errors import value_error
from weft.rehearsal.result import Rehearsal
from weft.rehearsal.table import columns, error_line, size_text

_MARK = "* nothing else in the table needs less memory without sending more, or sends less without needing more"


@dataclass(frozen=True)
class Candidate:
    """One way to run a script.

    Attributes:
        arguments: Of its command line.
        mesh: Of the context; None: as the script has it.
        label: What differs from other choices, "shard=8, batch=16".
    """

    arguments: tuple[str, ...]
    mesh: Mapping[str, int] | None
    label: str


@dataclass(frozen=True)
class Trial:
    """What came of a choice: `found`, or why there is nothing."""

    choice: Candidate
    found: Rehearsal | None = None
    error: Exception | None = None

    @property
    def costs(self) -> tuple[int, int]:
        """Bytes at the peak of a step, and bytes sent in it."""
        assert self.found is not None
        return self.found.step_peak.total, self.found.sent


def candidates(
    arguments: Sequence[str], ranks: int, axes: Sequence[str], options: Mapping[str, Sequence[str]]
) -> list[Candidate]:
    """Every division of the ranks over some axes, with every combination of options.

    `{name}` in an argument stands for the value of the option of this name, or the size of the axis; `{mesh}` stands
    for "replica=8,shard=8". A mesh that no argument mentions is the context's.

    Args:
        arguments: Of the script.
        ranks: How many.
        axes: Names; none: the mesh is not varied.
        options: Names, and the values of each.

    Raises:
        ValueError: An option occurs in no argument, or names an axis.
    """
    text = "\n".join(arguments)
    taken = {"mesh", *axes}
    for name in options:
        if f"{{{name}}}" not in text or name in taken:
            problem = "is the name of an axis, too" if name in taken else "occurs in no argument of the script"
            raise value_error(
                f"rehearse: --vary {name} {problem}",
                found=" ".join(arguments) or "no arguments",
                expected=f"{{{name}}} where the script takes it",
                fix=f"weft rehearse --ranks {ranks} --vary {name}=1,2 train.py --{name} {{{name}}}",
            )
    in_script = any(f"{{{name}}}" in text for name in taken)
    found = []
    meshes: list[dict[str, int]] = list(_divisions(ranks, axes)) if axes else [{}]
    for mesh, values in itertools.product(meshes, itertools.product(*options.values())):
        chosen = dict(zip(options, values, strict=True))
        words = {**{name: str(size) for name, size in mesh.items()}, **chosen}
        label = ", ".join(f"{name}={word}" for name, word in words.items())
        if axes:
            words["mesh"] = ",".join(f"{name}={size}" for name, size in mesh.items())
        filled = tuple(_filled(each, words) for each in arguments)
        found.append(Candidate(filled, mesh if axes and not in_script else None, label))
    return found


def _divisions(ranks: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Every way to write `ranks` as a product of sizes, one per axis."""
    first, *rest = axes
    if not rest:
        yield {first: ranks}
        return
    for size in (size for size in range(ranks, 0, -1) if ranks % size == 0):
        for others in _divisions(ranks // size, rest):
            yield {first: size, **others}


def _filled(argument: str, words: Mapping[str, str]) -> str:
    for name, word in words.items():
        argument = argument.replace(f"{{{name}}}", word)
    return argument


def try_candidate(choice: Candidate, rehearse: Callable[[Candidate], Rehearsal]) -> Trial:
    """Rehearse a choice; what fails, such as heads that an axis cannot divide, is a result, too."""
    try:
        return Trial(choice, rehearse(choice))
    except Exception as error:  # noqa: BLE001  (the table has it)
        return Trial(choice, error=error)


def pareto_front(trials: Iterable[Trial]) -> list[Trial]:
    """Those than which no other needs less memory without sending more, or sends less without needing more."""
    ran = [each for each in trials if each.found is not None]
    return [one for one in ran if not any(_beats(other, one) for other in ran)]


def _beats(one: Trial, other: Trial) -> bool:
    return one.costs != other.costs and all(a <= b for a, b in zip(one.costs, other.costs, strict=True))


def table(trials: Sequence[Trial], limit: float = math.inf) -> str:
    """Trials by the memory of a step, least first; those of `pareto_front` have a mark, and errors are at the end."""
    best = pareto_front(trials)
    ran = sorted((each for each in trials if each.found is not None), key=lambda each: each.costs)
    rows: list[tuple[str, ...]] = [("", "at rest", "peak of a step", "sent in a step", "time (a model)")]
    if limit < math.inf:
        rows[0] += (f"within {size_text(limit)}",)
    for each in ran:
        found = each.found
        assert found is not None
        sizes = map(size_text, (found.at_rest.total, *each.costs))
        row = (f"{'*' if each in best else ' '} {each.choice.label}", *sizes, f"{found.communication_s:.3g} s")
        rows.append((*row, "yes" if each.costs[0] <= limit else "no") if limit < math.inf else row)
    parts = [f"{columns(rows)}\n{_MARK}"] if ran else []
    failed = [f"  {each.choice.label}: {error_line(each.error)}" for each in trials if each.error is not None]
    return "\n\n".join([*parts, *(["\n".join(["failed", *failed])] if failed else [])])
