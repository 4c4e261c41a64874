"""Dicts and lists of plain values, such as the best loss so far, saved without a class of their own."""

from __future__ import annotations

from collections.abc import MutableMapping, MutableSequence
from typing import Any, TypeAlias

Container: TypeAlias = MutableMapping[Any, Any] | MutableSequence[Any]


class Filled:
    """A dict or a list of the caller's; `load_state_dict` fills it in place, so that every name for it sees that.

    Attributes:
        held: It.
    """

    def __init__(self, held: Container) -> None:
        self.held = held

    def state_dict(self) -> Any:
        """The values in it, as a dict or a list of Python's own."""
        return dict(self.held) if isinstance(self.held, MutableMapping) else list(self.held)

    def load_state_dict(self, state: Any, /) -> None:
        """Replace the values in it."""
        if isinstance(state, MutableMapping) is not isinstance(self.held, MutableMapping):
            raise TypeError(f"a {type(self.held).__name__} cannot take the values of a {type(state).__name__}")
        self.held.clear()
        if isinstance(self.held, MutableMapping):
            self.held.update(state)
        else:
            self.held.extend(state)
