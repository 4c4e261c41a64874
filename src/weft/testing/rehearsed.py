"""`assert_rehearsed`: does a rehearsal say what a real run then does?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from weft.context import DistContext
from weft.rehearsal.memory import Memory, Moment
from weft.rehearsal.messages import Message
from weft.rehearsal.rehearse import observe_steps, rehearse
from weft.rehearsal.result import Rehearsal
from weft.rehearsal.simulation.observe import ProgramObserver
from weft.rehearsal.simulation.pretended_tensors import Assumed
from weft.rehearsal.simulation.settled import finish_messages
from weft.testing.ranks import run_ranks

_Facts = tuple[tuple[Moment, ...], tuple[Message, ...], tuple[Message, ...]]


def assert_rehearsed(
    program: Callable[..., Callable[[], object]],
    ranks: int,
    *args: Any,
    mesh: Mapping[str, int] | None = None,
    steps: int = 2,
    assume: Assumed | None = None,
    peak: float = 0.05,
    only: Iterable[int] | None = None,
    timeout_s: float = 120.0,
) -> Rehearsal:
    """Rehearse a program, run it on real ranks, and compare.

    On every rank, bytes at rest by kind and the messages of a step along each axis, their number and bytes, are equal,
    and the peaks of steps differ by `peak` at most. With `local_steps`, both end with an exchange, compared too.
    In the real run a message is waited for when it is made: how long a thread of gloo then holds it is no matter of the
    program.

    Changes: starts processes. Collectives: those of the program.

    Args:
        program: As for `weft.rehearse`; called with `args` after the context.
        ranks: How many.
        args: For `program`.
        mesh: As for `weft.start`.
        steps: How many.
        assume: As for `weft.rehearse`.
        peak: The largest relative difference of peaks.
        only: The ranks to rehearse; default: all.
        timeout_s: Of the real run.

    Returns:
        The rehearsal of the first of these ranks.

    Raises:
        AssertionError: The rehearsal was wrong; the text has both values.
        RanksFailed: The program raised.

    Example:
        >>> def program(ctx):
        ...     model, ctx = weft.replicate(torch.nn.Linear(2, 2), ctx)
        ...     return lambda: model(torch.ones(1, 2)).sum().backward()
        >>> import torch, weft
        >>> assert_rehearsed(program, 2, steps=1, only=[0]).messages[0].kind
        'all_reduce'
    """
    real = run_ranks(_run, ranks, program, args, steps, mesh=mesh, timeout_s=timeout_s, probes="off")
    found = {
        rank: rehearse(lambda ctx: program(ctx, *args), ranks, mesh=mesh, rank=rank, steps=steps, assume=assume)
        for rank in (range(ranks) if only is None else only)
    }
    for rank, one in found.items():
        where, (moments, messages, exchange) = f"rank {rank} of {ranks}", real[rank]
        for what, said, done in (
            ("bytes at rest", _kinds(one.at_rest), _kinds(moments[-1].at_rest)),
            ("messages", _counts(one.messages), _counts(messages)),
            ("messages of an exchange", _counts(one.exchange), _counts(exchange)),
        ):
            assert said == done, f"{where}, {what}: rehearsed {said}, real {done}"
        for rehearsed, then in zip(one.timeline[1:], moments[1:], strict=True):
            now, real_peak = rehearsed.peak.total, then.peak.total
            assert abs(now - real_peak) <= peak * real_peak, (
                f"{where}, peak of {then.label}: rehearsed {_kinds(rehearsed.peak)}, real {_kinds(then.peak)}"
            )
    return next(iter(found.values()))


def _run(ctx: DistContext, program: Callable[..., Any], args: tuple[Any, ...], steps: int) -> _Facts:
    found = ProgramObserver()
    ctx.mesh  # noqa: B018  (made here, as in a rehearsal)
    observe_steps(lambda ctx: program(ctx, *args), ctx, steps, found, finish_messages)
    _, messages, exchange = found.messages(dict(ctx.axes), ctx.local_world_size)
    return found.moments(), messages, exchange


def _kinds(memory: Memory) -> dict[str, int]:
    return {name: value for name, value in vars(memory).items() if isinstance(value, int) and value}


def _counts(messages: tuple[Message, ...]) -> dict[tuple[str, str], tuple[int, int]]:
    return {(each.kind, each.axis): (each.count, each.bytes) for each in messages}
