"""Hooks on the steps of all optimizers, also of those that weft was not given; each hook belongs to one object.

torch iterates over its table of these hooks while they run: an entry that goes meanwhile makes the step of somebody's
optimizer raise "OrderedDict mutated during iteration". Objects may be collected at any time, also in a hook, or in
another thread. So a collected object leaves an entry that does nothing. Only calls of the program change the table:
those that make or end a hook, which take off such entries as well. As with torch's own handles, these are not for
hooks of optimizers, and not for one thread while another one steps.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from weft.torch_internals import ALL_STEP_POST_HOOKS, ALL_STEP_PRE_HOOKS

T = TypeVar("T")
Run = Callable[[T, torch.optim.Optimizer], None]


class StepHook(Generic[T]):
    """An entry in torch's table of hooks, as long as its owner lives."""

    def __init__(self, owner: T, run: Run[T], register: Callable[[Any], Any]) -> None:
        self._run: Run[T] | None = run
        self._owner = weakref.ref(owner, self._forget)
        self._handle = register(self)
        remove_finished_hooks()

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """A step of any optimizer."""
        owner, run = self._owner(), self._run
        if owner is not None and run is not None:
            run(owner, optimizer)

    def release(self) -> None:
        """Take the hook off."""
        self._run = None
        remove_finished_hooks()

    def _forget(self, owner: object) -> None:
        self._run = None


def remove_finished_hooks() -> None:
    """Take hooks off that do nothing any more; not to be called in a step."""
    for table in (ALL_STEP_PRE_HOOKS, ALL_STEP_POST_HOOKS):
        for hook in list(table.found.values()):
            if isinstance(hook, StepHook) and hook._run is None:
                hook._handle.remove()


def before_every_step(owner: T, run: Run[T]) -> StepHook[T]:
    """Call a function before each step of every optimizer of this process.

    Args:
        owner: As long as it lives.
        run: Gets the owner, which it does not keep alive, and the optimizer; asks first whether that one concerns it.

    Returns:
        The hook; the owner ends it with its own end.
    """
    return StepHook(owner, run, register_optimizer_step_pre_hook)


def after_every_step(owner: T, run: Run[T]) -> StepHook[T]:
    """As `before_every_step`, after each step."""
    return StepHook(owner, run, register_optimizer_step_post_hook)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The parameters in all groups of an optimizer, in order."""
    return [p for entry in optimizer.param_groups for p in entry["params"]]


def optimizers_of(parameters: Iterable[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """Find the living optimizers that hold one of these parameters."""
    wanted = {id(p) for p in parameters}
    return [
        obj
        for obj in gc.get_objects()
        if issubclass(type(obj), torch.optim.Optimizer)
        and any(id(p) in wanted for entry in getattr(obj, "param_groups", ()) for p in entry["params"])
    ]


def optimizers_besides(
    known: Iterable[torch.optim.Optimizer], parameters: Collection[torch.Tensor]
) -> list[torch.optim.Optimizer]:
    """Find the living optimizers that hold one of these parameters and are not known."""
    ids = {id(one) for one in known}
    if any(id(one) not in ids for one in optimizers_of(parameters)):
        gc.collect()  # some may have been dropped, in a cycle
    return [one for one in optimizers_of(parameters) if id(one) not in ids]
