"""How rehearsals print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.rehearsal.memory import KINDS, Holder, Memory
from weft.rehearsal.messages import Links, Message

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


def error_line(error: BaseException | None) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


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


def memory(at_rest: Memory, step_peak: Memory, peak: Memory) -> str:
    """Bytes by kind between two steps and at the peak of a step, and the peak before the first step if it is higher."""
    rows: list[tuple[str, ...]] = [("tensors", "at rest", "peak of a step")]
    for name in (*KINDS, "total"):
        numbers = int(getattr(at_rest, name)), int(getattr(step_peak, name))
        if any(numbers) or name == "total":
            rows.append((f"  {name}", *map(size_text, numbers)))
    text = columns(rows)
    if step_peak.where:
        text += f"  at {step_peak.where}"
    if peak.total > step_peak.total:
        text += f"\nthe peak before the first step is {size_text(peak.total)}"
        text += f", at {peak.where}" if peak.where else ""
    return text


def holders(found: Sequence[Holder]) -> str:
    """The lines of the program that made the most of a peak."""
    rows = [(f"  {each.where or '?'}", each.kind, size_text(each.bytes)) for each in found[:_HOLDERS]]
    return "largest at the peak of a step\n" + columns(rows, left=2)


def messages(part: str, found: Sequence[Message], links: Links) -> str:
    """The messages of a part of the program, with the bytes that a rank sends and the time of the model."""
    rows: list[tuple[str, ...]] = [(f"messages of {part}", "axis", "ranks", "count", "whole", "sent")]
    rows += [(f"  {m.kind}", m.axis, str(m.ranks), str(m.count), size_text(m.bytes), size_text(m.sent)) for m in found]
    sent, seconds = sum(m.sent for m in found), sum(map(links.seconds, found))
    model = f"{seconds:.3g} s (a model: alpha-beta, nothing overlaps)"
    return f"{columns(rows, left=2)}\n  sent in {part}: {size_text(sent)}, {model}"


def difference(rows: Sequence[tuple[str, int, int]]) -> str:
    """What differs between two rehearsals."""
    if not rows:
        return "no difference"
    found: list[tuple[str, ...]] = [("", "before", "after", "change")]
    for name, before, after in rows:
        text = str if name.endswith("messages") else size_text
        found.append((name, text(before), text(after), f"{after / before - 1:+.0%}" if before else "new"))
    return columns(found)
