"""Gradients averaged over the replicas of an elastic job, when a backward pass has ended.

A replica may be lost in the middle. Then the gradients are zero, so that what the loop does before its step (clipping,
logging) finds numbers, and the step does nothing: `resilient` sees to it that this step is made again.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from weft import torch_internals
from weft.engines.options import StrategyOptions
from weft.engines.torch.hooks.backward_session import BackwardSession, when_entered
from weft.engines.torch.hooks.graph_walk import running_backward
from weft.engines.torch.hooks.method_hooks import Attached, attach
from weft.engines.torch.hooks.shared_buffers import SharedBuffers
from weft.engines.torch.reducing.flat_buffer import FlatPiece
from weft.engines.torch.reducing.strategy import unused_error
from weft.peers.replica_groups import ReplicaGroup
from weft.tensors.dtensor import local
from weft.tensors.messages import grouped, in_buckets

_BUCKET_BYTES = 25 * 2**20


class ReplicaAverage(Attached):
    """Averages the gradients of one module.

    Attributes:
        mean_over: The ranks of this replica's own group that do: none.
        enabled: Whether the next backward pass communicates.
    """

    mean_over = 1

    def __init__(self, module: nn.Module, replicas: ReplicaGroup, options: StrategyOptions, *, alone: bool) -> None:
        super().__init__()
        self.enabled = True
        self._due = False
        self._kinds: list[tuple[int, torch.dtype, torch.Size]] = []
        self._pieces: list[FlatPiece] = []
        self._of_gradients: list[_Flat] = []  # of those that do not lie in pieces
        self._of_buffers: list[_Flat] = []
        self._named = dict(module.named_parameters())
        self._alone = alone
        self._buffers = SharedBuffers(module, shared=options.buffers == "broadcast")
        self._class_name = type(module).__name__
        self._replicas = replicas
        self._options = options
        self._session = BackwardSession(self._begin, self._end, rounds=2)  # after the ranks of this replica
        self._got: set[str] = set()  # the parameters that a gradient has reached since they had none
        self._seen: set[str] = set()  # those with a hook
        if alone:
            self._see_arrivals()
        attach(module, self._removable, after=self._watch)

    def _see_arrivals(self) -> None:
        for name, p in self._named.items():
            if p.requires_grad and name not in self._seen:
                self._seen.add(name)
                self._removable.add(p.register_post_accumulate_grad_hook(partial(self._arrive, name)).remove)

    def _arrive(self, name: str, parameter: torch.Tensor) -> None:
        self._got.add(name)
        self._session.enter()

    def _watch(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self._alone:  # gradients of the parameters themselves come from a strategy
            when_entered(output, lambda _: self._session.enter())
        self._buffers.watch(output)

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

    def _begin(self) -> None:
        """Let what is left of the backward pass add to the pieces; not sooner, for it may never come."""
        if not self._pieces:
            return
        self._got -= {name for name, p in self._named.items() if p.grad is None}
        for piece in self._pieces:
            if all(p.requires_grad for p in piece.parameters):
                piece.attach()

    def _end(self) -> None:
        if self._buffers.shared:
            self._buffers.passed(retained=running_backward().retains_graph)
        if self.enabled:
            self._due = False
            self._exchange(zeros=not self._alone or self._options.unused == "zero")

    @torch.no_grad()
    def _exchange(self, *, zeros: bool) -> None:
        trained = {name: p for name, p in self._named.items() if p.requires_grad}
        without = self._without(trained)
        if without and not zeros:
            for name in without:
                self._named[name].grad = None
            raise unused_error("replicate", self._class_name, without, "replica")
        used = torch.tensor([float(name not in without) for name in trained]) if zeros else None
        for name in without:
            if trained[name].grad is None:
                trained[name].grad = torch.zeros_like(trained[name])
        sums = [*self._fill(list(trained.values()))] if self._replicas.size > 1 else []
        counts = [] if used is None else [used]
        if not self._replicas.add_up([*sums, *counts], room=bool(sums)):
            torch_internals.foreach_zero([local(p.grad) for p in trained.values() if p.grad is not None])
            return
        if sums:
            for flat in self._of_gradients:
                flat.put_back()
            if self._of_buffers:
                self._buffers.receive(self._put_buffers, is_first=self._replicas.index == 0)
        if used is not None:
            for p, count in zip(trained.values(), used.tolist(), strict=True):
                if not count:
                    p.grad = None  # no replica used it

    def _without(self, trained: Mapping[str, nn.Parameter]) -> list[str]:
        """The names of those that this backward pass has given no gradient, to this replica."""
        unreached: set[str] = set()  # which hold zeros of a piece
        for piece in self._pieces:
            unreached |= piece.without - self._got
            piece.without.clear()
        return [name for name, p in trained.items() if p.grad is None or name in unreached]

    def _fill(self, trained: Sequence[nn.Parameter]) -> Iterator[torch.Tensor]:
        """The mean of the gradients, and the first replica's buffers, each as far as this replica adds to it."""
        given = [p.grad for p in trained]
        gradients: list[torch.Tensor] = []
        if not self._are_views(given):
            gradients = [local(g) for g in given if g is not None]
            kinds = [(id(p), g.dtype, g.shape) for p, g in zip(trained, gradients, strict=True)]
            if kinds != self._kinds:
                self._kinds = kinds
                self._lay_out(trained, gradients)
        factor = 1 / self._replicas.size
        for piece in self._pieces:
            piece.attach()
            piece.without.clear()
            yield piece.gradients.mul_(factor)
        for flat in self._of_gradients:
            yield flat.fill(gradients, factor)
        buffers = self._buffers.tensors()
        for flat in self._of_buffers:
            yield flat.fill(buffers, float(self._replicas.index == 0))

    def _put_buffers(self, buffers: Sequence[torch.Tensor]) -> None:
        for flat in self._of_buffers:
            flat.put_back(buffers)

    def _are_views(self, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Whether these are the views of the one piece, in order, as nearly always: then nothing has changed."""
        if len(self._pieces) != 1 or self._of_gradients:
            return False
        views = self._pieces[0].views
        return len(gradients) == len(views) and all(map(operator.is_, gradients, views))

    def _lay_out(self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
        """Decide where gradients and buffers lie together: on the CPU, each with room for one element at the end."""
        names = {id(p): name for name, p in self._named.items()}
        self._pieces, self._of_gradients = [], []
        if self._alone:
            self._see_arrivals()  # at those that were frozen until now
        for which in _by_kind(gradients):
            same, first = [parameters[index] for index in which], gradients[which[0]]
            if self._alone and first.device.type == "cpu" and self._options.dtype in (None, first.dtype):
                self._pieces.append(FlatPiece(same, [names[id(p)] for p in same], keeps_values=False, room=1))
            else:
                self._of_gradients.append(_Flat(gradients, which, self._options.dtype))
        buffers = self._buffers.tensors()
        self._of_buffers = [_Flat(buffers, which) for which in _by_kind(buffers)]


def _by_kind(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The indices of tensors of one dtype on one device."""
    return [*grouped(range(len(tensors)), lambda index: (tensors[index].dtype, tensors[index].device)).values()]


class _HostCopies(NamedTuple):
    """Tensors that are copied to the CPU and back together.

    Attributes:
        which: Of the tensors of a `_Flat`.
        values: Their part of its piece.
        packed: As much memory on the accelerator, if they are packed there.
        parts: Of that memory or else of the piece, in the shapes of the tensors.
    """

    which: slice
    values: torch.Tensor
    packed: torch.Tensor | None
    parts: list[torch.Tensor]


class _Flat:
    """Copies of tensors of one dtype in one piece on the CPU, kept from step to step, with one element at the end.

    Those on an accelerator are packed there, so that one copy moves up to `_BUCKET_BYTES`, for which this takes as much
    of its memory; a larger tensor is copied as it is. The piece is then pinned.

    Attributes:
        values: This piece, one-dimensional.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], which: Sequence[int], dtype: torch.dtype | None = None) -> None:
        """Make room for those of the tensors with the indices `which`."""
        self._which = which
        first = tensors[which[0]]
        kind = torch.uint8 if (dtype or first.dtype) == torch.bool else dtype or first.dtype
        sizes = [tensors[index].numel() for index in which]
        self._device, self._is_far = first.device, first.device.type != "cpu"
        self.values = torch.zeros(sum(sizes) + 1, dtype=kind, pin_memory=self._is_far)
        parts = self.values[:-1].split(sizes)
        self._parts = [part.view(tensors[i].shape) for part, i in zip(parts, which, strict=True)]
        self._tensors: list[torch.Tensor] = []
        together = _HostCopies(slice(None), self.values, None, self._parts)
        self._buckets = list(self._cut(sizes)) if self._is_far else [together]

    def _cut(self, sizes: Sequence[int]) -> Iterator[_HostCopies]:
        room = _BUCKET_BYTES // self.values.element_size()
        places = [0, *itertools.accumulate(sizes)]
        memory = torch.empty(min(room, places[-1]), dtype=self.values.dtype, device=self._device)
        for bucket in in_buckets(range(len(sizes)), sizes.__getitem__, room):
            which = slice(bucket[0], bucket[-1] + 1)
            values = self.values[places[which.start] : places[which.stop]]
            packed, parts = None, self._parts[which]
            if len(bucket) > 1:
                packed = memory[: len(values)]
                parts = [one.view(own.shape) for one, own in zip(packed.split(sizes[which]), parts, strict=True)]
            yield _HostCopies(which, values, packed, parts)

    def fill(self, tensors: Sequence[torch.Tensor], factor: float) -> torch.Tensor:
        """The values of the tensors, multiplied by a factor."""
        self._tensors = [tensors[index] for index in self._which]
        for bucket in self._buckets:
            torch_internals.foreach_copy(bucket.parts, self._tensors[bucket.which], non_blocking=self._is_far)
            if bucket.packed is not None:
                bucket.values.copy_(bucket.packed, non_blocking=True)
        if self._is_far:
            torch.accelerator.current_stream(self._device).synchronize()
        if factor == 1:
            return self.values
        return self.values.mul_(factor) if factor else self.values.zero_()

    def put_back(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Give the tensors, or others like them, the values of the piece."""
        given = [tensors[index] for index in self._which] if tensors else self._tensors
        for bucket in self._buckets:
            if bucket.packed is not None:
                bucket.packed.copy_(bucket.values, non_blocking=True)
            torch_internals.foreach_copy(given[bucket.which], bucket.parts, non_blocking=self._is_far)
