"""`ledger`: what happened in each step of a run, so that two runs can be compared.

[Note: what it costs] One look at the memory of the parameters, and one all-reduce of some hundred numbers, which is
waited for in the next call: nothing waits for the device, or for other ranks, in the step itself.

[Note: words as numbers] Exact sums are numbers of 64 bits. Their halves travel as float64, which adds up the halves of
2**20 ranks exactly, beside the numbers with a fraction.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import platform
import struct
import sys
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import nn

from weft.checks import as_number, check_choice, check_count
from weft.collectives import gather_objects
from weft.collectives.primitives import name_lost_peer, wait_for_collective
from weft.context import DistContext
from weft.contract import offered, part_axes
from weft.engines.torch.steps.skip import SkippingStep
from weft.errors import NotSynchronized, listed, message, value_error, warn
from weft.monitoring.log_start import git_commit
from weft.monitoring.run_ledger.exact_sums import number_of
from weft.monitoring.run_ledger.file import LedgerFile, number
from weft.monitoring.run_ledger.parameter_sums import TURNS, ParameterSums
from weft.monitoring.run_ledger.samples import SampleSums
from weft.precision.policies import PrecisionOffer
from weft.tensors.dtensor import local
from weft.tensors.rng_state import RngState, generator_state, is_generator
from weft.version import __version__

_RANDOM = ("torch", "device", "numpy", "python", "generators")
_FLOATS = ("samples", "tokens", "loss", "grad_norm")


@dataclass
class _Replay:
    """A program that runs again: where its ledger is written, and how many steps are left."""

    folder: Path
    steps: int


_replay: ContextVar[_Replay | None] = ContextVar("_replay", default=None)


@contextlib.contextmanager
def replaying(folder: Path, steps: int) -> Iterator[None]:
    """Let ledgers that are made inside be written to another folder, and leave the program after some steps."""
    token = _replay.set(_Replay(folder, steps))
    try:
        yield
    finally:
        _replay.reset(token)


def ledger(
    objects: Mapping[str, Any],
    folder: str | Path,
    ctx: DistContext,
    *,
    every: int = 1,
    parameters_every: int = 1,
    drift: Literal["raise", "warn"] = "raise",
) -> Ledger:
    """Record what happened in each step, so that `weft ledger compare` finds the first that differs between two runs.

    Call what it returns once for each step of the optimizer, right after it and before the scheduler's. The main rank
    adds a line to `ledger.jsonl` in the folder: a digest of the samples, their number and that of the tokens, the
    numbers in the groups of optimizers, loss and norm of the gradients, digests of the random states, and for each unit
    of the parameters (`blocks.3`) an exact sum over all bits, in which each element has a weight for its place in the
    whole tensor. All of these but the random states are independent of the number of ranks and of the strategy, up to
    the rounding of what was computed; so for each unit there is a norm as well, every eighth step.

    Each step is written in the next call, or by `close`: use it in a `with` statement. A resumed run adds to the file,
    and steps that are computed again count as they were recorded last.

    Replicas that should be equal are compared each time. Their difference is reported by the next call, on all ranks.

    Changes: the file. A loader of `shard_data` remembers the numbers of the samples that it gave until the next call.
    Collectives: none here; each call makes one all-reduce of a few numbers, and waits for that of the call before it.

    Args:
        objects: By name, as for `checkpointable`: modules whose parameters are summed, optimizers, random generators of
            your own, and the loader of `shard_data` or `accumulate_grads` that the loop reads. Others do nothing.
        folder: Of the run.
        ctx: The context after all transforms.
        every: Record every so many steps, by their number, and otherwise nothing.
        parameters_every: Sum parameters in every so many steps only.
        drift: What to do if replicas of a parameter differ.

    Returns:
        A function `(step, loss=..., grad_norm=..., tokens=...)`; see `Ledger`.

    Raises:
        ValueError: An option cannot be used.
        ContextError: The context cannot communicate.

    Example:
        >>> import tempfile, weft
        >>> model, ctx = nn.Linear(2, 1), weft.local()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with weft.monitoring.ledger({"model": model, "optimizer": optimizer}, folder, ctx) as record:
        ...         for step in range(1, 3):
        ...             loss = model(torch.ones(4, 2)).square().mean()
        ...             loss.backward()
        ...             optimizer.step()
        ...             record(step, loss=loss)
        ...             optimizer.zero_grad()
        ...     len(Path(folder, "ledger.jsonl").read_text().splitlines())
        3
    """
    fix = 'weft.monitoring.ledger({"model": model}, folder, ctx, every=1, parameters_every=1, drift="raise")'
    check_count("ledger", "every", every, fix=fix)
    check_count("ledger", "parameters_every", parameters_every, fix=fix)
    check_choice("ledger", "drift", drift, ("raise", "warn"), fix=fix)
    if not ctx.world.pretended:
        ctx.require_collective("ledger")
    replay = _replay.get()
    return Ledger(objects, Path(folder) if replay is None else replay.folder, ctx, every, parameters_every, drift)


class _Pending(NamedTuple):
    """A step whose numbers are on their way.

    Attributes:
        step: Its number.
        numbers: Of all ranks, on the CPU, once they are there.
        work: The message; None if there is none to wait for.
        event: When they are there, on an accelerator.
        units: Number of units whose parameters were summed.
        own: The sums of what this rank holds of them.
        given: Which of loss and norm were given.
        skipped: Whether an optimizer skipped the step; None if none would.
        rates: Numbers in the groups of optimizers.
    """

    step: int
    numbers: torch.Tensor
    work: dist.Work | None
    event: torch.Event | None
    units: int
    own: torch.Tensor
    given: tuple[bool, ...]
    skipped: bool | None
    rates: dict[str, dict[str, Any]]


class Ledger:
    """Records steps; made by `ledger`."""

    def __init__(
        self,
        objects: Mapping[str, Any],
        folder: Path,
        ctx: DistContext,
        every: int,
        parameters_every: int,
        drift: Literal["raise", "warn"],
    ) -> None:
        self._ctx, self._every, self._parameters_every, self._drift = ctx, every, parameters_every, drift
        modules = {name: each for name, each in objects.items() if isinstance(each, nn.Module)}
        self._optimizers = {name: each for name, each in objects.items() if isinstance(each, torch.optim.Optimizer)}
        self._generators = [each for each in objects.values() if is_generator(each)]
        self._parameters = ParameterSums(modules, ctx)
        self._samples = SampleSums(objects)
        self._file = LedgerFile(folder) if ctx.is_main and (ctx.replicas is None or ctx.replicas.place == 0) else None
        self._facts = {} if self._file is None else _facts(ctx, modules, self._parameters.units)
        self._pending: _Pending | None = None
        self._last: int | None = None
        self._has_warned = False
        same = {axis for axis, place in ctx.coordinates.items() if place}  # of the ranks with the same samples one counts
        self._counts_samples = not same - set(ctx.data_axes)
        self._counts_tokens = not same - {*ctx.data_axes, *part_axes(ctx)}

    def saw(self, batch: Any) -> None:
        """Look at a batch of a loader whose samples have no numbers, before it is used: one that is not of weft.

        The digest is that of the bytes of each row of its tensors and arrays, in any order.

        Changes: nothing. Collectives: none.

        Args:
            batch: Of this rank, one row per sample; each micro-batch of a window.
        """
        if not self._ctx.world.pretended:
            self._samples.see(batch)

    def __call__(
        self,
        step: int,
        *,
        loss: torch.Tensor | float | None = None,
        grad_norm: torch.Tensor | float | None = None,
        tokens: int = 0,
    ) -> None:
        """Record a step, together with all ranks.

        Changes: the file: the step before is written. Collectives: one all-reduce of a few numbers, which the next call
        waits for.

        Args:
            step: Number of the step of the optimizer; larger than the one before.
            loss: What the mean over the ranks is the loss of, as for `weft.log`: the sum of `loss * window.share`, or
                the loss itself if it is the same on all ranks.
            grad_norm: As `clip_grads` returns it.
            tokens: Of this rank, if they are counted.

        Raises:
            ValueError: `step` cannot be used, or does not come after the one before.
            NotSynchronized: On all ranks: replicas differed in the step before, with `drift="raise"`.
            PeerError: Another rank failed.
        """
        fix = "record(step, loss=loss)  # the number of the optimizer's step"
        check_count("ledger", "step", step, least=0, fix=fix)
        if self._last is not None and step <= self._last:
            raise value_error(
                f"ledger: step {step} comes after step {self._last}",
                found=f"record({step}) in a program that has recorded step {self._last}",
                expected="steps whose numbers grow; a program that resumes makes a new ledger in the same folder",
                fix=fix,
            )
        self._last = step
        if self._ctx.world.pretended:
            return
        self._finish()
        samples, count = self._samples.take(self._ctx.device)
        if step % self._every == 0:
            self._pending = self._send(step, samples, (count, tokens, loss, grad_norm))
            self._count_replayed()

    def _count_replayed(self) -> None:
        replay = _replay.get()
        if replay is not None:
            replay.steps -= 1
            if replay.steps == 0:
                self.close()
                sys.exit(0)

    def _send(self, step: int, samples: torch.Tensor, values: tuple[Any, ...]) -> _Pending:
        """Begin to add up over the ranks what this one knows of a step."""
        ctx, device = self._ctx, self._ctx.device
        count, tokens, loss, norm = values
        with_parameters = step % self._parameters_every == 0
        found = self._parameters(step) if with_parameters else self._parameters.nothing()
        random = torch.tensor(self._random_digests(), dtype=torch.int64).to(device)
        words = torch.cat([samples[None] * self._counts_samples, random, found.sums[:2].flatten()])
        counts = [float(count * self._counts_samples), float(tokens * self._counts_tokens)]
        means = [_as_float(value, device) / ctx.world_size for value in (loss, norm)]
        floats = torch.cat([torch.tensor(counts, dtype=torch.float64).to(device), torch.stack(means)])
        numbers = torch.cat([words & 0xFFFFFFFF, words >> 32, floats, found.squares])
        work, event = None, None
        if ctx.world.group is not None:
            work = dist.all_reduce(numbers, group=ctx.world.group, async_op=True)
        if device.type != "cpu":  # the copy follows on the device, and is looked at when it is long there
            if work is not None:
                work.wait()
            work, on_device = None, numbers
            numbers = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
            numbers.copy_(on_device, non_blocking=True)
            event = torch.Event(device=device)
            event.record()
        skipping = [offer for each in self._optimizers.values() for offer in offered(each, SkippingStep)]
        return _Pending(
            step,
            numbers,
            work,
            event,
            len(found.squares),
            found.sums[2],
            (loss is not None, norm is not None),
            any(offer.skipped for offer in skipping) if skipping else None,
            {f"{name} {at}": _rates(group) for name, o in self._optimizers.items() for at, group in _groups(o)},
        )

    def _random_digests(self) -> list[int]:
        """A number for each kind of random state of this rank, int64."""
        ctx = self._ctx
        state = RngState.capture(ctx.device, ctx.engine)
        texts = {
            "torch": bytes(state.cpu.numpy()),
            "device": bytes(0 if state.device is None else state.device.cpu().numpy()),
            "numpy": bytes(state.numpy[1]) + repr(state.numpy[2:]).encode(),
            "python": struct.pack(f"{len(state.python[1])}I", *state.python[1]),
            "generators": json.dumps([generator_state(one) for one in self._generators]).encode(),
        }
        return [_signed(number_of(b"%d " % ctx.rank + texts[name])) for name in _RANDOM]

    def _finish(self) -> None:
        """Wait for the step before, write it, and report replicas that differ."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        ctx = self._ctx
        with name_lost_peer("ledger", ctx.world):
            if pending.work is not None:
                wait_for_collective(pending.work, ctx.world, on_cpu=True)
            if pending.event is not None:
                pending.event.synchronize()
        numbers: list[float] = pending.numbers.tolist()
        length = 1 + len(_RANDOM) + 2 * pending.units
        halves = zip(numbers[:length], numbers[length : 2 * length], strict=True)
        words = [(int(low) + (int(high) << 32)) % 2**64 for low, high in halves]
        samples, random, sums = words[0], words[1 : 1 + len(_RANDOM)], words[1 + len(_RANDOM) :]
        units, zeros = sums[: pending.units], sums[pending.units :]
        floats, squares = numbers[2 * length :][: len(_FLOATS)], numbers[2 * length :][len(_FLOATS) :]
        drifted = [at for at, zero in enumerate(zeros) if zero]
        if self._file is not None:
            if self._facts:
                self._file.start(self._facts)
                self._facts = {}
            values = dict(zip(_FLOATS, floats, strict=True))
            given = [name for name, is_given in zip(("loss", "grad_norm"), pending.given, strict=True) if is_given]
            turn = range(pending.step % TURNS, pending.units, TURNS)
            self._file.step(
                pending.step,
                {
                    **({"digest": f"{samples:016x}", "samples": int(values["samples"])} if self._samples.are_known else {}),
                    **({"tokens": int(values["tokens"])} if values["tokens"] else {}),
                    **{name: number(values[name]) for name in given},
                    **({} if pending.skipped is None else {"skipped": pending.skipped}),
                    "random": {name: f"{one:016x}" for name, one in zip(_RANDOM, random, strict=True)},
                    **({"sums": [f"{one:016x}" for one in units]} if pending.units else {}),
                    **({"norms": {str(at): number(squares[at] ** 0.5) for at in turn}} if turn else {}),
                    **({"drift": [self._parameters.units[at] for at in drifted]} if drifted else {}),
                },
                pending.rates,
            )
        if drifted and not (self._drift == "warn" and self._has_warned):
            self._report_drift(pending, drifted)

    def _report_drift(self, pending: _Pending, units: list[int]) -> None:
        """Say on all ranks which ranks hold other values. Collectives: a gathering."""
        ctx = self._ctx
        place = [[ctx.coordinates[axis] for axis in sorted(self._parameters.cut[at])] for at in units]
        mine = pending.own.tolist()
        told = gather_objects([[*here, mine[at]] for at, here in zip(units, place, strict=True)], ctx)
        wrong = []
        for index, at in enumerate(units):
            ranks: dict[tuple[int, ...], dict[int, list[int]]] = {}
            for rank, theirs in enumerate(told):
                *where, value = theirs[index]
                ranks.setdefault(tuple(where), {}).setdefault(value, []).append(rank)
            groups = [f"rank {listed(one)}" for here in ranks.values() if len(here) > 1 for one in here.values()]
            wrong.append(f"{self._parameters.units[at]}: one value on {', another on '.join(groups)}")
        text: dict[str, str] = {
            "found": f"step {pending.step}: {'; '.join(wrong[:3])}{f'; and {len(wrong) - 3} more' * (len(wrong) > 3)}",
            "expected": "parameters that are equal on all ranks that hold the same, bit for bit, after each step",
            "fix": "weft.check(ctx, model=model)  # says what is missing; or model, ctx = weft.replicate(model, ctx)",
        }
        if self._drift == "raise":
            raise NotSynchronized(message("ledger: replicas of parameters have different values", **text))
        self._has_warned = True
        warn("ledger: replicas of parameters have different values", **text)

    def close(self) -> None:
        """Write the last step, which all ranks wait for; a second call does nothing.

        Raises:
            NotSynchronized: As for a call.
            PeerError: Another rank failed.
        """
        self._samples.close()
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        pending = self._pending
        if error is None or (pending is not None and (pending.work is None or pending.work.is_completed())):
            with contextlib.suppress(*(() if error is None else (Exception,))):
                self.close()
        self._pending = None
        self._samples.close()


