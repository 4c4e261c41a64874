"""What `weft rehearse --json` wrote: memory by kind in each part of the program, messages by axis."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from weft.monitoring.report.charts import Chart, bars, unit_of, with_unit
from weft.monitoring.report.run import Rehearsed

_KINDS = ("parameters", "gradients", "optimizer", "gathered", "activations", "buffers", "other")

_WHEN = (("peak", "peak"), ("at its end", "at_rest"))  # of a part of the program, and the name of the field


def rehearsal_charts(found: Rehearsed) -> list[Chart]:
    """Memory by kind at the peak and the end of each part of the program, and bytes sent in a step by axis."""
    moments = found["timeline"] or [{"label": "program", "peak": found["peak"], "at_rest": found["at_rest"]}]
    parts = [(f"{each['label']}, {when}", each[key]) for each in moments for when, key in _WHEN]
    drawn = [_in_units("Memory by kind", {label: {kind: memory[kind] for kind in _KINDS} for label, memory in parts})]
    sent: dict[str, dict[str, int]] = {}
    for each in found["messages"]:
        kinds = sent.setdefault(f"{each['axis']} ({each['ranks']})", {})
        kinds[each["kind"]] = kinds.get(each["kind"], 0) + each["sent"]
    return [*drawn, _in_units("Sent in a step, by axis", sent)] if sent else drawn


def _in_units(title: str, rows: Mapping[str, Mapping[str, int]]) -> Chart:
    largest = max((sum(row.values()) for row in rows.values()), default=0)
    factor, unit = unit_of("bytes", largest)
    names = dict.fromkeys(name for row in rows.values() for name, value in row.items() if value)
    lines = {name: [row.get(name, 0) / factor for row in rows.values()] for name in names}
    return bars(title, unit, list(rows), lines)


def rehearsal_facts(found: Rehearsed) -> dict[str, str]:
    """What was rehearsed, and what it took for granted."""
    mesh = ", ".join(f"{name}={size}" for name, size in found["mesh"])
    steps = [each["peak"] for each in found["timeline"] if each["label"] != "build"] or [found["peak"]]
    peak = max(steps, key=_total)
    return {
        "program": found["program"],
        "rank": f"{found['rank']} of {found['world_size']:,} ({mesh})",
        "at rest": with_unit("bytes", _total(found["at_rest"])),
        "peak of a step": with_unit("bytes", _total(peak)) + (f", at {peak['where']}" if peak["where"] else ""),
        "sent in a step": with_unit("bytes", sum(each["sent"] for each in found["messages"])),
        **({"assumed": "; ".join(found["assumed"])} if found["assumed"] else {}),
    }


def message_rows(found: Rehearsed) -> Iterable[tuple[str, ...]]:
    """The messages of a step, and of an exchange of `local_steps`: kind, axis, ranks, count, bytes, bytes sent."""
    exchange = [{**each, "kind": f"{each['kind']} (exchange)"} for each in found.get("exchange", ())]
    for each in (*found["messages"], *exchange):
        whole, sent = (with_unit("bytes", each[name]) for name in ("bytes", "sent"))
        yield each["kind"], each["axis"], f"{each['ranks']:,}", f"{each['count']:,}", whole, sent


def _total(memory: Mapping[str, Any]) -> int:
    return sum(int(memory[kind]) for kind in _KINDS)
