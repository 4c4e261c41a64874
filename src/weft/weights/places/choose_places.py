"""Which unit goes where: first as it fits, else with room for those that are streamed.

[Note: what is streamed] Streaming takes room on the first device: a slot for the largest unit that is streamed.
So the choice is tried for every size of slot: what is larger has to stay, and of the rest as much stays as fits.
Of units of one size those that stay lie evenly among those that are streamed, which are read while the former compute.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

from weft.weights.places.place_units import PlaceUnit

STAGING = 2**22  # bytes of the CPU, at most, through which what lies on a disk comes to an accelerator
Places: TypeAlias = dict[int, str]
Fill: TypeAlias = Callable[[Sequence[PlaceUnit], Sequence[int], int], set[int]]


class ChosenPlaces(NamedTuple):
    """Where each unit lies, and the room that streaming takes at some places."""

    places: Places
    room: dict[str, int]


def fast_places(budgets: Mapping[str, int]) -> list[str]:
    """Where units compute: accelerators, or the CPU if there are none."""
    return [place for place in budgets if place not in ("cpu", "disk")] or [next(iter(budgets))]


def choose_places(units: Sequence[PlaceUnit], budgets: Mapping[str, int], balance: str) -> ChosenPlaces | None:
    """Choose a place for each unit; None if there is no room.

    Args:
        units: Of `place_units`: the first one lies on the first device.
        budgets: Bytes by place, fast ones first.
        balance: "sequential", "even" or "low_0": how what fits is spread over the accelerators.
    """
    fast = {place: budgets[place] for place in fast_places(budgets)}
    whole = _balanced(units, fast, balance) or _packed(units, range(len(units)), fast)
    if whole is not None:
        return ChosenPlaces(whole, {})
    slow = {place: size for place, size in budgets.items() if place not in fast}
    # A choice for each size of the slot, and each order in which units are given what is left.
    rooms = sorted({unit.slot for unit in units if not unit.fixed})
    fills = (partial(_by_size, largest_first=True), partial(_by_size, largest_first=False), _in_order)
    tried = (_with_room(units, fast, slow, room, fill) for room in rooms for fill in fills)
    found = [one for one in tried if one is not None]
    if not found:
        return None
    most = _streamed_in_order(units, fast)
    counts = [sum(place in slow for place in one.places.values()) for one in found]
    best = min(
        (sum(units[i].parameters for i, place in one.places.items() if place in slow), count, index)
        for index, (one, count) in enumerate(zip(found, counts, strict=True))
        if count <= max(most, min(counts))
    )
    return found[best[2]]


# -- everything fits ---------------------------------------------------------------------------------


def _packed(
    units: Sequence[PlaceUnit],
    chosen: Iterable[int],
    left: Mapping[str, int],
    must: Container[int] | None = None,
    *,
    in_order: bool = False,
) -> Places | None:
    """Put each of some units into the first place that has room for it; the first unit of all only into the first.

    Args:
        units: All.
        chosen: Which, one after the other.
        left: Room by place.
        must: Those that may not be left out where they fit nowhere; None: all.
        in_order: Return to no place when a unit had to go to a later one.
    """
    left, order, places = dict(left), list(left), Places()
    for i in chosen:
        place = next((place for place in (order[:1] if i == 0 else order) if left[place] >= units[i].size), None)
        if place is not None:
            places[i] = place
            left[place] -= units[i].size
            order = order[order.index(place) :] if in_order and i > 0 else order
        elif must is None or i in must:
            return None
    return places


def _balanced(units: Sequence[PlaceUnit], fast: dict[str, int], balance: str) -> Places | None:
    caps = fast
    if balance == "low_0" and len(fast) > 1:
        first = next(iter(fast))
        caps = fast | {first: min(fast[first], _least(units, [first], fast))}
    if balance != "sequential":
        rest = [place for place in fast if balance == "even" or place != next(iter(fast))] or list(fast)
        least = _least(units, rest, caps)
        caps = caps | {place: min(caps[place], least) for place in rest}
    return _packed(units, range(len(units)), caps, in_order=True)


def _least(units: Sequence[PlaceUnit], places: Sequence[str], caps: dict[str, int]) -> int:
    """The smallest limit for some places with which everything still fits."""

    def fits(limit: int) -> bool:
        tried = caps | {place: min(caps[place], limit) for place in places}
        return _packed(units, range(len(units)), tried, in_order=True) is not None

    return bisect.bisect_left(range(sum(unit.size for unit in units)), True, key=fits)  # noqa: FBT003


# -- some are streamed -------------------------------------------------------------------------------


def _with_room(
    units: Sequence[PlaceUnit], fast: Mapping[str, int], slow: Mapping[str, int], room: int, fill: Fill
) -> ChosenPlaces | None:
    first = next(iter(fast))
    must = {i for i, unit in enumerate(units) if unit.fixed or unit.slot > room}
    free = [i for i in range(len(units)) if i not in must]
    space = (
        sum(fast.values()) - room - sum(unit.parameters * (i in must) + unit.buffers for i, unit in enumerate(units))
    )
    if space < 0:
        return None
    stay = must | fill(units, free, space)
    while True:
        streamed = [i for i in free if i not in stay]
        left = dict(fast) | {first: fast[first] - room - sum(units[i].buffers for i in streamed)}
        places = _packed(units, sorted(stay), left, in_order=True)
        if places is not None:
            break
        # The largest first; what fits nowhere is streamed as well.
        largest = sorted(stay, key=lambda i: (i > 0, i not in must, -units[i].size, i))
        places = _packed(units, largest, left, must)
        if places is None:
            return None
        if places.keys() == stay:
            break
        stay = set(places)
    lies = _on_slow(units, streamed, slow, staged=first != "cpu")
    if lies is None:
        return None
    more = sum(sorted((units[i].slot for i in streamed), reverse=True)[:2])
    used = sum(units[i].size for i, place in places.items() if place == first)
    return ChosenPlaces(places | lies.places, {first: min(more, room + left[first] - used)} | lies.room)


def _by_size(units: Sequence[PlaceUnit], free: Sequence[int], space: int, *, largest_first: bool) -> set[int]:
    """As many units as fit, size by size; of one size, spread over the module."""
    stay: set[int] = set()
    for size in sorted({units[i].parameters for i in free}, reverse=largest_first):
        alike = [i for i in free if units[i].parameters == size]
        count = min(len(alike), space // size) if size else len(alike)
        stay |= {i for at, i in enumerate(alike) if (at + 1) * count // len(alike) > at * count // len(alike)}
        space -= count * size
    return stay


def _in_order(units: Sequence[PlaceUnit], free: Sequence[int], space: int) -> set[int]:
    stay: set[int] = set()
    for i in free:
        if units[i].parameters <= space:
            stay.add(i)
            space -= units[i].parameters
    return stay


def _on_slow(
    units: Sequence[PlaceUnit], streamed: Sequence[int], slow: Mapping[str, int], *, staged: bool
) -> ChosenPlaces | None:
    """Fill the slow places in their order; memory of the CPU also passes on what comes from a disk."""
    left, places = dict(slow), Places()
    for i in streamed:
        place = next((place for place in left if left[place] >= units[i].parameters), None)
        if place is None:
            return None
        places[i] = place
        left[place] -= units[i].parameters
    largest = max((units[i].slot for i, place in places.items() if place == "disk"), default=0)
    if not (staged and largest and "cpu" in slow):
        return ChosenPlaces(places, {})
    staging = min(largest, STAGING, slow["cpu"] // 4)
    while left["cpu"] < staging:
        back = max(i for i, place in places.items() if place == "cpu")
        places[back] = "disk"
        left["cpu"], left["disk"] = left["cpu"] + units[back].parameters, left["disk"] - units[back].parameters
    return ChosenPlaces(places, {"cpu": staging}) if left["disk"] >= 0 else None


def _streamed_in_order(units: Sequence[PlaceUnit], fast: Mapping[str, int]) -> int:
    """How many units are streamed if places are filled in order until one does not fit, beside the largest to come."""
    place, used, sizes = 0, 0, list(fast.values())
    for i, unit in enumerate(units):
        while place < len(sizes):
            to_come = max((one.slot for one in units[i + 1 :]), default=0) if place == 0 else 0
            if used + unit.size + to_come <= sizes[place]:
                used += unit.size
                break
            place, used = place + 1, 0
        if place == len(sizes):
            return len(units) - i
    return 0
