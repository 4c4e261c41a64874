"""Let an optimizer step on other tensors than those in its groups: the same values, whole.

An optimizer may keep numbers in its groups and move them in each `step`; they are put back before
each part, and after the optimizer's own step, which finds no gradients, so that they move once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch

from weft import torch_internals
from weft.engines.torch.compute.combined_optimizer import CombinedOptimizer, kinds_of, plain_step
from weft.errors import ContractError, value_error

Groups = Sequence[Sequence[torch.Tensor]]

# Optimizers whose update of an element depends on that element alone.
_ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)
# What their state holds once per parameter; everything else has the parameter's shape.
SHARED_STATE = frozenset({"step", "eta", "mu", "mu_product"})


class StepsOnOthers:
    """Hooks on an optimizer that exchange the tensors in its groups for a step, and put them back."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        before: Callable[..., Any],
        after: Callable[..., None],
        take_state: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._own: list[list[torch.Tensor]] | None = None  # what its groups hold otherwise, while a step runs
        self._handles = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
            optimizer.register_load_state_dict_post_hook(take_state),
        ]

    def _give(self, optimizer: torch.optim.Optimizer, others: Groups) -> None:
        """Let its groups hold other tensors."""
        self._own = [entry["params"] for entry in optimizer.param_groups]
        for entry, parameters in zip(optimizer.param_groups, others, strict=True):
            entry["params"] = list(parameters)

    def _give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Let its groups hold their own tensors again."""
        assert self._own is not None
        for entry, parameters in zip(optimizer.param_groups, self._own, strict=True):
            entry["params"] = parameters
        self._own = None

    def _unhook(self) -> torch.optim.Optimizer | None:
        """Take the hooks off; returns the optimizer, if it is alive."""
        for handle in self._handles:
            handle.remove()
        return self._optimizer()


class SwappedStep(StepsOnOthers):
    """The hooks on one optimizer; who inherits says in `_step_parts` what is stepped on."""

    def __init__(self, optimizer: torch.optim.Optimizer, places: Collection[int] | None = None) -> None:
        """Hang it on.

        Args:
            optimizer: Whose.
            places: Of the groups that are stepped on here; those of others are left to the optimizer's own step. None:
                all.
        """
        self._at = None if places is None else frozenset(places)
        super().__init__(optimizer, self._on_step, self._after_step, self._take_state)
        self._step = plain_step(optimizer)
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._numbers: list[dict[str, Any]] = []
        self._moved: list[dict[str, Any]] = []
        self._take_state(optimizer)

    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep only what this rank keeps of state that already exists."""
        raise NotImplementedError

    def _step_parts(self, optimizer: torch.optim.Optimizer, groups: Groups) -> None:
        """Step on everything, part by part, by `_step_on`."""
        raise NotImplementedError

    def _groups(self, optimizer: torch.optim.Optimizer) -> Groups:
        """What its groups hold; nothing in place of those that are not stepped on here."""
        groups = [entry["params"] for entry in optimizer.param_groups]
        return groups if self._at is None else [one if at in self._at else [] for at, one in enumerate(groups)]

    def _step_on(self, optimizer: torch.optim.Optimizer, part: Groups) -> None:
        """One step on a part of the parameters.

        Args:
            optimizer: With their state in its own.
            part: Group by group, with gradients.
        """
        for entry, before, parameters in zip(optimizer.param_groups, self._numbers, part, strict=True):
            entry.update(before)
            entry["params"] = list(parameters)
        self._step(optimizer)
        self._moved = numbers_of(optimizer)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_no_closure("step on whole parameters", (*args[1:], *kwargs.values()))
        groups = [entry["params"] for entry in optimizer.param_groups]
        self._numbers, self._moved = numbers_of(optimizer), []
        own = self._groups(optimizer)
        try:
            self._step_parts(optimizer, own)
        finally:
            for entry, parameters, before in zip(optimizer.param_groups, groups, self._numbers, strict=True):
                entry.update(before)
                entry["params"] = parameters
        for parameters in own:  # the optimizer's own step, which comes now, finds nothing to do
            for parameter in parameters:
                if parameter.grad is not None:
                    self._gradients.append((parameter, parameter.grad))
                    parameter.grad = None

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._gradients.clear()
        if self._moved:
            for entry, moved in zip(optimizer.param_groups, self._moved, strict=True):
                entry.update(moved)


