"""The state of optimizers on the CPU between steps; in a step, that of a few parameters at a time is on the device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from weft.engines.torch.hooks.every_optimizer import before_every_step, parameters_of
from weft.engines.torch.hooks.method_hooks import Removable
from weft.engines.torch.reducing.flat_step import FlatStep
from weft.engines.torch.steps.in_backward import check_has_gradients
from weft.engines.torch.steps.step_by_parts import AroundPart, step_by_parts
from weft.engines.torch.steps.swapped import step_hooks
from weft.errors import OrderError
from weft.tensors.blocks import sharded_as
from weft.tensors.dtensor import local, resting_parameters
from weft.tensors.nested import map_tensors

_CPU = torch.device("cpu")


class StateOffload:
    """The optimizers that hold parameters of one module; each is seen in its first step."""

    def __init__(self, what: str, module: nn.Module, device: torch.device) -> None:
        """Begin to look for them.

        Args:
            what: Name of the strategy, for errors.
            module: Whose parameters.
            device: Where it computes; not a CPU.
        """
        self._what, self._module, self._device = what, weakref.ref(module), device
        self._hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, Removable] = weakref.WeakKeyDictionary()
        self._every = before_every_step(self, StateOffload._see)

    def undo(self) -> None:
        """Let optimizers keep their state on the device."""
        self._every.release()
        for optimizer, hooks in list(self._hooks.items()):
            hooks.remove()
            _move(optimizer, parameters_of(optimizer), self._device)
        self._hooks.clear()

    def _see(self, optimizer: torch.optim.Optimizer) -> None:
        module = self._module()
        if module is None or optimizer in self._hooks:
            return
        held = {id(p) for p in parameters_of(optimizer)}
        if held.isdisjoint(map(id, resting_parameters(module))):
            return
        check_has_gradients(f'{self._what}: offload="optimizer"', parameters_of(optimizer))
        if isinstance(optimizer, torch.optim.LBFGS) or any(isinstance(one, FlatStep) for one in step_hooks(optimizer)):
            raise OrderError(
                f'{self._what}: offload="optimizer" steps on a few parameters after the other',
                found="LBFGS, which couples all parameters"
                if isinstance(optimizer, torch.optim.LBFGS)
                else "fuse_step, which steps on all of them as one",
                expected="an optimizer that updates each parameter by itself",
                fix=f'leave offload="optimizer" out of the call of {self._what}',
            )
        around = AroundPart(partial(_move, optimizer, device=self._device), partial(_move, optimizer, device=_CPU))
        loaded = optimizer.register_load_state_dict_post_hook(lambda one: _move(one, parameters_of(one), _CPU))
        hooks = self._hooks[optimizer] = Removable()
        hooks.add(loaded.remove)
        hooks.add(step_by_parts(optimizer, around))


@torch.no_grad()
def _move(optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], device: torch.device) -> None:
    """Move the state of parameters; numbers stay where the optimizer has them."""
    pinned = device.type == "cpu" and torch.accelerator.is_available()

    def moved(value: torch.Tensor) -> torch.Tensor:
        part = local(value)
        if not value.dim() or part.device.type == device.type:
            return value
        if pinned and type(part) is torch.Tensor:
            there = torch.empty_like(part, device=device, pin_memory=True).copy_(part, non_blocking=True)
        else:
            there = part.to(device, non_blocking=not pinned)
        return sharded_as(there, value)

    for parameter in parameters:
        state = optimizer.state.get(parameter)
        if state:
            optimizer.state[parameter] = map_tensors(moved, dict(state))
    if pinned:  # whoever reads the state on the CPU finds it there
        torch.accelerator.current_stream().synchronize()
