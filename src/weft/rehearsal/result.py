"""What a rehearsal found: frozen values that print, compare, and become JSON."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from weft.errors import value_error
from weft.rehearsal import table
from weft.rehearsal.memory import KINDS, Holder, Memory, Moment
from weft.rehearsal.messages import Links, Message

_FORMAT = "weft rehearsal 1"


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What one rank of a job holds and sends. `print` shows it as a table.

    Attributes:
        program: What was rehearsed: a function's name, or a script and its arguments.
        rank: Which rank this is.
        world_size: Of how many.
        mesh: Axes and their sizes, outermost first.
        device: The pretended one.
        steps: How many steps ran; the optimizer's state exists from the first on.
        at_rest: Between two steps.
        peak: The highest, build of the model included.
        timeline: The build, then each step, then the exchange if there is one.
        setup: Messages before the last step.
        messages: Messages of the last step.
        exchange: Messages of an exchange of `local_steps`, which comes after so many steps; made after the last step.
        saved: Bytes of tensors that the rank writes of a checkpoint; 0 if the program saved none.
        assumed: What the rehearsal could not know, and took for granted.
        links: What the time model was computed with.
        same_as: Ranks that were found, or are known, to hold and send the same, this one included.
    """

    program: str
    rank: int
    world_size: int
    mesh: tuple[tuple[str, int], ...]
    device: str
    steps: int
    at_rest: Memory
    peak: Memory
    timeline: tuple[Moment, ...] = ()
    setup: tuple[Message, ...] = ()
    messages: tuple[Message, ...] = ()
    exchange: tuple[Message, ...] = ()
    saved: int = 0
    assumed: tuple[str, ...] = ()
    links: Links = Links()  # noqa: RUF009  (frozen)
    same_as: tuple[int, ...] = ()

    @property
    def step_peak(self) -> Memory:
        """The highest in a step, or in the exchange of `local_steps` after it; if there were none, the highest."""
        steps = [moment.peak for moment in self.timeline if moment.label != "build"]
        return max(steps, key=lambda memory: memory.total, default=self.peak)

    @property
    def sent(self) -> int:
        """Bytes that the rank sends in the last step."""
        return sum(message.sent for message in self.messages)

    @property
    def communication_s(self) -> float:
        """The modelled time of the last step's messages; see [Note: the time is a model]."""
        return sum(self.links.seconds(message) for message in self.messages)

    def compare(self, other: Rehearsal) -> Difference:
        """What differs in the other one, as a value that prints.

        Example:
            >>> facts = dict(program="train.py", rank=0, world_size=2, mesh=(("data", 2),), device="cpu", steps=2)
            >>> one = Rehearsal(**facts, at_rest=Memory(parameters=2048), peak=Memory(parameters=2048))
            >>> print(one.compare(dataclasses.replace(one, at_rest=Memory(parameters=1024))))
                                  before  after  change
            at rest, parameters    2 KiB  1 KiB    -50%
            at rest, total         2 KiB  1 KiB    -50%
        """
        return Difference(self, other)

    def to_json(self) -> str:
        """As text that `from_json` and `weft report` read."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Rehearsal:
        """The value that `to_json` wrote.

        Raises:
            ValueError: The text is something else.
        """
        try:
            values = json.loads(text)
        except ValueError:
            values = None
        if not isinstance(values, dict) or values.pop("format", None) != _FORMAT:
            raise value_error(
                "Rehearsal.from_json: this is not a rehearsal",
                found=text[:60],
                expected=f'JSON with "format": "{_FORMAT}"',
                fix="weft rehearse --ranks 8 --json rehearsal.json train.py",
            )
        moments = [(each["label"], _memory(each["at_rest"]), _memory(each["peak"])) for each in values["timeline"]]
        for name in ("setup", "messages", "exchange"):
            values[name] = [Message(**each) for each in values.get(name, ())]
        values |= {
            "mesh": [tuple(axis) for axis in values["mesh"]],
            "at_rest": _memory(values["at_rest"]),
            "peak": _memory(values["peak"]),
            "timeline": [Moment(*each) for each in moments],
            "links": Links(**_with_tuples(values["links"])),
        }
        return cls(**_with_tuples(values))

    def __str__(self) -> str:
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh)
        alike = f"; the same on ranks {table.ranges(self.same_as)}" if len(self.same_as) > 1 else ""
        place = f"rank {self.rank} of {self.world_size} ({mesh}), {self.device}"
        memory = table.memory(self.at_rest, self.step_peak, self.peak)
        parts = [f"{self.program}: {place}, {self.steps} steps{alike}", memory]
        if self.step_peak.holders:
            parts.append(table.holders(self.step_peak.holders))
        if self.messages:
            parts.append(table.messages("a step", self.messages, self.links))
        elif self.world_size > 1 and not self.exchange:
            parts.append(f"no messages in step {self.steps}, the last one; more: weft.rehearse(..., steps=...)")
        if self.exchange:
            parts.append(table.messages("an exchange of local_steps", self.exchange, self.links))
        if self.saved:
            parts.append(f"of a checkpoint, this rank writes {table.size_text(self.saved)}")
        if self.assumed:
            parts.append("\n".join(["assumed", *(f"  {line}" for text in self.assumed for line in text.splitlines())]))
        return "\n\n".join(parts)


@dataclass(frozen=True)
class Difference:
    """Two rehearsals side by side. `print` shows what differs."""

    before: Rehearsal
    after: Rehearsal

    @property
    def rows(self) -> tuple[tuple[str, int, int], ...]:
        """What differs: a name, bytes (or a count) before, and after."""
        before, after = self._numbers(self.before), self._numbers(self.after)
        names = dict.fromkeys([*before, *after])
        every = ((name, before.get(name, 0), after.get(name, 0)) for name in names)
        return tuple(row for row in every if row[1] != row[2])

    @staticmethod
    def _numbers(rehearsal: Rehearsal) -> dict[str, int]:
        found: dict[str, int] = {}
        for label, memory in (("at rest", rehearsal.at_rest), ("peak", rehearsal.peak)):
            found |= {f"{label}, {kind}": int(getattr(memory, kind)) for kind in (*KINDS, "total")}
        every = (*(("", each) for each in rehearsal.messages), *(("exchange: ", each) for each in rehearsal.exchange))
        for where, message in every:
            name = f"{where}{message.kind} along {message.axis}"
            found[f"{name}, messages"] = found.get(f"{name}, messages", 0) + message.count
            found[f"{name}, sent"] = found.get(f"{name}, sent", 0) + message.sent
        return {**found, "sent in a step": rehearsal.sent}

    def __str__(self) -> str:
        return table.difference(self.rows)


def _with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    """In place of the lists of JSON."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _memory(values: dict[str, Any]) -> Memory:
    return Memory(**{**values, "holders": tuple(Holder(**each) for each in values["holders"])})
