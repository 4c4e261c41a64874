"""The parameters of the stages of this rank: copies of them that share their memory, for the passes of a schedule.

[Note: aliases] A schedule runs backward passes inside a call. Their gradients are not those of the module yet: what
arrives at the loss later multiplies them, and strategies and hooks on the parameters may see them only then. So a
pass runs on aliases: parameters of their own that share memory with the module's.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from weft.tensors.dtensor import local

__all__ = ["Aliases"]


class Aliases:
    """The aliases of the parameters of one module."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    @contextlib.contextmanager
    def in_place(self, module: nn.Module) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
        """Let a module compute with aliases inside the body; those on meta stay.

        Yields:
            The parameters of the module, each with its alias, whose gradient is None.
        """
        slots: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    if id(parameter) not in pairs:
                        pairs[id(parameter)] = (parameter, self._alias(parameter))
                    slots.append((part._parameters, name, parameter))
        self._made = pairs
        for slot, name, parameter in slots:
            slot[name] = pairs[id(parameter)][1]
        try:
            yield list(pairs.values())
        finally:
            for slot, name, parameter in slots:
                slot[name] = parameter

    def forget(self) -> None:
        """Let go of what was made."""
        self._made.clear()

    def _alias(self, parameter: nn.Parameter) -> nn.Parameter:
        known, made = self._made.get(id(parameter), (None, None))
        if known is not parameter or made is None or not _same_memory(parameter, made):
            made = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            vars(made).update(vars(parameter))
        made.requires_grad_(parameter.requires_grad)
        made.grad = None
        return made


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = local(one), local(other)
    return first.untyped_storage()._cdata == second.untyped_storage()._cdata and first.shape == second.shape


@contextlib.contextmanager
def units_whole(module: nn.Module) -> Iterator[None]:
    """Let FSDP2 gather all units of a module at once, and not for each micro-batch.

    Inside, its hooks on the units take the calls for those of a second run in backward, for which backward has
    gathered the parameters. What was gathered is freed by the end of backward.

    Yields:
        Nothing.
    """
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    units: list[Any] = (
        [part for part in module.modules() if part is not module and isinstance(part, kind)] if kind else []
    )
    states = list({id(state): state for state in (unit._get_fsdp_state() for unit in units)}.values())
    before = [state._training_state for state in states]
    for unit in units:
        unit.unshard()
    try:
        for state in states:
            state._training_state = type(state._training_state).PRE_BACKWARD
        yield
    finally:
        for state, training in zip(states, before, strict=True):
            state._training_state = training


class Kept:
    """Gradients of one call that wait for what arrives at its loss.

    Attributes:
        gradients: For the parameters that got one; None when they were used.
        scale: The number they are multiplied by, besides what arrives.
    """

    def __init__(self, gradients: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
        self.gradients: list[torch.Tensor] | None = list(gradients)
        self.scale = scale
