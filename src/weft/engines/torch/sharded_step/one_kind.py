"""Steps on tensors of one kind, where an optimizer holds plain tensors and DTensors.

A strategy may leave parameters whole, and optimizers hand lists of parameters to torch, by default on CUDA (`foreach`)
and with `fused=True`: torch refuses lists of both kinds. An optimizer whose update of an element depends on that
element alone steps on the shards as plain tensors. Any other one gets the whole parameters as DTensors that are
replicated over the mesh of the sharded ones: so a norm over all of them is that of whole parameters.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from weft import torch_internals
from weft.engines.torch.hooks.every_optimizer import optimizers_of, parameters_of
from weft.engines.torch.sharded_step.shards import ParameterShard, PartitionedStep
from weft.engines.torch.steps.swapped import StepsOnOthers, ids_of, is_elementwise, step_hooks
from weft.tensors.blocks import as_dtensor, full_tensor
from weft.tensors.dtensor import local


def step_on_one_kind(optimizer: torch.optim.Optimizer) -> tuple[RemovableHandle, ...]:
    """Let an optimizer that holds DTensors step on tensors of one kind; to be called before each step's own hooks.

    Nothing is done where a transform has said how it steps. Other hooks see the optimizer as it is between steps.

    Returns:
        The hooks, if they are new.
    """
    found = [one for one in step_hooks(optimizer) if isinstance(one, StepsOnOthers)]
    mine = next((one for one in found if isinstance(one, _OneKind)), None)
    if not found:
        return _OneKind(optimizer).handles
    if mine is not None and len(found) > 1:
        for handle in mine.handles:
            handle.remove()
    elif mine is not None:
        mine.come_last(optimizer)
    return ()


class _OneKind(PartitionedStep):
    """The hooks on one optimizer, and their handles."""

    by_request = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._elementwise = is_elementwise(optimizer)
        self._copied_over: DeviceMesh | None = None
        super().__init__(optimizer, None, {})
        self._handles.pop().remove()  # state that is loaded is taken in the next step, and may be read in place
        self.handles = tuple(self._handles)
        self.come_last(optimizer)

    def come_last(self, optimizer: Any) -> None:
        """Let other hooks run before parameters are exchanged, and after they were put back."""
        torch_internals.STEP_PRE_HOOKS.of(optimizer).move_to_end(self.handles[0].id)
        torch_internals.STEP_POST_HOOKS.of(optimizer).move_to_end(self.handles[1].id, last=False)

    @override
    def _take_groups(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = parameters_of(optimizer)
        mesh = next((p.device_mesh for p in parameters if isinstance(p, DTensor)), None)
        is_mixed = mesh is not None and not all(isinstance(p, DTensor) for p in parameters)
        self._copied_over = mesh if is_mixed and not self._elementwise and not _is_wrapped(optimizer) else None
        super()._take_groups(optimizer)

    @override
    def _part_of(self, parameter: nn.Parameter) -> ParameterShard | None:
        if self._elementwise:
            return super()._part_of(parameter)
        if self._copied_over is None or isinstance(parameter, DTensor):
            return None
        return _Copy(parameter, self._copied_over)

    @override
    def _check_groups(self, optimizer: torch.optim.Optimizer) -> None:
        if ids_of(optimizer) != self._held:
            self._take_groups(optimizer)

    @override
    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = optimizer is self._optimizer()  # else a wrapper has its hooks
        calls = not self._elementwise and any(one is not None for one in (*args[1:], *kwargs.values()))
        return super()._before(optimizer, args, kwargs) if own and not calls else None

    @override
    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._own is not None:
            super()._after(optimizer, args, kwargs)


def _is_wrapped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether another optimizer has the same groups: one that steps inside the other finds what that has put there."""
    groups = set(map(id, optimizer.param_groups))
    parameters = parameters_of(optimizer)
    others = (one for one in optimizers_of(parameters) if one is not optimizer)
    return any(id(entry) in groups for one in others for entry in one.param_groups)


class _Copy(ParameterShard):
    """A whole parameter as a replicated DTensor in the same memory."""

    def __init__(self, parameter: nn.Parameter, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        super().__init__(parameter, self.as_dtensor(parameter.detach()))

    @override
    def follow(self) -> None:
        if self.place != self.parameter.data_ptr():
            self.values = nn.Parameter(self.as_dtensor(self.parameter.detach()), self.parameter.requires_grad)
            self.place = self.parameter.data_ptr()
        gradient = self.parameter.grad
        self.values.grad = None if gradient is None else self.as_dtensor(gradient)

    @override
    def as_dtensor(self, value: torch.Tensor) -> torch.Tensor:
        return as_dtensor(value, self._mesh, [Replicate()] * self._mesh.ndim)

    @override
    def _hide(self, value: Any) -> Any:
        is_plain = isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, DTensor)
        return self.as_dtensor(value) if is_plain else value

    @override
    def _show(self, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        return local(value) if all(one.is_replicate() for one in value.placements) else full_tensor(value)
