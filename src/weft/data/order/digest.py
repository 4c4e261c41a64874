"""A digest of the order of an epoch: equal where ranks, or two runs, read the same samples in the same order."""

from __future__ import annotations

import hashlib
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

_MOST = 2**16  # units that are looked at, of a longer order evenly many: some 3 ms


def digest_of(units: Sequence[Any]) -> str:
    """A text that is equal for equal orders, in every process.

    Args:
        units: Indices of any integer type, batches of them, or what else a dataset takes as an index.

    Example:
        >>> digest_of(range(3)) == digest_of([0, 1, 2]), digest_of([0, 1, 2]) == digest_of([0, 2, 1])
        (True, False)
    """
    found = hashlib.blake2b(str(len(units)).encode(), digest_size=8)
    some = units[:: -(-len(units) // _MOST) or 1]
    if not (isinstance(some, range) or all(issubclass(kind, (int, np.integer)) for kind in set(map(type, some)))):
        some = [_canonical(unit) for unit in some]
    if some and all(isinstance(unit, (list, tuple)) for unit in some):  # batches
        found.update(np.fromiter(map(len, some), np.int64, len(some)).tobytes())
        some = list(itertools.chain.from_iterable(some))
    numbers = _numbers(some)
    found.update(repr(some).encode() if numbers is None else numbers.tobytes())
    return found.hexdigest()


def _numbers(units: Sequence[Any]) -> np.ndarray[Any, Any] | None:
    if isinstance(units, range):
        return np.arange(units.start, units.stop, units.step, dtype=np.int64)
    if not all(issubclass(kind, (int, np.integer)) for kind in set(map(type, units))):
        return None
    try:
        return np.fromiter(units, np.int64, len(units))
    except OverflowError:
        return None


def _canonical(unit: Any) -> Any:
    if isinstance(unit, (str, bytes, float, complex, type(None))):
        return unit
    if isinstance(unit, (torch.Tensor, np.ndarray)) and unit.ndim:
        return unit.tolist()
    if isinstance(unit, Mapping):
        return sorted((repr(_canonical(key)), _canonical(value)) for key, value in unit.items())
    if isinstance(unit, (list, tuple)):
        return [_canonical(item) for item in unit]
    try:
        return operator.index(unit)
    except TypeError:
        return type(unit).__qualname__  # its text might have an address in it
