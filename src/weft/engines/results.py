"""What an engine returns to a transform, which offers it to later ones."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from weft.engines.probes import Probe

Axes = tuple[tuple[str, int], ...]  # names and sizes, outermost first


@runtime_checkable
class Undoable(Protocol):
    """Offered by transforms that can be taken back."""

    def undo(self) -> None:
        """Leave the object as it was before the transform."""


class Probed(Undoable, Protocol):
    """What is measured as well.

    Attributes:
        probes: That measure it.
    """

    probes: tuple[Probe, ...]


class Releasable(Protocol):
    """Something that a context keeps until it is closed."""

    def release(self) -> None:
        """Let it go."""


class ReducedModule(Undoable, Protocol):
    """A module whose gradients are reduced, for later transforms: `GradSync` and `Undoable` of the contract."""

    mean_over: int

    def begin_window(self) -> None:
        """A window of micro-batches begins."""

    def last_backward(self) -> None:
        """The next backward pass is the last one of the window."""

    def end_window(self, *, left: bool = False) -> None:
        """The window is over, or was left early."""


class TensorParallel(ReducedModule, Probed, Protocol):
    """A module whose layers are cut over ranks."""

    @property
    def adds_up(self) -> bool:
        """Whether there are gradients of which each rank has a part: else there is nothing to reduce."""
        ...
