"""Checks of arguments that many functions have in common, with one form of text."""

from __future__ import annotations

import importlib
import numbers
from collections.abc import Collection, Container
from typing import Any

import torch
from torch import nn
from torch.torch_version import TorchVersion

from weft.errors import ContextError, MissingExtra, listed, type_error, value_error


def as_number(value: object) -> int | float | None:
    """A number as one of Python: of Python, numpy or torch, or the only element of an array or tensor; else None.

    A truth is one. A tensor on an accelerator is waited for.

    Example:
        >>> as_number(torch.tensor([2.5])), as_number(3), as_number("3"), as_number(1j), as_number(torch.ones(2))
        (2.5, 3, None, None, None)
    """
    size: Any = value.numel() if isinstance(value, torch.Tensor) else getattr(value, "size", None)
    if type(size) is int and size == 1:
        value = value.detach() if isinstance(value, torch.Tensor) else value
        value = getattr(value, "item", lambda: value)()
    if isinstance(value, numbers.Integral):
        return int(value) if not isinstance(value, bool) else value
    # Decimals are numbers that are neither real nor complex for `numbers`.
    is_real = isinstance(value, numbers.Real) or not isinstance(value, numbers.Complex)
    return float(value) if isinstance(value, numbers.Number) and is_real else None  # type: ignore[arg-type]


def check_torch(what: str, least: str, why: str) -> None:
    """Raise if torch is older than a function needs.

    Args:
        what: The function, or an option of it, for the text.
        least: The oldest version with which it is tested.
        why: What older ones do.

    Raises:
        ContextError: It is older.
    """
    if TorchVersion(torch.__version__) < least:
        raise ContextError(
            f"{what}: torch {torch.__version__} cannot run it",
            found=why,
            expected=f"torch {least} or newer",
            fix=f"pip install 'torch>={least}'",
        )


def option_error(what: str, name: str, value: object, *, expected: str, fix: str) -> ValueError:
    """What to raise for an argument whose value cannot be used."""
    return value_error(f"{what}: {name} = {value!r} cannot be used", found=repr(value), expected=expected, fix=fix)


def check_count(what: str, name: str, value: object, *, least: int = 1, below: int | None = None, fix: str) -> None:
    """Raise unless a value is a whole number, and neither too small nor too large.

    Args:
        what: Name of the function, for the text.
        name: Name of the argument.
        value: Its value.
        least: The smallest that is allowed.
        below: All that are allowed are smaller than this.
        fix: A line to write instead.

    Raises:
        ValueError: It is something else; booleans are no numbers here.

    Example:
        >>> check_count("f", "steps", 3, fix="f(steps=1)")
        >>> check_count("f", "steps", 0, fix="f(steps=1)")
        Traceback (most recent call last):
        ValueError: f: steps = 0 cannot be used
          found:    0
          expected: a whole number >= 1
          fix:      f(steps=1)
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (below is not None and value >= below):
        allowed = f"a whole number >= {least}" if below is None else f"a whole number, {least} to {below - 1}"
        raise option_error(what, name, value, expected=allowed, fix=fix)


def check_choice(what: str, name: str, value: object, choices: Collection[object], *, fix: str = "") -> None:
    """Raise unless a value is one of several.

    Args:
        what: Name of the function, for the text.
        name: Name of the argument.
        value: Its value.
        choices: What is allowed; the first is the suggestion.
        fix: A line to write instead.

    Raises:
        ValueError: It is none of them.

    Example:
        >>> check_choice("f", "mode", "fast", ["slow", "exact"])
        Traceback (most recent call last):
        ValueError: f: mode = 'fast' is unknown
          found:    'fast'
          expected: 'slow' or 'exact'
          fix:      f(..., mode='slow')
    """
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        *others, last = map(repr, choices)
        raise value_error(
            f"{what}: {name} = {value!r} is unknown",
            found=repr(value),
            expected=f"{', '.join(others)} or {last}" if others else last,
            fix=fix or f"{what}(..., {name}={next(iter(choices))!r})",
        )


def check_module(what: str, module: object, *, fix: str = "") -> None:
    """Raise unless this is a module.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(module, nn.Module):
        raise type_error(
            f"{what}: this is not a module",
            found=type(module).__name__,
            expected="a torch.nn.Module",
            fix=fix or f"model, ctx = weft.{what}(model, ctx)",
        )


def check_optimizer(what: str, optimizer: object, *, fix: str = "") -> None:
    """Raise unless this is an optimizer.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise type_error(
            f"{what}: this is not an optimizer",
            found=type(optimizer).__name__,
            expected="a torch.optim.Optimizer",
            fix='optimizer = weft.optimizers(model, {"*.bias": torch.optim.SGD, "*": torch.optim.AdamW}, ctx)'
            if isinstance(optimizer, (list, tuple))
            else fix or f"optimizer, ctx = weft.{what}(optimizer, ctx)",
        )


def other_parameters(optimizer: torch.optim.Optimizer, known: Container[int]) -> list[str]:
    """The parameters of an optimizer that are not among the known ones, in words; `known` holds ids."""
    return [
        f"group {index}: a parameter of shape {tuple(p.shape)}"
        for index, entry in enumerate(optimizer.param_groups)
        for p in entry["params"]
        if id(p) not in known
    ]


def is_of(kind: type[torch.optim.Optimizer], library: str) -> bool:
    """Whether a class of optimizers, or what it was derived from, is of a library, by name."""
    return any(one.__module__.partition(".")[0] == library for one in kind.__mro__)


def check_not_lazy(what: str, module: nn.Module) -> None:
    """Raise unless all parameters and buffers of a module have a shape.

    Raises:
        ValueError: One has none yet; the text names it.
    """
    named = (*module.named_parameters(), *module.named_buffers())
    lazy = [name for name, tensor in named if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise value_error(
            f"{what}: parameters of {type(module).__name__} have no shape yet",
            found=listed(lazy),
            expected="a module that has been called once (lazy modules get their shapes then)",
            fix=f"model(example_batch)  # before {what}",
        )


def import_extra(module: str, problem: str, *, expected: str, extra: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: Its name.
        problem: What cannot be done without it.
        expected: The package.
        extra: The extra of weft that installs it.

    Raises:
        MissingExtra: It is not installed.

    Example:
        >>> import_extra("json", "f: there is no json", expected="the package json", extra="json").dumps([1])
        '[1]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        fix = f"pip install 'torchweft[{extra}]'"
        raise MissingExtra(problem, found=str(error), expected=expected, fix=fix) from error
