"""A pipeline, measured: rows of two micro-batches through each stage, together and apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from weft.engines.probes import Compared, ProbeMode, Schedule
from weft.engines.torch.pipeline.batch_parts import Inputs
from weft.engines.torch.probes.compare import difference, largest_over
from weft.engines.torch.probes.no_trace import no_trace, random_kept, zeros_filled
from weft.engines.torch.probes.observed import Observed
from weft.engines.torch.probes.repeated_hooks import hooks_off, quiet_hooks
from weft.engines.torch.probes.same_draws import SameDraws
from weft.errors import ProbeFailed
from weft.tensors.nested import map_tensors, tensors

__all__ = ["RowProbe"]

_ROWS = 2  # of a micro-batch: batch statistics need more than one
_LIMIT, _LOW_LIMIT = 1e-5, 5e-2


class _Rows(NamedTuple):
    """A few rows of one micro-batch, as a stage computes with them."""

    part: Inputs
    received: tuple[torch.Tensor, ...]
    number: int


class RowProbe:
    """What stages compute for rows of several micro-batches."""

    def __init__(self, mode: ProbeMode, stages: int, module: nn.Module) -> None:
        self._schedule = Schedule(mode, ["rows"])
        self._stages = stages
        self._module = module
        self._rows: dict[int, dict[int, _Rows]] = {}
        self._is_due = False
        self._watch = contextlib.ExitStack()
        self._quiet: set[int] = set()

    def begin(self) -> None:
        """A call with gradients begins."""
        self._rows = {}
        self._is_due = self._schedule.is_due("rows") > 0
        if self._is_due:
            self._quiet = self._watch.enter_context(quiet_hooks(self._module))

    def end(self) -> None:
        """The call ends, perhaps with an error."""
        self._watch.close()

    def see(self, stage: int, index: int, last: int, part: Inputs, received: Sequence[torch.Tensor]) -> None:
        """Keep a few rows of the first and of the last micro-batch."""
        if not self._is_due or not last or index not in (0, last):
            return
        size = next((t.shape[0] for t in tensors(part.nested()) if t.dim()), 0)
        rows = min(size, _ROWS)

        def cut(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[:rows].detach() if tensor.dim() and tensor.shape[0] == size else tensor

        few = Inputs(map_tensors(cut, part.args), map_tensors(cut, part.kwargs), part.target)
        self._rows.setdefault(stage, {})[index] = _Rows(few, tuple(map(cut, received)), rows)

    def check(
        self,
        compute: Callable[[int, Inputs, tuple[torch.Tensor, ...]], Any],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Compare. Collectives: one all-reduce of a number per stage, if this call is measured.

        Raises:
            ProbeFailed: On all ranks: what a stage computes for a row depends on other rows.
        """
        if not self._is_due:
            return
        self._watch.close()
        found = [0.0] * self._stages
        for stage, pair in self._rows.items():
            quiet = hooks_off(self._module, lambda _, hook: id(hook) in self._quiet)
            with no_trace(self._module), zeros_filled(self._module), quiet, torch.no_grad():
                found[stage] = self._largest(lambda *call, stage=stage: compute(stage, *call), list(pair.values()))
        self._rows = {}
        worst = largest_over(group, found, device)
        wrong = [f"stage {stage}: by {relative:.2g}" for stage, relative in enumerate(worst) if relative]
        if wrong:
            raise ProbeFailed(
                "pipeline: rows of a batch are mixed, which are computed in micro-batches",
                found=f"rows of two micro-batches, together and apart, differ: {', '.join(wrong)} of their norm",
                expected="a row that depends on no other one: no statistics, sorting or sums over the batch",
                fix='LayerNorm or GroupNorm for each row, or weft.pipeline(..., micro_batches=1, schedule="gpipe")',
            )

    def _largest(self, compute: Callable[[Inputs, tuple[torch.Tensor, ...]], Any], rows: list[_Rows]) -> float:
        """The largest relative difference that is no rounding; 0 without one."""
        kept = {name: buffer.clone() for name, buffer in self._module.named_buffers() if not buffer.is_meta}
        buffers = dict(self._module.named_buffers())
        draws = SameDraws()

        def run(part: Inputs, received: tuple[torch.Tensor, ...], *, together: bool) -> list[torch.Tensor]:
            draws.begin(together=together)
            try:
                with random_kept():
                    return list(tensors(compute(part, received)))
            finally:
                for name, before in kept.items():
                    buffers[name].copy_(before)

        with Observed() as observed, draws:
            apart = [run(one.part, one.received, together=False) for one in rows]
            together = run(*_joined(rows), together=True)
        limit = _LOW_LIMIT if observed.low else _LIMIT
        count = sum(one.number for one in rows)
        pairs = [
            Compared("a row", whole, torch.cat([one[at] for one in apart]))
            for at, whole in enumerate(together)
            if whole.dim() and whole.shape[0] == count and whole.is_floating_point()
        ]
        return max((relative for relative in map(difference, pairs) if relative > limit), default=0.0)


def _joined(rows: list[_Rows]) -> tuple[Inputs, tuple[torch.Tensor, ...]]:
    first = rows[0]

    def join(values: Sequence[Any]) -> Any:
        others = [iter(list(tensors(value))) for value in values[1:]]

        def one(tensor: torch.Tensor) -> torch.Tensor:
            more = [next(other) for other in others]
            return torch.cat([tensor, *more]) if tensor.dim() and tensor.shape[0] == first.number else tensor

        return map_tensors(one, values[0])

    part = Inputs(join([one.part.args for one in rows]), join([one.part.kwargs for one in rows]), first.part.target)
    return part, join([one.received for one in rows])
