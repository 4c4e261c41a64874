"""Skip an optimizer's step when a gradient is not finite, on all ranks alike; with fp16, adjust the loss scales.

A pre-hook that sets the gradients to None makes `step()` do nothing, on the user's plain
optimizer; no wrapper stands in for it. With `step(closure)` the same happens after the closure.

[Note: one news, once] Several optimizers may hold parameters of one module. One skips if its own
gradients are not finite; or if gradients of another one were not when backward ended, and its own were
changed since: clipping all of them together makes zeros of those that are finite. The first one that
steps after an overflow adjusts the scale.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle

from weft.engines.torch.amp.loss_scale import LossScale, check_finite
from weft.engines.torch.compute.grad_norm import Gradients
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.steps.swapped import after_closure


class _Flags(NamedTuple):
    """What all ranks together know of one scale.

    Attributes:
        found: Bad in a gradient at the end of a backward pass the optimizer has not seen yet.
        came_in: Bad when it came in.
        went_out: Bad when it went out.
        fresh: Not adjusted since the last backward pass.
    """

    found: bool
    came_in: bool
    went_out: bool
    fresh: bool


class SkippingStep:
    """What skips the steps of one optimizer, by a hook of its own or called by another one.

    Attributes:
        skipped: Whether the last step was skipped.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scales: Sequence[LossScale],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self.skipped = False
        self._group = group
        self._device = device
        # A scale lives as long as its module; the optimizer shall not keep the module's hooks alive.
        self._scales = [weakref.ref(scale) for scale in scales]
        self._seen = weakref.WeakKeyDictionary({scale: scale.backwards for scale in scales})
        self._handle: RemovableHandle | None = None
        held = set(map(id, parameters_of(optimizer)))
        self._own = [ref for ref, one in zip(self._scales, scales, strict=True) if _holds(one, held)]
        self._count(1)

    def attach(self, optimizer: torch.optim.Optimizer) -> SkippingStep:
        """Look at the gradients before each step by a hook; returns this."""
        self._handle = optimizer.register_step_pre_hook(self._before_step)
        return self

    def undo(self) -> None:
        """Take the hook off."""
        if self._handle is not None:
            self._handle.remove()
        self._count(-1)

    def _count(self, change: int) -> None:
        for scale in (ref() for ref in self._own):
            if scale is not None:
                scale.num_optimizers += change

    def release(self) -> None:
        """Let the process group go."""
        self._group = None

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        self.skipped = False
        return after_closure(args, kwargs, lambda: self.check(optimizer))

    @torch.no_grad()
    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Skip the step that is about to begin if it has to be, and adjust the scales."""
        self.skipped = False
        scales = [scale for scale in (ref() for ref in self._scales) if scale is not None]
        parameters = parameters_of(optimizer)
        if not self._scales:
            held = Gradients(parameters, self._device, {})
            if not held.checked_norm(math.inf, self._group).is_finite:
                self._skip(parameters)
        if not scales:
            return
        for scale in scales:
            scale.unscale_after_error()
        ids = {id(p) for p in parameters}
        own = [_holds(scale, ids) for scale in scales]
        changed = any(scale.was_changed(parameters) for scale, mine in zip(scales, own, strict=True) if mine)
        gradients = [p.grad for p in parameters if p.grad is not None]
        flags, bad_now, changed = self._flags(scales, gradients, changed=changed)
        found = any(f.found for f, mine in zip(flags, own, strict=True) if mine)
        overflow = found and (changed or bad_now)
        skip = overflow or bad_now
        if skip:
            self._skip(parameters)
        _adjust(scales, own, flags, skip=skip, by_hand=bad_now and not overflow)
        for scale, mine in zip(scales, own, strict=True):
            self._seen[scale] = scale.backwards
            if mine:
                scale.settle(ids)
            else:
                scale.forget_borders()

    def _skip(self, parameters: list[torch.Tensor]) -> None:
        self.skipped = True
        for parameter in parameters:
            parameter.grad = None

    def _flags(
        self, scales: list[LossScale], gradients: list[torch.Tensor], *, changed: bool
    ) -> tuple[list[_Flags], bool, bool]:
        """What the ranks found, the maximum over them; whether a gradient is bad by now, and whether one changed."""
        no = torch.zeros((), dtype=torch.float32, device=scales[0].value.device)
        bad_now = check_finite(gradients, no, no + 1)
        rows = [torch.stack([bad_now, no + float(changed), no, no])]
        for scale in scales:
            found = scale.found if scale.backwards != self._seen[scale] else no
            fresh = no + float(scale.backwards != scale.moved_at)
            flags = (found, scale.came_in, scale.went_out, fresh)
            rows.append(torch.stack([flag.to(no.device) for flag in flags]))
        table = torch.stack(rows)
        if self._group is not None:
            dist.all_reduce(table, op=dist.ReduceOp.MAX, group=self._group)
        first, *others = table.bool().tolist()
        return [_Flags(*row) for row in others], first[0], first[1]


def _holds(scale: LossScale, held: Collection[int]) -> bool:
    """Whether an optimizer over parameters with these ids holds some of the module of a scale."""
    return any(id(p) in held for p in scale.parameters())


def _adjust(scales: list[LossScale], own: list[bool], flags: list[_Flags], *, skip: bool, by_hand: bool) -> None:
    """Let each scale grow or back off; see [Note: who overflowed] and [Note: one news, once].

    Args:
        scales: All that the context knows.
        own: Whether the optimizer holds parameters of their modules.
        flags: What happened to their gradients.
        skip: The step is skipped.
        by_hand: A gradient is bad that was not when backward ended: somebody changed it.
    """
    at_fault = [(f.went_out or (f.found and mine)) and not f.came_in for f, mine in zip(flags, own, strict=True)]
    passed_on = any(bad and f.went_out for bad, f in zip(at_fault, flags, strict=True))
    for scale, mine, f, fault in zip(scales, own, flags, at_fault, strict=True):
        overflow = f.fresh and (fault or (mine and f.came_in and not passed_on))
        overflow = overflow or (mine and by_hand and not passed_on)
        if overflow or (f.fresh and mine and not skip):
            scale.adjust(overflow=overflow)
