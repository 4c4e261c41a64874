"""Several optimizers as one: its groups and its state are theirs, and its step is theirs, one after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override


class CombinedOptimizer(torch.optim.Optimizer):
    """An optimizer like any other, which computes each group by the class of optimizer that the group was made for.

    Hooks and transforms are on this one alone: those it is made of have groups and state only while they step, and
    their steps are called without the hooks that torch puts around them.

    Attributes:
        members: Those that it is made of, and how many of its groups each has, in order.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        groups = [entry for one in optimizers for entry in one.param_groups]
        # Schedulers ask for them: what all groups have.
        common = {key: value for key, value in groups[0].items() if all(key in entry for entry in groups)}
        self.members = [(one, len(one.param_groups)) for one in optimizers]
        super().__init__(groups, {key: value for key, value in common.items() if key != "params"})
        for one in optimizers:
            _let_go(one)

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of each; a closure is called once, before the first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for member, count in self.members:
            member.param_groups = self.param_groups[first : first + count]
            member.state = self.state
            try:
                plain_step(member)(member)
            finally:
                _let_go(member)
            first += count
        return loss

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "members": self.members}


def _let_go(member: torch.optim.Optimizer) -> None:
    # Whoever looks for the optimizers of a parameter is to find one.
    member.param_groups = []
    member.state = defaultdict(dict)


def kinds_of(optimizer: torch.optim.Optimizer) -> list[type[torch.optim.Optimizer]]:
    """The class by which each group of an optimizer is stepped on."""
    if not isinstance(optimizer, CombinedOptimizer):
        return [type(optimizer) for _ in optimizer.param_groups]
    return [type(member) for member, count in optimizer.members for _ in range(count)]


def plain_step(optimizer: torch.optim.Optimizer) -> Any:
    """The class's own `step`, without the hooks torch puts around it."""
    step: Any = type(optimizer).step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step
