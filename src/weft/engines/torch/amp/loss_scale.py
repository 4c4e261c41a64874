"""The fp16 loss scale of one module, with gradients in true units outside it.

[Note: true units] Gradients in fp16 underflow unless the loss is scaled. GradScaler scales the
loss, so that every gradient between backward and step is S times too large and the user has to
unscale. Here the scale lives inside the module: the gradient that enters through its outputs is
multiplied by S, the one that leaves through its inputs is divided by S, and when backward has
ended the gradients of the leaves inside (its parameters, and whatever else it uses) are divided by
S. Outside, everything is in true units: losses, clipping, logging, the gradients of another module
in the chain with another S. Gradients that are there already are multiplied by S when backward
begins, so that they add up; S is a power of two, so both ways are exact. A leaf used inside and
outside in one backward pass would get both kinds of gradient: that is refused (`graph_walk.py`).

[Note: who overflowed] In a chain D(G(z)) the gradient of G comes through D. If D's scale is too
large, D's inputs hand a non-finite gradient to G, whose step must be skipped although G's scale is
fine. So each scale remembers whether gradients were bad when they came in, when they went out, and
in its parameters; at the step, a scale that only received bad gradients from another one keeps its
value, and the one that made them backs off.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any, cast

import torch
from torch import nn

from weft import torch_internals
from weft.engines.torch.hooks.backward_session import BackwardSession
from weft.engines.torch.hooks.graph_walk import running_backward, walk_to_leaves
from weft.errors import ContractError, listed
from weft.precision import LossScaling
from weft.tensors.dtensor import is_sharded, local, resting_parameters
from weft.tensors.messages import grouped
from weft.tensors.nested import map_tensors
from weft.tensors.remote_parameter import is_elsewhere


class LossScale:
    """The scale of one module, and what happened to its gradients; see [Note: true units].

    Attributes:
        value: S, a 0-d float32 tensor on the module's device.
        backwards: Backward passes through the module that have ended.
        moved_at: The one of them for which S was adjusted last.
        found: Whether a gradient was not finite at the end of the last backward.
        came_in: Whether a non-finite gradient entered since the last step.
        went_out: Whether one left through the inputs since the last step.
        num_optimizers: Those that hold parameters of the module and know of the scale.
    """

    def __init__(self, module: nn.Module, options: LossScaling, device: torch.device) -> None:
        self.options = options
        self._module = weakref.ref(module)
        self._class_name = type(module).__name__
        self.value = torch.full((), options.init, dtype=torch.float32, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self._no = torch.zeros((), dtype=torch.float32, device=device)
        self.found = self.came_in = self.went_out = self._no
        self.backwards = self.moved_at = self.num_optimizers = 0
        self._ended: dict[int, tuple[torch.Tensor, int]] = {}
        self._leaves: list[torch.Tensor] = []
        self._scaled = False
        self._unstepped: list[tuple[torch.Tensor, int]] = []
        self._session = BackwardSession(self._begin, self._end, rounds=2)

    def parameters(self) -> list[nn.Parameter]:
        """The module's parameters as they are now: they may be frozen, freed, added and replaced, or elsewhere."""
        module = self._module()
        return [] if module is None else [p for p in resting_parameters(module) if not is_elsewhere(p)]

    # -- at the borders --------------------------------------------------------------------------

    def at_inputs(self, value: Any) -> Any:
        """Divide the gradient that leaves through these tensors by S."""
        return self._mark(value, entering=False)

    def at_outputs(self, value: Any, dtype: torch.dtype | None) -> Any:
        """Multiply the gradient that enters through these tensors by S; cast the tensors, if a dtype is given."""
        self.unscale_after_error()
        return self._mark(value, entering=True, dtype=dtype)

    def _mark(self, value: Any, *, entering: bool, dtype: torch.dtype | None = None) -> Any:
        def mark(tensor: torch.Tensor) -> torch.Tensor:
            if torch.is_grad_enabled() and tensor.requires_grad:
                marked: torch.Tensor = _ScaleBorder.apply(tensor, self, entering, dtype)  # type: ignore[no-untyped-call]
                return marked
            return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)

        return map_tensors(mark, value)

    def enter(self, gradient: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """A gradient comes in through an output, which had this dtype before it was cast."""
        try:
            self._session.enter()
        except ContractError:
            self._session.flag[0] = 0  # refused before anything was scaled
            raise
        self.came_in = torch.maximum(self.came_in, _is_bad(gradient))
        return _times(gradient, self.value, dtype)

    def leave(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient goes out through an input."""
        if not self._session.flag[0]:
            return gradient  # that of a gradient (double backward): it never entered, so it is in true units
        self.went_out = torch.maximum(self.went_out, _is_bad(gradient))
        return _times(gradient, 1 / self.value, gradient.dtype)

    # -- one backward pass -----------------------------------------------------------------------

    def _begin(self) -> None:
        self._check_optimizer()
        parameters = self.parameters()
        _check_wide(self._class_name, parameters)
        self._leaves = self._find_leaves(parameters)
        existing = _dense([p.grad for p in self._leaves if p.grad is not None])
        if existing:
            torch_internals.foreach_mul(existing, self.value)
        self._scaled = True

    def _end(self) -> None:
        self._unscale()
        self.backwards += 1
        parameters = self.parameters()
        self._unstepped = [(p, torch_internals.VERSION.of(p)) for p in parameters if p.grad is not None]
        if self.num_optimizers > 1:
            gradients = {id(p): _held(p.grad) for p in parameters if p.grad is not None}
            self._ended = {one: (gradient, torch_internals.VERSION.of(gradient)) for one, gradient in gradients.items()}

    def was_changed(self, parameters: Collection[torch.Tensor]) -> bool:
        """Whether gradients of these parameters were changed since backward ended, or may have been."""
        if self.num_optimizers < 2:
            return True
        there = [(self._ended.get(id(p)), _held(p.grad)) for p in parameters if p.grad is not None]
        return any(
            ended is not None and (ended[0].data_ptr() != now.data_ptr() or ended[1] != torch_internals.VERSION.of(now))
            for ended, now in there
        )

    def _unscale(self) -> None:
        gradients = [p.grad for p in self._leaves if p.grad is not None]
        self.found = check_finite(gradients, self._no, 1 / self.value)
        self._leaves, self._scaled = [], False

    def unscale_after_error(self) -> None:
        """If a backward pass raised half-way, bring what it left behind back to true units."""
        if self._session.was_torn() and self._scaled:
            self._unscale()

    # -- at the optimizer's step -----------------------------------------------------------------

    def adjust(self, *, overflow: bool) -> None:
        """Shrink the scale after an overflow; or count a good step, after some of which it grows."""
        o, found = self.options, self._no + overflow
        torch_internals.update_scale(self.value, self._growth, found, o.growth, o.backoff, o.growth_every)
        self.moved_at = self.backwards

    def settle(self, stepped: Collection[int]) -> None:
        """Forget what happened: the parameters with these ids were stepped, or their step skipped."""
        self.moved_at = self.backwards
        self._unstepped = [(p, version) for p, version in self._unstepped if id(p) not in stepped]
        self._ended = {one: ended for one, ended in self._ended.items() if one not in stepped}
        self.forget_borders()

    def forget_borders(self) -> None:
        """Forget what crossed the borders: it was taken into account."""
        self.came_in = self.went_out = self._no

    # -- for checkpoints -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, float]:
        """The scale, and the good steps since it moved."""
        return {"scale": float(self.value), "good_steps": int(self._growth)}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on with a saved scale."""
        self.value.fill_(state["scale"])
        self._growth.fill_(state["good_steps"])

    # -- what can go wrong -----------------------------------------------------------------------

    def _check_optimizer(self) -> None:
        """Raise if an optimizer that knows nothing of the scale changed the parameters."""
        changed = any(torch_internals.VERSION.of(p) != version for p, version in self._unstepped)
        self._unstepped = []
        if changed:
            raise ContractError(
                f"with_precision: parameters of {self._class_name} were updated by an optimizer that cannot skip steps",
                found="an optimizer step after an fp16 backward, by an optimizer that skip_nonfinite does not know",
                expected="with fp16, a step with a non-finite gradient is skipped, on all ranks",
                fix="optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)",
            )

    def _find_leaves(self, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
        """Find the leaves inside; raise if the backward pass mixes scaled and true gradients.

        The parameters always count as inside: activation checkpoints hide them from the graph.

        Raises:
            ContractError: A leaf is used inside and outside, or its gradient is to be returned.
        """
        running = running_backward()
        seen = walk_to_leaves(running.roots(), self._crosses)
        inside = {id(leaf): leaf for leaf in (*parameters, *seen.inside)}
        direct = [leaf for leaf in seen.outside if id(leaf) in inside]
        if direct:
            raise ContractError(
                f"with_precision: the loss uses parameters of {self._class_name} outside its forward pass",
                found=listed(f"a parameter of shape {tuple(p.shape)}" for p in direct),
                expected="with fp16, gradients reach what the module uses through the module's outputs only",
                fix="compute this part of the loss inside forward, call backward for it alone, "
                'or use the policy "bf16"',
            )
        asked = [t for t in running.returned if id(t) in inside or t.grad_fn in seen.nodes_inside]
        if asked:
            raise ContractError(
                f"with_precision: torch.autograd.grad for tensors inside {self._class_name}",
                found=listed(f"a tensor of shape {tuple(t.shape)}" for t in asked),
                expected="with fp16, gradients inside the module are scaled until backward has ended",
                fix='loss.backward()  # then read parameter.grad; or the policy "bf16", if it is no parameter',
            )
        return list(inside.values())

    def _crosses(self, node: Any) -> bool | None:
        """Whether a node of the graph leads into (True) or out of (False) this module; else None."""
        if isinstance(node, torch_internals.NODE_CLASS.of(_ScaleBorder)) and node.scale is self:
            return bool(node.entering)
        return None


def _check_wide(class_name: str, parameters: list[nn.Parameter]) -> None:
    """Raise if a float16 parameter is trained after all: its true gradient would underflow."""
    half = [p for p in parameters if p.requires_grad and p.dtype is torch.float16]
    if half:
        raise ContractError(
            f"with_precision: float16 parameters of {class_name} are trained since it was applied",
            found=listed(f"a parameter of shape {tuple(p.shape)}" for p in half),
            expected="float32 parameters, computed in float16",
            fix="parameter.data = parameter.data.float()  # when it is unfrozen",
        )


class _ScaleBorder(torch.autograd.Function):
    """The identity, or a cast; on the way back, into or out of the scaled world of one module.

    The cast is part of it because logits are large: their gradient is scaled and cast in one pass, and nothing of its
    size lies in between in 32 bits.
    """

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, scale: LossScale, entering: bool, dtype: torch.dtype | None
    ) -> torch.Tensor:
        ctx.scale, ctx.entering, ctx.dtype = scale, entering, tensor.dtype
        # Not a view for autograd, which would forbid to change the module's output in place.
        inside = tensor.detach()
        return inside if dtype is None or not tensor.is_floating_point() else inside.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        passed = ctx.scale.enter(gradient, ctx.dtype) if ctx.entering else ctx.scale.leave(gradient)
        return passed, None, None, None


def check_finite(gradients: list[torch.Tensor], no: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Multiply gradients by `factor` in place and say whether one of them is not finite.

    Returns:
        0-d float, 1 if so; on the device of `no`.
    """
    found = no.clone()
    for same in grouped(_dense(gradients), lambda one: (one.device, one.dtype)).values():
        torch_internals.unscale(same, found, factor)
    return found


@torch.no_grad()
def _held(gradient: torch.Tensor) -> torch.Tensor:
    """What of a gradient lies on this rank: the tensor itself, whose version tells of changes."""
    part: torch.Tensor = cast("Any", gradient).to_local() if is_sharded(gradient) else gradient
    return part


def _dense(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same numbers as dense real tensors, in the same memory; of shards, this rank's part."""
    values = [torch_internals.SPARSE_VALUES.of(g)() if g.is_sparse else g for g in map(local, gradients)]
    return [torch.view_as_real(g) if g.is_complex() else g for g in values]


def _times(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product in this dtype, rounded once."""
    wide = gradient.float() if gradient.dtype is torch.float16 else gradient  # 2**16 is infinite in float16
    factor = factor.to(wide.dtype)
    if dtype == wide.dtype or torch.is_grad_enabled() or is_sharded(wide):
        return (wide * factor).to(dtype)
    return torch.mul(wide, factor, out=torch.empty(0, dtype=dtype, device=wide.device))  # in one pass


def _is_bad(gradient: torch.Tensor) -> torch.Tensor:
    """1 if an element that lies here is not finite: a nan is the least and the greatest one."""
    (values,) = _dense([gradient.detach()])
    if not values.numel():
        return torch.zeros((), device=values.device)
    return (~torch.stack(torch.aminmax(values)).isfinite().all()).float()  # nothing of the size of the gradient
