"""Step on whole parameters: for optimizers that look at whole tensors, when those are cut into shards.

Adafactor keeps statistics of rows and columns, Muon multiplies matrices: an update of an element
depends on others. Here each parameter and its gradient are made whole on every rank, one after the
other, stepped as in one process, and cut again. State of the parameter's shape is kept in shards.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import override

from weft.checks import is_of
from weft.engines.options import StepMeshes
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.sharded_step.state_layout import state_layout
from weft.engines.torch.steps.combined_optimizer import kinds_of
from weft.engines.torch.steps.swapped import Groups, SwappedStep, is_elementwise, step_hooks
from weft.errors import OrderError
from weft.tensors.blocks import full_tensor, redistributed_as
from weft.tensors.nested import map_tensors

_LOOK_AT_WHOLE = (torch.optim.Adafactor, torch.optim.Muon, torch.optim.LBFGS)


class WholeStep(SwappedStep):
    """The hooks on one optimizer."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, others: StepMeshes, places: Collection[int]
    ) -> None:
        """Hang it on.

        Args:
            optimizer: Over plain or sharded parameters.
            mesh: State of plain parameters is cut over it between steps; None: it stays whole.
            others: Parameters for which that is otherwise.
            places: Of the groups that are stepped on here.
        """
        super().__init__(optimizer, places)
        self._layout_of = partial(state_layout, mesh=mesh, others=others)
        self._take_state(optimizer)

    def _states(self, optimizer: torch.optim.Optimizer) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        """The parameters that are stepped on here and have state, with it."""
        held = [p for parameters in self._groups(optimizer) for p in parameters]
        return [(p, optimizer.state[p]) for p in held if p in optimizer.state]

    @override
    def _kept_in_rows(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
        return [p for p, _ in self._states(optimizer) if self._layout_of(p) is not None]

    @override
    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep only this rank's part of state that already exists."""
        for parameter, state in self._states(optimizer):
            state.update(self._kept_state(state, parameter))

    @override
    def _step_parts(self, optimizer: torch.optim.Optimizer, groups: Groups) -> None:
        for place, parameters in enumerate(groups):
            for parameter in parameters:
                if parameter.grad is not None:
                    whole = nn.Parameter(full_tensor(parameter.detach()))
                    whole.grad = full_tensor(parameter.grad)
                    self._step_on(optimizer, [(place, parameter, whole)])
                    with torch.no_grad():
                        parameter.copy_(redistributed_as(whole.detach(), parameter))

    @override
    def _whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return map_tensors(full_tensor, dict(state))

    @override
    def _kept_state(self, state: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        """Of tensors of the parameter's shape, also in lists and dicts, this rank's part."""
        return map_tensors(partial(self._part, parameter), dict(state))

    def _part(self, parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if not value.dim() or value.shape != parameter.shape:
            return value
        layout = self._layout_of(parameter)
        return redistributed_as(value, parameter) if layout is None else layout.dtensor(layout.part(value))


def _is_uneven(parameter: torch.Tensor) -> bool:
    """Whether a complex parameter has shards that differ in size.

    Optimizers step on `view_as_real`, as torch's do. It gathers such shards, so that the step changes a copy.
    """
    if not parameter.is_complex() or not isinstance(parameter, DTensor):
        return False
    return any(
        placement.is_shard() and parameter.shape[cast("Shard", placement).dim] % parameter.device_mesh.size(axis)
        for axis, placement in enumerate(parameter.placements)
    )


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
    if problem is None or any(getattr(one, "by_request", False) for one in step_hooks(optimizer)):
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
