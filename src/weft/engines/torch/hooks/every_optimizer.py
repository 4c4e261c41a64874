"""Functions that run before each step of every optimizer, as long as what they belong to lives.

Meanwhile the versions of parameters tell of every step: torch's fused kernels leave them as they are.

torch iterates over its global hooks while these run, and an object may be collected in the middle of that. Taking a
hook off then makes the step of somebody's optimizer raise "OrderedDict mutated during iteration". So there is one
hook for all functions: the end of an object makes it forget a function, and only a call takes it off, outside of steps.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["before_every_step", "take_off_unless_used"]

Run = Callable[[torch.optim.Optimizer, Any, Any], None]

_running: dict[int, Run] = {}
_numbers = itertools.count()
_hooks: list[RemovableHandle] = []  # two, or none


def before_every_step(owner: object, run: Run) -> Callable[[], None]:
    """Call a function before each step of every optimizer of this process.

    Args:
        owner: As long as it lives; the function does not keep it alive.
        run: Gets the optimizer, and the arguments of its step.

    Returns:
        What ends that sooner; not to be called in a step.
    """
    number = next(_numbers)
    _running[number] = run
    weakref.finalize(owner, _running.pop, number, None).atexit = False
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_run_all))
        _hooks.append(register_optimizer_step_post_hook(_note_fused))

    def end() -> None:
        _running.pop(number, None)
        take_off_unless_used()

    return end


def take_off_unless_used() -> None:
    """Take the hooks off torch if no function is left; not to be called in a step."""
    while not _running and _hooks:
        _hooks.pop().remove()


def _run_all(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for run in list(_running.values()):
        run(optimizer, args, kwargs)


def _note_fused(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    fused = (entry["params"] for entry in optimizer.param_groups if entry.get("fused"))
    stepped = [p for parameters in fused for p in parameters if p.grad is not None]
    if stepped:
        torch.autograd.graph.increment_version(stepped)
