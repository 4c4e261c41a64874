"""Choose parts of a module by class, name, size, question or hand.

Transforms that treat some parts of a module separately (`fully_shard(units=...)`, `recompute(blocks=...)`,
`compile(blocks=...)`) let the user say which in the same ways. Whether parts may lie inside each
other is for the transform to decide: `select_apart` allows none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NoReturn, TypeAlias

from torch import nn

from weft.checks import check_not_lazy
from weft.errors import listed, type_error, value_error

Choice: TypeAlias = type[nn.Module] | str | int | Callable[[str, nn.Module], bool] | nn.Module
Selection: TypeAlias = Choice | Iterable[Choice]
Names: TypeAlias = str | Iterable[str] | Callable[[str], bool]  # of tensors: patterns, or a question


def select(what: str, module: nn.Module, chosen: Selection) -> dict[str, nn.Module]:
    """Find the chosen parts of `module`.

    Changes: nothing. Collectives: none.

    Args:
        what: The function that asks, for the texts of errors.
        module: The whole.
        chosen: A class (its subclasses count), or its name ("LlamaDecoderLayer"); a pattern of qualified
            names, in which `*`, `?` and `[...]` stay within one part of the name and `**` stands for any
            number of parts ("blocks.*" is each block and nothing in it); a whole number: the smallest parts with
            at least that many parameters that have a forward, none inside another; a function
            of qualified name and part; a part itself; or several of these.

    Returns:
        Qualified name to part, in the order of `named_modules()`. A part with several names comes
        once, under its first. `module` itself is in it only if it was given itself, under "".

    Raises:
        ValueError: Something chosen is not in `module`.
        TypeError: Something chosen is none of these.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 3)), nn.Linear(3, 1))
        >>> list(select("f", model, nn.Linear)), list(select("f", model, "*")), list(select("f", model, 5))
        (['0', '1.0', '2'], ['0', '1', '2'], ['0', '1.0'])
    """
    found: set[int] = set()
    choices = _choices(chosen)
    if not choices:
        _raise_nothing(what, module, "an empty list")
    for choice in choices:
        matches = _matches(what, module, choice)
        if not matches:
            _raise_nothing(what, module, _said(choice))
        found.update(map(id, matches))
    return {name: part for name, part in module.named_modules() if id(part) in found}


def select_apart(what: str, module: nn.Module, chosen: Selection) -> dict[str, nn.Module]:
    """As `select`, for transforms that do something around the calls of parts.

    Changes: nothing. Collectives: none.

    Args:
        what: As for `select`.
        module: As for `select`.
        chosen: As for `select`.

    Returns:
        As `select`; each part has a forward, and none is inside another.

    Raises:
        ValueError: As `select`; a part is inside another; or it is never called.

    Example:
        >>> list(select_apart("f", nn.Sequential(nn.Linear(1, 1)), nn.Linear))
        ['0']
    """
    parts = select(what, module, chosen)
    check_apart(what, parts, outer=parts)
    uncalled = [name for name, part in parts.items() if not has_forward(part)]
    if uncalled:
        raise value_error(
            f"{what}: chosen parts are never called",
            found=listed(f"{name!r} ({type(parts[name]).__name__})" for name in uncalled),
            expected="parts that have a forward",
            fix=f'"{called_inside(uncalled[0], parts[uncalled[0]])}"',
        )
    return parts


def check_apart(what: str, parts: Mapping[str, nn.Module], *, outer: Collection[str]) -> None:
    """Raise if a part is inside another one.

    Args:
        what: The function that asks, for the text.
        parts: By name.
        outer: The names of those in which none may be.

    Raises:
        ValueError: One is.
    """
    names = {id(part): name for name, part in parts.items()}
    nested = [(names[id(q)], name) for name in outer for q in parts[name].modules() if id(q) in names]
    nested = [(inner, outer) for inner, outer in nested if inner != outer]
    if nested:
        raise value_error(
            f"{what}: chosen parts are nested",
            found=listed(f"{inner!r} in {outer or 'the module itself'!r}" for inner, outer in nested),
            expected="parts that do not contain each other: what is inside a part is treated with it",
            fix=f'choose "{nested[0][1] or nested[0][0]}" or "{nested[0][0]}", not both',
        )


def has_forward(part: nn.Module) -> bool:
    """Whether it can be called; a list of modules has no forward, and nothing can be done around its call."""
    return type(part).forward is not nn.Module.forward


def called_inside(name: str, part: nn.Module) -> str:
    """The pattern of what is called in a list of modules, or in a list of lists."""
    pattern, inner = f"{name}.*", list(part.children())
    while inner and not any(map(has_forward, inner)):
        pattern, inner = f"{pattern}.*", [child for one in inner for child in one.children()]
    return pattern


def _choices(chosen: Any) -> list[Any]:
    if isinstance(chosen, (str, type, nn.Module)) or callable(chosen) or not isinstance(chosen, Iterable):
        return [chosen]
    return [choice for part in chosen for choice in _choices(part)]


def _matches(what: str, module: nn.Module, choice: Any) -> list[nn.Module]:
    if isinstance(choice, nn.Module):
        return [choice] if any(part is choice for part in module.modules()) else []
    if isinstance(choice, str):
        pattern = choice.split(".")
        # Under all names of a part, not only its first.
        named = [(name, part) for name, part in module.named_modules(remove_duplicate=False) if name]
        found = [part for name, part in named if _fits(name.split("."), pattern)]
        return found or [part for _, part in named if choice in (cls.__name__ for cls in type(part).__mro__)]
    inner = [(name, part) for name, part in module.named_modules() if name]
    if isinstance(choice, type) and issubclass(choice, nn.Module):
        return [part for _, part in inner if isinstance(part, choice)]
    if isinstance(choice, int) and not isinstance(choice, bool) and choice > 0:
        check_not_lazy(what, module)  # parameters without a shape have no size
        return _smallest([part for _, part in inner], choice)
    if not isinstance(choice, type) and callable(choice):
        return [part for name, part in inner if choice(name, part)]
    raise type_error(
        f"{what}: {choice!r} chooses no parts of a module",
        found=f"{choice!r} of type {type(choice).__name__}",
        expected="a class of modules or its name, a pattern of names, a number of parameters > 0, "
        "a function of name and module, or a part itself",
        fix=f'"{next((name for name, _ in inner), "blocks.*")}"',
    )


def fits_pattern(name: str, pattern: str) -> bool:
    """Whether a qualified name fits a pattern, as patterns are in `select`.

    Example:
        >>> fits_pattern("blocks.0.weight", "blocks.*"), fits_pattern("blocks.0.weight", "**.weight")
        (False, True)
    """
    return _fits(name.split("."), pattern.split("."))


def is_within(name: str, outer: str) -> bool:
    """Whether a qualified name is that of a part, or of something in it; all is in the module itself, "".

    Example:
        >>> is_within("blocks.1.weight", "blocks.1"), is_within("blocks.10.weight", "blocks.1")
        (True, False)
    """
    return not outer or name == outer or name.startswith(f"{outer}.")


def _fits(parts: list[str], pattern: list[str]) -> bool:
    """Whether a name, split at its dots, fits a pattern split likewise."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return _fits(parts, pattern[1:]) or (bool(parts) and _fits(parts[1:], pattern))
    return bool(parts) and fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def _smallest(parts: list[nn.Module], least: int) -> list[nn.Module]:
    large = [part for part in parts if has_forward(part) and sum(p.numel() for p in part.parameters()) >= least]
    ids = set(map(id, large))
    return [part for part in large if not any(id(p) in ids for p in part.modules() if p is not part)]


def _said(choice: Any) -> str:
    if isinstance(choice, nn.Module):
        return f"a given {type(choice).__name__}"
    if isinstance(choice, int):
        return f"{choice} parameters or more"
    name = getattr(choice, "__qualname__", None)
    if name is None:
        return repr(choice)
    return f"class {name}" if isinstance(choice, type) else f"function {name}"


def _raise_nothing(what: str, module: nn.Module, said: str) -> NoReturn:
    inner = [(name, part) for name, part in module.named_modules() if name]
    kinds = dict.fromkeys(type(part).__name__ for _, part in inner)
    called = [(name, part) for name, part in inner if has_forward(part)]
    largest = max((sum(p.numel() for p in part.parameters()) for _, part in inner), default=0)
    raise value_error(
        f"{what}: no part of {type(module).__name__} is chosen by {said}",
        found=f"classes: {listed(kinds) or 'none'}; names: {listed(name for name, _ in inner) or 'none'}; "
        f"largest part: {largest} parameters",
        expected="each choice chooses at least one part",
        fix=f'"{type(called[0][1]).__name__}", or a pattern such as "{called[0][0]}"'
        if called
        else "the module itself",
    )
