"""Who may have sent a gradient past forward: found in the code of the user's class, once it has happened."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator, Sequence
from typing import NoReturn

from torch import nn

from weft.engines.torch.hooks.program_lines import part_expression
from weft.errors import NotSynchronized, listed

_BY_HAND = (
    'p.grad = weft.reduce(p.grad, ctx, "mean")  # before its optimizer steps, without a strategy, and left out of '
    "weft.check; or a module whose forward returns it, under a strategy"
)


def raise_bypassed_forward(
    what: str, name: str, module: nn.Module | None, kind: str, listed_methods: Sequence[str]
) -> NoReturn:
    """Raise for a gradient of parameter `name` that came through no call that the strategy knows of.

    Raises:
        NotSynchronized: The text names the methods that compute with the parameter, if there are any.
    """
    found, fix = calls_that_bypass_forward(what, name, module, listed_methods)
    raise NotSynchronized(
        f"{what}: a gradient reached {name!r} of {kind} past forward, and would not be reduced",
        found=found,
        expected="calls of the module itself, or of a method in methods=(...)",
        fix=fix,
    )


def calls_that_bypass_forward(
    what: str, name: str, module: nn.Module | None, listed_methods: Sequence[str]
) -> tuple[str, str]:
    """Which calls may compute with parameter `name` past forward, and what to write instead."""
    part = name.partition(".")[0]
    if module is not None and _is_container(module):
        return f"{type(module).__name__} has no forward, and {part!r} is used by itself", line_for_container(
            module, name, "fully_shard" if what == "fully_shard" else "replicate"
        )
    methods = [] if module is None else [m for m in methods_that_call(type(module), part) if m not in listed_methods]
    objects = "..." if what == "zero_partition" else "model, ctx"
    whole = f"model(...)  # in place of {part_expression(part)}(...)"
    if methods:
        return (
            f"a call of {listed(methods)}, not in methods={tuple(listed_methods)}, or of {part!r} itself",
            f"weft.{what}({objects}, methods={tuple(sorted({*listed_methods, *methods}))}); or {whole}",
        )
    return f"a call of {part!r} itself, or of another part of the module", whole


def line_for_container(module: nn.Module, name: str, what: str = "replicate") -> str:
    """What averages gradients of parameter `name`, where the module may be a container that is never called.

    The strategy is for the outermost part that can be called. A parameter in a `ParameterList` is in none.
    """
    path = name.split(".")[:-1]
    parts = [".".join(path[:end]) for end in range(len(path) + 1)]
    part = next((one for one in parts if not _is_container(module.get_submodule(one))), None)
    if part is None:
        return _BY_HAND
    called = part_expression(part)
    return f"{called}, ctx = weft.{what}({called}, ctx)"


def _is_container(module: nn.Module) -> bool:
    """Whether a module has no forward, nor a method of a user's class: `ModuleDict`, `ParameterList` and their kind."""
    has_forward = type(module).forward is not nn.Module.forward or "forward" in vars(module)
    return not (has_forward or any(not name.startswith("_") for name in _functions_of_user(type(module))))


def methods_that_call(cls: type, part: str) -> list[str]:
    """The public methods besides forward, of classes outside torch, that call `self.<part>`, or one that does."""
    functions = _functions_of_user(cls)
    reads = {name: set(_attributes_of_self(function)) for name, function in functions.items()}
    found = {name for name, names in reads.items() if part in names}
    while more := {name for name, names in reads.items() if names & found} - found:
        found |= more
    return [name for name in functions if name in found and not name.startswith("_")]


def _functions_of_user(cls: type) -> dict[str, types.FunctionType]:
    """The methods besides forward of classes outside torch."""
    functions: dict[str, types.FunctionType] = {}
    for owner in cls.__mro__:
        if owner.__module__.partition(".")[0] not in ("torch", "builtins"):
            for name, value in vars(owner).items():
                if isinstance(value, types.FunctionType) and name not in ("forward", "__init__"):
                    functions.setdefault(name, value)
    return functions


def _attributes_of_self(function: types.FunctionType) -> Iterator[str]:
    """What a method uses of its first argument: what it calls, goes through or passes on, but does not just give."""
    code = function.__code__
    steps = list(dis.get_instructions(code))
    own = code.co_varnames[0] if code.co_argcount else None
    for before, step, after in zip(steps, steps[1:], steps[2:], strict=False):
        last = before.argval[-1] if type(before.argval) is tuple else before.argval  # of two loads in one, since 3.13
        reads = step.opname in ("LOAD_ATTR", "LOAD_METHOD") and last == own
        if reads and not after.opname.startswith(("RETURN", "STORE", "POP_JUMP", "TO_BOOL")):
            yield step.argval
