"""Which rows of tensors go to which ranks of an axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from weft.engines.torch.parallel.exchange import exchanged
from weft.errors import ContextError


class Line:
    """The ranks of an axis on the line through this one.

    Attributes:
        size: How many they are.
        place: Of this rank among them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group: dist.ProcessGroup | None = group
        self.size = dist.get_world_size(group)
        self.place = dist.get_rank(group)

    @property
    def group(self) -> dist.ProcessGroup:
        """Their process group.

        Raises:
            ContextError: The context was closed.
        """
        if self._group is None:
            raise ContextError(
                "expert_parallel: the ranks of the experts are gone",
                found="a call after the context was closed",
                expected="calls of the module while its context is open",
                fix="model, ctx = weft.undo(model, ctx)  # before the context is closed",
            )
        return self._group

    def release(self) -> None:
        """Let the process group go."""
        self._group = None


class RowRoute(NamedTuple):
    """How many rows go where, for `exchanged`: one all-to-all per tensor.

    Attributes:
        group: Between whom.
        sent: Rows for each rank; those for the first rank come first.
        received: Rows from each rank.
    """

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    def back(self) -> RowRoute:
        """The way back."""
        return RowRoute(self.group, self.received, self.sent)

    def send(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send the rows of tensors [rows sent, ...]; gives [rows received, ...] of each."""
        return [self._sent(tensor.contiguous()) for tensor in tensors]

    def send_back(self, tracked: Sequence[int], gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send the gradients of rows back."""
        return exchanged(self.back(), gradients)

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        # As bytes, which every backend knows; and contiguous: into other memory torch would write without an error.
        received = tensor.new_empty([sum(self.received), *tensor.shape[1:]])
        dist.all_to_all_single(_as_bytes(received), _as_bytes(tensor), self.received, self.sent, group=self.group)
        return received


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(len(tensor), -1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0, dtype=torch.uint8)
