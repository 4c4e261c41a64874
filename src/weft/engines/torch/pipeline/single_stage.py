"""A module whose calls give a loss, on one rank: what a pipeline of one stage is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.engines.torch.pipeline.batch_parts import NOTHING, inputs_of


class SingleStage:
    """Calls of a module take a target."""

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Any] | None) -> None:
        self._loss = loss
        self._removable = Removable()
        attach(module, self._removable, around=self._around, methods=["forward"])

    def undo(self) -> None:
        """Let calls give the output again."""
        self._removable.remove()

    def _around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._loss is not None
        inputs = inputs_of(call, args, kwargs, has_loss=True)
        output = call(*inputs.args, **inputs.kwargs)
        if inputs.target is NOTHING:
            return output
        value = self._loss(output, inputs.target)
        return value[0] / value[1] if isinstance(value, (tuple, list)) and len(value) == 2 else value
