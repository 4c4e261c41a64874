"""Know when a backward pass enters a module and when it has ended.

[Note: backward session] torch offers no hook for "backward through this module begins" and none
for "it has ended". The first is a tensor hook on the module's outputs: it runs before any gradient
of a parameter that was used through them. The second is the engine's `queue_callback`; a callback
that is queued by a callback runs after all those that were queued while the graph ran, such as the
one with which DDP's reducer or FSDP2 finish their communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.nested import map_tensors

__all__ = ["BackwardSession", "hook_outputs"]

_queue_callback = torch.autograd.Variable._execution_engine.queue_callback


class BackwardSession:
    """Whether a backward pass is inside a module at this moment.

    Attributes:
        flag: One byte, 1 while a backward pass is inside. Hooks on parameters hold this and not
            the session, which would close a cycle through C++ that no collector can see.
    """

    __slots__ = ("_begin", "_end", "_late", "flag")

    def __init__(self, begin: Callable[[], None], end: Callable[[], None], *, late: bool = False) -> None:
        """Remember what to do.

        Args:
            begin: Runs once when backward enters.
            end: Runs once when the whole backward pass has ended.
            late: Run `end` one round later, after the `end` of sessions that are not late.
        """
        self.flag = bytearray(1)
        self._begin = begin
        self._end = end
        self._late = late

    def enter(self, gradient: object = None) -> None:
        """Hook for the outputs: begins a session unless one is live."""
        if not self.flag[0]:
            self.flag[0] = 1
            _queue_callback(self._leave)
            self._begin()

    def _leave(self) -> None:
        _queue_callback(self._leave_later if self._late else self._finish)

    def _leave_later(self) -> None:
        _queue_callback(self._finish)

    def _finish(self) -> None:
        self.flag[0] = 0
        self._end()

    def was_torn(self) -> bool:
        """Whether the last backward pass raised and never ended; forgets it."""
        if self.flag[0] and torch._C._current_graph_task_id() == -1:
            self.flag[0] = 0
            return True
        return False


def hook_outputs(output: Any, hook: Callable[[torch.Tensor], object]) -> Any:
    """Register `hook` on every tensor of `output` that needs a gradient.

    Returns:
        `output`; a leaf in it (a module that returns its own parameter) is replaced by a view,
        because a hook on a leaf would stay there.
    """
    if type(output) is torch.Tensor and output.grad_fn is not None:
        output.register_hook(hook)
        return output
    return map_tensors(lambda tensor: _hook_one(tensor, hook), output)


def _hook_one(tensor: torch.Tensor, hook: Callable[[torch.Tensor], object]) -> torch.Tensor:
    if not tensor.requires_grad:
        return tensor
    if tensor.grad_fn is None:
        tensor = tensor.view_as(tensor)
    tensor.register_hook(hook)
    return tensor
