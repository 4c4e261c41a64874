"""Which modules of a model attend, read from its code before anything is changed.

[Note: read from code] It is written nowhere else. So the names that a class's forward uses are read, also those of the
methods and functions that it calls. What reading cannot see is seen when the model runs: an attention module that does
not call the function that was caught raises, and a probe measures all else.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from weft.engines.torch.hooks.method_hooks import innermost
from weft.errors import ContractError

_CAUGHT = frozenset(
    {"scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS"}
)  # the second: of transformers, for "sdpa"
_REFUSED = frozenset({"flex_attention", "varlen_attn"})
_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "IMPORT_FROM")
_MASKS, _OF_PARTS = "transformers.masking_utils", frozenset({"create_recurrent_attention_mask"})


def attention_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The modules whose forward calls `F.scaled_dot_product_attention`, by name; see [Note: read from code]."""
    return {
        name or type(module).__name__: part
        for name, part in module.named_modules()
        if isinstance(part, nn.MultiheadAttention) or (not _of_torch(part) and _CAUGHT & _names(type(part)))
    }


def other_attention(module: nn.Module) -> list[str]:
    """The modules that call a function of `torch.nn.attention` which is not caught."""
    parts = ((name, part) for name, part in module.named_modules() if not _of_torch(part))
    return [
        f"{name or type(module).__name__}: {', '.join(sorted(used))}"
        for name, part in parts
        if (used := _REFUSED & _names(type(part)))
    ]


def mask_functions(function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The functions of transformers that make masks of whole sequences, by the name that some code calls them by."""
    code: Any = inspect.unwrap(innermost(function))
    found = {name: code.__globals__.get(name) for name in _names_in(code.__code__)}
    return {
        name: one
        for name, one in found.items()
        if getattr(one, "__module__", "") == _MASKS and name.startswith("create_") and name not in _OF_PARTS
    }


def methods_that_make_masks(part: nn.Module) -> list[str]:
    """The methods behind a module's forward that call `mask_functions`.

    Raises:
        ContractError: One is that of a base class, behind another of the same name.
    """
    cls = type(part)
    found = [] if _of_torch(part) else [one for one in _functions(cls, far=False) if mask_functions(one)]
    for name, function in ((one.__name__, one) for one in found):
        if inspect.unwrap(getattr(cls, name)) is not function:
            raise ContractError(
                f"context_parallel: {cls.__name__} makes masks where they cannot be those of whole sequences",
                found=f"{function.__qualname__}, called by {cls.__name__}.{name}",
                expected=f"a class that has all of the code of {name}, or inherits it",
                fix=f"del {cls.__name__}.{name}  # what it does around the other one is for register_forward_hook",
            )
    return [function.__name__ for function in found]


def _of_torch(part: nn.Module) -> bool:
    return type(part).__module__.partition(".")[0] == "torch"


def _names(cls: type[nn.Module]) -> set[str]:
    """The names in the code of a class's forward and of what it calls."""
    return {name for function in _functions(cls) for name in _names_in(function.__code__)}


def _functions(cls: type[nn.Module], *, far: bool = True) -> list[types.FunctionType]:
    """A class's forward and what it calls: its methods, and with `far` functions."""
    found: list[types.FunctionType] = []
    todo: list[Any] = [inspect.unwrap(cls.forward)]
    while todo:
        function = todo.pop()
        if not isinstance(function, types.FunctionType) or function in found:
            continue
        found.append(function)
        used = set(_names_in(function.__code__))
        if "super" in used:
            todo += [inspect.unwrap(vars(base)[name]) for base in cls.__mro__[1:] for name in _own_methods(base, used)]
        for name in used - {"__init__", "forward"}:
            method = inspect.getattr_static(cls, name, None)
            todo.append(inspect.unwrap(method) if isinstance(method, types.FunctionType) else None)
            other = function.__globals__.get(name)
            if far and isinstance(other, types.FunctionType) and "ALL_ATTENTION_FUNCTIONS" not in used:
                todo.append(other if other.__module__.partition(".")[0] not in ("torch", "builtins") else None)
    return found


def _own_methods(base: type, used: set[str]) -> list[str]:
    """The methods of a base class that are called through `super()`."""
    return [name for name in used & vars(base).keys() if isinstance(vars(base)[name], types.FunctionType)]


def _names_in(code: types.CodeType) -> Iterator[str]:
    for step in dis.get_instructions(code):
        if step.opname.startswith(_READS):
            yield str(step.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
