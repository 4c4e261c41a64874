"""Gradients of a window, which FSDP2 keeps in its units.

[Note: gradients of a window] Inside of a window FSDP2 keeps full gradients in its units; `.grad` shows them after
the reduced backward that ends the window, or, where the last micro-batch was skipped on all ranks, when the window
ends. A window that is left early leaves them there: nothing may be sent then, for other ranks may not have left it.
What happens to them is what would happen to gradients in `.grad`: `zero_grad` drops them, a step takes them, the next
window adds to them. As they are not in `.grad`, a made-up gradient of one parameter stands for them, the marker: if
it is gone, zero or another, the user's program has cleared or changed gradients.
"""

from __future__ import annotations

import torch
from torch import nn

from weft.engines.torch.fsdp.units import Units
from weft.errors import NotSynchronized
from weft.peers.ledger import Ledger
from weft.tensors.dtensor import local


class PendingGradients:
    """What the units hold; see [Note: gradients of a window].

    Attributes:
        pending: Whether they hold gradients.
    """

    def __init__(self, what: str, class_name: str, units: Units, peers: Ledger) -> None:
        self.pending = False
        self._what = what
        self._class_name = class_name
        self._units = units
        self._peers = peers
        self._marker: _Marker | None = None

    def leave(self, parameter: nn.Parameter) -> None:
        """A window is left early: let the gradient of `parameter` stand for those that are held."""
        self._marker = _Marker(parameter)

    def settle(self) -> bool:
        """Do to what the units hold what was done to the marker; are gradients pending after that?

        Collectives: if there is a marker, a meeting: the rows of its parameter may lie on other ranks.

        Raises:
            NotSynchronized: Gradients were changed.
        """
        marker, self._marker = self._marker, None
        if marker is not None:
            states = set(self._peers.meet("gradients of a window that was left early", marker.state()))
            if "changed" in states:
                raise NotSynchronized(
                    f"{self._what}: gradients of {self._class_name} were changed (clipped?) before they were reduced",
                    found="a window that was left early, by `break` or an exception, and then clip_grad_norm_ or "
                    "the like",
                    expected="gradients are changed after they were reduced",
                    fix="continue  # in place of break: a window that comes to its end reduces its gradients",
                )
            marker.give_way(cleared="cleared" in states)
            if "cleared" in states:
                self.drop()
        return self.pending

    def drop(self) -> None:
        """Forget them."""
        self.pending = False
        self._units.drop_gradients()


class _Marker:
    """A gradient that stands for those in the units, in the place of the one that is there; see the note above."""

    # Large, so that clipping changes it, and of a square that float32 has.
    _VALUE = 2.0**50

    def __init__(self, parameter: nn.Parameter) -> None:
        self._parameter = parameter
        self._before = parameter.grad
        self._gradient = parameter.grad = torch.full_like(parameter, self._VALUE)
        self._values = local(self._gradient).clone()

    def state(self) -> str:
        """Whether it is "kept", "cleared" or "changed", as far as this rank can see."""
        if self._parameter.grad is not self._gradient:
            return "cleared"
        now = local(self._gradient)
        if torch.equal(now, self._values):  # the state of an empty part is what the others see
            return "kept"
        return "changed" if bool(now.any()) else "cleared"

    def give_way(self, *, cleared: bool) -> None:
        """Put back the gradient that was there; zeros, if the program has set gradients to zero."""
        if self._parameter.grad is self._gradient:
            if cleared and self._before is not None:
                self._before.zero_()
            if self._before is not None or not cleared:
                self._parameter.grad = self._before
