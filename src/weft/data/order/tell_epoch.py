"""`set_epoch` of everything that has it in a dataset or sampler, however it is wrapped."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

_DEEPEST, _MOST_PARTS, _FEW = 8, 10_000, 16  # of what is looked at for a `set_epoch`
_VALUES = (str, bytes, int, float, type(None), torch.Tensor, np.ndarray, np.generic)
_NO_PARTS = (*_VALUES, type, FunctionType, ModuleType, torch.nn.Module, DataLoader)
_DATA = ("data_source", "dataset")  # of a sampler


def tell_epoch(obj: object, epoch: int, *, of_data: bool = True) -> None:
    """Call `set_epoch(epoch)` of an object, or else of those inside it that have such a method.

    One that has it is in charge of what is inside it. Inside are attributes, and entries of lists, tuples and dicts,
    that is datasets in datasets and samplers in samplers, however they were wrapped.

    Args:
        obj: A dataset, sampler or batch sampler.
        epoch: Number of the epoch.
        of_data: Whether it is data; the data that a sampler holds are not told by it.
    """
    method = getattr(obj, "set_epoch", None)
    if callable(method):
        method(epoch)
        return
    seen, level = {id(obj)}, [obj]
    for _ in range(_DEEPEST):
        found = itertools.chain.from_iterable(_parts(each, of_data=of_data) for each in level)
        level = []
        for part in [*itertools.islice(found, _MOST_PARTS)]:
            if isinstance(part, _NO_PARTS) or id(part) in seen:
                continue
            seen.add(id(part))
            inner: Any = part
            if callable(getattr(type(inner), "set_epoch", None)):
                inner.set_epoch(epoch)
            else:
                level.append(inner)


def _parts(obj: object, *, of_data: bool) -> Iterable[object]:
    """What is directly inside an object."""
    if isinstance(obj, dict):
        return () if _holds_values(obj.values()) else obj.values()
    if isinstance(obj, (list, tuple)):
        return () if _holds_values(obj) else obj
    found: dict[str, object] = getattr(obj, "__dict__", None) or {}
    if of_data:
        return found.values()
    return [part for name, part in found.items() if name not in _DATA and not isinstance(part, Dataset)]


def _holds_values(entries: Collection[object]) -> bool:
    """Whether entries are values, or rows of values, that have nothing inside; of many, by the first few."""
    few = itertools.islice(entries, _FEW)
    rows = (one[:_FEW] if isinstance(one, (list, tuple)) else (one,) for one in few)
    return all(isinstance(part, _NO_PARTS) for row in rows for part in row)
