"""Tables by name: `{"*.bias": ..., "blocks.*.mlp": ..., "*": ...}`, where the first pattern that fits decides.

One form for everything that parts or parameters of a module get by their names: precision, recomputation, units,
bits, optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NoReturn, TypeGuard, TypeVar

from torch import nn

from weft.contract.select_modules import fits_pattern, has_forward
from weft.errors import listed, type_error, value_error

T = TypeVar("T")


def is_table(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a table was given, and not a choice of another form."""
    return isinstance(value, Mapping)


def fits_in_table(name: str, pattern: str) -> bool:
    """Whether a pattern of a table fits a name, or something that what is called so lies inside.

    `*` stands for any text, dots included, `?` for one character, `[...]` for one of several (`fnmatch`).

    Example:
        >>> [fits_in_table("blocks.0.mlp.weight", pattern) for pattern in ("*.weight", "blocks.*.mlp", "mlp")]
        [True, True, False]
    """
    # `**.weight` of `select` fits "weight" as well.
    deep = "**" in pattern and fits_pattern(name, pattern)
    return deep or fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


def patterns_by_name(what: str, names: Iterable[tuple[str, object]], table: Mapping[str, object]) -> dict[int, str]:
    """The pattern that decides about each of several things.

    Args:
        what: The function that asks, for the texts of errors.
        names: Names and things; one with several names is there several times.
        table: By pattern; the order counts.

    Returns:
        Patterns by the `id` of a thing; without those that no pattern fits.

    Raises:
        TypeError: A key is no text.
        ValueError: The table is empty, or a pattern decides about nothing.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1))
        >>> list(patterns_by_name("f", model.named_parameters(), {"*.bias": 1, "*": 2}).values())
        ['*.bias', '*']
    """
    _check_keys(what, table)
    names = list(names)
    found: dict[int, str] = {}
    for pattern in table:
        new = {id(thing): pattern for name, thing in names if id(thing) not in found and fits_in_table(name, pattern)}
        if not new:
            _raise_idle(what, pattern, [name for name, _ in names])
        found |= new
    return found


def parts_by_name(what: str, module: nn.Module, table: Mapping[str, T]) -> dict[str, tuple[nn.Module, T]]:
    """The parts of a module about which a table decides, each with its value.

    Args:
        what: The function that asks, for the texts of errors.
        module: The whole, which `"*"` fits as well.
        table: By pattern; the order counts.

    Returns:
        By name, outer parts before those inside them: each part about which another pattern decides than about what it
        lies in. Of parts without a forward, such as a list of modules, what they hold.

    Raises:
        TypeError: A key is no text.
        ValueError: The table is empty, or a pattern decides about no part.

    Example:
        >>> model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1)))
        >>> {name: value for name, (_, value) in parts_by_name("f", model, {"1": "a", "*": "b"}).items()}
        {'': 'b', '1': 'a'}
    """
    of = patterns_by_name(what, module.named_modules(remove_duplicate=False), table)
    found: dict[str, tuple[nn.Module, T]] = {}
    inside: dict[str, str | None] = {}  # the pattern that decides about what is in a part, by its name
    for name, part in module.named_modules():
        own, inside[name] = of.get(id(part)), inside.get(name.rpartition(".")[0])
        if own is not None and own != inside[name] and has_forward(part):
            found[name] = (part, table[own])
            inside[name] = own
    return found


def _check_keys(what: str, table: Mapping[str, object]) -> None:
    wrong = [key for key in table if not isinstance(key, str)]
    if wrong:
        raise type_error(
            f"{what}: {wrong[0]!r:.80} is no pattern of names",
            found=f"a key of type {type(wrong[0]).__name__}",
            expected='texts as keys, such as "blocks.*.mlp", and "*" for the rest',
            fix='{"*.bias": ..., "*": ...}',
        )
    if not table:
        raise value_error(
            f"{what}: the table is empty",
            found="{}",
            expected="at least one pattern of names",
            fix='{"*": ...}',
        )


def _raise_idle(what: str, pattern: str, names: list[str]) -> NoReturn:
    fitting = [name or "itself" for name in names if fits_in_table(name, pattern)]
    raise value_error(
        f"{what}: the pattern {pattern!r} decides about nothing",
        found=f"all that it fits is taken by patterns before it: {listed(fitting)}"
        if fitting
        else f"names: {listed(name for name in names if name) or 'none'}",
        expected="patterns that fit something, the first one that fits deciding",
        fix=f"move {pattern!r} up in the table, or leave it out"
        if fitting
        else f"leave {pattern!r} out, or correct it",
    )
