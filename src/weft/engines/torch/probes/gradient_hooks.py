"""Hooks on parameters that change gradients, measured: they run on those of one rank, before these are averaged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from operator import attrgetter

import torch
from torch import nn

from weft import torch_internals
from weft.engines.probes import Compared
from weft.engines.torch.probes.compare import LOW_LIMIT, difference
from weft.engines.torch.probes.no_trace import random_kept
from weft.errors import ContractError, listed
from weft.tensors.dtensor import local

_Hook = Callable[[torch.Tensor], torch.Tensor | None]
_SCALES = (1.0, 1e3)  # of a second gradient beside the one that was there: the larger one meets limits


class GradientHooks:
    """The hooks of a program on the parameters of one strategy.

    The mean of what they make of the gradients of all ranks is what they make of the mean, if they are affine: a
    factor, a mask, a projection, weight decay. Limits and norms are not.
    """

    def __init__(self, what: str, class_name: str) -> None:
        self._what = what
        self._class_name = class_name
        self._tables: dict[str, tuple[dict[int, _Hook], dict[int, _Hook]]] = {}  # torch's by name, and what was in it
        self._seen: dict[str, list[torch.Tensor]] = {}  # gradients that hooks have changed, before they did
        self._known: set[int] = set()  # torch's numbers of hooks that were looked at

    def watch(self, named: Mapping[str, nn.Parameter]) -> None:
        """See what new hooks on these parameters make of the next gradient."""
        parameters, hooks = list(named.values()), torch_internals.TENSOR_HOOKS
        # This runs in each forward pass; the first one is asked in the way that says if the name is gone.
        if parameters and (hooks.of(parameters[0]) or any(map(attrgetter(hooks.name), parameters))):
            for name, parameter in named.items():
                self._watch(name, hooks.of(parameter) or {})

    def _watch(self, name: str, table: dict[int, _Hook]) -> None:
        of_program = {key: hook for key, hook in table.items() if not type(hook).__module__.startswith("weft.")}
        if not self._known.issuperset(of_program):
            self._known.update(of_program)
            self._leave(name)
            self._tables[name] = table, {key: table[key] for key in of_program}
            table.update({key: partial(self._see, name, table[key]) for key in of_program})

    def _see(self, name: str, hook: _Hook, gradient: torch.Tensor) -> torch.Tensor | None:
        returned, seen = hook(gradient), self._seen.setdefault(name, [])
        if returned is not None:
            seen.append(gradient)
        return returned

    def check(self) -> None:
        """After a backward pass: call hooks once more that have returned another gradient, with made ones.

        Raises:
            ContractError: What they make of a mean is not the mean of what they make.
        """
        seen, self._seen = self._seen, {}
        wrong = []
        for name, changed in seen.items():
            first = local(changed[0]) if changed else None
            if first is None or bool(first.isfinite().all()):  # else the step is skipped, and the next one is looked at
                hooks = self._leave(name)
                wrong += [name] if first is not None and not _is_affine(hooks, first) else []
        if wrong:
            raise ContractError(
                f"{self._what}: hooks on parameters of {self._class_name} change the gradients of one rank",
                found=f"p.register_hook on {listed(wrong)}: what it makes of a mean of gradients is not the mean of "
                "what it makes of each, as with limits and norms",
                expected="gradients are changed after backward, when they are averaged over the ranks",
                fix="loss.backward(); p.grad.clamp_(-1, 1)  # in place of p.register_hook(...)",
            )

    def release(self) -> None:
        """Leave all hooks as they were."""
        for name in list(self._tables):
            self._leave(name)
        self._seen.clear()

    def _leave(self, name: str) -> Collection[_Hook]:
        table, held = self._tables.pop(name, ({}, {}))
        table.update({key: hook for key, hook in held.items() if key in table})
        return held.values()


def _is_affine(hooks: Collection[_Hook], gradient: torch.Tensor) -> bool:
    def after(changed: torch.Tensor) -> torch.Tensor:
        for hook in hooks:
            returned = hook(changed)
            changed = changed if returned is None else returned
        return changed

    if gradient.layout is not torch.strided:
        return True
    drawn = torch.Generator().manual_seed(0)
    for scale in _SCALES:
        other = torch.randn(gradient.shape, generator=drawn).to(gradient) * (scale * gradient.abs().max().clamp(1e-3))
        with torch.no_grad(), random_kept(), suppress(Exception):  # of the program, for gradients that it never has
            mean, ends = after((gradient + other) / 2), (after(gradient) + after(other)) / 2
            if difference(Compared("", mean, ends)) > LOW_LIMIT:
                return False
    return True
