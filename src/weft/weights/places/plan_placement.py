"""`plan_placement`: which parts of a module lie on which device, in memory of the CPU or on a disk."""

from __future__ import annotations

import bisect
import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from weft.checks import check_choice, check_module, check_not_lazy
from weft.contract.select_modules import Selection
from weft.errors import listed, type_error, value_error
from weft.weights.places.choose_places import choose_places, fast_places
from weft.weights.places.module_sizes import bytes_of, parse_size
from weft.weights.places.place_units import PlaceUnit, classes_within, place_units

_ENDLESS = 2**62


@dataclass(frozen=True)
class PlacedUnit:
    """Parts that lie in one place.

    Attributes:
        names: Of the parts; several share parameters, or are one part. "" is what lies in no other unit.
        place: A device, "cpu" or "disk".
        num_bytes: Of parameters, tied ones once.
        buffer_bytes: Of buffers, which stay where the unit computes.
    """

    names: tuple[str, ...]
    place: str
    num_bytes: int
    buffer_bytes: int


@dataclass(frozen=True)
class PlacementPlan:
    """Where the parts of a module lie; prints as a table, and can be compared and kept as JSON.

    Attributes:
        units: In the order of the module.
        budgets: Bytes by place, fast ones first; None: no limit.
        room: Bytes by place that streaming takes beside the units.
    """

    units: tuple[PlacedUnit, ...]
    budgets: tuple[tuple[str, int | None], ...]
    room: tuple[tuple[str, int], ...] = ()

    @property
    def computes_on(self) -> tuple[str, ...]:
        """Where units compute; those that lie elsewhere are streamed to the first."""
        return tuple(fast_places(dict.fromkeys((place for place, _ in self.budgets), 0)))

    @property
    def streamed(self) -> tuple[PlacedUnit, ...]:
        """The units that lie elsewhere than they compute."""
        return tuple(unit for unit in self.units if unit.place not in self.computes_on)

    def used(self) -> dict[str, int]:
        """Bytes that each place needs, room for streaming included."""
        used = {place: 0 for place, _ in self.budgets} | dict(self.room)
        for unit in self.units:
            used[unit.place] += unit.num_bytes
            used[unit.place if unit.place in self.computes_on else self.computes_on[0]] += unit.buffer_bytes
        return used

    def unit_of(self, name: str) -> PlacedUnit:
        """The unit of a part, parameter or buffer, by its name."""
        found = [(len(one), unit) for unit in self.units for one in unit.names if f"{name}.".startswith(f"{one}.")]
        return max(found, key=lambda pair: pair[0])[1] if found else self.units[0]

    def place_of(self, name: str) -> str:
        """Where a part, parameter or buffer lies, by its name."""
        return self.unit_of(name).place

    def check(self, module: nn.Module) -> None:
        """Compare the plan with a module.

        Raises:
            ValueError: It has other parts or sizes, a tied parameter would lie in two places, or a budget is exceeded.
        """
        parts = dict(module.named_modules(remove_duplicate=False))
        unknown = [name for unit in self.units for name in unit.names if name not in parts]
        held: dict[PlacedUnit, list[torch.Tensor]] = {unit: [] for unit in self.units}
        owners: dict[int, PlacedUnit] = {}
        tied: list[str] = []
        for name, parameter in [] if unknown else module.named_parameters(remove_duplicate=False):
            unit = self.unit_of(name)
            held[unit].append(parameter)
            if owners.setdefault(id(parameter), unit) is not unit:
                tied.append(f"{name} and {_said(owners[id(parameter)])}")
        wrong = [
            f"{_said(unit)}: {bytes_of(tensors)} bytes, not {unit.num_bytes}"
            for unit, tensors in held.items()
            if bytes_of(tensors) != unit.num_bytes and not unknown and not tied
        ]
        used, limits = self.used(), dict(self.budgets)
        full = [
            f"{place}: {used[place]} of {limits[place]} bytes" for place in used if used[place] > _number(limits[place])
        ]
        if unknown or tied or wrong or full:
            said = {"no such part": unknown, "tied, in two units": tied, "sizes": wrong, "too much": full}
            raise value_error(
                f"place: the plan does not fit this {type(module).__name__}",
                found="; ".join(f"{what}: {listed(items)}" for what, items in said.items() if items),
                expected="a plan made for this module, with its dtypes",
                fix="plan = weft.weights.plan_placement(model, budgets)",
            )

    def to_json(self) -> str:
        """The plan as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PlacementPlan:
        """The plan that `to_json` made a text of.

        Raises:
            ValueError: The text is none.
        """
        try:
            data: Any = json.loads(text)
            units = tuple(PlacedUnit(**unit | {"names": tuple(unit["names"])}) for unit in data["units"])
            budgets, room = (tuple((place, size) for place, size in data[key]) for key in ("budgets", "room"))
            limits = dict(budgets)
            _ = [limits[place] for place in (*(unit.place for unit in units), *dict(room))]  # each has a budget
        except (ValueError, TypeError, LookupError) as error:
            raise value_error(
                "PlacementPlan.from_json: the text is not a plan",
                found=f"{type(error).__name__}: {error}",
                expected="the text that plan.to_json() returned",
                fix="plan = weft.weights.plan_placement(model, budgets)",
            ) from error
        return cls(units, budgets, room)

    def __str__(self) -> str:
        used = self.used()
        rows = [f"{'place':8} {'bytes':>15}   of"]
        for place, limit in self.budgets:
            rows.append(f"{place:8} {used[place]:15,}   {'any' if limit is None else f'{limit:,}'}")
        rows.append("")
        for unit in self.units:
            size = unit.num_bytes + unit.buffer_bytes
            rows += [f"{unit.place:8} {size:15,}   {_said(unit)}"] if size else []
        rows += [f"{place:8} {size:15,}   (reserved for streamed units)" for place, size in self.room]
        return "\n".join(rows)


def plan_placement(
    module: nn.Module,
    budgets: Mapping[str, int | str | None],
    *,
    units: Selection | None = None,
    balance: Literal["sequential", "even", "low_0"] = "sequential",
    keep: Selection = (),
) -> PlacementPlan:
    """Choose a place for each part of a module, for `weft.place`: arithmetic on names and bytes.

    Units stay whole. What does not fit on the accelerators (without any, into memory of the CPU) lies on a slower
    place and is streamed: read into a slot for the time of its call. As few bytes as possible are streamed, the slot
    counts in the budget of the first place, and what is left of that lets the next unit be read ahead. Budgets are
    for weights: leave room for activations and caches.

    Changes: nothing. Collectives: none.

    Args:
        module: On any device, or on meta, in the dtypes it will have.
        budgets: Bytes by place, in the order in which they are filled: accelerators ("cuda:0"), then "cpu", then
            "disk". A number, a text ("20GB" is 20e9 bytes, "20GiB" 20 * 2**30), or None for no limit.
        units: Parts that are not split, chosen as for `weft.recompute`. Default: the classes that a model of
            transformers names for this; else the blocks in lists of the module, and large layers.
        balance: How a module that fits is spread over several accelerators: "sequential" fills one after the other,
            "even" gives each about the same, "low_0" the first as little as possible.
        keep: Parts that are not streamed; also what the module around them reads without a call.

    Returns:
        The plan, a value.

    Raises:
        TypeError: Not a module, or something given chooses no parts.
        ValueError: There is no room; the text names the bytes that are needed. Or a budget cannot be read, or a
            choice chooses nothing.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
        >>> plan = plan_placement(model, {"cpu": "24MiB", "disk": None})
        >>> [name for unit in plan.streamed for name in unit.names], plan.used()["cpu"] <= 24 * 2**20
        (['0', '2', '4', '6'], True)
    """
    check_module("plan_placement", module, fix="weft.weights.plan_placement(model, budgets)")
    check_not_lazy("plan_placement", module)
    check_choice("plan_placement", "balance", balance, ("sequential", "even", "low_0"))
    limits = _limits(budgets)
    found = place_units(module, units, keep)
    sizes = {place: _number(limit) for place, limit in limits.items()}
    choice = choose_places(found, sizes, balance)
    if choice is None:
        _raise_full(module, found, limits, balance, keep)
    placed = (PlacedUnit(u.names, choice.places[i], u.parameters, u.buffers) for i, u in enumerate(found))
    return PlacementPlan(tuple(placed), tuple(limits.items()), tuple(choice.room.items()))


def _raise_full(
    module: nn.Module, found: list[PlaceUnit], limits: dict[str, int | None], balance: str, keep: Selection
) -> NoReturn:
    """Raise, with the smallest budget of the first place that would do, and units with which a smaller one does."""
    sizes = {place: _number(limit) for place, limit in limits.items()}
    first, least = next(iter(sizes)), _least(found, sizes, balance)
    total, largest = sum(unit.size for unit in found), max(found, key=lambda unit: unit.slot)
    more = [] if "disk" in sizes else ['or "disk": None beside it']
    with contextlib.suppress(ValueError):  # these cannot be units
        classes = classes_within(module, largest)
        less = _least(place_units(module, classes, keep), sizes, balance)
        if less < least:
            more.append(f"or units={classes}: {less} bytes")
    raise value_error(
        "plan_placement: the module does not fit",
        found=f"{total} bytes, the largest unit {largest.slot} ({listed(largest.names) or 'the module'}); "
        f"{', '.join(f'{place}: {size}' for place, size in sizes.items() if size < _ENDLESS)}",
        expected=f"{least} bytes for {first!r}, with the other budgets as they are",
        fix=f"budgets = {limits | {first: least}}" + (f"  # {'; '.join(more)}" if more else ""),
    )


def _least(found: list[PlaceUnit], sizes: dict[str, int], balance: str) -> int:
    """The smallest budget of the first place that would do."""
    first, most = next(iter(sizes)), 2 * sum(unit.size + unit.slot for unit in found)

    def fits(size: int) -> bool:
        return choose_places(found, sizes | {first: size}, balance) is not None

    return bisect.bisect_left(range(most), True, key=fits)  # noqa: FBT003


def _limits(budgets: Mapping[str, int | str | None]) -> dict[str, int | None]:
    """Budgets as numbers.

    Raises:
        ValueError: One cannot be read, or they are out of order.
        TypeError: They are no mapping.
    """
    fix = 'weft.weights.plan_placement(model, {"cuda:0": "20GB", "cpu": "30GB", "disk": None})'
    if not isinstance(budgets, Mapping):
        raise type_error(
            "plan_placement: budgets are bytes by place",
            found=repr(budgets),
            expected='a mapping, such as {"cuda:0": "20GB", "cpu": None}, where None is no limit; or a PlacementPlan',
            fix=fix,
        )
    limits = {place: _limit(size) for place, size in budgets.items()}
    wrong = [f"{place!r}: {size!r}" for place, size in budgets.items() if not _is_place(place) or limits[place] == -1]
    rank = [("cpu", "disk").index(place) if place in ("cpu", "disk") else -1 for place in budgets]
    if wrong or rank != sorted(rank) or not set(budgets) - {"disk"}:
        raise value_error(
            "plan_placement: budgets cannot be used",
            found=listed(wrong) or listed(map(repr, budgets)) or "none",
            expected='bytes by place: accelerators such as "cuda:0", then "cpu", then "disk"',
            fix=fix,
        )
    return limits


def _is_place(place: object) -> bool:
    if not isinstance(place, str):
        return False
    try:
        return place in ("cpu", "disk") or torch.device(place).type not in ("cpu", "meta")
    except RuntimeError:
        return False


def _limit(size: object) -> int | None:
    """A budget in bytes, None for no limit; -1 if it cannot be read."""
    if isinstance(size, str):
        found = parse_size(size.strip().upper().replace("I", "i"))
        return -1 if found is None else found
    return size if size is None or (type(size) is int and size >= 0) else -1


def _said(unit: PlacedUnit) -> str:
    return listed(unit.names) or "(all else)"


def _number(limit: int | None) -> int:
    return _ENDLESS if limit is None else limit
