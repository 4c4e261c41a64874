"""What an engine returns to a transform, which offers it to later ones."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

Axes = tuple[tuple[str, int], ...]  # names and sizes, outermost first


@runtime_checkable
class Undoable(Protocol):
    """Offered by transforms that can be taken back."""

    def undo(self) -> None:
        """Leave the object as it was before the transform."""


@runtime_checkable
class GradSync(Protocol):
    """Offered by transforms that reduce gradients over ranks in backward.

    Outside of a window every backward pass reduces the gradients. A window of micro-batches is three events,
    the same ones on every rank.

    What may also have an attribute `owes`, whether no backward pass has reduced the gradients of the running window,
    is safe in a window of several modules: all ranks then have to owe the same.

    Attributes:
        mean_over: Number of ranks over which gradients are averaged; 1 if they are summed.
    """

    mean_over: int

    def begin_window(self) -> None:
        """A window begins: until the next event, backward passes keep their gradients on this rank."""

    def last_backward(self) -> None:
        """The next backward pass is the last one of the window: it reduces the gradients of all of them."""

    def end_window(self, *, left: bool = False) -> None:
        """The window is over, and backward passes reduce again.

        Args:
            left: It was left early, by `break` or an exception, perhaps on this rank alone: nothing may be sent now.
                Otherwise gradients that no backward pass has reduced are reduced now, by the messages of a
                backward pass, so that a rank that skipped its last micro-batch meets one that did not.
        """


class ReducedModule(Undoable, GradSync, Protocol):
    """A module whose gradients are reduced, for later transforms."""
