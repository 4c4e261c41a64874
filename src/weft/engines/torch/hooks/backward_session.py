"""Know when a backward pass enters a module and when it has ended.

[Note: backward session] torch offers no hook for "backward through this module begins" and none
for "it has ended". The first is seen by whatever meets a gradient first: a node at the module's
outputs, or a hook on a parameter. The second is the engine's `queue_callback`; a callback that is
queued by a callback runs after all those that were queued while the graph ran, such as the one
with which DDP's reducer or FSDP2 finish their communication.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import torch

from weft import torch_internals
from weft.tensors.nested import tensors


def _queue_callback(run: Callable[[], None], rounds: int) -> None:
    """Call a function when the running backward pass has ended, after so many rounds of callbacks."""
    call = partial(_queue_callback, run, rounds - 1) if rounds else run
    torch_internals.execution_engine.found.queue_callback(call)


class BackwardSession:
    """Whether a backward pass is inside a module at this moment.

    Attributes:
        flag: One byte, 1 while a backward pass is inside. Hooks on parameters hold this and not
            the session, which would close a cycle through C++ that no collector can see.
    """

    __slots__ = ("_begin", "_end", "_rounds", "flag")

    def __init__(self, begin: Callable[[], None], end: Callable[[], None], *, rounds: int = 1) -> None:
        """Remember what to do.

        Args:
            begin: Runs once when backward enters.
            end: Runs once when the whole backward pass has ended.
            rounds: In which round of callbacks `end` runs. 0: with the callbacks queued while the
                graph ran; 1: after them; 2: after the `end` of sessions with fewer rounds.
        """
        self.flag = bytearray(1)
        self._begin = begin
        self._end = end
        self._rounds = rounds

    def enter(self) -> None:
        """Begin a session unless one is live."""
        if not self.flag[0]:
            self.flag[0] = 1
            _queue_callback(self._finish, self._rounds)
            self._begin()

    def entrance(self, enter: Callable[[], None]) -> Callable[..., None]:
        """A hook on tensors, which calls a method of the session's owner when a backward pass has not entered yet.

        It must not hold the owner, which may hold the tensor, in C++.
        """
        flag, method = self.flag, weakref.WeakMethod(enter)

        def hook(_: torch.Tensor | None = None) -> None:
            if not flag[0] and (alive := method()) is not None:
                alive()

        return hook

    def _finish(self) -> None:
        self.flag[0] = 0
        self._end()

    def was_torn(self) -> bool:
        """Whether the last backward pass raised and never ended; forgets it."""
        if self.flag[0] and torch_internals.graph_task_id() == -1:
            self.flag[0] = 0
            return True
        return False


def when_entered(output: object, hook: Callable[[torch.Tensor], object]) -> None:
    """Call a hook on a gradient when a backward pass comes back through one of these tensors."""
    for tensor in tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(hook)


def after_callbacks(run: Callable[[], None]) -> None:
    """Call a function when the running backward pass has ended, after the `end` of all sessions."""
    _queue_callback(run, 1)


def inside_backward(run: Callable[[], None]) -> None:
    """Call a function inside an otherwise empty backward pass, which ends with the callbacks queued in it."""
    with torch.enable_grad():
        made = torch.zeros((), requires_grad=True).clone()
    made.register_hook(lambda _: run())
    made.backward()
