"""What the code of a model says about its attention and its positions, read before anything is changed.

[Note: read from code] Which modules attend, and whether a model numbers its tokens itself, is written nowhere but in
its code. So the names that a class's forward uses are read, also those of the methods and functions that it calls. What
reading cannot see is seen when the model runs: an attention module that does not call the function that was caught
raises, and so does a call of the model without the positions of its tokens.
"""

from __future__ import annotations

import dis
import inspect
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from weft.errors import ContractError, listed

__all__ = ["attention_modules", "check_code", "forward_of", "heads_of", "makes_masks", "numbers_tokens", "takes"]

_CAUGHT = {"scaled_dot_product_attention", "ALL_ATTENTION_FUNCTIONS"}  # the second: of transformers, for "sdpa"
_OTHER_KERNELS = {
    *("flex_attention", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_qkvpacked_func"),
    *("memory_efficient_attention", "selective_scan_fn", "causal_conv1d_fn", "mamba_chunk_scan_combined"),
}
_PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum", "@"}
_MASKS = {"create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask"}
_POSITION = re.compile(r"(^|_)(pos|position|positions|wpe|rope|rotary|freqs|pe|cos|sin)(_|$)")
_MIXES = (nn.RNNBase, nn.modules.batchnorm._BatchNorm)


def attention_modules(module: nn.Module) -> dict[str, nn.Module]:
    """The modules whose forward calls `F.scaled_dot_product_attention`, by name; see [Note: read from code]."""
    return {
        name or type(module).__name__: part
        for name, part in module.named_modules()
        if isinstance(part, nn.MultiheadAttention) or (not _of_torch(part) and _CAUGHT & _names(type(part)))
    }


def check_code(module: nn.Module) -> None:
    """Raise if a part of a model mixes the places of a sequence in a way that cannot be caught.

    Raises:
        ContractError: It attends without `F.scaled_dot_product_attention`, is recurrent, or a convolution.
    """
    found = [
        f"{name or 'the module itself'} ({type(p).__name__}): {w}"
        for name, p in module.named_modules()
        if (w := _mixes(p))
    ]
    if found:
        raise ContractError(
            f"context_parallel: parts of {type(module).__name__} mix the places of a sequence by themselves",
            found=listed(found),
            expected="attention through F.scaled_dot_product_attention; all else for each place alone",
            fix='AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")',
        )


def _mixes(part: nn.Module) -> str | None:
    """What mixes places in a module itself, besides attention that is caught."""
    if isinstance(part, _MIXES):
        return "over all places"
    if isinstance(part, nn.modules.conv._ConvNd):
        wide = any(size > 1 for size in part.kernel_size)
        return f"a kernel of {tuple(part.kernel_size)}" if wide else None
    if _of_torch(part):
        return None
    names = _names(type(part))
    if "ALL_ATTENTION_FUNCTIONS" in names:
        chosen = getattr(getattr(part, "config", None), "_attn_implementation", "sdpa")
        return None if chosen == "sdpa" else f'attn_implementation="{chosen}"'
    if others := names & _OTHER_KERNELS:
        return listed(sorted(others))
    by_hand = "softmax" in names and names & _PRODUCTS and not names & _CAUGHT
    return "softmax and a product of matrices, which is attention by hand" if by_hand else None


def numbers_tokens(module: nn.Module) -> dict[str, nn.Module]:
    """The modules that number tokens themselves unless they are given positions, by name.

    Raises:
        ContractError: One takes no positions.
    """
    found = {}
    for name, part in module.named_modules():
        if _of_torch(part):
            continue
        own = [
            n
            for n, _ in (
                *part.named_children(),
                *part.named_parameters(recurse=False),
                *part.named_buffers(recurse=False),
            )
        ]
        signs = [n for n in own if _POSITION.search(n)] + (
            ["arange"] if "arange" in _names(type(part), far=False) else []
        )
        if not signs:
            continue
        found[name or type(part).__name__] = part
        if len(takes(part)) < 2 and not any("pos" in each for each in takes(part)):
            raise ContractError(
                f"context_parallel: {type(part).__name__} numbers the places of a sequence itself",
                found=f"{listed(signs)} in {name or 'the module itself'}, and forward({', '.join(takes(part))})",
                expected="a forward that takes positions: each rank holds other places than the first ones",
                fix="def forward(self, x, position_ids): ...  # weft.data.split_sequence gives them",
            )
    return found


def makes_masks(module: nn.Module) -> dict[str, nn.Module]:
    """The modules of transformers that make a mask for all layers, by name."""
    return {n: p for n, p in module.named_modules() if not _of_torch(p) and _MASKS & _names(type(p), far=False)}


def heads_of(part: nn.Module) -> int | None:
    """The number of heads of an attention module, where it says it."""
    config = getattr(part, "config", None)
    for owner, name in (
        (part, "num_heads"),
        (part, "n_head"),
        (part, "num_attention_heads"),
        (config, "num_attention_heads"),
    ):
        heads = getattr(owner, name, None)
        if isinstance(heads, int):
            return heads
    return None


def forward_of(part: nn.Module) -> Callable[..., Any]:
    """The forward of a module's class, without decorators."""
    found: Callable[..., Any] = inspect.unwrap(type(part).forward)
    return found


def takes(part: nn.Module) -> list[str]:
    """The names of what a module's forward takes; `*` and `**` are in them for what it takes without a name."""
    parameters = list(inspect.signature(forward_of(part)).parameters.values())[1:]
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
        if step.opname.startswith(
            ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "IMPORT_FROM")
        ):
            yield str(step.argval)
        elif step.opname == "BINARY_OP" and step.argrepr.startswith("@"):
            yield "@"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
