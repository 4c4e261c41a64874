"""Gradients averaged over the replicas of an elastic job, when a backward pass has ended.

A replica may be lost in the middle. Then the gradients are zero, so that what the loop does before its step (clipping,
logging) finds numbers, and the step does nothing: `resilient` sees to it that this step is made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.engines.options import StrategyOptions
from weft.engines.peers import Replicas
from weft.engines.torch.hooks.backward_session import BackwardSession
from weft.errors import UnusedParameters, listed
from weft.tensors.dtensor import local
from weft.tensors.nested import tensors

__all__ = ["ReplicaAverage"]


class ReplicaAverage:
    """Averages the gradients of one module.

    Attributes:
        mean_over: The ranks of this replica's own group that do: none.
        enabled: Whether the next backward pass communicates.
    """

    mean_over = 1

    def __init__(self, module: nn.Module, replicas: Replicas, options: StrategyOptions, *, alone: bool) -> None:
        self.enabled = True
        self._due = False
        self._named = dict(module.named_parameters())
        self._alone = alone
        self._buffers = list(module.buffers()) if options.buffers == "broadcast" else []
        self._class_name = type(module).__name__
        self._replicas = replicas
        self._options = options
        self._session = BackwardSession(_nothing, self._end, rounds=2)  # after the ranks of this replica
        if alone:
            enter, trained = partial(_enter, self._session), [p for p in self._named.values() if p.requires_grad]
            self._handles = [p.register_post_accumulate_grad_hook(enter) for p in trained]
        else:  # gradients of the parameters themselves come from a strategy
            self._handles = [module.register_forward_hook(partial(_watch, self._session))]

    def undo(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def begin_window(self) -> None:
        """Backward passes keep their gradients here from now on."""
        self.enabled, self._due = False, True

    def last_backward(self) -> None:
        """The next backward pass averages the gradients of the window."""
        self.enabled = True

    def end_window(self, *, left: bool = False) -> None:
        """Average the gradients of a window whose last backward pass did not come."""
        owes, self.enabled, self._due = self._due, True, False
        if owes and not left:
            self._exchange(zeros=True)

    def _end(self) -> None:
        if self.enabled:
            self._due = False
            self._exchange(zeros=not self._alone or self._options.unused == "zero")

    @torch.no_grad()
    def _exchange(self, *, zeros: bool) -> None:
        trained = {name: p for name, p in self._named.items() if p.requires_grad}
        without = [name for name, p in trained.items() if p.grad is None]
        if without and not zeros:
            raise UnusedParameters(
                f"replicate: {len(without)} parameter(s) of {self._class_name} got no gradient in this backward pass",
                found=listed(without),
                expected="every parameter that requires a gradient takes part in the loss, on every replica",
                fix='weft.replicate(..., unused="zero"), or requires_grad_(False) on them',
            )
        used = torch.tensor([float(p.grad is not None) for p in trained.values()])
        for name in without:
            trained[name].grad = torch.zeros_like(trained[name])
        gradients = [local(p.grad) for p in trained.values() if p.grad is not None]
        replicas = self._replicas
        sums = self._flats(gradients) if replicas.size > 1 else []
        if zeros:
            sums.append(_Flat([used], 1.0))
        if not replicas.add_up(flat.values for flat in sums):
            torch._foreach_zero_(gradients)
            return
        for flat in sums:
            flat.put_back()
        for p, count in zip(trained.values(), used.tolist(), strict=True):
            if not count:
                p.grad = None  # nobody used it

    def _flats(self, gradients: Sequence[torch.Tensor]) -> list[_Flat]:
        """The mean of the gradients, and the first replica's buffers."""
        size, first, dtype = self._replicas.size, float(self._replicas.index == 0), self._options.dtype
        found = [_Flat(same, 1 / size, dtype) for same in _by_dtype(gradients)]
        return found + [
            _Flat(same, first) for same in _by_dtype([buffer for buffer in self._buffers if buffer.numel()])
        ]


def _nothing() -> None:
    pass


def _enter(session: BackwardSession, parameter: torch.Tensor) -> None:
    session.enter()


def _watch(session: BackwardSession, module: nn.Module, inputs: Any, output: Any) -> None:
    for tensor in tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(partial(_enter, session))


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    found: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return list(found.values())


class _Flat:
    """Tensors of one dtype in one piece on the CPU, multiplied by a factor.

    Attributes:
        values: This piece, one-dimensional.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], factor: float, dtype: torch.dtype | None = None) -> None:
        self._tensors = tensors
        kind = dtype or tensors[0].dtype
        kind = torch.uint8 if kind == torch.bool else kind
        self.values = torch.empty(sum(t.numel() for t in tensors), dtype=kind)
        parts = self.values.split([t.numel() for t in tensors])
        self._parts = [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]
        torch._foreach_copy_(self._parts, list(tensors))
        if factor == 0:
            self.values.zero_()
        elif factor != 1:
            self.values.mul_(factor)

    def put_back(self) -> None:
        """Give the tensors the values of the piece."""
        torch._foreach_copy_(list(self._tensors), self._parts)
