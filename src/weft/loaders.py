"""A `DataLoader` with more to it: a copy of the user's loader whose class is a subclass of its class.

Nothing is re-constructed, so subclasses with other constructors and attributes that were set later
survive; the original is left alone.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch.utils.data import DataLoader

__all__ = ["Extension", "Seekable", "extended_copy"]

T = TypeVar("T")


@runtime_checkable
class Seekable(Protocol):
    """A loader whose position is a number of samples, so that batches can be left unread and read later."""

    def weft_position(self, back: int) -> dict[str, Any]:
        """Its `state_dict` as it was so many batches ago, in the running iteration."""
        ...

    def weft_hold_back(self, count: int) -> None:
        """Leave the last batches of the iteration that was just begun for the next one, which begins with them."""


class Extension(DataLoader[T]):
    """Base of what is put before the class of a loader; makes the result picklable."""

    def __reduce__(self) -> tuple[Any, ...]:
        state = {key: value for key, value in self.__dict__.items() if key not in ("_iterator", "_weft_marks")}
        return _rebuild, (_chain(type(self)), {**state, "_iterator": None})


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
    new.__dict__.update(attributes, _iterator=None)
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
