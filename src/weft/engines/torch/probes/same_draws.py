"""Rows that are computed together draw the random numbers that they draw when computed separately."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from weft import torch_internals
from weft.tensors.rng_state import seed_torch

_Shapes = tuple[tuple[int, ...] | None, ...]


class SameDraws(torch_internals.dispatch_mode.base):  # type: ignore[name-defined, misc]
    """Around several calls: for parts of some rows, one after the other, and then for all of them together.

    Each operation that draws begins anew, with the seed that the operation of the same number has in the other calls.
    The next one has the next seed, also in a block that is computed again, with its random state. In the last call an
    operation is computed for each part by itself, where its arguments are those of the parts, joined.

    Attributes:
        has_drawn: Whether an operation drew random numbers of torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_drawn = False
        self._parts: list[dict[int, _Shapes]] = []  # by seed
        self._is_together = False

    def begin(self, *, together: bool) -> None:
        """The next call begins."""
        seed_torch(0)
        self._is_together = together
        if not together:
            self._parts.append({})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation; see the class."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        self.has_drawn = True
        shapes, number = tuple(map(_shape, (*args, *kwargs.values()))), torch.initial_seed()
        if not self._is_together:
            if self._parts:
                self._parts[-1][number] = shapes
            return _draw(func, args, kwargs, number)
        parts = [part[number] for part in self._parts if number in part]
        cuts = _cuts(shapes, parts) if len(parts) == len(self._parts) else None
        if cuts is None:
            return _draw(func, args, kwargs, number)
        dim, starts = cuts
        results = []
        for part, start in zip(parts, starts, strict=True):
            wanted = iter(part)
            own = [_cut(value, next(wanted), dim, start) for value in args]
            named = {name: _cut(value, next(wanted), dim, start) for name, value in kwargs.items()}
            results.append(_draw(func, own, named, number))
        if torch_internals.schema.of(func).is_mutable:
            return args[0].copy_(torch.cat(results, dim))
        return torch_internals.tree.found.tree_map(lambda *parts: _joined(parts, dim), *results)


def _draw(func: Any, args: Any, kwargs: Any, number: int) -> Any:
    seed_torch(number)
    result = func(*args, **kwargs)
    seed_torch((number + 1) % (1 << 62))
    return result


def _shape(value: Any) -> tuple[int, ...] | None:
    """The shape of a tensor, or one that is given as numbers."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    is_size = isinstance(value, (list, tuple)) and value and all(isinstance(one, int) for one in value)
    return tuple(value) if is_size else None


def _cuts(whole: _Shapes, parts: Sequence[_Shapes]) -> tuple[int, list[int]] | None:
    """The dimension in which the parts add up, and where each begins; None if there is none."""
    found: set[tuple[int, tuple[int, ...]]] = set()
    for place, shape in enumerate(whole):
        theirs = [part[place] if place < len(part) else None for part in parts]
        if shape is None or all(one == shape for one in theirs):
            continue
        dims = [dim for dim in range(len(shape)) if _adds_up(shape, theirs, dim)]
        if len(dims) != 1:
            return None
        found.add((dims[0], tuple(one[dims[0]] for one in theirs if one is not None)))
    if len(found) != 1:
        return None
    dim, sizes = found.pop()
    return dim, [sum(sizes[:place]) for place in range(len(sizes))]


def _adds_up(shape: tuple[int, ...], theirs: Sequence[tuple[int, ...] | None], dim: int) -> bool:
    def rest(one: tuple[int, ...]) -> tuple[int, ...]:
        return (*one[:dim], *one[dim + 1 :])

    fits = [one for one in theirs if one is not None and len(one) == len(shape) and rest(one) == rest(shape)]
    return len(fits) == len(theirs) and sum(one[dim] for one in fits) == shape[dim]


def _cut(value: Any, shape: tuple[int, ...] | None, dim: int, start: int) -> Any:
    if shape is None or shape == _shape(value):
        return value
    return value.narrow(dim, start, shape[dim]).contiguous() if isinstance(value, torch.Tensor) else list(shape)


def _joined(values: tuple[Any, ...], dim: int) -> Any:
    return torch.cat(values, dim) if isinstance(values[0], torch.Tensor) and values[0].dim() > dim else values[0]
