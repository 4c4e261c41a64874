"""Gradients for lines over `model.parameters()`, as `torch.nn.utils.clip_grad_norm_`, between backward and a step.

Parameters that other ranks have get gradients that raise where they are read: such a line would take the parameters of
this rank for all there are. Those of cut layers go together with plain ones. Optimizers see what torch has made: before
a step all this is taken away, and after it it is back.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import nn

from weft import torch_internals
from weft.engines.torch.hooks.backward_session import after_callbacks, when_entered
from weft.engines.torch.hooks.every_optimizer import before_every_step, parameters_of
from weft.engines.torch.parts.refuse_pickle import refuse_optimizer_file
from weft.tensors.remote_parameter import gradient_elsewhere, is_elsewhere


class PartGradients:
    """Those of one module, from a backward pass on until `zero_grad`.

    Args:
        what: Name of the transform.
        module: Some of its parameters are elsewhere, or cut.
        cut: The class of gradients that are cut.
    """

    def __init__(self, what: str, module: nn.Module, cut: type[Any] | None = None) -> None:
        self._cut = cut
        self._what = what
        self._module = weakref.ref(module)
        self._there: list[nn.Parameter] = []
        self._backward = -1  # the last one that was seen
        self._seen: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self.release = before_every_step(self, PartGradients._hide).release

    @torch_internals.untraced
    def follow(self, output: object) -> None:
        """A backward pass through these tensors brings gradients to parameters of the module."""
        if torch.is_grad_enabled():
            when_entered(output, self._enter)

    def _enter(self, gradient: torch.Tensor) -> None:
        number = torch_internals.graph_task_id()
        if number != self._backward:
            self._backward = number
            after_callbacks(self._show)

    @torch.no_grad()
    def _show(self, *unused: Any) -> None:
        module = self._module()
        if module is not None and any(p.grad is not None for p in module.parameters() if not is_elsewhere(p)):
            self._there = self._there or [p for p in module.parameters() if is_elsewhere(p)]
            for p in self._there:
                if p.requires_grad and p.grad is None:
                    p.grad = gradient_elsewhere(p)
        if self._cut is not None and module is not None:
            for p in module.parameters():
                if type(p.grad) is self._cut.__base__:
                    p.grad.__class__ = self._cut

    def _hide(self, optimizer: torch.optim.Optimizer) -> None:
        module = self._module()
        ours = set() if module is None else set(map(id, module.parameters()))
        held: list[Any] = [p for p in parameters_of(optimizer) if id(p) in ours]
        there = [p for p in held if is_elsewhere(p)]
        cut = [p.grad for p in held if self._cut is not None and isinstance(p.grad, self._cut)]
        for p in there:
            p.grad = None
        for gradient in cut:
            gradient.__class__ = type(gradient).__base__
        if (there or cut) and optimizer not in self._seen:
            self._seen.add(optimizer)
            optimizer.register_step_post_hook(self._show)
            if there:
                optimizer.register_state_dict_post_hook(partial(refuse_optimizer_file, self._what))
