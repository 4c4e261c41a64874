"""Gradients averaged over the replicas of an elastic job, when a backward pass has ended.

A replica may be lost in the middle. Then the gradients are zero, so that what the loop does before its step (clipping,
logging) finds numbers, and the step does nothing: `resilient` sees to it that this step is made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
        self._shapes: list[tuple[torch.dtype, torch.Size]] = []
        self._of_gradients: list[_Flat] = []
        self._of_buffers: list[tuple[_Flat, list[torch.Tensor]]] = []
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
        used = torch.tensor([float(p.grad is not None) for p in trained.values()]) if zeros else None
        for name in without:
            trained[name].grad = torch.zeros_like(trained[name])
        holders = [p for p in trained.values() if p.grad is not None]
        gradients = [local(p.grad) for p in holders if p.grad is not None]
        sums = [*self._fill(gradients)] if self._replicas.size > 1 else []
        counts = [] if used is None else [used]
        if not self._replicas.add_up([*(flat.values for flat in sums), *counts], room=bool(sums)):
            torch._foreach_zero_(gradients)
            return
        for flat in sums:
            flat.put_back(holders if self._alone and flat.is_grad else None)
        if used is not None:
            for p, count in zip(trained.values(), used.tolist(), strict=True):
                if not count:
                    p.grad = None  # nobody used it

    def _fill(self, gradients: Sequence[torch.Tensor]) -> Iterator[_Flat]:
        """The mean of the gradients, and the first replica's buffers, each as far as this replica adds to it."""
        shapes = [(g.dtype, g.shape) for g in gradients]
        if shapes != self._shapes:
            self._shapes = shapes
            self._of_gradients = [_Flat(gradients, which, self._options.dtype) for which in _by_dtype(gradients)]
            buffers = [buffer for buffer in self._buffers if buffer.numel()]
            self._of_buffers = [(_Flat(buffers, which, are_buffers=True), buffers) for which in _by_dtype(buffers)]
        for flat in self._of_gradients:
            flat.fill(gradients, 1 / self._replicas.size)
            yield flat
        for flat, buffers in self._of_buffers:
            flat.fill(buffers, float(self._replicas.index == 0))
            yield flat


def _nothing() -> None:
    pass


def _enter(session: BackwardSession, parameter: torch.Tensor) -> None:
    session.enter()


def _watch(session: BackwardSession, module: nn.Module, inputs: Any, output: Any) -> None:
    for tensor in tensors(output):
        if tensor.requires_grad:
            tensor.register_hook(partial(_enter, session))


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    found: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        found.setdefault(tensor.dtype, []).append(index)
    return list(found.values())


class _Flat:
    """Tensors of one dtype in one piece on the CPU, kept from step to step, with room for one element at the end.

    Attributes:
        values: This piece, one-dimensional.
        is_grad: Its parts can be gradients themselves.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        which: Sequence[int],
        dtype: torch.dtype | None = None,
        *,
        are_buffers: bool = False,
    ) -> None:
        """Make room for those of the tensors with the indices `which`."""
        self._which = which
        first = tensors[which[0]]
        kind = dtype or first.dtype
        kind = torch.uint8 if kind == torch.bool else kind
        sizes = [tensors[index].numel() for index in which]
        self.values = torch.zeros(sum(sizes) + 1, dtype=kind)
        parts = self.values[:-1].split(sizes)
        # `.data`: autograd need not know that these are views; adding to them is far cheaper.
        self._parts = [part.view(tensors[i].shape).data for part, i in zip(parts, which, strict=True)]
        self.is_grad = not are_buffers and first.dtype == kind and first.device.type == "cpu"
        self._tensors: list[torch.Tensor] = []

    def fill(self, tensors: Sequence[torch.Tensor], factor: float) -> None:
        """Take the values of the tensors, multiplied by a factor."""
        self._tensors = [tensors[index] for index in self._which]
        torch._foreach_copy_(self._parts, self._tensors)
        if factor == 0:
            self.values.zero_()
        elif factor != 1:
            self.values.mul_(factor)

    def put_back(self, holders: Sequence[nn.Parameter] | None) -> None:
        """Give the tensors the values of the piece; where they are gradients of parameters, let these be its parts."""
        if holders is None:
            torch._foreach_copy_(self._tensors, self._parts)
            return
        for index, part, tensor in zip(self._which, self._parts, self._tensors, strict=True):
            if part.stride() == tensor.stride():
                holders[index].grad = part
            else:
                tensor.copy_(part)
