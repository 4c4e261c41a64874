"""Add up gradients of which each rank has computed a part, in one message at the end of the last backward pass.

[Note: parts of sums] A parameter that every rank holds whole, and uses on its part of the sequence or of the heads,
has a gradient that is the sum of what the ranks have computed. Until the message it is a part of the sum on every
rank. What was added up before, by an earlier backward pass, is divided by the number of ranks when the next one
begins, so that the sum over the ranks restores it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft import torch_internals
from weft.errors import ContractError, listed
from weft.tensors.blocks import as_dtensor
from weft.tensors.dtensor import is_sharded, local, resting_parameters
from weft.tensors.messages import add_up, gathered
from weft.tensors.remote_parameter import is_elsewhere

_TOLERANCE = 1e-2  # of norms of gradients that are computed alike on all ranks, or in parts, which differ altogether
_SMALL = 1e-6  # of the largest norm: below it there is only noise


class PartSums:
    """The parameters of a module whose gradients are parts of sums.

    Attributes:
        in_parts: Whether gradients are parts of sums at this moment.
        checked: Whether the gradients of the others were seen to be equal on all ranks.
    """

    def __init__(self, summed: Collection[str], alike: Collection[str], cut: Collection[str]) -> None:
        """Remember the names of parameters.

        Args:
            summed: Whose gradients are parts of sums.
            alike: DTensors that are alike on all ranks; torch may leave their gradients as parts of sums.
            cut: DTensors that are cut.
        """
        self.in_parts = self.checked = False
        self._summed = frozenset(summed)
        self._alike = tuple(alike)
        self._others = frozenset((*summed, *alike, *cut))
        self._resting: list[nn.Parameter] = []

    def __bool__(self) -> bool:
        return bool(self._summed or self._alike)

    def begin(self, module: nn.Module, ranks: int) -> None:
        """A backward pass begins: see [Note: parts of sums]."""
        if self.in_parts or not self:
            return
        self.in_parts = True
        with torch.no_grad():
            earlier = [local(p.grad) for p in self._parameters(module) if p.grad is not None]
            if earlier:
                torch_internals.foreach_div(earlier, ranks)

    def add_up(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        """Add the parts up. Collectives: one all-reduce per dtype."""
        self._resting = []
        with torch.no_grad():
            add_up(self._parts(module), group)
        self.in_parts = False

    def _parts(self, module: nn.Module) -> Iterator[torch.Tensor]:
        for p in self._parameters(module):
            if p.grad is not None:
                yield local(p.grad)
        for name in self._alike:
            p = module.get_parameter(name)
            if p.grad is not None and _is_partial(p.grad):
                p.grad = _as_replicated(p.grad)
                yield local(p.grad)

    def has_gradients(self, module: nn.Module) -> bool:
        """Whether there is something to add up."""
        return any(p.grad is not None for p in self._parameters(module))

    def _parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """The parameters as they are between steps."""
        if not self._resting and self._summed:
            names = [name for name, _ in module.named_parameters()]
            resting = dict(zip(names, resting_parameters(module), strict=True))
            self._resting = [resting[n] for n in names if n in self._summed and not is_elsewhere(resting[n])]
        return self._resting

    def check_others(
        self, module: nn.Module, group: dist.ProcessGroup, what: str, line_for: Callable[[list[str]], str]
    ) -> None:
        """Raise if gradients differ between the ranks that were not said to; asked after the first backward pass.

        Collectives: one all-gather of a number per parameter.

        Raises:
            ContractError: On all ranks.
        """
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad and not p.is_meta}
        named = {name: p for name, p in trained.items() if name not in self._others}
        gradients = [p.grad for p in named.values()]
        if named and not any(gradient is not None for gradient in gradients):
            return
        self.checked = True
        if not named:
            return
        device = next(iter(named.values())).device
        norms = torch.stack([_norm(gradient, device) for gradient in gradients])
        table = torch.stack(gathered(norms, group))
        least, most = table.amin(0), table.amax(0)
        wrong = ((most - least) > _TOLERANCE * most) & (most > _SMALL * most.max())
        names = [name for name, bad in zip(named, wrong.tolist(), strict=True) if bad]
        if names:
            raise ContractError(
                f"{what}: gradients of whole parameters differ between the ranks",
                found=listed(names),
                expected="a style for each part between a column and a row, which sees this rank's heads alone",
                fix=line_for(names),
            )


def _norm(gradient: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if gradient is None:
        return torch.zeros((), device=device)
    norm: torch.Tensor = torch.linalg.vector_norm(local(gradient).detach().float())
    return norm.nan_to_num(0.0, 0.0, 0.0)


def _is_partial(gradient: torch.Tensor) -> bool:
    return is_sharded(gradient) and any(placement.is_partial() for placement in gradient.placements)


def _as_replicated(gradient: torch.Tensor) -> torch.Tensor:
    """The same memory, as a DTensor that is alike on the ranks over which it will be added up."""
    from torch.distributed.tensor import Replicate  # noqa: PLC0415  (who has a DTensor has imported it)

    cut: Any = gradient.detach()
    placements = [Replicate() if placement.is_partial() else placement for placement in cut.placements]
    return as_dtensor(cut.to_local(), cut.device_mesh, placements, cut.shape, cut.stride())
