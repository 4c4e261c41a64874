"""Step on a few parameters after the other, whose state is made ready for it and put away after it.

For state that lies otherwise between steps than the optimizer computes with it: in fewer bits, or in other memory. Only
that of one part at a time is there in both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from weft import torch_internals
from weft.engines.torch.compute.combined_optimizer import plain_step
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.steps.swapped import after_closure, exchange_hooks, exchange_last, numbers_of
from weft.tensors.dtensor import local

State = Callable[[Sequence[torch.Tensor]], None]  # does something with the state of parameters
_Pair = tuple[torch.Tensor, torch.Tensor]


class StepByParts:
    """The hooks on one optimizer.

    They come right before the hooks that exchange what its groups hold, which they call for each part, and after all
    others: those see one step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, ready: State, put_away: State, part_bytes: int) -> None:
        """Hang them on.

        Args:
            optimizer: One that updates each parameter by itself.
            ready: Called with the parameters of a part before the step on them, and
            put_away: after it; both find the state as it is between steps, in shards where parameters are.
            part_bytes: Of the parameters of a part, where they are not larger.
        """
        self._ready, self._put_away, self._part_bytes = ready, put_away, part_bytes
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._moved: list[dict[str, Any]] | None = None
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        # Hooks of the program that come after see the gradients.
        torch_internals.STEP_POST_HOOKS.of(optimizer).move_to_end(self._handles[1].id, last=False)
        exchange_last(optimizer)

    def undo(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return after_closure(args, kwargs, lambda: self.step_in_parts(optimizer))

    def step_in_parts(self, optimizer: torch.optim.Optimizer) -> None:
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
                self._ready(parameters)
                self._set_numbers(optimizer, numbers)
                for hook in before:
                    hook(optimizer, *given)
                step(optimizer)
                moved = numbers_of(optimizer)
                for hook in after:
                    hook(optimizer, *given)
                self._put_away(parameters)
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
        part: list[_Pair] = []
        filled = 0
        for one in live:
            size = local(one[0]).nbytes
            if part and filled + size > self._part_bytes:
                yield part
                part, filled = [], 0
            part.append(one)
            filled += size
        if part:
            yield part
