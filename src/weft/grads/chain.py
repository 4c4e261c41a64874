"""The hook of `grad_chain` on one optimizer: it calls one element after the other before each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.context import DistContext
from weft.contract import offered, owners
from weft.contract.layout import apart_axes
from weft.contract.marks import known_modules
from weft.engines.torch.steps.skip import SkippingStep
from weft.engines.torch.steps.step_by_parts import exchange_last
from weft.engines.torch.steps.swapped import after_closure
from weft.errors import ContractError, listed
from weft.grads.named_grads import Element, NamedGrads, ParameterNames, same_kind
from weft.tensors.dtensor import local


class GradChain:
    """The hook on one optimizer, and the number of its steps, which checkpoints keep.

    Args:
        optimizer: Whose gradients.
        elements: What is called, in this order.
        ctx: Knows the modules that the parameters are of.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, elements: Sequence[Element | SkippingStep], ctx: DistContext
    ) -> None:
        modules = known_modules(ctx)
        self._elements = elements
        self._ctx = ctx
        self._names = ParameterNames("grad_chain", optimizer, modules)
        # Along others, ranks have other parameters, or step on gradients of their own.
        other = {axis for module in modules for owner in owners(module).values() for axis, _ in owner}
        other |= {axis for module in modules for axis in apart_axes(module)}
        self._alike = ctx.on([name for name, _ in ctx.axes if name not in other])
        self._steps = self._seen = 0
        self._handle = optimizer.register_step_pre_hook(self._before_step)
        exchange_last(optimizer)

    def undo(self) -> None:
        """Take the hook off."""
        self._handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """The number of steps."""
        return {"steps": self._steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from a saved number."""
        self._steps = state["steps"]

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return after_closure(args, kwargs, lambda: self._run(optimizer))

    @torch.no_grad()
    def _run(self, optimizer: torch.optim.Optimizer) -> None:
        number = self._steps
        self._steps += 1
        skips = [one for one in offered(optimizer, SkippingStep) if one not in self._elements]
        if any(one.skipped for one in skips):
            return  # there are no gradients, on no rank
        named = self._names.of(optimizer)
        left: dict[str, object] = {}
        grads = NamedGrads(named, number)
        for grads.place, element in enumerate(self._elements):
            if isinstance(element, SkippingStep):
                element.check(optimizer)
                if element.skipped:
                    return
            elif (result := element(grads, self._ctx)) is not grads:
                _check(name_of(element), grads, result)
                left[f"{name_of(element)} leaves out"] = sorted(_put(grads, result))
                grads = NamedGrads(named, number)
        self._seen += 1
        if not self._seen & (self._seen - 1):  # in steps 1, 2, 4, 8, ... of this process
            self._alike.agree("grad_chain: gradients that are left out", left)


def name_of(element: object) -> str:
    """An element, as errors and the record of the chain name it."""
    return str(getattr(element, "__qualname__", type(element).__name__)).rpartition("<locals>.")[2]


def _check(element: str, grads: NamedGrads, result: object) -> None:
    """Raise unless an element returned gradients of the kind it was given, by their names, or None for some."""
    problems = [] if isinstance(result, Mapping) else [f"{type(result).__name__}, no mapping"]
    for name, value in result.items() if isinstance(result, Mapping) else ():
        if name not in grads:
            problems.append(f"{name!r}, which has no gradient")
        elif value is not None and not same_kind(value, grads[name]):
            problems.append(f"{name}: {_kind(value)} for {_kind(grads[name])}")
    if problems:
        raise ContractError(
            f"grad_chain: {element} returned what are no gradients of these parameters",
            found=listed(problems),
            expected="a mapping of names in `grads` to tensors like those in `grads`, or None; a name that is missing "
            "is left out of the step",
            fix="return {name: gradient * 0.5 for name, gradient in grads.items()}  # in the element",
        )


def _kind(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{value.dtype} {list(value.shape)} {getattr(value, 'placements', '')}".rstrip()


def _put(grads: NamedGrads, result: Mapping[str, torch.Tensor | None]) -> list[str]:
    """Give the parameters what an element returned, in the memory of their gradients; the names that are left out."""
    for name, gradient in grads.items():
        value = result.get(name)
        if value is None or gradient.is_sparse:
            grads.parameters[name].grad = value
        elif value is not gradient:
            local(gradient).copy_(local(value))
    return [name for name in grads if result.get(name) is None]
