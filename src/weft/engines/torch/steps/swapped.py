"""Let an optimizer step on other tensors than those in its groups: the same values, whole."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from weft import torch_internals
from weft.engines.torch.steps.combined_optimizer import CombinedOptimizer, kinds_of, plain_step
from weft.errors import ContractError, listed, value_error
from weft.tensors.blocks import redistributed_as
from weft.tensors.dtensor import is_sharded
from weft.tensors.nested import map_tensors, tensors

Groups = list[list[torch.Tensor]]
Numbers = list[dict[str, Any]]

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
    """Hooks on an optimizer that exchange the tensors in its groups for a step, and put them back.

    Attributes:
        by_request: Of a transform.
    """

    by_request = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        before: Callable[..., Any],
        after: Callable[..., None],
        take_state: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._own: Groups | None = None  # what its groups hold otherwise, while a step runs
        self._handles = [
            optimizer.register_step_pre_hook(before),
            optimizer.register_step_post_hook(after),
            optimizer.register_load_state_dict_post_hook(take_state),
        ]

    def undo(self) -> None:
        """Take the hooks off. State in rows is made whole: one all-gather per tensor of it."""
        optimizer = self._unhook()
        if optimizer is not None:
            for p in self._kept_in_rows(optimizer):
                state = optimizer.state.get(p, {})
                state.update(map_tensors(partial(redistributed_as, other=p), dict(state)))

    def is_left_out(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the optimizer has stepped without these hooks: its state is whole, which is cut here."""
        return any(
            value.dim() and value.shape == p.shape and not is_sharded(value)
            for p in self._kept_in_rows(optimizer)
            for value in tensors(dict(optimizer.state.get(p, {})))
        )

    def _kept_in_rows(self, optimizer: torch.optim.Optimizer) -> Sequence[torch.Tensor]:
        """The parameters of whose state each rank keeps its rows between steps."""
        return ()

    def _give(self, optimizer: torch.optim.Optimizer, others: Groups) -> None:
        """Let its groups hold other tensors."""
        self._own = exchange(optimizer, others)

    def _give_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Let its groups hold their own tensors again."""
        assert self._own is not None
        exchange(optimizer, self._own)
        self._own = None

    def _unhook(self) -> torch.optim.Optimizer | None:
        """Take the hooks off; returns the optimizer, if it is alive."""
        for handle in self._handles:
            handle.remove()
        return self._optimizer()


def exchange(optimizer: torch.optim.Optimizer, others: Groups) -> Groups:
    """Let the groups of an optimizer hold other tensors; returns what they held."""
    held = [entry["params"] for entry in optimizer.param_groups]
    for entry, parameters in zip(optimizer.param_groups, others, strict=True):
        entry["params"] = parameters
    return held


class PartSteps:
    """Steps on parts of what an optimizer holds, made before its own step, which finds no gradients.

    An optimizer may keep numbers in its groups and move them in each `step`; they are put back before each part, and
    after the optimizer's own step, so that they move once.
    """

    def __init__(self) -> None:
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._numbers: Numbers = []
        self._moved: Numbers = []

    @contextlib.contextmanager
    def all_parts(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """The steps on all parts are made inside the body."""
        self._numbers, self._moved = _numbers_of(optimizer), []
        try:
            yield
        finally:
            _set_numbers(optimizer, self._numbers)

    @contextlib.contextmanager
    def one_part(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """The step on one part is made inside the body."""
        _set_numbers(optimizer, self._numbers)
        yield
        self._moved = _numbers_of(optimizer)

    def hide(self, parameters: Iterable[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Take the gradients of parameters away; returns those with one, and it."""
        found = [(p, p.grad) for p in parameters if p.grad is not None]
        for parameter, _ in found:
            parameter.grad = None
        self._hidden += found
        return found

    def show(self) -> None:
        """Give parameters their gradients again."""
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()

    def end(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer's own step has been made."""
        self.show()
        if self._moved:
            _set_numbers(optimizer, self._moved)


def _numbers_of(optimizer: torch.optim.Optimizer) -> Numbers:
    """What its groups hold besides parameters."""
    return [{key: value for key, value in entry.items() if key != "params"} for entry in optimizer.param_groups]


def _set_numbers(optimizer: torch.optim.Optimizer, numbers: Numbers) -> None:
    for entry, given in zip(optimizer.param_groups, numbers, strict=True):
        entry.update(given)


class SwappedStep(StepsOnOthers):
    """The hooks on one optimizer; who inherits says in `_step_parts` what is stepped on."""

    def __init__(self, optimizer: torch.optim.Optimizer, places: Collection[int]) -> None:
        """Hang it on.

        Args:
            optimizer: Whose.
            places: Of the groups that are stepped on here; those of others are left to the optimizer's own step.
        """
        self._at = frozenset(places)
        self._step = plain_step(optimizer)
        self._parts = PartSteps()
        super().__init__(optimizer, self._on_step, self._after_step, self._take_state)

    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep only what this rank keeps of state that already exists."""
        raise NotImplementedError

    def _step_parts(self, optimizer: torch.optim.Optimizer, groups: Groups) -> None:
        """Step on everything, part by part, by `_step_on`."""
        raise NotImplementedError

    def _whole_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """State that this rank keeps of a parameter, as the step takes it."""
        return state

    def _kept_state(self, state: dict[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
        """What this rank keeps of the state of a parameter."""
        return state

    def _groups(self, optimizer: torch.optim.Optimizer) -> Groups:
        """What its groups hold; nothing in place of those that are not stepped on here."""
        return [entry["params"] if at in self._at else [] for at, entry in enumerate(optimizer.param_groups)]

    def _step_on(
        self, optimizer: torch.optim.Optimizer, wholes: Sequence[tuple[int, torch.Tensor, torch.Tensor]]
    ) -> None:
        """One step on whole parameters.

        Args:
            optimizer: With the state of those they stand for in its own, before and after it.
            wholes: The place of the group, the parameter, and what stands for it, with a gradient.
        """
        groups: Groups = [[] for _ in optimizer.param_groups]
        for place, parameter, whole in wholes:
            groups[place].append(whole)
            state = optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[whole] = self._whole_state(state)
        held = exchange(optimizer, groups)
        try:
            with self._parts.one_part(optimizer):
                self._step(optimizer)
        finally:
            exchange(optimizer, held)
            for _, parameter, whole in wholes:
                state = optimizer.state.pop(whole, None)
                if state:
                    optimizer.state[parameter] = self._kept_state(state, parameter)

    def _on_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_no_closure("step on whole parameters", (*args[1:], *kwargs.values()))
        own = self._groups(optimizer)
        with self._parts.all_parts(optimizer):
            self._step_parts(optimizer, own)
        self._parts.hide(p for parameters in own for p in parameters)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._parts.end(optimizer)


def check_same_groups(
    problem: str, optimizer: torch.optim.Optimizer, before: list[list[int]], *, expected: str, fix: str
) -> None:
    """Raise if the groups of an optimizer hold other parameters than they did, as `ids_of` told.

    Raises:
        ContractError: They do.
    """
    now = ids_of(optimizer)
    if now != before:
        raise ContractError(
            problem,
            found=f"{len(now)} groups of {listed(map(len, now))} parameters, "
            f"before {len(before)} of {listed(map(len, before))}, or other ones",
            expected=expected,
            fix=fix,
        )


def ids_of(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    """The ids of the parameters in each group."""
    return [list(map(id, entry["params"])) for entry in optimizer.param_groups]


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """The objects whose methods are called before each step of an optimizer, in this order."""
    return [getattr(hook, "__self__", None) for hook in torch_internals.STEP_PRE_HOOKS.of(optimizer).values()]


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its update of an element is known to depend on that element alone."""
    kinds = kinds_of(optimizer) if isinstance(optimizer, CombinedOptimizer) else [type(optimizer)]
    return all(kind in _ELEMENTWISE for kind in kinds)


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
