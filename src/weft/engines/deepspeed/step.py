"""A step of the user's optimizer, made by DeepSpeed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from weft import torch_internals
from weft.engines.deepspeed.backward import raise_unused
from weft.engines.deepspeed.placeholders import GradientPlaceholders, is_local
from weft.engines.torch.steps.swapped import check_no_closure
from weft.errors import NotSynchronized, listed, message


@dataclass(eq=False)
class Step:
    """Hooks before and after the step of an optimizer, which itself finds no gradients and does nothing.

    Attributes:
        engine: DeepSpeed's.
        groups: Numbers of the optimizer's groups, and the engine's group for each.
        stand_ins: What is in `p.grad`.
        watches: Whether the user may change parameters between steps, which hold their values then.
    """

    engine: Any
    groups: Sequence[tuple[int, Mapping[str, Any]]]
    stand_ins: GradientPlaceholders
    watches: bool
    _versions: dict[nn.Parameter, int] = field(default_factory=dict)
    _done: bool = False

    def __post_init__(self) -> None:
        self.names = self.stand_ins.names

    def note_versions(self) -> None:
        """The weights that are stepped on are those of the module."""
        if self.watches:
            self._versions = {p: torch_internals.VERSION.of(p) for p in self.names}

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let DeepSpeed step, if there are gradients.

        Raises:
            NotSynchronized: Some are not averaged over the ranks.
            UnusedParameters: Some are missing.
            FloatingPointError: Some are not finite.
        """
        check_no_closure("zero_partition", (*args[1:], *kwargs.values()))
        self._done = False
        local = [name for p, name in self.names.items() if is_local(p.grad)]
        if local:
            raise NotSynchronized(
                f"optimizer.step() with gradients of {self.stand_ins.class_name} that are not averaged over the ranks",
                found=listed(local),
                expected="a step after the last micro-batch of a window, and gradients made by backward",
                fix="for window in loader:\n    for batch in window: ...\n    optimizer.step()",
            )
        if not self.stand_ins.settle():
            return  # no gradients: torch's step does nothing either
        missing = [name for p, name in self.names.items() if p not in self.stand_ins]
        if missing:
            raise_unused(self.stand_ins.class_name, missing)
        self._step(optimizer)

    def after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Leave gradients that are spent, if there was a step."""
        if self._done:
            self._done = False
            self.stand_ins.spend()

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        for number, group in self.groups:
            given = optimizer.param_groups[number]
            group.update({key: value for key, value in given.items() if key != "params"})  # type: ignore[attr-defined]
        for parameter, version in self._versions.items():
            if torch_internals.VERSION.of(parameter) != version:
                self.stand_ins.buffers.take_weights(parameter)
        for parameter in self.names:
            parameter.grad = None
        self.stand_ins.buffers.before_step()
        self.engine.step()
        skipped = bool(self.engine.optimizer.overflow)
        names = list(self.names.values())
        self.stand_ins.drop()
        self.note_versions()
        if skipped:
            raise FloatingPointError(
                message(
                    "zero_partition: gradients are not finite, and DeepSpeed skipped the step",
                    found=f"a norm that is not finite, over {listed(names)}",
                    expected="finite gradients on all ranks; torch would step and make the weights non-finite",
                    fix='weft.clip_grads(model, ctx, nonfinite="skip")  # before optimizer.step()',
                )
            )
        torch.autograd.graph.increment_version(list(self.names))
        self.note_versions()
        self._done = True
