"""`probe_results`: what the probes of a program have measured so far."""

from __future__ import annotations

from weft.context import DistContext
from weft.contract.marks import marks_of
from weft.engines.probes import Schedule
from weft.errors import listed


def probe_results(ctx: DistContext) -> str:
    """Describe which probes have run, what they have compared, and the largest difference that they found.

    Log it under the name "probes", now and then or at the end, and `weft report` shows it:
    `weft.log({"probes": probe_results(ctx)}, step, ctx, trackers)`. See the page on probes.

    Changes: nothing. Collectives: none; the differences are those that this rank has seen.

    Args:
        ctx: After all transforms, whose objects still exist.

    Returns:
        A line for each transform that measures something. Differences are relative to their limits: above 1,
        `ProbeFailed` was raised. Empty if no transform does.

    Example:
        >>> import torch, weft
        >>> model, ctx = weft.recompute(torch.nn.Sequential(torch.nn.Linear(2, 2)), weft.local(), blocks="*")
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> print(probe_results(ctx))
        recompute(Sequential): 1 call of 1 part measured, nothing found; compared bit for bit: what it returns
    """
    lines = []
    for record in ctx.applied:
        for obj in [one for ref in record.refs if (one := ref()) is not None][:1]:
            offers = [offer for mark in marks_of(obj) if mark.record is record for offer in mark.offers]
            found = [getattr(offer, "schedule", None) for offer in offers]
            measured = [_words(each, ctx.probes) for each in found if isinstance(each, Schedule)]
            lines += [f"{record.name}({type(obj).__name__}): {words}" for words in measured]
    return "\n".join(lines)


def _words(schedule: Schedule, mode: str) -> str:
    calls, parts = schedule.measured.total(), len(schedule.measured)
    if not calls:
        return "probes are off" if mode == "off" else "nothing measured yet"
    worst = max(schedule.differences, key=lambda what: schedule.differences[what])
    times = schedule.differences[worst]
    said = (
        f"{_number(calls, 'call')} of {_number(parts, 'part')} measured, {'FAILED' if times > 1 else 'nothing found'}"
    )
    if not times:
        return f"{said}; compared bit for bit: {listed(schedule.differences)}"
    return f"{said}; largest difference {times:.2g} of its limit ({worst}); compared: {listed(schedule.differences)}"


def _number(count: int, name: str) -> str:
    return f"{count:,} {name}{'s' if count != 1 else ''}"
