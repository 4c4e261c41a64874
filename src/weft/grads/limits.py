"""What clipping needs besides the gradients: limits that are numbers, and who has which of the parameters."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from weft.checks import as_number
from weft.context import DistContext
from weft.contract import Placed, is_here, offered, owners
from weft.contract.marks import known_modules
from weft.engines.torch.compute.grad_norm import GradientRanks, Gradients
from weft.errors import type_error, value_error
from weft.tensors.dtensor import resting_parameters


def gradients_of(parameters: Collection[torch.Tensor], ctx: DistContext) -> Gradients:
    """The gradients of parameters, whose norm counts each of their elements once; see [Note: who adds up what]."""
    return Gradients(parameters, ctx.device, _partly_held(parameters, ctx))


def _partly_held(parameters: Iterable[torch.Tensor], ctx: DistContext) -> dict[int, GradientRanks]:
    """The ranks of which only some have a parameter, by its id: those along the axes of a pipeline."""
    given = set(map(id, parameters))
    found: dict[int, GradientRanks] = {}
    for module in known_modules(ctx):
        if not offered(module, Placed):
            continue
        partly = owners(module)
        for (name, _), parameter in zip(module.named_parameters(), resting_parameters(module), strict=True):
            if name in partly and id(parameter) in given:
                group = ctx.on([axis for axis, _ in partly[name]]).group
                if group is not None:
                    found[id(parameter)] = GradientRanks(line=group, is_copy=not is_here(partly[name], ctx))
    return found


def check_limit(what: str, name: str, value: object, *, call: str, default: str = "1.0", more: str = "") -> None:
    """Raise unless a limit is a number > 0.

    Args:
        what: Name of the function, for the text.
        name: Name of the argument.
        value: Its value.
        call: The line to write, up to the value.
        default: A value that can be used.
        more: What is allowed besides.

    Raises:
        TypeError: It is no number.
        ValueError: It is not > 0.
    """
    number = None if isinstance(value, bool) else as_number(value)
    if number is None:
        raise type_error(
            f"{what}: {name} = {value!r:.80} is no number",
            found=type(value).__name__,
            expected="a number > 0",
            fix=call + ("float('inf'))" if value == "inf" else f"{default})"),
        )
    if not number > 0:
        raise value_error(
            f"{what}: {name} = {value!r} cannot be used",
            found=repr(value),
            expected=f"a number > 0{more}",
            fix=f"{call}{default})",
        )
