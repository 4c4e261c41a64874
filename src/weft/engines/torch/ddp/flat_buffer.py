"""Parameters and gradients as views of one buffer: one all-reduce, and one optimizer kernel.

For models of many small tensors, where the cost of a step is calls and not arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from weft.errors import ContractError
from weft.tensors.pairwise import SmallSum, as_real

__all__ = ["FlatBuffer", "FlatPiece"]


class FlatPiece:
    """All parameters of one dtype and device, laid out one after another.

    Attributes:
        values: The parameters' storage, [number of elements].
        gradients: Their gradients' storage, [number of elements].
        parameters: Views of `values`, in order.
        views: Views of `gradients`, in order.
        without: Indices of the parameters that had no gradient before what is reduced next.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], indices: Sequence[int]) -> None:
        self.parameters = list(parameters)
        self.indices = list(indices)
        first = self.parameters[0]
        total = sum(p.numel() for p in self.parameters)
        self.values = torch.empty(total, dtype=first.dtype, device=first.device)
        self.gradients = torch.zeros_like(self.values)
        self.views: list[torch.Tensor] = []
        start = 0
        for parameter in self.parameters:
            part = slice(start, start + parameter.numel())
            self.values[part].copy_(parameter.detach().reshape(-1))
            parameter.data = self.values[part].view(parameter.shape)
            # `.data`: autograd need not know that these are views; adding to them is far cheaper.
            self.views.append(self.gradients[part].view(parameter.shape).data)
            start = part.stop
        self._pairs = list(zip(self.parameters, self.views, strict=True))
        self._all = frozenset(self.indices)
        self.without: frozenset[int] = frozenset()
        # One without elements has no address.
        self._first = next((p for p in self.parameters if p.numel()), first)
        self._address = self._first.data_ptr()

    def attach(self) -> None:
        """Let every parameter's gradient be its view, before backward adds to it."""
        if self.parameters[0].grad is None:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    break
            else:
                self.gradients.zero_()
                for parameter, view in self._pairs:
                    parameter.grad = view
                self.without = self._all
                return
        for parameter, view in self._pairs:
            if parameter.grad is not view:
                break
        else:
            return
        pairs = zip(self.indices, self.parameters, strict=True)
        self.without |= {index for index, parameter in pairs if parameter.grad is None}
        for parameter, view in self._pairs:
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                view.copy_(parameter.grad)
            parameter.grad = view

    def is_intact(self) -> bool:
        """Whether the parameters still lie in the buffer; `Module.to` moves them out of it."""
        return self._first.data_ptr() == self._address

    def detach(self) -> None:
        """Give every parameter and gradient a storage of its own again."""
        for parameter, view in self._pairs:
            if parameter.grad is view:
                parameter.grad = view.clone()
            parameter.data = parameter.data.clone()


class FlatBuffer:
    """Averages all gradients at once when backward has ended."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        *,
        find_unused: bool,
        dtype: torch.dtype | None,
    ) -> None:
        self._indices = {id(p): index for index, p in enumerate(parameters)}
        self.pieces: list[FlatPiece] = []
        self._group: dist.ProcessGroup = group
        self._scale = 1 / dist.get_world_size(group)
        self._find_unused = find_unused
        self._dtype = dtype
        self.lay_out(parameters)

    def lay_out(self, order: Sequence[nn.Parameter]) -> None:
        """Put the parameters into buffers in this order; those not in it come last, as before."""
        rank = {id(p): place for place, p in enumerate(order)}
        old = [p for piece in self.pieces for p in piece.parameters] or list(order)
        kinds: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for p in sorted(old, key=lambda p: rank.get(id(p), len(rank))):
            assert isinstance(p, nn.Parameter)
            kinds.setdefault((p.dtype, p.device), []).append(p)
        for piece in self.pieces:
            piece.detach()
        self.pieces = [FlatPiece(same, [self._indices[id(p)] for p in same]) for same in kinds.values()]
        travelling = [as_real(piece.gradients) for piece in self.pieces]
        self._sums = [SmallSum(self._group, buffer.to(self._dtype or buffer.dtype)) for buffer in travelling]

    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keep these parameters from now on; others get storages of their own again."""
        for piece in self.pieces:
            piece.detach()
        self.pieces = []
        self._indices = {id(p): index for index, p in enumerate(parameters)}
        self.lay_out(parameters)

    def prepare(self) -> None:
        """Let the backward pass to come write into the buffer."""
        for piece in self.pieces:
            if not piece.is_intact():
                raise ContractError(
                    "replicate: the parameters were moved out of the flat buffer",
                    found=f"a parameter of shape {tuple(piece.parameters[0].shape)} with storage of its own",
                    expected="no Module.to(), .half() or `parameter.data = ...` after replicate(flat=True)",
                    fix="move or cast the model before weft.replicate",
                )
            piece.attach()

    def begin(self, outputs: list[torch.Tensor]) -> None:
        """Nothing to do yet: all travels at the end."""

    def end(self, got: bytearray) -> None:
        """Average the buffer over the ranks."""
        for piece, add_up in zip(self.pieces, self._sums, strict=True):
            piece.attach()  # zero_grad between forward and backward detached it
            gradients = as_real(piece.gradients)
            if self._dtype is None:
                add_up(gradients.mul_(self._scale))
            else:
                small = (gradients * self._scale).to(self._dtype)
                add_up(small)
                gradients.copy_(small)
        if self._find_unused:
            self._forget_unused(got)
            for piece in self.pieces:
                piece.without = frozenset()

    def _forget_unused(self, got: bytearray) -> None:
        """A parameter that no rank used has no gradient if it had none before, as in one process."""
        used = torch.tensor(list(got), dtype=torch.int32, device=self.pieces[0].values.device)
        self._group.allreduce([used]).wait()
        counts = used.tolist()
        for piece in self.pieces:
            for index, parameter in zip(piece.indices, piece.parameters, strict=True):
                if not counts[index] and index in piece.without:
                    parameter.grad = None

    def undo(self) -> None:
        """Give the parameters storages of their own again."""
        for piece in self.pieces:
            piece.detach()
