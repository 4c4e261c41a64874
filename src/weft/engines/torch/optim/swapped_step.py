"""Let an optimizer step on other tensors than those in its groups: the same values, whole.

An optimizer may keep numbers in its groups and move them in each `step`; they are put back before
each part, and after the optimizer's own step, which finds no gradients, so that they move once.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from weft.engines.torch.optim.closures import check_no_closure

Groups = Sequence[Sequence[torch.Tensor]]


class SwappedStep:
    """The hooks on one optimizer; who inherits says in `_step_parts` what is stepped on."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._step = plain_step(optimizer)
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._before: list[dict[str, Any]] = []
        self._moved: list[dict[str, Any]] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._on_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_load_state_dict_post_hook(self._take_state),
        ]
        self._take_state(optimizer)

    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep only what this rank keeps of state that already exists."""
        raise NotImplementedError

    def _step_parts(self, optimizer: torch.optim.Optimizer, groups: Groups) -> None:
        """Step on everything, part by part, by `_step_on`."""
        raise NotImplementedError

    def _step_on(self, optimizer: torch.optim.Optimizer, part: Groups) -> None:
        """One step on a part of the parameters.

        Args:
            optimizer: With their state in its own.
            part: Group by group, with gradients.
        """
        for entry, before, parameters in zip(optimizer.param_groups, self._before, part, strict=True):
            entry.update(before)
            entry["params"] = list(parameters)
        self._step(optimizer)
        self._moved = _numbers(optimizer)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_no_closure("step on whole parameters", (*args[1:], *kwargs.values()))
        groups = [entry["params"] for entry in optimizer.param_groups]
        self._before, self._moved = _numbers(optimizer), []
        try:
            self._step_parts(optimizer, groups)
        finally:
            for entry, parameters, before in zip(optimizer.param_groups, groups, self._before, strict=True):
                entry.update(before)
                entry["params"] = parameters
        for parameters in groups:  # the optimizer's own step, which comes now, finds nothing to do
            for parameter in parameters:
                if parameter.grad is not None:
                    self._gradients.append((parameter, parameter.grad))
                    parameter.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients.clear()
        if self._moved:
            for entry, moved in zip(optimizer.param_groups, self._moved, strict=True):
                entry.update(moved)


def _numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if key != "params"} for entry in optimizer.param_groups]


def plain_step(optimizer: torch.optim.Optimizer) -> Any:
    """The class's own `step`, without the hooks torch puts around it."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step
