"""A `DataLoader` with more to it: a copy of the user's loader whose class is a subclass of its class.

Nothing is re-constructed, so subclasses with other constructors and attributes that were set later
survive; the original is left alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from weft import torch_internals
from weft.data import datasets_internals
from weft.data.worker_signals import workers_outlive_signals

T = TypeVar("T")
Size = tuple[int | None, int | None]  # samples in this rank's batch, and in those of all ranks; None: not known here
# Who splits data says so in one of these pairs: DistributedSampler and its likes; Accelerate's; Hugging Face's.
_SPLIT_BY = (("num_replicas", "rank"), ("num_processes", "process_index"), ("world_size", "rank"))


class Extension(DataLoader[T]):
    """Base of what is put before the class of a loader; makes the result picklable."""

    def __reduce__(self) -> tuple[Any, ...]:
        iterator = torch_internals.LOADER_ITERATOR.name
        state = {key: value for key, value in self.__dict__.items() if key not in (iterator, "_weft_marks")}
        return _rebuild, (_chain(type(self)), {**state, iterator: None})


def extended_copy(loader: DataLoader[Any], addition: type[Extension[Any]], **attributes: Any) -> Any:
    """Copy `loader`, set attributes on the copy, and put `addition` before its class.

    Args:
        loader: Any loader; also one that was extended before.
        addition: Class with methods that call `super()`.
        attributes: Set on the copy, also those a `DataLoader` guards against being set.

    Returns:
        The copy, an instance of `addition` and of the class of `loader`.
    """
    new = copy.copy(loader)
    new.__dict__.update(attributes)
    new.__dict__[torch_internals.LOADER_ITERATOR.name] = None
    new.__class__ = _extended(addition, type(loader))
    return new


def _extended(addition: type[Any], cls: type[Any]) -> type[Any]:
    if issubclass(addition, cls):
        return addition  # over a plain DataLoader the addition is all there is to it
    names = {"weft_parts": (addition, cls), "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (addition, cls), names)


def _chain(cls: type[Any]) -> tuple[type[Any], ...]:
    """The importable classes a loader class was put together from, outermost first."""
    parts = cls.__dict__.get("weft_parts")
    return (cls,) if parts is None else (parts[0], *_chain(parts[1]))


def _rebuild(chain: tuple[type[Any], ...], state: dict[str, Any]) -> Any:
    cls = chain[-1]
    for addition in reversed(chain[:-1]):
        cls = _extended(addition, cls)
    loader: Any = object.__new__(cls)
    loader.__dict__.update(state)
    return loader


def length_of(source: Any, measure: Callable[[], int] | None = None) -> int | None:
    """The length of a sampler, stream or loader; None if it does not tell."""
    try:
        return len(source) if measure is None else measure()
    except (TypeError, NotImplementedError):
        return None


def split_already(loader: Any) -> str | None:
    """Who splits the data among ranks, if somebody does."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    dataset = getattr(loader, "dataset", None)
    for source in (getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None), dataset):
        if source is dataset and datasets_internals.split_of(source) is not None:
            return f"{type(source).__name__}, which split_dataset_by_node has split"
        names = vars(source) if hasattr(source, "__dict__") else {}
        if isinstance(source, DistributedSampler) or any(a in names and b in names for a, b in _SPLIT_BY):
            return type(source).__name__
    return None


# -- torch's own iterators ---------------------------------------------------------------------------


def is_torch_iterator(value: Any) -> bool:
    """Whether this is an iterator of torch over some loader."""
    return torch_internals.base_iterator.holds(value)


def torch_iterator(loader: DataLoader[Any], note: Callable[[Any], Any] | None = None) -> Any:
    """Torch's iterator over a loader that is used for nothing else; `note` takes each batch and returns it.

    It names its batches in a profile only while a profiler runs: torch opens a `record_function` around every
    batch, watched or not, which takes 2 to 5 us of CPU.
    """
    torch_internals.RESET.check()
    iterate = partial(torch_internals.LOADER_ITERATES.of(DataLoader), loader)
    iterator: Any = workers_outlive_signals(loader, iterate) if loader.num_workers else iterate()
    kinds = {torch_internals.single_iterator.found: _QuickSingle, torch_internals.worker_iterator.found: _QuickMulti}
    iterator.__class__ = kinds.get(type(iterator), type(iterator))
    iterator.weft_note = note
    return iterator


class _Quick:
    """What both of torch's iterators do for a batch, without the name."""

    weft_note: Callable[[Any], Any] | None = None

    def __next__(self: Any) -> Any:
        if torch_internals.profiles() or torch_internals.LENGTH_CALLED.of(self) is not None:
            data = super().__next__()  # type: ignore[misc]
        else:  # batches are counted for the length of a stream only
            data = torch_internals.NEXT_DATA.of(self)()
        return data if self.weft_note is None else self.weft_note(data)

    def _reset(self: Any, loader: Any, first_iter: bool = False) -> None:
        if self.weft_note is not None:
            self.weft_note = loader.weft_noting()
        torch_internals.RESET.of(super())(loader, first_iter)


class _QuickSingle(_Quick, torch_internals.single_iterator.base):  # type: ignore[misc, name-defined]
    pass


class _QuickMulti(_Quick, torch_internals.worker_iterator.base):  # type: ignore[misc, name-defined]
    pass
