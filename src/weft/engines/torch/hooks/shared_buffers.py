"""Buffers that get the first rank's values, and forward passes that still need the ones they had.

[Note: passes that wait] Autograd keeps what a backward pass needs of its forward pass, also buffers, and raises if one
was changed in between: its gradients would be wrong. So while a forward pass waits for its backward pass, values arrive
in other tensors, which the module has until no pass waits any more; then its own ones get the values and are put back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft import torch_internals
from weft.tensors.messages import broadcast
from weft.tensors.nested import tensors


class SharedBuffers:
    """The buffers of one module, as one rank has them.

    Attributes:
        shared: Whether there are any, and they are to be the same on all ranks. Otherwise nothing happens here.
    """

    def __init__(self, module: nn.Module, *, shared: bool) -> None:
        self.shared = shared and any(True for _ in module.buffers())
        self._module = weakref.ref(module)
        self._waiting: weakref.WeakSet[_BufferPass] = weakref.WeakSet()  # a graph alone holds each
        self._entered: set[_BufferPass] = set()
        self._away: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what the module has, and in whose place

    def watch(self, output: Any) -> None:
        """The module was called, and returned this."""
        if self.shared and torch.is_grad_enabled():
            self._watch(output)

    @torch_internals.untraced
    def _watch(self, output: Any) -> None:
        if torch_internals.graph_task_id() != -1:
            return  # computed again, inside backward
        one = _BufferPass()
        for tensor in tensors(output):
            if tensor.grad_fn is not None:
                self._waiting.add(one)
                tensor.register_hook(partial(_enter, self._entered, one))

    def passed(self, *, retained: bool) -> None:
        """A backward pass has ended; if its graph is `retained`, another one may follow through it."""
        if not retained:
            self._waiting -= self._entered
        self._entered.clear()
        if self._away and not self._waiting:
            with torch.no_grad():
                self._replace({id(there): own.copy_(there) for there, own in self._away.values()})
            self._away = {}

    def tensors(self) -> list[torch.Tensor]:
        """Those that are shared, each once."""
        module = self._module()
        return list(module.buffers()) if module is not None and self.shared else []

    def by_rule(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """By name, those of which the program says how they change, without caches; and statistics of batch norms."""
        module = self._module()
        own: dict[str, torch.Tensor] = {}
        statistics: dict[str, torch.Tensor] = {}
        for prefix, part in () if module is None or not self.shared else module.named_modules():
            found = statistics if isinstance(part, torch_internals.batch_norm.found) else own
            for name, buffer in part.named_buffers(recurse=False):
                if name not in torch_internals.NON_PERSISTENT.of(part):
                    found[f"{prefix}.{name}".lstrip(".")] = buffer
        return own, statistics

    def broadcast(self, group: dist.ProcessGroup) -> None:
        """Give all ranks of a group the values of the first one."""
        if self.shared:
            self.receive(lambda buffers: broadcast(buffers, group), is_first=dist.get_rank(group) == 0)

    def receive(self, into: Callable[[list[torch.Tensor]], object], *, is_first: bool) -> None:
        """Let the values of all buffers arrive; this rank's are the ones if it `is_first`."""
        present = self.tensors()
        if not self._waiting:
            into(present)
            return
        others = {id(buffer): buffer.detach().clone() for buffer in present}
        into(list(others.values()))
        if not is_first:
            own = {id(buffer): self._away.get(id(buffer), (buffer, buffer))[1] for buffer in present}
            self._away = {id(other): (other, own[place]) for place, other in others.items()}
            self._replace(others)

    def _replace(self, others: Mapping[int, torch.Tensor]) -> None:
        """Put other tensors in the place of those with these ids."""
        module = self._module()
        for part in () if module is None else module.modules():
            own = torch_internals.BUFFERS.of(part)
            own.update({name: others[id(b)] for name, b in own.items() if id(b) in others})


class _BufferPass:
    """A forward pass."""


def _enter(entered: set[_BufferPass], one: _BufferPass, gradient: torch.Tensor) -> None:
    """Backward has come to an output of this pass."""
    entered.add(one)
