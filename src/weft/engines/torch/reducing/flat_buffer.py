"""Gradients as views of one buffer, which is one all-reduce; parameters, too, for one optimizer kernel.

For models of many small tensors, where the cost of a step is calls and not arithmetic.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft import torch_internals
from weft.engines.options import ReduceOptions
from weft.engines.torch.reducing.buckets import sparse_gradients
from weft.errors import ContractError
from weft.tensors.messages import grouped
from weft.tensors.pairwise import SmallSum, as_real

_MANY = 16  # with fewer parameters buckets cost no more


def fit_one_message(module: nn.Module, options: ReduceOptions) -> bool:
    """Whether the gradients are many and small, so that one message when backward has ended costs less than buckets.

    Then they would be one bucket anyway, torch's first one, which leaves little of backward to send it in.
    """
    own = [p for name, p in module.named_parameters() if p.requires_grad and name not in options.apart]
    return (
        len(own) >= _MANY
        and sum(p.nbytes for p in own) <= min(torch_internals.FIRST_BUCKET_BYTES.found, options.bucket_bytes)
        and not any(p.is_meta or p.is_complex() or not p.numel() or p.layout is not torch.strided for p in own)
        and options.unused == "error"
        and options.compress is None
        and options.dtype is None
        and not sparse_gradients(module)
    )


class FlatPiece:
    """All parameters of one dtype and device, laid out one after another.

    Attributes:
        values: The parameters' storage, [number of elements]; without elements if they keep their own.
        gradients: Their gradients' storage, [number of elements], with what else there is room for behind it.
        parameters: Views of `values`, in order.
        views: Views of `gradients`, in order.
        keys: By which whoever made it knows the parameters, in order: names, or places.
        without: Keys of the parameters that had no gradient before what is reduced next.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], keys: Sequence[Any], *, keeps_values: bool, room: int = 0
    ) -> None:
        self.parameters = list(parameters)
        self.keys = list(keys)
        self._keeps_values = keeps_values
        first = self.parameters[0]
        total = sum(p.numel() for p in self.parameters)
        self.gradients = torch.zeros(total + room, dtype=first.dtype, device=first.device)
        self.values = torch.empty_like(self.gradients[: total if keeps_values else 0])
        self._home = self.values.untyped_storage()
        self.views: list[torch.Tensor] = []
        start = 0
        for parameter in self.parameters:
            part = slice(start, start + parameter.numel())
            if keeps_values:
                self.values[part].copy_(parameter.detach().reshape(-1))
                parameter.data = self.values[part].view(parameter.shape)
            # `.data`: autograd need not know that these are views; adding to them is far cheaper.
            # In the order of the parameter's elements in memory: torch's fused optimizers take that for granted.
            order = torch.empty_like(parameter).stride()
            self.views.append(self.gradients[part].as_strided(parameter.shape, order).data)
            start = part.stop
        self.without: set[Any] = set()
        # One without elements has no address.
        self._first = next((p for p in self.parameters if p.numel()), first)

    def attach(self) -> None:
        """Let every parameter's gradient be its view, with the value that it has."""
        given = [p.grad for p in self.parameters]
        if all(map(operator.is_, given, self.views)):
            return
        are_new = not any(map(operator.is_, given, self.views))
        if are_new:
            self.gradients.zero_()
        for key, parameter, view, gradient in zip(self.keys, self.parameters, self.views, given, strict=True):
            if gradient is view:
                continue
            if gradient is not None:
                view.copy_(gradient)
            else:
                self.without.add(key)
                if not are_new:
                    view.zero_()
            parameter.grad = view

    def is_intact(self) -> bool:
        """Whether the parameters still lie in the buffer; `Module.to` moves them out of it."""
        address = torch_internals.STORAGE_ADDRESS.of  # of the object: in a rehearsal there is no memory
        return not self._keeps_values or address(self._first.untyped_storage()) == address(self._home)

    def detach(self) -> None:
        """Give every parameter and gradient a storage of its own again."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is view:
                parameter.grad = view.clone()
            if self._keeps_values:
                parameter.data = parameter.data.clone()


class FlatBuffer:
    """Averages all gradients at once when backward has ended.

    Attributes:
        pieces: One for each dtype and device.
        keeps_values: Whether the parameters lie in it, too.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, options: ReduceOptions) -> None:
        self.keeps_values = options.flat
        self.pieces: list[FlatPiece] = []
        self._group: dist.ProcessGroup = group
        self._scale = 1 / dist.get_world_size(group)
        self._find_unused = options.unused == "zero"
        self._dtype = options.dtype
        self.take(parameters)

    def lay_out(self, order: Sequence[nn.Parameter]) -> None:
        """Put the parameters into buffers in this order; those not in it come last, as before."""
        rank = {id(p): place for place, p in enumerate(order)}
        old = [p for piece in self.pieces for p in piece.parameters] or list(order)
        kinds = grouped(sorted(old, key=lambda p: rank.get(id(p), len(rank))), lambda p: (p.dtype, p.device))
        self.undo()
        self.pieces = [
            FlatPiece(same, [self._places[id(p)] for p in same], keeps_values=self.keeps_values)
            for same in kinds.values()
        ]
        travelling = [as_real(piece.gradients) for piece in self.pieces]
        self._sums = [SmallSum(self._group, buffer.to(self._dtype or buffer.dtype)) for buffer in travelling]

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep these parameters from now on; others get storages of their own again."""
        self.undo()
        self.pieces = []
        self._places = {id(p): place for place, p in enumerate(parameters)}
        self.lay_out(parameters)

    def prepare(self) -> None:
        """See to it that the parameters lie in the buffer still."""
        for piece in self.pieces:
            if not piece.is_intact():
                raise ContractError(
                    "replicate: the parameters were moved out of the flat buffer",
                    found=f"a parameter of shape {tuple(piece.parameters[0].shape)} with storage of its own",
                    expected="no Module.to(), .half() or `parameter.data = ...` after replicate(flat=True)",
                    fix="move or cast the model before weft.replicate",
                )

    def begin(self, outputs: list[torch.Tensor]) -> None:
        """Let what is left of the backward pass write into the buffer; not sooner, for it may never come."""
        for piece in self.pieces:
            piece.attach()

    def end(self, got: bytearray) -> None:
        """Average the buffer over the ranks."""
        for piece, add_up in zip(self.pieces, self._sums, strict=True):
            piece.attach()
            gradients = as_real(piece.gradients)
            if self._dtype is None:
                add_up(gradients.mul_(self._scale))
            else:
                small = (gradients * self._scale).to(self._dtype)
                add_up(small)
                gradients.copy_(small)
        if self._find_unused:
            self._forget_unused(got)

    def _forget_unused(self, got: bytearray) -> None:
        """A parameter that no rank used has no gradient if it had none before, as in one process."""
        used = torch.tensor(list(got), dtype=torch.int32, device=self.pieces[0].values.device)
        self._group.allreduce([used]).wait()
        counts = used.tolist()
        for piece in self.pieces:
            for place, parameter in zip(piece.keys, piece.parameters, strict=True):
                if not counts[place] and place in piece.without:
                    parameter.grad = None
            piece.without.clear()

    def undo(self) -> None:
        """Give the parameters storages of their own again."""
        for piece in self.pieces:
            piece.detach()
