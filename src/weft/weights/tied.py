"""Tied weights: found, and tied again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from weft.checks import check_module
from weft.errors import listed, value_error


def find_tied(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """The names of parameters that are one object, also because a whole layer is used twice.

    Changes: nothing. Collectives: none.

    Args:
        module: Any module; parameters may be on meta.

    Returns:
        A group of names for each tied parameter, in the order of `named_parameters`.

    Raises:
        TypeError: Not a module.

    Example:
        >>> model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
        >>> model[1].weight = model[0].weight
        >>> find_tied(model)
        (('0.weight', '1.weight'),)
    """
    check_module("find_tied", module, fix="weft.weights.find_tied(model)")
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def tie(module: nn.Module, groups: Sequence[Sequence[str]]) -> None:
    """Make parameters one object again, for instance after each has got its own memory: the first of each group.

    Before transforms; those keep what is tied.

    Changes: the module, in place; an optimizer comes after. Collectives: none.

    Args:
        module: Any module.
        groups: As from `find_tied`.

    Raises:
        TypeError: Not a module.
        ValueError: There is no such parameter, or two of a group differ in shape or dtype. Nothing was changed.

    Example:
        >>> model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
        >>> tie(model, [("0.weight", "1.weight")])
        >>> model[0].weight is model[1].weight
        True
    """
    check_module("tie", module, fix="weft.weights.tie(model, groups)")
    named = dict(module.named_parameters(remove_duplicate=False))
    unknown = [name for group in groups for name in group if name not in named]
    kinds = {
        group[0]: {f"{tuple(named[name].shape)} {named[name].dtype}" for name in group}
        for group in groups
        if group and not unknown
    }
    different = [f"{name}: {listed(sorted(found))}" for name, found in kinds.items() if len(found) > 1]
    if unknown or different:
        raise value_error(
            f"tie: parameters of {type(module).__name__} cannot be tied",
            found=f"no parameters: {listed(map(repr, unknown))}" if unknown else listed(different),
            expected="names of parameters of one shape and dtype, in groups",
            fix="weft.weights.tie(model, weft.weights.find_tied(original))",
        )
    for group in groups:
        for name in group[1:]:
            path, _, own = name.rpartition(".")
            setattr(module.get_submodule(path), own, named[group[0]])
