"""Step on a few parameters after the other, whose state is made ready for it and put away after it.

For state that lies otherwise between steps than the optimizer computes with it: in fewer bits, or in other memory. Only
that of one part at a time is there in both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from weft import torch_internals
from weft.engines.torch.compute.combined_optimizer import plain_step
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.steps.swapped import (
    after_closure,
    exchange_hooks,
    exchange_last,
    numbers_of,
    step_hooks,
)
from weft.tensors.dtensor import local

_Pair = tuple[torch.Tensor, torch.Tensor]


class AroundPart(NamedTuple):
    """What is done around the step on a part, with state as it is between steps: in shards where parameters are.

    Attributes:
        ready: Called with the parameters before the step.
        put_away: Called with them after it.
        part_bytes: Of the parameters of a part, where they are not larger.
    """

    ready: Callable[[Sequence[torch.Tensor]], None]
    put_away: Callable[[Sequence[torch.Tensor]], None]
    part_bytes: int


def step_by_parts(optimizer: torch.optim.Optimizer, around: AroundPart) -> Callable[[], None]:
    """Let an optimizer, one that updates each parameter by itself, step on a part after the other.

    What was added last is the outermost: it makes state ready first, and puts it away last.

    Returns:
        What ends it.
    """
    found = next((one for one in step_hooks(optimizer) if isinstance(one, StepByParts)), None)
    steps = StepByParts(optimizer) if found is None else found
    steps.around.append(around)
    return partial(steps.end, around)


class StepByParts:
    """The hooks on one optimizer.

    They come right before the hooks that exchange what its groups hold, which they call for each part, and after all
    others: those see one step.

    Attributes:
        around: What is done around the step on each part, the innermost first.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.around: list[AroundPart] = []
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._moved: list[dict[str, Any]] | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        # Hooks of the program that come after see the gradients.
        torch_internals.STEP_POST_HOOKS.of(optimizer).move_to_end(self._handles[1].id, last=False)
        exchange_last(optimizer)

    def end(self, around: AroundPart) -> None:
        """Do something no more; without anything to do, the hooks are taken off."""
        self.around = [one for one in self.around if one is not around]
        for handle in () if self.around else self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return after_closure(args, kwargs, lambda: self.step_part_by_part(optimizer))

    def step_part_by_part(self, optimizer: torch.optim.Optimizer) -> None:
        """Step on everything that has a gradient; the optimizer's own step, which comes then, finds none."""
        step, given = plain_step(optimizer), ((optimizer,), dict[str, Any]())
        before, after = exchange_hooks(optimizer)
        live = [(p, p.grad) for p in parameters_of(optimizer) if p.grad is not None]
        for parameter, _ in live:
            parameter.grad = None
        self._hidden = live
        # An optimizer may keep numbers in its groups that move in each step: they move once.
        numbers = moved = numbers_of(optimizer)
        try:
            for part in self._parts(live):
                parameters = [parameter for parameter, _ in part]
                for parameter, gradient in part:
                    parameter.grad = gradient
                for one in reversed(self.around):
                    one.ready(parameters)
                self._set_numbers(optimizer, numbers)
                for hook in before:
                    hook(optimizer, *given)
                step(optimizer)
                for hook in after:
                    hook(optimizer, *given)
                moved = numbers_of(optimizer)
                for one in self.around:
                    one.put_away(parameters)
                for parameter in parameters:
                    parameter.grad = None
        except BaseException:
            self._show_gradients()
            raise
        self._set_numbers(optimizer, numbers)
        self._moved = moved if live else None

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._show_gradients()
        if self._moved is not None:
            self._set_numbers(optimizer, self._moved)
        self._moved = None

    @staticmethod
    def _set_numbers(optimizer: torch.optim.Optimizer, numbers: Sequence[dict[str, Any]]) -> None:
        for entry, before in zip(optimizer.param_groups, numbers, strict=True):
            entry.update(before)

    def _show_gradients(self) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden = []

    def _parts(self, live: Sequence[_Pair]) -> Iterator[list[_Pair]]:
        most = min(one.part_bytes for one in self.around)
        part: list[_Pair] = []
        filled = 0
        for one in live:
            size = local(one[0]).nbytes
            if part and filled + size > most:
                yield part
                part, filled = [], 0
            part.append(one)
            filled += size
        if part:
            yield part
