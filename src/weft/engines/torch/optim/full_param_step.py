"""Step on whole parameters: for optimizers that look at whole tensors, when those are cut into shards.

Adafactor keeps statistics of rows and columns, Muon multiplies matrices: an update of an element
depends on others. Here each parameter and its gradient are made whole on every rank, one after the
other, stepped as in one process, and cut again. State of the parameter's shape is kept in shards.

An optimizer may keep numbers in its groups and move them in each `step`; they are put back before
each parameter, and after the optimizer's own step, which finds no gradients, so that they move once.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from weft.engines.options import StepMeshes
from weft.engines.torch.optim.closures import check_no_closure
from weft.engines.torch.optim.rebind import like
from weft.engines.torch.optim.state_layout import state_layout
from weft.engines.torch.optim.zero1_step import PartitionedStep
from weft.errors import OrderError
from weft.tensors.dtensor import full_tensor

__all__ = ["WholeStep", "check_steps_on_shards"]

_LOOK_AT_WHOLE = (torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS)
_FUSED_ON_PLAIN = (torch.optim.SGD, torch.optim.Adagrad)  # torch has these kernels for plain tensors only


class WholeStep:
    """The hooks on one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, others: StepMeshes) -> None:
        """Hang it on.

        Args:
            optimizer: Over plain or sharded parameters.
            mesh: State of plain parameters is cut over it between steps; None: it stays whole.
            others: Parameters for which that is otherwise.
        """
        self._others = others
        self._mesh = mesh
        self._optimizer = weakref.ref(optimizer)
        self._step = _plain_step(optimizer)
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._moved: list[dict[str, Any]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_load_state_dict_post_hook(self._cut_state),
        ]
        self._cut_state(optimizer)

    def undo(self) -> None:
        """Take the hooks off. State of plain parameters is made whole: one all-gather per tensor."""
        for handle in self._handles:
            handle.remove()
        optimizer = self._optimizer()
        for parameter, state in optimizer.state.items() if optimizer is not None else ():
            for key, value in state.items():
                if isinstance(value, DTensor) and (not isinstance(parameter, DTensor) or parameter in self._others):
                    state[key] = like(value, parameter)

    def _cut_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep only this rank's part of state that is there already."""
        for parameter, state in optimizer.state.items():
            state.update({key: self._cut(value, parameter) for key, value in state.items()})

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_no_closure("step on whole parameters", (*args[1:], *kwargs.values()))
        groups = [entry["params"] for entry in optimizer.param_groups]
        options = [{key: value for key, value in e.items() if key != "params"} for e in optimizer.param_groups]
        self._moved = []
        try:
            for place, parameters in enumerate(groups):
                for parameter in parameters:
                    if parameter.grad is None:
                        continue
                    for entry, before in zip(optimizer.param_groups, options, strict=True):
                        entry.update(before)
                        entry["params"] = []
                    self._step_one(optimizer, place, parameter)
                    self._moved = [{k: v for k, v in e.items() if k != "params"} for e in optimizer.param_groups]
        finally:
            for entry, parameters, before in zip(optimizer.param_groups, groups, options, strict=True):
                entry.update(before)
                entry["params"] = parameters
        for parameters in groups:  # the optimizer's own step, which comes now, finds nothing to do
            for parameter in parameters:
                if parameter.grad is not None:
                    self._gradients.append((parameter, parameter.grad))
                    parameter.grad = None

    def _step_one(self, optimizer: torch.optim.Optimizer, place: int, parameter: torch.Tensor) -> None:
        whole = nn.Parameter(_whole(parameter.detach()))
        whole.grad = _whole(parameter.grad) if parameter.grad is not None else None
        state = optimizer.state.pop(parameter, None)
        if state is not None:
            optimizer.state[whole] = {key: _whole(value) for key, value in state.items()}
        optimizer.param_groups[place]["params"] = [whole]
        try:
            self._step(optimizer)
        finally:
            state = optimizer.state.pop(whole, {})
            optimizer.state[parameter] = {key: self._cut(value, parameter) for key, value in state.items()}
        with torch.no_grad():
            parameter.copy_(like(whole.detach(), parameter))

    def _cut(self, value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape != parameter.shape:
            return value
        rows, cut = self._others.get(cast("nn.Parameter", parameter), (self._mesh, None))
        if rows is None or (isinstance(parameter, DTensor) and cut is None):
            return like(value, parameter)
        layout = state_layout(parameter, rows, cut)
        return like(value, parameter) if layout is None else layout.dtensor(layout.part(value))

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients.clear()
        if self._moved:
            for entry, moved in zip(optimizer.param_groups, self._moved, strict=True):
                entry.update(moved)


def check_steps_on_shards(what: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer is known not to step on DTensors, or to come to other numbers on them.

    Args:
        what: Name of the strategy, for the error text.
        optimizer: Over sharded parameters.

    Raises:
        OrderError: `gather_step` is missing.
    """
    hooks = [getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values()]
    if any(isinstance(one, (WholeStep, PartitionedStep)) for one in hooks):
        return
    kind = type(optimizer).__name__
    if isinstance(optimizer, _LOOK_AT_WHOLE):
        problem = f"{kind} looks at whole tensors, and would step on shards"
    elif isinstance(optimizer, _FUSED_ON_PLAIN) and any(entry.get("fused") for entry in optimizer.param_groups):
        problem = f"{kind} with fused=True cannot step on shards: torch has its kernel for plain tensors only"
    elif isinstance(optimizer, torch.optim.Rprop):
        problem = f"{kind} cannot step on shards: torch has its operations for plain tensors only"
    else:
        return
    couples_all = isinstance(optimizer, torch.optim.LBFGS)
    raise OrderError(
        f"{what}: {problem}",
        found=f"{kind} over sharded parameters" + ("" if couples_all else ", without gather_step"),
        expected="replicate, which leaves parameters whole"
        if couples_all
        else f"{what}, then the optimizer, then gather_step; or replicate",
        fix="model, ctx = weft.replicate(model, ctx)  # instead of sharding"
        if couples_all
        else "optimizer, ctx = weft.gather_step(optimizer, ctx)",
    )


def _whole(value: Any) -> Any:
    return full_tensor(value) if isinstance(value, DTensor) else value


def _plain_step(optimizer: torch.optim.Optimizer) -> Any:
    """The class's own `step`, without the hooks torch puts around it."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step
