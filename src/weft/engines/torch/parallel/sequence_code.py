"""Which modules of a model attend, read from its code before anything is changed.

[Note: read from code] It is written nowhere else. So the names that a class's forward uses are read, also those of the
methods and functions that it calls. What reading cannot see is seen when the model runs: an attention module that does
not call the function that was caught raises, and a probe measures all else.
"""

from __future__ import annotations

import dis
import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

_CAUGHT = frozenset(
    {"scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS"}
)  # the second: of transformers, for "sdpa"
_READS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "IMPORT_FROM")
_MASKS = frozenset({"create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"})


def attention_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The modules whose forward calls `F.scaled_dot_product_attention`, by name; see [Note: read from code]."""
    return {
        name or type(module).__name__: part
        for name, part in module.named_modules()
        if isinstance(part, nn.MultiheadAttention) or (not _of_torch(part) and _CAUGHT & _names(type(part)))
    }


def modules_that_make_masks(module: nn.Module) -> dict[str, nn.Module]:
    """The modules of transformers that make a mask for all layers, by name."""
    return {n: p for n, p in module.named_modules() if not _of_torch(p) and _MASKS & _names(type(p), far=False)}


def forward_parameters(part: nn.Module) -> list[str]:
    """The names of what a module's forward takes; `*` and `**` are in them for what it takes without a name."""
    parameters = list(inspect.signature(inspect.unwrap(type(part).forward)).parameters.values())[1:]
    marks: dict[object, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [marks.get(parameter.kind, "") + parameter.name for parameter in parameters]


def _of_torch(part: nn.Module) -> bool:
    return type(part).__module__.partition(".")[0] == "torch"


def _names(cls: type[nn.Module], *, far: bool = True) -> set[str]:
    """The names in the code of a class's forward and of what it calls: its methods, and with `far` functions."""
    names: set[str] = set()
    todo: list[Any] = [inspect.unwrap(cls.forward)]
    seen: set[int] = set()
    while todo:
        function = todo.pop()
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        used = set(_names_in(function.__code__))
        names |= used
        if "super" in used:
            todo += [inspect.unwrap(vars(base)[name]) for base in cls.__mro__[1:] for name in _own_methods(base, used)]
        for name in used - {"__init__", "forward"}:
            method = inspect.getattr_static(cls, name, None)
            todo.append(inspect.unwrap(method) if isinstance(method, types.FunctionType) else None)
            other = function.__globals__.get(name)
            if far and isinstance(other, types.FunctionType) and "ALL_ATTENTION_FUNCTIONS" not in used:
                todo.append(other if other.__module__.partition(".")[0] not in ("torch", "builtins") else None)
    return names


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
