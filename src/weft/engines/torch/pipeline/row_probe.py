"""A pipeline, measured: two micro-batches through all stages and back, one after the other and as one batch.

What depends on rows of other micro-batches shows in the loss or in a gradient, wherever it is: in a layer, between
layers, in the loss, or in a backward pass alone. No tensor between the stages needs to have its rows in some dimension.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft import torch_internals
from weft.engines.probes import Compared, ProbeMode, Schedule
from weft.engines.torch.pipeline.batch_parts import Inputs, MicroBatches
from weft.engines.torch.pipeline.losses import MicroBatchLoss, Result, batch_loss
from weft.engines.torch.pipeline.outputs import join_rows, row_dims
from weft.engines.torch.pipeline.stage_borders import Borders
from weft.engines.torch.probes.compare import LIMIT, LOW_LIMIT, difference, differing_ranks, largest_over
from weft.engines.torch.probes.no_trace import measured, no_trace, random_kept, zeros_filled
from weft.engines.torch.probes.observed import WithoutDropout
from weft.engines.torch.probes.repeated_hooks import hooks_of_user, hooks_off, quiet_hooks
from weft.engines.torch.probes.same_draws import SameDraws
from weft.errors import ProbeFailed, listed
from weft.tensors.dtensor import local
from weft.tensors.nested import map_tensors, tensors

_FLOOR = 1e-2  # of the largest gradient: some are zero but for rounding, as those of the biases of keys

Compute = Callable[[int, Inputs, Any], tuple[Any, Any]]


class RowProbe:
    """What two micro-batches give, separately and together.

    Attributes:
        dims: The dimension of rows in each tensor that the last layer returns; None if it is not known.
        schedule: Which calls are measured, and what was found.
    """

    def __init__(
        self, mode: ProbeMode, module: nn.Module, borders: Borders, here: Sequence[int], stages: int, *, wide: bool
    ) -> None:
        self._wide = wide  # without autocast: gradients would underflow in float16, whose scale is not theirs
        self.dims: list[int | None] | None = None
        self.schedule = Schedule(mode, ["rows"])
        self._module = module
        self._borders = borders
        self._here = here
        self._stages = stages
        self._is_due = 0
        self._watch = contextlib.ExitStack()
        self._quiet: set[int] = set()

    def begin(self) -> None:
        """A call with gradients begins."""
        self._is_due = self.schedule.is_due("rows")
        if self._is_due:
            self._quiet = self._watch.enter_context(quiet_hooks(self._module))

    def end(self) -> None:
        """The call ends, perhaps with an error."""
        self._watch.close()

    def measure(
        self,
        batches: MicroBatches,
        compute: Compute,
        compute_whole: Callable[[Inputs], MicroBatchLoss | None],
        group: dist.ProcessGroup,
        device: torch.device,
        *,
        is_sum: bool,
    ) -> list[float]:
        """Relative differences, or 0 where there is none but rounding; nothing if this call is not measured.

        Of the gradients in each stage and of the loss, separately and together; of the loss of one micro-batch, with
        all layers on one rank and on several.

        Collectives: one all-gather of two numbers; what leaves stages and comes back, and one all-reduce of a number
        per stage. In the first call, those of `compute_whole`.

        Args:
            batches: Of which the first and the last one are measured; later, half of their rows.
            compute: What a stage gives for a batch and what it has received, with what the last layer has returned;
                the last stage gives a `MicroBatchLoss`.
            compute_whole: The loss of all stages for a batch, if it can be had.
            group: The ranks of the pipeline.
            device: Of this rank.
            is_sum: Whether losses are parts of one sum.

        Raises:
            ProbeFailed: On all ranks: they were given different batches.
        """
        self._watch.close()
        if not self._is_due or len(batches.parts) == 1:
            return []
        _check_same_batch(batches.whole, group, device)
        quiet = self._quiet_everywhere(group, device) if self._is_due == 1 else None

        def compare(half: int | None) -> list[float]:
            runs = _Runs(self._module, self._borders, self._here, self._stages - 1, compute, is_sum=is_sum)
            return self._compare(*batches.ends(half), runs, compute_whole, group, device, quiet)

        worst = compare(None if self._is_due == 1 else self._is_due.bit_length())
        if self._is_due > 1 and any(worst):  # as many labels may count in each micro-batch, but not in its halves
            worst = compare(None)
        return worst

    def _compare(
        self,
        parts: list[Inputs],
        whole: Inputs,
        runs: _Runs,
        compute_whole: Callable[[Inputs], MicroBatchLoss | None],
        group: dist.ProcessGroup,
        device: torch.device,
        quiet: set[int] | None,
    ) -> list[float]:
        in_float32 = torch.autocast(device.type, enabled=False) if self._wide else contextlib.nullcontext()
        if self._wide:
            parts, whole = list(map(_in_float32, parts)), _in_float32(whole)
        with in_float32, measured(recompute=True), no_trace(self._module), zeros_filled(self._module), random_kept():
            with hooks_off(self._module, lambda _, hook: id(hook) in self._quiet):
                apart, together = runs.run(parts, together=False), runs.run([whole], together=True)
            found = [0.0] * (self._stages + 3)
            for stage in self._here:
                found[stage] = _largest(apart.gradients[stage], together.gradients[stage])
            if apart.result is not None and together.result is not None:
                found[-3] = difference(Compared("the loss", together.result.loss, apart.result.loss))
                self.dims = _dims(apart.returned, together.returned[0])
            alone = None
            if quiet is not None:
                with hooks_off(self._module, lambda _, hook: id(hook) in quiet):
                    alone = runs.run_whole(parts[0], compute_whole)
            if alone is not None and apart.losses:
                found[-2] = difference(Compared("the loss", apart.losses[0].mean(), alone.mean()))
            found[-1] = float(runs.observed.low)
            *worst, low = largest_over(group, found, device)
        limit = LOW_LIMIT if low else LIMIT
        self.schedule.note("", zip(_names(self._stages), (relative / limit for relative in worst), strict=True))
        return [relative if relative > limit else 0.0 for relative in worst]

    def _quiet_everywhere(self, group: dist.ProcessGroup, device: torch.device) -> set[int] | None:
        """The hooks that return nothing on any rank, by id; None if ranks have different ones.

        Collectives: up to two all-reduces.
        """
        hooks = hooks_of_user(self._module)
        most, least = largest_over(group, [len(hooks), -len(hooks)], device)
        if most != -least:
            return None
        loud = largest_over(group, [float(id(hook) not in self._quiet) for hook in hooks], device)
        return {id(hook) for hook, returns in zip(hooks, loud, strict=True) if not returns}


def _check_same_batch(inputs: Inputs, group: dist.ProcessGroup, device: torch.device) -> None:
    others = [dist.get_global_rank(group, rank) for rank in differing_ranks(inputs, group, device)]
    if others:
        raise ProbeFailed(
            "pipeline: the ranks of one pipeline were given different batches",
            found=f"other values or shapes on rank {listed(others)} than on {dist.get_global_rank(group, 0)}",
            expected="one batch on all of them: the first stage reads its inputs, and the last one its targets",
            fix="loader, ctx = weft.shard_data(loader, ctx)  # the same batches along the axis of the stages",
        )


def check_rows(worst: Sequence[float]) -> None:
    """Raise if what `RowProbe.measure` has found is no rounding.

    Raises:
        ProbeFailed: On all ranks: what is computed for a row depends on other rows.
    """
    if worst and worst[-1]:
        raise ProbeFailed(
            "pipeline: a value goes from one stage to another past the arguments of the layers",
            found=f"with all layers on one rank, the loss of a micro-batch differs by {worst[-1]:.2g} of its norm",
            expected="layers that are given what they need: no dict, attribute, hook, buffer or counter that layers of "
            "several stages use",
            fix="x, kept = layer(x, kept)  # what a later layer needs goes through those before it",
        )
    pairs = zip(_names(len(worst) - 2), worst, strict=True) if worst else ()
    wrong = [f"{name} by {relative:.2g}" for name, relative in pairs if relative]
    if wrong:
        raise ProbeFailed(
            "pipeline: rows of a batch are mixed, which are computed in micro-batches",
            found=f"two micro-batches, together and apart, differ: {', '.join(wrong)} of their norm",
            expected="rows that depend on no other ones, in layers, loss and backward: no statistics, sorting or sums "
            "over the batch",
            fix='LayerNorm or GroupNorm for each row, or weft.pipeline(..., micro_batches=1, schedule="gpipe")',
        )


def _names(stages: int) -> list[str]:
    gradients = (f"the gradients of stage {number}" for number in range(stages))
    return [*gradients, "the loss", "the loss with all layers on each rank"]


@dataclass
class _ProbeRun:
    """What came of some batches, one after the other.

    Attributes:
        gradients: By stage, of the parameters that this rank trains; their sum over the batches.
        returned: By the last layer, for each batch.
        losses: Of the batches, where the last stage is.
        result: The loss of all of them, there.
    """

    gradients: dict[int, list[torch.Tensor | None]]
    returned: list[Any] = field(default_factory=list)
    losses: list[MicroBatchLoss] = field(default_factory=list)
    result: Result | None = None


class _Runs:
    """Batches through the stages and back, with the same random numbers and buffers."""

    def __init__(
        self, module: nn.Module, borders: Borders, here: Sequence[int], last: int, compute: Compute, *, is_sum: bool
    ) -> None:
        self.observed = WithoutDropout()
        self._draws = SameDraws()
        self._module = module
        self._borders = borders
        self._here = here
        self._last = last
        self._compute = compute
        self._is_sum = is_sum
        self._trained = [p for p in module.parameters() if p.requires_grad and not p.is_meta]
        self._buffers = [
            (buffers, name, held)
            for buffers in map(torch_internals.BUFFERS.of, module.modules())
            for name, held in buffers.items()
            if held is not None and not held.is_meta
        ]

    def run(self, batches: Sequence[Inputs], *, together: bool) -> _ProbeRun:
        """All forwards, and then all backwards."""
        run, ends = _ProbeRun({stage: [] for stage in self._here}), {}
        for number, batch in enumerate(batches):
            with self._modes(together=together):
                self._renew_buffers(first=number == 0)
                for stage in self._here:
                    received = map_tensors(lambda t: t.detach().requires_grad_(), self._borders.receive(None, stage))
                    output, returned = self._compute(stage, batch, received)
                    ends[number, stage] = list(tensors(received)), output
                    if stage < self._last:
                        self._borders.send(None, stage, map_tensors(torch.Tensor.detach, output))
                    else:
                        run.returned.append(map_tensors(torch.Tensor.detach, returned))
        if self._last in self._here:
            losses: list[MicroBatchLoss] = [ends[number, self._last][1] for number in range(len(batches))]
            run.losses = [one._replace(value=one.value.detach()) for one in losses]
            run.result = batch_loss(run.losses, None, is_sum=self._is_sum)
        for number in range(len(batches)):
            for stage in reversed(self._here):
                received, output = ends.pop((number, stage))
                with self.observed, self._draws:
                    back, found = self._gradients(stage, received, output, run.result)
                self._borders.send_back(stage, back)
                own = [None if one is None else local(one) for one in found]
                before = run.gradients[stage] or [None] * len(own)
                run.gradients[stage] = [_sum(a, b) for a, b in zip(before, own, strict=True)]
        self._borders.wait()
        return run

    def run_whole(self, batch: Inputs, compute: Callable[[Inputs], MicroBatchLoss | None]) -> MicroBatchLoss | None:
        """The forward of a batch, with all layers on each rank."""
        with torch.no_grad(), self._modes(together=False):
            self._renew_buffers(first=True)
            return compute(batch)

    @contextlib.contextmanager
    def _modes(self, *, together: bool) -> Iterator[None]:
        with random_kept(), self.observed, self._draws:
            self._draws.begin(together=together)
            yield

    def _renew_buffers(self, *, first: bool) -> None:
        """Let the forward of a batch begin with copies of the buffers that the one before left, or those of the call.

        Backward needs the ones that it had.
        """
        made: dict[int, torch.Tensor] = {}
        for slot, name, held in self._buffers:
            begins = held if first else slot[name]
            if id(begins) not in made:
                made[id(begins)] = begins.clone()
            slot[name] = made[id(begins)]

    def _gradients(
        self, stage: int, received: list[torch.Tensor], output: Any, result: Result | None
    ) -> tuple[list[torch.Tensor], Sequence[torch.Tensor | None]]:
        """Of what a stage has received, and of parameters."""
        if stage == self._last:
            assert result is not None
            ends = [output.value * result.scale.to(output.value.dtype)]
            arriving: Sequence[torch.Tensor] = [torch.ones_like(ends[0])]
        else:
            ends = list(tensors(output))
            arriving = self._borders.receive_back(stage, ends)
        pairs = [(end, given) for end, given in zip(ends, arriving, strict=True) if end.requires_grad]
        inputs = [*received, *self._trained]
        found: Sequence[torch.Tensor | None] = [None] * len(inputs)
        if pairs and inputs:
            outputs, given = zip(*pairs, strict=True)
            found = torch.autograd.grad(outputs, inputs, given, allow_unused=True)
        back = [torch.zeros_like(t) if g is None else g for t, g in zip(received, found, strict=False)]
        return back, found[len(received) :]


def _in_float32(inputs: Inputs) -> Inputs:
    return map_tensors(lambda t: t.float() if t.dtype is torch.float16 else t, inputs)


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    return one if other is None else other if one is None else one + other


def _largest(apart: Sequence[torch.Tensor | None], together: Sequence[torch.Tensor | None]) -> float:
    norms = [float(g.norm()) for g in apart if g is not None]
    floor, worst = _FLOOR * max(norms, default=0.0), 0.0
    for expected, found in zip(apart, together, strict=True):
        like = expected if found is None else found
        if like is not None:
            a, b = (torch.zeros_like(like) if g is None else g for g in (found, expected))
            worst = max(worst, difference(Compared("a gradient", a, b, floor)))
    return worst


def _dims(apart: Sequence[Any], together: Any) -> list[int | None] | None:
    """The dimensions of rows in what the last layer returns, if joined there it is what it returns for all rows."""
    dims = None if any(one is None for one in (*apart, together)) else row_dims(apart[0], together)
    if dims is None:
        return None
    pairs = zip(tensors(join_rows(apart, dims, [1.0] * len(apart))), tensors(together), strict=True)
    off = (difference(Compared("rows", local(t), local(w))) > LOW_LIMIT for t, w in pairs if t.dim())
    return None if any(off) else dims
