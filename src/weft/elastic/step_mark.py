"""What a step that failed has changed besides the weights, and putting it back.

Weights and the optimizer's state change in the optimizer's step alone, which does nothing after a failure. The rest
changes before it and after it: buffers in forward, random states, the learning rate, the position in the data.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from weft.checkpoint.state.collect import Checkpoint
from weft.checkpoint.state.random_states import generator_state, is_generator, prepare_generator
from weft.context import DistContext
from weft.tensors.rng_state import RngState

__all__ = ["StepMark"]


class StepMark:
    """The state between two steps, as far as a step that fails changes it.

    Attributes:
        position: Of the loader.
    """

    def __init__(self, state: Checkpoint, loader: Any, ctx: DistContext) -> None:
        objects = state.objects.values()
        self.position: dict[str, Any] = {}
        self._loader, self._ctx, self._has_rng = loader, ctx, state.rng
        # Walking through a model costs more than all the rest; its modules are those of now.
        self._modules = [part for obj in objects if isinstance(obj, nn.Module) for part in obj.modules()]
        self._optimizers = [obj for obj in objects if isinstance(obj, torch.optim.Optimizer)]
        apart = (nn.Module, torch.optim.Optimizer)
        self._others = [obj for obj in objects if not isinstance(obj, apart) and obj is not loader]
        self._values: list[Any] = []
        self._options: list[list[dict[str, Any]]] = []
        self._random: RngState | None = None
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(self) -> None:
        """Note the state of this moment."""
        self.position = self._loader.state_dict()
        self._values = [_value_of(obj) for obj in self._others]
        self._options = [[_options_of(group) for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._random = RngState.capture(self._ctx.device, self._ctx.engine) if self._has_rng else None
        parts = (module._buffers for module in self._modules if module._buffers)
        found = {id(b): b for buffers in parts for b in buffers.values() if b is not None}  # each once
        buffers = list(found.values())
        if len(buffers) != len(self._buffers) or any(a is not b for a, (b, _) in zip(buffers, self._buffers)):  # noqa: B905
            self._buffers = [(buffer, buffer.clone()) for buffer in buffers]
        elif buffers:
            torch._foreach_copy_([kept for _, kept in self._buffers], buffers)

    def put_back(self) -> None:
        """Go back to it: the step that followed has not been."""
        for optimizer, groups in zip(self._optimizers, self._options, strict=True):
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)
            optimizer.zero_grad()
        for obj, value in zip(self._others, self._values, strict=True):
            _put_back(obj, value)
        with torch.no_grad():
            for buffer, kept in self._buffers:
                buffer.copy_(kept)
        if self._random is not None:
            self._random.apply(self._ctx.device, self._ctx.engine)


def _options_of(group: dict[str, Any]) -> dict[str, Any]:
    plain = (int, float, str, type(None))
    return {n: v if isinstance(v, plain) else copy.deepcopy(v) for n, v in group.items() if n != "params"}


def _value_of(obj: Any) -> Any:
    return generator_state(obj) if is_generator(obj) else copy.deepcopy(obj.state_dict())


def _put_back(obj: Any, value: Any) -> None:
    if is_generator(obj):
        prepare_generator(obj, value, new=(0, 0, 0, ""))()
    else:
        obj.load_state_dict(value)
