"""Which device holds which part of a tensor: the strategies as layouts, see [Note: one view]; and where a step ends.

[Note: marks get lost] XLA keeps the layout with the values of a tensor. What is copied in from elsewhere, and the
state that an optimizer makes in its first step or loads, comes without; so the layout of each parameter and
of its state is kept beside the parameter, and laid on again.

[Note: one graph per step] XLA collects operations and runs nothing until it is told to, or until a value is looked
at. All of a step is one graph here: it ends when an optimizer of tensors on XLA has stepped. A window of
micro-batches is one graph as well, and a shorter last window is another one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.engines.xla import internals

Plan = tuple[tuple[str, ...] | None, ...]  # for each dimension the mesh axes that cut it; None: whole
_KEPT = "_weft_layout"


class _TensorLayout(NamedTuple):
    """What is kept beside a parameter or buffer.

    Attributes:
        own: Layout of the tensor itself.
        state: Of the optimizer's state of its shape; None: as XLA decides.
    """

    own: Plan
    state: Plan | None


class Laid:
    """The layout of a module, for later transforms; `undo` takes it off."""

    mean_over = 1

    def __init__(self, mesh: Any, module: nn.Module, axes: Sequence[str], cut: str) -> None:
        self._mesh = mesh
        self._module = weakref.ref(module)
        over = tuple(name for name in axes if mesh.shape()[name] > 1)[-1:]
        for tensor in _tensors(module):
            whole: Plan = (None,) * tensor.dim()
            parts = whole
            if over and isinstance(tensor, nn.Parameter):
                parts = _cut(tuple(tensor.shape), over, mesh.shape()[over[0]])
            vars(tensor)[_KEPT] = _TensorLayout(
                parts if cut == "all" else whole, parts if cut in ("all", "state") else None
            )
        lay(mesh, [module])

    # Gradients are sums over the batch of all devices in every backward; there is nothing to switch.

    def begin_window(self) -> None:
        """Nothing to do."""

    def last_backward(self) -> None:
        """Nothing to do."""

    def end_window(self, *, left: bool = False) -> None:
        """Nothing to do."""

    def undo(self) -> None:
        """Let every device hold everything again."""
        module = self._module()
        for tensor in _tensors(module) if module is not None else ():
            vars(tensor).pop(_KEPT, None)
            mark(self._mesh, tensor, (None,) * tensor.dim())


def lay(mesh: Any, objects: Iterable[object]) -> None:
    """Lay the modules and optimizers among `objects` out as it was decided for them."""
    for obj in objects:
        if isinstance(obj, nn.Module):
            for tensor in _tensors(obj):
                if kept := plans_of(tensor):
                    mark(mesh, tensor, kept.own)
        elif isinstance(obj, torch.optim.Optimizer):
            lay_state(mesh, obj)


def lay_state(mesh: Any, optimizer: torch.optim.Optimizer) -> None:
    """Lay out what an optimizer keeps of the shape of its parameters."""
    for parameter, state in optimizer.state.items():
        kept = plans_of(parameter) if isinstance(parameter, torch.Tensor) else None
        if kept is None or kept.state is None:
            continue
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.device.type == "xla" and value.shape == parameter.shape:
                mark(mesh, value, kept.state)


def plans_of(tensor: torch.Tensor) -> _TensorLayout | None:
    """What was decided for a tensor."""
    found: _TensorLayout | None = vars(tensor).get(_KEPT)
    return found


def mark(mesh: Any, tensor: torch.Tensor, plan: Plan) -> None:
    """Lay a tensor out; nothing happens if it is so already."""
    layout = mesh.get_op_sharding(plan)
    values = tensor.detach()
    try:
        internals.mark_sharding(values, layout)
    except RuntimeError:  # it has another layout, which has to go first
        internals.clear_sharding(values)
        internals.mark_sharding(values, layout)


def batch_plan(shape: Sequence[int], axes: Sequence[str], num_devices: int) -> Plan:
    """Rows of a batch to the devices; a batch that cannot be shared out evenly goes to all of them."""
    whole: Plan = (None,) * len(shape)
    if not shape or not axes or not shape[0] or shape[0] % num_devices:
        return whole
    return (tuple(axes), *whole[1:])


def _cut(shape: tuple[int, ...], axes: tuple[str, ...], size: int) -> Plan:
    """The first dimension that can be cut evenly; what has none stays whole."""
    for dim, length in enumerate(shape):
        if length and length % size == 0:
            return (*(None,) * dim, axes, *(None,) * (len(shape) - dim - 1))
    return (None,) * len(shape)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, tied ones once."""
    return [*module.parameters(), *module.buffers()]
