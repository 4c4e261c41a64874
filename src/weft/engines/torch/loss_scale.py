"""The fp16 loss scale of one module, with gradients in true units outside of it.

[Note: true units] Gradients in fp16 underflow unless the loss is scaled. GradScaler scales the
loss, so that every gradient between backward and step is S times too large and the user has to
unscale. Here the scale lives inside the module: the gradient that enters through its outputs is
multiplied by S, the one that leaves through its inputs is divided by S, and when backward has
ended the parameters' gradients are divided by S. Outside, everything is in true units: losses,
clipping, logging, the gradients of another module in the chain with another S. Gradients that are
there already are multiplied by S when backward begins, so that they add up; S is a power of two,
so both ways are exact.

[Note: who overflowed] In a chain D(G(z)) the gradient of G comes through D. If D's scale is too
large, D's inputs hand a non-finite gradient to G, whose step must be skipped although G's scale is
fine. So each scale remembers whether gradients were bad when they came in, when they went out, and
in its parameters; at the step, a scale that only received bad gradients from another one keeps its
value, and the one that made them backs off.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import nn

from weft.engines.options import ScaleOptions
from weft.engines.torch.backward import BackwardSession
from weft.errors import ContractError, listed, message
from weft.nested import map_tensors

__all__ = ["LossScale", "check_finite"]


class LossScale:
    """The scale of one module, and what happened to its gradients; see [Note: true units].

    Attributes:
        value: S, a 0-d float32 tensor on the module's device.
        parameters: Those whose gradients are scaled.
        found: Whether a gradient of a parameter was not finite at the end of the last backward.
        came_in: Whether a non-finite gradient entered since the last step.
        went_out: Whether one left through the inputs since the last step.
    """

    def __init__(self, module: nn.Module, options: ScaleOptions) -> None:
        self.options = options
        self.parameters: list[torch.Tensor] = [p for p in module.parameters() if p.requires_grad]
        self._class_name = type(module).__name__
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.value = torch.full((), options.init, dtype=torch.float32, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self._no = torch.zeros((), dtype=torch.float32, device=device)
        self.found = self.came_in = self.went_out = self._no
        self._versions: int | None = None
        self._session = BackwardSession(self._begin, self._end, rounds=2)

    # -- at the borders --------------------------------------------------------------------------

    def at_inputs(self, value: Any) -> Any:
        """Divide the gradient that leaves through these tensors by S."""
        return self._mark(value, entering=False)

    def at_outputs(self, value: Any) -> Any:
        """Multiply the gradient that enters through these tensors by S."""
        if self._session.was_torn():
            self._unscale()  # a backward pass raised half-way: its gradients are still scaled
        return self._mark(value, entering=True)

    def _mark(self, value: Any, *, entering: bool) -> Any:
        if not torch.is_grad_enabled():
            return value
        return map_tensors(lambda t: _Border.apply(t, self, entering) if _carries_gradient(t) else t, value)  # type: ignore[no-untyped-call]

    def enter(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient comes in through an output."""
        self._session.enter()
        self.came_in = torch.maximum(self.came_in, _is_bad(gradient))
        return gradient * self.value.to(gradient.dtype)

    def leave(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient goes out through an input."""
        self.went_out = torch.maximum(self.went_out, _is_bad(gradient))
        return gradient / self.value.to(gradient.dtype)

    # -- one backward pass -----------------------------------------------------------------------

    def _begin(self) -> None:
        self._check_optimizer()
        self._check_direct_use()
        existing = [p.grad for p in self.parameters if p.grad is not None]
        if existing:
            torch._foreach_mul_(existing, self.value)

    def _end(self) -> None:
        self.found = self._unscale()
        self._versions = self._version()

    def _unscale(self) -> torch.Tensor:
        return check_finite([p.grad for p in self.parameters if p.grad is not None], self._no, 1 / self.value)

    def _version(self) -> int:
        return sum(p._version for p in self.parameters)

    # -- at the optimizer's step -----------------------------------------------------------------

    def flags(self) -> torch.Tensor:
        """[3] floats, 0 or 1: bad in a parameter, bad when it came in, bad when it went out."""
        return torch.stack([self.found, self.came_in, self.went_out])

    def grow(self) -> None:
        """Count a good step; now and then the scale grows."""
        self._update(self._no)

    def back_off(self) -> None:
        """Shrink the scale after an overflow."""
        self._update(self._no + 1)

    def _update(self, overflow: torch.Tensor) -> None:
        o = self.options
        torch._amp_update_scale_(self.value, self._growth, overflow, o.growth, o.backoff, o.growth_every)

    def settle(self) -> None:
        """Forget what happened: a step was made or skipped."""
        self.found = self._no
        self._versions = None
        self.forget_borders()

    def forget_borders(self) -> None:
        """Forget what crossed the borders: it was taken into account."""
        self.came_in = self.went_out = self._no

    # -- what can go wrong -----------------------------------------------------------------------

    def _check_optimizer(self) -> None:
        """Raise if an optimizer that knows nothing of the scale changed the parameters."""
        if self._versions is None or self._versions == self._version():
            return
        self._versions = None
        raise ContractError(
            message(
                f"with_precision: the parameters of {self._class_name} were stepped by an optimizer that cannot skip",
                found="an optimizer step after an fp16 backward, by an optimizer with_precision was not told of",
                expected="with fp16, a step with a non-finite gradient is skipped, on all ranks",
                fix="optimizer, ctx = weft.with_precision(optimizer, ctx)",
            )
        )

    def _check_direct_use(self) -> None:
        """Raise if the loss uses a parameter outside of the module: that part would not be scaled."""
        known = {id(p): p for p in self.parameters}
        direct = [p for p in _leaves_outside(_running_roots()) if id(p) in known]
        if direct:
            raise ContractError(
                message(
                    f"with_precision: the loss uses parameters of {self._class_name} outside of its forward pass",
                    found=listed(f"a parameter of shape {tuple(p.shape)}" for p in direct),
                    expected="with fp16, gradients reach the parameters through the module's outputs only",
                    fix='compute the penalty inside of forward, use weight_decay, or the policy "bf16"',
                )
            )


class _Border(torch.autograd.Function):
    """The identity; on the way back, into or out of the scaled world of one module."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, scale: LossScale, entering: bool) -> torch.Tensor:
        ctx.scale, ctx.entering = scale, entering
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (ctx.scale.enter(gradient) if ctx.entering else ctx.scale.leave(gradient)), None, None


def check_finite(gradients: list[torch.Tensor], no: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Multiply gradients by `factor` in place and say whether one of them is not finite.

    Returns:
        0-d float, 1 if so; on the device of `no`.
    """
    found = no.clone()
    kinds: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    for same in kinds.values():
        torch._amp_foreach_non_finite_check_and_unscale_(same, found, factor)
    return found


def _carries_gradient(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and tensor.is_floating_point()


def _is_bad(gradient: torch.Tensor) -> torch.Tensor:
    return (~torch.isfinite(gradient).all()).float()


def _leaves_outside(roots: list[torch.Tensor]) -> list[torch.Tensor]:
    """Leaves that the graph above `roots` uses before it reaches the outputs of a scaled module."""
    stack = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen: set[Any] = set(stack)
    found: list[torch.Tensor] = []
    while stack:
        node: Any = stack.pop()
        if getattr(node, "_forward_cls", None) is _Border:
            continue
        if hasattr(node, "variable"):
            found.append(node.variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found


def _running_roots() -> list[torch.Tensor]:
    """The tensors that the running backward pass was called on.

    torch does not tell, but its Python entry `_engine_run_backward` is on the stack of this
    thread (CPU), or of the thread that waits for the device's. Empty if it cannot be found:
    the check above is then left out.
    """
    for innermost in (sys._getframe(), *sys._current_frames().values()):
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code.co_name == "_engine_run_backward":
                return [t for t in frame.f_locals.get("t_outputs", ()) if isinstance(t, torch.Tensor)]
            frame = frame.f_back
    return []
