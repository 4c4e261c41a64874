"""Step on whole parameters: for optimizers that look at whole tensors, when those are cut into shards.

Adafactor keeps statistics of rows and columns, Muon multiplies matrices: an update of an element
depends on others. Here each parameter and its gradient are made whole on every rank, one after the
other, stepped as in one process, and cut again. State of the parameter's shape is kept in shards.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from weft.checks import is_of
from weft.engines.options import StepMeshes
from weft.engines.torch.compute.combined_optimizer import kinds_of
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.steps.state_layout import state_layout
from weft.engines.torch.steps.swapped import Groups, SwappedStep, is_elementwise, step_hooks
from weft.errors import OrderError
from weft.tensors.blocks import full_tensor, redistributed_as
from weft.tensors.nested import map_tensors, tensors

_LOOK_AT_WHOLE = (torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS)


class WholeStep(SwappedStep):
    """The hooks on one optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        mesh: DeviceMesh | None,
        others: StepMeshes,
        places: Collection[int] | None = None,
    ) -> None:
        """Hang it on.

        Args:
            optimizer: Over plain or sharded parameters.
            mesh: State of plain parameters is cut over it between steps; None: it stays whole.
            others: Parameters for which that is otherwise.
            places: Of the groups that are stepped on here; None: all.
        """
        self._others = others
        self._mesh = mesh
        super().__init__(optimizer, places)

    def undo(self) -> None:
        """Take the hooks off. State of plain parameters is made whole: one all-gather per tensor."""
        optimizer = self._unhook()
        for parameter, state in self._states(optimizer):
            if not isinstance(parameter, DTensor) or parameter in self._others:
                state.update(map_tensors(functools.partial(_joined, parameter=parameter), dict(state)))

    def is_left_out(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has stepped without these hooks: its state is whole, which is cut here."""
        return any(
            value.dim() and value.shape == p.shape and not isinstance(value, DTensor)
            for p, state in self._states(optimizer)
            if self._others.get(cast("nn.Parameter", p), (self._mesh, None))[0] is not None
            for value in tensors(dict(state))
        )

    def _states(self, optimizer: torch.optim.Optimizer | None) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """The parameters that are stepped on here and have state, with it."""
        if optimizer is None:
            return []
        held = [p for parameters in self._groups(optimizer) for p in parameters]
        return [(p, optimizer.state[p]) for p in held if p in optimizer.state]

    @override
    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep only this rank's part of state that already exists."""
        for parameter, state in self._states(optimizer):
            state.update(self._cut(state, parameter))

    @override
    def _step_parts(self, optimizer: torch.optim.Optimizer, groups: Groups) -> None:
        for place, parameters in enumerate(groups):
            for parameter in parameters:
                if parameter.grad is not None:
                    self._step_one(optimizer, place, parameter)

    def _step_one(self, optimizer: torch.optim.Optimizer, place: int, parameter: torch.Tensor) -> None:
        whole = nn.Parameter(_whole(parameter.detach()))
        whole.grad = _whole(parameter.grad) if parameter.grad is not None else None
        state = optimizer.state.pop(parameter, None)
        if state is not None:
            optimizer.state[whole] = map_tensors(_whole, dict(state))
        try:
            self._step_on(optimizer, [[whole] if at == place else [] for at in range(len(optimizer.param_groups))])
        finally:
            state = optimizer.state.pop(whole, {})
            optimizer.state[parameter] = self._cut(state, parameter)
        with torch.no_grad():
            parameter.copy_(redistributed_as(whole.detach(), parameter))

    def _cut(self, state: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        """The state of a parameter; of tensors of its shape, also in lists and dicts, this rank's part."""
        return map_tensors(lambda value: self._part(value, parameter), dict(state))

    def _part(self, value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        if not value.dim() or value.shape != parameter.shape:
            return value
        rows, cut = self._others.get(cast("nn.Parameter", parameter), (self._mesh, None))
        if rows is None or (isinstance(parameter, DTensor) and cut is None):
            return redistributed_as(value, parameter)
        layout = state_layout(parameter, rows, cut)
        return redistributed_as(value, parameter) if layout is None else layout.dtensor(layout.part(value))


def _is_uneven(parameter: torch.Tensor) -> bool:
    """Whether a complex parameter has shards that differ in size.

    Optimizers step on `view_as_real`, as torch's do. It gathers such shards, so that the step changes a copy.
    """
    if not parameter.is_complex() or not isinstance(parameter, DTensor):
        return False
    return any(parameter.shape[dim] % size for dim, size in _cuts(parameter))


def _cuts(parameter: DTensor) -> Iterator[tuple[int, int]]:
    """The dimensions in which it is cut, and into how many parts."""
    for axis, placement in enumerate(parameter.placements):
        if placement.is_shard():
            yield cast("Shard", placement).dim, parameter.device_mesh.size(axis)


def check_steps_on_shards(what: str, optimizer: torch.optim.Optimizer) -> None:
    """Raise if an optimizer is known not to step on DTensors, or to come to other numbers on them.

    Args:
        what: Name of the strategy, for the error text.
        optimizer: Over sharded parameters.

    Raises:
        OrderError: `gather_step` is missing.
    """
    if is_elementwise(optimizer):
        return  # steps on what this rank holds; see `one_kind.py`
    kinds: list[Any] = kinds_of(optimizer)  # mypy does not know that a class has a hash
    kind = next((one for one in kinds if _problem_of(one)), kinds[0])
    problem = _problem_of(kind)
    if problem is None and any(_is_uneven(p) for p in parameters_of(optimizer)):
        problem = "cannot step on complex shards that differ in size: torch would lose its steps"
    gathers = any(isinstance(one, SwappedStep) or getattr(one, "by_request", False) for one in step_hooks(optimizer))
    if problem is None or gathers:
        return
    name = kind.__name__
    couples_all = issubclass(kind, torch.optim.LBFGS)
    raise OrderError(
        f"{what}: {name} {problem}",
        found=f"{name} over sharded parameters" + ("" if couples_all else ", without gather_step"),
        expected="replicate, which leaves parameters whole"
        if couples_all
        else f"{what}, then the optimizer, then gather_step; or replicate",
        fix="model, ctx = weft.replicate(model, ctx)  # instead of sharding"
        if couples_all
        else "optimizer, ctx = weft.gather_step(optimizer, ctx)",
    )


@functools.cache  # asked in every step
def _problem_of(kind: type[Any]) -> str | None:
    """Why no optimizer of a class can step on shards."""
    if issubclass(kind, _LOOK_AT_WHOLE):
        return "looks at whole tensors, and would step on shards"
    if is_of(kind, "bitsandbytes"):
        return "cannot step on shards: bitsandbytes has its kernels for plain tensors only"
    return None


def _whole(value: torch.Tensor) -> torch.Tensor:
    return full_tensor(value) if isinstance(value, DTensor) else value


def _joined(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return redistributed_as(value, parameter) if isinstance(value, DTensor) else value