def _facts(ctx: DistContext, modules: Mapping[str, nn.Module], units: tuple[str, ...]) -> dict[str, Any]:
    """What the program is that records steps."""
    device = torch.cuda.get_device_name(ctx.device) if ctx.device.type == "cuda" else ctx.device.type
    dtypes = {p.dtype for module in modules.values() for p in module.parameters()}
    for part in (part for module in modules.values() for part in module.modules()):
        for offer in offered(part, PrecisionOffer):
            policy = offer.precision
            dtypes |= {each for each in (policy.compute, policy.reduce, policy.gather, policy.matmul) if each}
    return {
        "started": f"{dt.datetime.now(dt.UTC):%Y-%m-%d %H:%M:%SZ}",
        "weft": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": git_commit(Path(sys.argv[0]).resolve().parent),
        "device": device,
        "threads": torch.get_num_threads(),
        "ranks": ctx.world_size,
        "axes": ", ".join(f"{name}={size}" for name, size in ctx.axes),
        "transforms": [str(record) for record in ctx.applied if record.name not in ("shard_data", "checkpointable")],
        "seed": ctx.seed,
        "rounding": max([torch.finfo(d).eps for d in dtypes if d.is_floating_point], default=torch.finfo().eps),
        "units": list(units),
    }


def _groups(optimizer: torch.optim.Optimizer) -> Iterator[tuple[int, dict[str, Any]]]:
    return iter(enumerate(optimizer.param_groups))


def _rates(group: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers in a group of an optimizer; not those that lie on an accelerator."""
    found: dict[str, Any] = {}
    for name, value in group.items():
        if isinstance(value, tuple) and all(isinstance(one, (int, float)) for one in value):
            found[name] = list(value)
        elif not isinstance(value, bool) and (not isinstance(value, torch.Tensor) or value.device.type == "cpu"):
            known = as_number(value)
            found |= {} if known is None or isinstance(known, bool) else {name: number(known)}
    return found


def _as_float(value: torch.Tensor | float | None, device: torch.device) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return local(value.detach()).reshape(()).to(device, torch.float64)
    return torch.tensor(0.0 if value is None else float(value), dtype=torch.float64).to(device)


def _signed(word: int) -> int:
    return word - 2**64 * (word >= 2**63)
