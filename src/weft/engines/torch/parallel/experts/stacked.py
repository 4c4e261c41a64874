"""Experts in stacked parameters [experts, ...], cut over an axis: tokens go to the rank that holds their expert.

The module's own forward computes the rows that a rank receives, with the experts that it holds; so what a row becomes
is what it becomes in one process.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from weft import torch_internals
from weft.engines.torch.parallel.exchange import exchanged
from weft.engines.torch.parallel.experts.all_to_all import Line, RowRoute
from weft.errors import value_error


class StackedExperts:
    """What is done around the forward of one module of experts.

    Attributes:
        off: Whether it computes alone, with all experts.
    """

    def __init__(self, name: str, part: nn.Module, line: Line) -> None:
        self._name = name
        self._part = weakref.ref(part)
        self._line = line
        self.off = False

    def __call__(self, call: Callable[..., torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute the experts of tokens [T, H], of which `index` and `weights` [T, K] say which and how much."""
        if self.off:
            return call(*args, **kwargs)
        part = self._part()
        assert part is not None
        _, hidden, index, weights = inspect.signature(type(part).forward).bind(part, *args, **kwargs).args
        experts = next(len(p) for p in torch_internals.PARAMETERS.of(part).values() if p is not None)
        held = experts // self._line.size
        order, per_expert, unknown = _sorted(index, experts)
        route, chosen = self._exchange_counts(per_expert.view(-1, held), unknown, index)
        order = order[: sum(route.sent)]
        tokens = hidden[order // index.shape[-1]]
        rows, weight = exchanged(route, [tokens, weights.reshape(-1, 1)[order]])
        with _held_alone(part, held):
            results = _never_empty(call, rows, chosen[:, None], weight)
        (own,) = exchanged(route.back(), [results])
        # Row by row and then the sum over K: adding up by index has no fixed order on an accelerator.
        placed = own.new_zeros(index.numel(), own.shape[-1]).index_copy(0, order, own)
        return placed.view(*index.shape, own.shape[-1]).sum(1).to(hidden.dtype)

    def _exchange_counts(
        self, counts: torch.Tensor, unknown: torch.Tensor, index: torch.Tensor
    ) -> tuple[RowRoute, torch.Tensor]:
        """Tell each rank how many rows each of its experts will get: counts [ranks, experts per rank].

        Returns the route of rows, and the expert of each row that is received.

        Raises:
            ValueError: Rows are for an expert that there is not.
        """
        group, theirs = self._line.group, torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=group)
        # The one read of the host: messages have sizes.
        sent, received, (num_unknown, *_) = torch.stack(
            [counts.sum(1), theirs.sum(1), unknown.expand(len(counts))]
        ).tolist()
        if num_unknown:
            raise value_error(
                f"expert_parallel: {self._name!r} is asked for an expert that there is not",
                found=f"experts {int(index.min())} to {int(index.max())}",
                expected=f"0 to {counts.numel() - 1}",
                fix="a router that chooses among the experts of its layer",
            )
        size, held = counts.shape
        experts = torch.arange(held, device=counts.device).repeat(size)
        return RowRoute(group, sent, received), experts.repeat_interleave(theirs.view(-1), output_size=sum(received))


def _sorted(index: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows in the order of their experts, how many each has, and how many are for an expert that there is not.

    `experts` itself stands for none. Counted by where each begins: `bincount` lets the host wait for a device.
    """
    experts_of_rows, order = index.reshape(-1).sort(stable=True)
    begins = torch.searchsorted(experts_of_rows, torch.arange(experts + 2, device=index.device))
    return order, begins[1:-1] - begins[:-2], len(order) - (begins[-1] - begins[0])


def _never_empty(
    call: Callable[..., torch.Tensor], rows: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Call experts; without rows, with one of zeros that has no weight.

    Else a rank without rows would leave its parameters without a gradient, and the ranks that wait for its part of
    the backward pass without a message.
    """
    if len(rows):
        return call(rows, experts, weights)
    one = (torch.cat([t, t.new_zeros(1, t.shape[-1])]) for t in (rows, experts, weights))
    return call(*one)[:0]


@contextlib.contextmanager
def _held_alone(part: Any, held: int) -> Iterator[None]:
    """Let a module have no other experts than those that this rank holds."""
    own = torch_internals.PARAMETERS.of(part)
    parameters, experts = dict(own), part.num_experts
    own.update({name: p.to_local() for name, p in parameters.items() if isinstance(p, DTensor)})
    part.num_experts = held
    try:
        yield
    finally:
        own.update(parameters)
        part.num_experts = experts
