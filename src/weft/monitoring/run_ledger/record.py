"""`ledger`: what happened in each step of a run, so that two runs can be compared.

[Note: what it costs] One look at the memory of the parameters, and one all-reduce of some hundred numbers, which is
waited for in the next call: nothing waits for the device, or for other ranks, in the step itself.

[Note: words as numbers] Exact sums are numbers of 64 bits. Their halves travel as float64, which adds up the halves of
2**20 ranks exactly, beside the numbers with a fraction.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import nn

from weft.checks import check_choice, check_count
from weft.collectives import gather_objects
from weft.collectives.primitives import name_lost_peer, wait_for_collective
from weft.context import DistContext
from weft.contract import offered, part_axes
from weft.engines.torch.reducing.strategy import Strategy
from weft.engines.torch.steps.skip import SkippingStep
from weft.errors import NotSynchronized, listed
from weft.monitoring.log_start import program_facts
from weft.monitoring.run_ledger.file import write_line
from weft.monitoring.run_ledger.parameter_sums import ParameterSums
from weft.monitoring.run_ledger.samples import SampleSums
from weft.monitoring.values import numbers_of
from weft.precision.policies import PrecisionOffer
from weft.tensors.checksums import begin_reading
from weft.tensors.dtensor import local
from weft.tensors.rng_state import RngState, generator_state, is_generator

Number = torch.Tensor | float
# Of a program that `weft ledger check` runs again: where its ledger is written, and after how many steps it ends.
REPLAY: ContextVar[tuple[Path, int] | None] = ContextVar("REPLAY", default=None)


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
    adds a line to `ledger.jsonl` in the folder: digests of the samples and of their contents, their number and that of
    the tokens, the numbers in the groups of optimizers, loss and norm of the gradients, digests of the random states,
    and for each unit of the parameters (`blocks.3`) an exact sum over all bits, in which each element has a weight for
    its place in the whole tensor. All of these but the random states are independent of the number of ranks and of the
    strategy, up to the rounding of what was computed; so for each unit there is a norm as well, in every eighth step or
    so.

    Each step is written in the next call, or by `close`: use it in a `with` statement. A resumed run adds to the file,
    and steps that are computed again count as they were recorded last.

    Replicas that should be equal are compared each time. Their difference is reported by the next call, on all ranks;
    strategies, which compare them now and then, leave that to the ledger.

    Changes: the file. The loader of `shard_data` has its batches looked at when it gives them.
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
    for name, count in (("every", every), ("parameters_every", parameters_every)):
        check_count("ledger", name, count, fix=fix)
    check_choice("ledger", "drift", drift, ("raise", "warn"), fix=fix)
    if not ctx.world.pretended:
        ctx.require_collective("ledger")
    return Ledger(objects, Path(folder), ctx, (every, parameters_every), drift)


class Ledger:
    """Records steps; made by `ledger`."""

    def __init__(
        self, objects: Mapping[str, Any], folder: Path, ctx: DistContext, every: tuple[int, int], drift: str
    ) -> None:
        self._ctx, self._drift, (self._every, self._parameters_every) = ctx, drift, every
        place: tuple[Path, float] = REPLAY.get() or (folder, math.inf)
        self._folder, self._left = place
        self._modules = {name: each for name, each in objects.items() if isinstance(each, nn.Module)}
        self._optimizers = {name: each for name, each in objects.items() if isinstance(each, torch.optim.Optimizer)}
        self._generators = [each for each in objects.values() if is_generator(each)]
        self._parameters, self._samples = ParameterSums(self._modules, ctx), SampleSums(objects, ctx.device)
        parts = [part for module in self._modules.values() for part in module.modules()]
        self._strategies = [strategy for part in parts for strategy in offered(part, Strategy)]
        self._compare_weights_by_strategies(allowed=False)  # they would raise before `drift` is looked at
        self._writes = ctx.is_main and (ctx.replicas is None or ctx.replicas.place == 0)
        self._pending: Callable[[], None] | None = None  # writes the last step when its numbers are there
        self._has_started = False
        same = {axis for axis, place in ctx.coordinates.items() if place}  # of ranks with the same samples one counts
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
        self, step: int, *, loss: Number | None = None, grad_norm: Number | None = None, tokens: int = 0
    ) -> None:
        """Record a step, together with all ranks.

        Changes: the file: the step before is written. Collectives: one all-reduce of a few numbers, which the next call
        waits for.

        Args:
            step: Number of the step of the optimizer, the same on all ranks. One that goes back, as after `restore`,
                removes those from it on.
            loss: What the mean over the ranks is the loss of, as for `weft.log`: the sum of `loss * window.share`, or
                the loss itself if it is the same on all ranks.
            grad_norm: As `clip_grads` returns it.
            tokens: Of this rank, if they are counted.

        Raises:
            ValueError: `step` is not a whole number >= 0.
            NotSynchronized: On all ranks: replicas differed in the step before, with `drift="raise"`.
            PeerError: Another rank failed.
        """
        check_count(
            "ledger", "step", step, least=0, fix="record(step, loss=loss)  # the number of the optimizer's step"
        )
        if self._ctx.world.pretended:
            return
        self._finish()
        samples, count = self._samples.take()
        if step % self._every == 0:
            self._pending = self._send(step, samples, count, tokens, {"loss": loss, "grad_norm": grad_norm})
            self._left -= 1
        if not self._left:
            self.close()
            sys.exit(0)

    def _send(
        self, step: int, samples: torch.Tensor, count: int, tokens: int, means: Mapping[str, Any]
    ) -> Callable[[], None]:
        """Begin to add up over the ranks what this one knows of a step; the result waits for that, and writes it."""
        ctx, device = self._ctx, self._ctx.device
        none = torch.zeros(3, 0, dtype=torch.int64, device=device), torch.zeros(0, dtype=torch.float64, device=device)
        sums, squares = self._parameters(step) if step % self._parameters_every == 0 else none
        words = torch.cat([samples * self._counts_samples, self._random_state(), sums[:2].flatten()])
        counts = torch.tensor([count * self._counts_samples, tokens * self._counts_tokens], dtype=torch.float64)
        given = {
            name: local(torch.as_tensor(value, dtype=torch.float64).detach()).reshape(1) / ctx.world_size
            for name, value in means.items()
            if value is not None
        }
        floats = [one.to(device) for one in (counts, *given.values())]
        wait = self._add_up(torch.cat([words & 0xFFFFFFFF, words >> 32, *floats, squares]))
        skipping = [offer for each in self._optimizers.values() for offer in offered(each, SkippingStep)]
        rates, skipped = self._rates(), any(offer.skipped for offer in skipping)

        def write() -> None:
            numbers = wait()
            halves = zip(numbers[: len(words)], numbers[len(words) : 2 * len(words)], strict=True)
            digest, content, shapes, random, *found = [(int(low) + (int(high) << 32)) % 2**64 for low, high in halves]
            samples, tokens, *rest = numbers[2 * len(words) :]
            units, norms = len(squares), rest[len(given) :]
            line: dict[str, Any] = {"step": step, "rates": rates, "skipped": skipped, "random": f"{random:016x}"}
            line |= dict(zip(given, map(_json, rest), strict=False))
            line |= {"samples": int(samples), "digest": f"{digest:016x}"} if self._samples.are_known else {}
            line |= {"content": f"{content:016x}", "shapes": f"{shapes:016x}"} if shapes else {}
            line |= {"tokens": int(tokens), "sums": [f"{one:016x}" for one in found[:units]]}
            line["norms"] = {at: _json(norms[at] ** 0.5) for at in self._parameters.normed(step) if units}
            drifted = [at for at, zero in enumerate(found[units:]) if zero]
            if self._writes:
                if not self._has_started:
                    write_line(self._folder, {"start": self._facts()})
                write_line(self._folder, line)
            self._has_started = True
            if drifted:
                self._report_drift(step, drifted, sums[2].tolist())

        return write

    def _add_up(self, numbers: torch.Tensor) -> Callable[[], list[float]]:
        """Begin to add numbers up over all ranks; the result waits for them."""
        world, work = self._ctx.world, None
        if world.group is not None:
            work = dist.all_reduce(numbers, group=world.group, async_op=True)
        if numbers.device.type != "cpu":  # the host goes on, and the copy is there long before it is looked at
            wait_for_collective(work, world)
            return begin_reading(numbers)

        def wait() -> list[float]:
            with name_lost_peer("ledger", world):
                wait_for_collective(work, world, on_cpu=True)
            found: list[float] = numbers.tolist()
            return found

        return wait

    def _rates(self) -> dict[str, float | str]:
        """The numbers in the groups of optimizers."""
        return {
            f"{option} of group {at} of {name}": _json(number)
            for name, optimizer in self._optimizers.items()
            for at, group in enumerate(optimizer.param_groups)
            for option, number in numbers_of({k: v for k, v in group.items() if not isinstance(v, bool)}).items()
        }

    def _random_state(self) -> torch.Tensor:
        """A number for the random states of torch, and of the user's generators, on this rank: int64 [1]."""
        ctx = self._ctx
        state = RngState.capture(ctx.device, ctx.engine)
        parts = [bytes(each.cpu().numpy()) for each in (state.cpu, state.device) if each is not None]
        text = json.dumps([ctx.rank, *map(generator_state, self._generators)]).encode()
        digest = hashlib.blake2b(b"".join([text, *parts]), digest_size=8).digest()
        return torch.tensor([int.from_bytes(digest, "little", signed=True)]).to(ctx.device)

    def _report_drift(self, step: int, units: list[int], mine: list[int]) -> None:
        """Say on all ranks which of them hold other values. Collectives: a gathering."""
        ctx, wrong = self._ctx, []
        told = gather_objects([mine[at] for at in units], ctx)
        for at, values in zip(units, zip(*told, strict=True), strict=True):
            alike: defaultdict[Any, defaultdict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
            for rank, value in enumerate(values):
                place = ctx.coordinates_of(rank)
                alike[tuple(place[axis] for axis in sorted(self._parameters.cut[at]))][value].append(rank)
            groups = [f"on rank {listed(ranks)}" for held in alike.values() if len(held) > 1 for ranks in held.values()]
            wrong.append(f"{self._parameters.units[at]}: one value {', another '.join(groups)}")
        error = NotSynchronized(
            "ledger: replicas of parameters have different values",
            found=f"step {step}: {listed(wrong)}",
            expected="equal parameters, bit for bit, on all ranks that hold the same",
            fix="model, ctx = weft.replicate(model, ctx)  # or weft.fully_shard, weft.zero_partition",
        )
        if self._drift == "raise":
            raise error
        if self._drift == "warn":
            warnings.warn(str(error), stacklevel=5)
        self._drift = "warned"

    def close(self) -> None:
        """Write the last step, which all ranks wait for; a second call does nothing.

        Raises:
            NotSynchronized: As for a call.
            PeerError: Another rank failed.
        """
        self._samples.close()
        self._compare_weights_by_strategies(allowed=True)
        self._finish()

    def _compare_weights_by_strategies(self, *, allowed: bool) -> None:
        for strategy in self._strategies:
            strategy.compares_weights = allowed

    def _finish(self) -> None:
        """Write the step before; see `_send`."""
        write, self._pending = self._pending, None
        if write is not None:
            write()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._ctx.world_size > 1:  # the other ranks may never come
            self._pending = None
        self.close()

    def _facts(self) -> dict[str, Any]:
        """What the program is that records steps."""
        ctx, modules = self._ctx, list(self._modules.values())
        parts = [part for module in modules for part in module.modules()]
        policies = [offer.precision for part in parts for offer in offered(part, PrecisionOffer)]
        dtypes = {parameter.dtype for module in modules for parameter in module.parameters()}
        dtypes |= {dtype for one in policies for dtype in (one.compute, one.reduce, one.matmul) if dtype is not None}
        return program_facts(ctx, None, {}) | {
            "threads": torch.get_num_threads(),
            "mesh": ", ".join(f"{name}={size}" for name, size in ctx.axes),
            "seed": ctx.seed,
            "applied": [str(record) for record in ctx.applied if record.name not in ("shard_data", "checkpointable")],
            "rounding": max([torch.finfo(d).eps for d in dtypes if d.is_floating_point], default=torch.finfo().eps),
            "units": self._parameters.units,
        }


def _json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
