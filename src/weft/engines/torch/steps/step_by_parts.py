"""Step on a few parameters after the other, whose state is made ready for it and put away after it.

For state that lies otherwise between steps than the optimizer computes with it: in fewer bits, or in other memory. Only
that of one part at a time is there in both forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from weft import torch_internals
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.steps.combined_optimizer import plain_step
from weft.engines.torch.steps.swapped import PartSteps, StepsOnOthers, after_closure, step_hooks
from weft.tensors.dtensor import local
from weft.tensors.messages import in_buckets


class AroundPart(NamedTuple):
    """What is done around the step on a part, with state as it is between steps: in shards where parameters are.

    Attributes:
        ready: Called with the parameters before the step.
        put_away: Called with them after it.
        part_bytes: Of the parameters of a part, where they are not larger.
    """

    ready: Callable[[Sequence[torch.Tensor]], None]
    put_away: Callable[[Sequence[torch.Tensor]], None]
    part_bytes: int = 64 * 2**20


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
        self._steps = PartSteps()
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
        return after_closure(args, kwargs, lambda: self._step_part_by_part(optimizer))

    def _step_part_by_part(self, optimizer: torch.optim.Optimizer) -> None:
        """Step on everything that has a gradient; the optimizer's own step, which comes then, finds none."""
        step, given = plain_step(optimizer), ((optimizer,), dict[str, Any]())
        tables = (torch_internals.STEP_PRE_HOOKS.of(optimizer), torch_internals.STEP_POST_HOOKS.of(optimizer))
        before, after = ([hook for hook in hooks.values() if _is_of(hook, StepsOnOthers)] for hooks in tables)
        live = self._steps.hide(parameters_of(optimizer))
        most = min(one.part_bytes for one in self.around)
        try:
            with self._steps.all_parts(optimizer):
                for part in in_buckets(live, lambda pair: local(pair[0]).nbytes, most):
                    parameters = [parameter for parameter, _ in part]
                    for parameter, gradient in part:
                        parameter.grad = gradient
                    for one in reversed(self.around):
                        one.ready(parameters)
                    with self._steps.one_part(optimizer):
                        for hook in before:
                            hook(optimizer, *given)
                        step(optimizer)
                        for hook in after:
                            hook(optimizer, *given)
                    for one in self.around:
                        one.put_away(parameters)
                    for parameter in parameters:
                        parameter.grad = None
        except BaseException:
            self._steps.show()
            raise

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._steps.end(optimizer)


def exchange_last(optimizer: torch.optim.Optimizer) -> None:
    """Let hooks that exchange tensors come after all others that run before a step: those see what it holds else."""
    hooks = torch_internals.STEP_PRE_HOOKS.of(optimizer)
    for kind in (StepByParts, StepsOnOthers):
        for key in [key for key, hook in hooks.items() if _is_of(hook, kind)]:
            hooks.move_to_end(key)


def _is_of(hook: object, kind: type[Any]) -> bool:
    """Whether a hook is a method of an object of this class."""
    return isinstance(getattr(hook, "__self__", None), kind)
