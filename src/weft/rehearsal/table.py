"""How rehearsals print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.rehearsal.messages import Message
    from weft.rehearsal.result import Rehearsal

__all__ = ["columns", "difference", "ranges", "rehearsal", "size_text"]

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
_HOLDERS = 5


def size_text(num_bytes: float) -> str:
    """Bytes as people read them.

    Example:
        >>> size_text(0), size_text(2**20), size_text(80e9)
        ('0 B', '1 MiB', '74.5 GiB')
    """
    for unit, name in _UNITS:
        if abs(num_bytes) >= unit:
            number = f"{num_bytes / unit:.3g}" if abs(num_bytes) < 999.5 * unit else f"{num_bytes / unit:.0f}"
            return f"{number} {name}"
    return f"{num_bytes:.0f} B"


def columns(rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    """Rows under each other, the first `left` columns to the left and the others to the right."""
    rows = [list(row) for row in rows]
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(max(map(len, rows)))]
    lines = (
        "  ".join(cell.ljust(widths[i]) if i < left else cell.rjust(widths[i]) for i, cell in enumerate(row))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def ranges(ranks: Iterable[int]) -> str:
    """Ranks, those that follow each other as ranges.

    Example:
        >>> ranges([0, 1, 2, 5])
        '0-2, 5'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def rehearsal(result: Rehearsal) -> str:
    """A rehearsal as a table: memory, who holds it, messages, what was assumed, what fails."""
    mesh = ", ".join(f"{name}={size}" for name, size in result.mesh)
    alike = f"; the same on ranks {ranges(result.same_as)}" if len(result.same_as) > 1 else ""
    place = f"rank {result.rank} of {result.world_size} ({mesh}), {result.device}"
    parts = [f"{result.program}: {place}, {result.steps} steps{alike}", _memory(result)]
    holders = result.step_peak.holders[:_HOLDERS]
    if holders:
        rows = [(f"  {each.where or '?'}", each.kind, size_text(each.bytes)) for each in holders]
        parts.append("largest at the peak of a step\n" + columns(rows, left=2))
    if result.messages:
        seconds = f"{result.communication_s:.3g} s (a model: alpha-beta, nothing overlaps)"
        parts.append(f"{_messages(result.messages)}\n  sent in a step: {size_text(result.sent)}, {seconds}")
    for title, texts in (("assumed", result.assumed), ("errors", result.errors)):
        if texts:
            parts.append("\n".join([title, *(f"  {line}" for text in texts for line in text.splitlines())]))
    return "\n\n".join(parts)


def _memory(result: Rehearsal) -> str:
    names = ("parameters", "gradients", "optimizer", "gathered", "activations", "buffers", "other", "total")
    peak = result.step_peak
    rows: list[tuple[str, ...]] = [("tensors", "at rest", "peak of a step")]
    for name in names:
        numbers = int(getattr(result.at_rest, name)), int(getattr(peak, name))
        if any(numbers) or name == "total":
            rows.append((f"  {name}", *map(size_text, numbers)))
    text = columns(rows)
    if peak.where:
        text += f"  at {peak.where}"
    if result.peak.total > peak.total:
        text += f"\nthe peak before the first step is {size_text(result.peak.total)}"
        text += f", at {result.peak.where}" if result.peak.where else ""
    return text


def _messages(messages: Iterable[Message]) -> str:
    rows: list[tuple[str, ...]] = [("messages of a step", "axis", "ranks", "count", "whole", "sent")]
    rows += [
        (f"  {m.kind}", m.axis, str(m.ranks), str(m.count), size_text(m.bytes), size_text(m.sent)) for m in messages
    ]
    return columns(rows, left=2)


def difference(rows: Sequence[tuple[str, int, int]]) -> str:
    """What differs between two rehearsals."""
    if not rows:
        return "no difference"
    found: list[tuple[str, ...]] = [("", "before", "after", "change")]
    for name, before, after in rows:
        text = str if name.endswith("messages") else size_text
        found.append((name, text(before), text(after), f"{after / before - 1:+.0%}" if before else "new"))
    return columns(found)
