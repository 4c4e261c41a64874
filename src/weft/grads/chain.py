"""The hook of `grad_chain` on one optimizer: it calls one element after the other before each step."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from weft import torch_internals
from weft.context import DistContext
from weft.contract import Stateful, offered, owners
from weft.contract.layout import apart_axes
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.steps.in_backward import check_has_gradients
from weft.engines.torch.steps.skip import SkippingStep
from weft.engines.torch.steps.swapped import after_closure, exchange_last
from weft.errors import ContractError, OrderError, listed
from weft.grads.limits import known_modules
from weft.grads.named_grads import Element, NamedGrads, name_parameters, same_kind
from weft.grads.skipping import SkipNonfinite, skipping_step
from weft.peers.ledger import Ledger
from weft.tensors.dtensor import local
from weft.tensors.sharded_grad import CutGradient


class GradChain:
    """The hook on one optimizer, and the number of its steps, which checkpoints keep.

    Attributes:
        skipped: Whether an element has skipped the last step on all ranks, because of a gradient that is not finite.

    Args:
        optimizer: Whose gradients.
        elements: What is called, in this order.
        ctx: Knows the modules that the parameters are of.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, elements: Sequence[Element], ctx: DistContext) -> None:
        self._elements = [_on(one, optimizer, ctx) for one in elements]
        self.skipped = False
        self._ctx: DistContext | None = ctx
        self._modules = [weakref.ref(module) for module in known_modules(ctx)]
        self._named: dict[str, torch.Tensor] = {}
        self._names(optimizer)
        alike = ctx.on(_alike_axes(known_modules(ctx), ctx))
        self._peers = Ledger(alike.world, "grad_chain") if alike.world_size > 1 else None
        self._steps = self._seen = 0
        self._handle = optimizer.register_step_pre_hook(self._before_step)
        exchange_last(optimizer)

    @property
    def skips(self) -> bool:
        """Whether an element may skip steps."""
        return any(isinstance(one, (SkipNonfinite, SkippingStep)) for one in self._elements)

    def undo(self) -> None:
        """Take the hook off."""
        self._handle.remove()
        for one in self._elements:
            if isinstance(one, SkippingStep):
                one.undo()
        self._ctx = None

    def release(self) -> None:
        """Let the process groups go."""
        self._ctx = self._peers = None
        for one in self._elements:
            if isinstance(one, SkippingStep):
                one.release()

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and the state of elements that have some."""
        kept = {str(place): one.state_dict() for place, one in self._stateful()}
        return {"steps": self._steps, "elements": kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Count on from a saved number."""
        self._steps = state["steps"]
        for place, one in self._stateful():
            if str(place) in state["elements"]:
                one.load_state_dict(state["elements"][str(place)])

    def _stateful(self) -> Iterator[tuple[int, Stateful]]:
        yield from ((place, one) for place, one in enumerate(self._elements) if isinstance(one, Stateful))

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return after_closure(args, kwargs, lambda: self._run(optimizer))

    @torch.no_grad()
    def _run(self, optimizer: torch.optim.Optimizer) -> None:
        ctx, number = self._ctx, self._steps
        self._steps, self.skipped = number + 1, False
        own = [one for one in self._elements if isinstance(one, SkippingStep)]
        if ctx is None or any(one.skipped for one in offered(optimizer, SkippingStep) if one not in own):
            return  # there are no gradients, on no rank
        named = self._names(optimizer)
        check_has_gradients("grad_chain", named.values())
        if any(isinstance(p.grad, CutGradient) for p in named.values()):
            refuse_pieces()
        left: dict[str, object] = {}
        for place, element in enumerate(self._elements):
            grads = NamedGrads(named, number, place)
            if isinstance(element, SkippingStep):
                element.check(optimizer)
                self.skipped = element.skipped
            else:
                result = element(grads, ctx)
                self.skipped = isinstance(element, SkipNonfinite) and result is not grads
                if result is not grads:
                    _check(name_of(element), grads, result)
                    left[f"{name_of(element)} leaves out"] = sorted(_put(grads, result))
            if self.skipped:
                return
        self._compare(left)

    def _names(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """The parameters by name, found anew when the optimizer has others."""
        now = parameters_of(optimizer)
        if [id(p) for p in now] != [id(p) for p in self._named.values()]:
            modules = [module for module in (ref() for ref in self._modules) if module is not None]
            self._named = name_parameters(optimizer, modules)
        return self._named

    def _compare(self, left: dict[str, object]) -> None:
        """Raise if ranks have left out different gradients; asked in steps 1, 2, 4, 8, ... of this process."""
        self._seen += 1
        if self._peers is None or self._seen & (self._seen - 1):
            return
        compare = self._peers.agree if self._seen == 1 else self._peers.compare
        compare(
            "gradients that are left out",
            left,
            fix="return {name: g for name, g in grads.items() if name.endswith('weight')}  # by what all ranks know",
        )


def _on(element: Element, optimizer: torch.optim.Optimizer, ctx: DistContext) -> Element | SkippingStep:
    """An element for one optimizer: what skips its steps moves the fp16 scales as well, if there are any."""
    step = skipping_step(optimizer, ctx) if isinstance(element, SkipNonfinite) else None
    return element if step is None else step


def _alike_axes(modules: Sequence[nn.Module], ctx: DistContext) -> list[str]:
    """The axes whose ranks have the same parameters, and step on the same gradients or on parts of them."""
    other = {axis for module in modules for owner in owners(module).values() for axis, _ in owner}
    other |= {axis for module in modules for axis in apart_axes(module)}
    return [name for name, _ in ctx.axes if name not in other]


def name_of(element: object) -> str:
    """An element, as errors and the record of the chain name it."""
    return str(getattr(element, "__qualname__", type(element).__name__)).rpartition("<locals>.")[2]


def refuse_pieces() -> NoReturn:
    """Raise for DeepSpeed, whose gradients have no values that an element could see.

    Raises:
        OrderError: Always.
    """
    raise OrderError(
        'grad_chain: cannot be combined with zero_partition(engine="deepspeed")',
        found="gradients that lie in pieces in the buffers of DeepSpeed, across the borders of parameters",
        expected='gradients of single parameters; engine="torch" divides the same state',
        fix='model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=2)  # engine="torch"',
    )


def _check(element: str, grads: NamedGrads, result: object) -> None:
    """Raise unless an element returned gradients of the kind it was given, by their names, or None for some."""
    problems: list[str] = []
    if not isinstance(result, Mapping):
        problems = [f"{type(result).__name__}, no mapping"]
    for name, value in result.items() if isinstance(result, Mapping) else ():
        if name not in grads:
            problems.append(f"{name!r}, which has no gradient")
        elif value is not None and not isinstance(value, torch.Tensor):
            problems.append(f"{name}: {type(value).__name__}")
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


def _kind(tensor: torch.Tensor) -> str:
    placements = f", {getattr(tensor, 'placements')}" if hasattr(tensor, "placements") else ""  # noqa: B009  (DTensor)
    return f"{tensor.dtype} {list(tensor.shape)}{placements}"


def _put(grads: NamedGrads, result: Mapping[str, torch.Tensor | None]) -> list[str]:
    """Give the parameters what an element returned, in the memory of their gradients; the names that are left out."""
    into: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    left: list[str] = []
    for name, gradient in grads.items():
        value = result.get(name)
        if value is None:
            grads.parameters[name].grad = None
            left.append(name)
        elif value is not gradient and gradient.is_sparse:
            grads.parameters[name].grad = value
        elif value is not gradient:
            into.append(local(gradient))
            values.append(local(value.detach()))
    if into:
        torch_internals.foreach_copy(into, values)
    return left
