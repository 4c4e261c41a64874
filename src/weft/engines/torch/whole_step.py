"""Step on whole parameters: for optimizers that look at whole tensors, when those are cut into shards.

Adafactor keeps statistics of rows and columns, Muon multiplies matrices: an update of an element
depends on others. Here each parameter and its gradient are made whole on every rank, one after the
other, stepped as in one process, and cut again. State of the parameter's shape is kept in shards.

An optimizer may keep numbers in its groups and move them in each `step`; they are put back before
each parameter, so that they move once.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from weft.engines.torch.rebinding import like
from weft.errors import ContractError, message

__all__ = ["WholeStep"]


class WholeStep:
    """The hooks on one optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None) -> None:
        """Hang it on.

        Args:
            optimizer: Over plain or sharded parameters.
            mesh: State of plain parameters is cut over it between steps; None: it stays whole.
        """
        self._mesh = mesh
        self._optimizer = weakref.ref(optimizer)
        self._step = _plain_step(optimizer)
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def undo(self) -> None:
        """Take the hooks off. State of plain parameters is made whole: one all-gather per tensor."""
        for handle in self._handles:
            handle.remove()
        optimizer = self._optimizer()
        for parameter, state in optimizer.state.items() if optimizer is not None else ():
            if not isinstance(parameter, DTensor):
                state.update({key: _whole(value) for key, value in state.items()})

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) > 1 or kwargs:
            raise ContractError(
                message(
                    "step on whole parameters: step() was called with a closure",
                    found="optimizer.step(closure)",
                    expected="backward first, then optimizer.step()",
                    fix="loss = closure(); optimizer.step()",
                )
            )
        groups = [entry["params"] for entry in optimizer.param_groups]
        options = [{key: value for key, value in e.items() if key != "params"} for e in optimizer.param_groups]
        moved = options
        try:
            for place, parameters in enumerate(groups):
                for parameter in parameters:
                    if parameter.grad is None:
                        continue
                    for entry, before in zip(optimizer.param_groups, options, strict=True):
                        entry.update(before)
                        entry["params"] = []
                    self._step_one(optimizer, place, parameter)
                    moved = [{k: v for k, v in e.items() if k != "params"} for e in optimizer.param_groups]
        finally:
            for entry, parameters, after in zip(optimizer.param_groups, groups, moved, strict=True):
                entry.update(after)
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
        self._step(optimizer)
        optimizer.state[parameter] = {
            key: self._cut(value, parameter) for key, value in optimizer.state.pop(whole, {}).items()
        }
        with torch.no_grad():
            parameter.copy_(like(whole.detach(), parameter))

    def _cut(self, value: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or value.shape != parameter.shape:
            return value
        if self._mesh is None or isinstance(parameter, DTensor):
            return like(value, parameter)
        return distribute_tensor(value, self._mesh, [Shard(0)], src_data_rank=None)

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients.clear()


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _plain_step(optimizer: torch.optim.Optimizer) -> Any:
    """The class's own `step`, without the hooks torch puts around it."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step