def numbers_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What its groups hold besides parameters."""
    return [{key: value for key, value in entry.items() if key != "params"} for entry in optimizer.param_groups]


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The objects whose methods are called before each step of an optimizer, in this order."""
    return [getattr(hook, "__self__", None) for hook in torch_internals.STEP_PRE_HOOKS.of(optimizer).values()]


@runtime_checkable
class StepsPartByPart(Protocol):
    """What steps on a few parameters after the other, and calls the hooks that exchange tensors itself."""

    def step_part_by_part(self, optimizer: torch.optim.Optimizer) -> None:
        """Step on everything that has a gradient."""


def exchange_last(optimizer: torch.optim.Optimizer) -> None:
    """Let hooks that exchange tensors come after all others that run before a step: those see what it holds else."""
    hooks = torch_internals.STEP_PRE_HOOKS.of(optimizer)
    for kind in (StepsPartByPart, StepsOnOthers):
        for key in [key for key, one in hooks.items() if isinstance(getattr(one, "__self__", None), kind)]:
            hooks.move_to_end(key)


def exchange_hooks(optimizer: torch.optim.Optimizer) -> tuple[list[Any], list[Any]]:
    """The hooks that exchange tensors before a step, and those that put them back."""
    tables = (torch_internals.STEP_PRE_HOOKS.of(optimizer), torch_internals.STEP_POST_HOOKS.of(optimizer))
    before, after = (
        [one for one in hooks.values() if isinstance(getattr(one, "__self__", None), StepsOnOthers)] for hooks in tables
    )
    return before, after


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its update of an element is known to depend on that element alone."""
    one = not isinstance(optimizer, CombinedOptimizer)
    return type(optimizer) in _ELEMENTWISE if one else {*kinds_of(optimizer)} <= {*_ELEMENTWISE}


def elementwise_groups(optimizer: torch.optim.Optimizer) -> list[int]:
    """The places of groups of which that is known."""
    return [place for place, kind in enumerate(kinds_of(optimizer)) if kind in _ELEMENTWISE]


def check_elementwise(what: str, optimizer: torch.optim.Optimizer, problem: str) -> None:
    """Raise `ValueError` if the update of an element may depend on others."""
    if not is_elementwise(optimizer):
        raise value_error(
            f"{what}: {type(optimizer).__name__} {problem}",
            found=type(optimizer).__name__,
            expected="one of " + ", ".join(kind.__name__ for kind in _ELEMENTWISE),
            fix=f"leave weft.{what} out",
        )


def replace_closure(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], wrap: Callable[[Callable[[], Any]], Callable[[], Any]]
) -> Any:
    """What a pre-hook returns to let `step` have `wrap(closure)` in place of its closure; None without one."""
    positional = len(args) > 1  # args[0] is the optimizer itself
    closure = args[1] if positional else kwargs.get("closure")
    if not callable(closure):
        return None
    new = wrap(closure)
    return ((args[0], new, *args[2:]), kwargs) if positional else (args, {**kwargs, "closure": new})


def after_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[], None]) -> Any:
    """Run a function when all gradients are there: after the closure if there is one, else at once."""

    def wrap(closure: Callable[[], Any]) -> Callable[[], Any]:
        def with_run() -> Any:
            loss = closure()
            run()
            return loss

        return with_run

    changed = replace_closure(args, kwargs, wrap)
    if changed is None:
        run()
    return changed


def check_no_closure(what: str, arguments: Iterable[object]) -> None:
    """Raise if `step` was called with a closure: it would see parts of the parameters.

    Raises:
        ContractError: It was.
    """
    if any(argument is not None for argument in arguments):
        raise ContractError(
            f"{what}: step() was called with a closure",
            found="optimizer.step(closure)",
            expected="backward first, then optimizer.step()",
            fix="loss = closure(); optimizer.step()",
        )
