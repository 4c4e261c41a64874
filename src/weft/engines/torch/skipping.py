"""Skip an optimizer's step when a gradient is not finite, on all ranks alike.

A pre-hook that sets the gradients to None makes `step()` do nothing, on the user's plain
optimizer; no wrapper stands in for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from weft.engines.torch.loss_scale import LossScale, check_finite

__all__ = ["SkippingStep"]


class SkippingStep:
    """The hook on one optimizer.

    Attributes:
        skipped: Whether the last step was skipped.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scales: Sequence[LossScale], group: dist.ProcessGroup | None
    ) -> None:
        self.skipped = False
        self._group = group
        mine = {id(p) for entry in optimizer.param_groups for p in entry["params"]}
        # A scale lives as long as its module; the optimizer shall not keep the module's hooks alive.
        self._scales = [weakref.ref(scale) for scale in scales]
        self._own = [any(id(p) in mine for p in scale.parameters) for scale in scales]
        self._handle = optimizer.register_step_pre_hook(self._before_step)

    def undo(self) -> None:
        """Take the hook off."""
        self._handle.remove()

    def release(self) -> None:
        """Let the process group go."""
        self._group = None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        pairs = [(ref(), own) for ref, own in zip(self._scales, self._own, strict=True)]
        scales = [(scale, own) for scale, own in pairs if scale is not None]
        if not scales:
            self.skipped = False
            return
        gradients = [p.grad for entry in optimizer.param_groups for p in entry["params"] if p.grad is not None]
        flags = self._flags([scale for scale, _ in scales], gradients)
        own = [index for index, (_, mine) in enumerate(scales) if mine]
        self.skipped = bool(flags[-1][0]) or any(flags[index][0] for index in own)
        if self.skipped:
            for entry in optimizer.param_groups:
                for parameter in entry["params"]:
                    parameter.grad = None
        _move_scales(scales, flags, self.skipped)

    def _flags(self, scales: list[LossScale], gradients: list[torch.Tensor]) -> list[list[float]]:
        """[scales + 1, 3] flags as in `LossScale.flags`, the maximum over the ranks; last row: now."""
        no = torch.zeros((), dtype=torch.float32, device=scales[0].value.device)
        now = check_finite(gradients, no, no + 1)
        rows = torch.stack([*(scale.flags() for scale in scales), torch.stack([now, no, no])])
        if self._group is not None:
            dist.all_reduce(rows, op=dist.ReduceOp.MAX, group=self._group)
        table: list[list[float]] = rows.tolist()
        return table


def _move_scales(scales: list[tuple[LossScale, bool]], flags: list[list[float]], skipped: bool) -> None:
    """Let each scale grow or back off; see [Note: who overflowed]."""
    at_fault = [
        bool(went_out or (found and mine)) and not came_in
        for (_, mine), (found, came_in, went_out) in zip(scales, flags[:-1], strict=True)
    ]
    passed_on = any(bad and flags[index][2] for index, bad in enumerate(at_fault))
    for index, (scale, mine) in enumerate(scales):
        received = bool(flags[index][1])
        if at_fault[index] or (mine and received and not passed_on):
            scale.back_off()
        elif mine and not skipped:
            scale.grow()
        elif mine and not received:
            scale.back_off()  # bad only since backward: somebody changed the gradients
        if mine:
            scale.settle()
        else:
            scale.forget_borders()
