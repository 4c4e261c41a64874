"""Parameters that get no gradient in a backward pass.

They count as zero, so that all ranks reduce the same units, and are noted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import nn

from weft.engines.torch.fsdp.gather_dtype import zeros_for

__all__ = ["Unused", "watch_reductions"]


class Unused:
    """What one backward pass left without gradient."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._missing: set[str] = set()  # no gradient when a unit was reduced in this backward pass
        self._used: set[str] = set()
        self._had_gradient: set[str] = set()

    def begin(self, trained: Mapping[str, nn.Parameter] | None) -> None:
        """A backward pass begins; with `trained`, note which of these parameters have a gradient before it."""
        self._missing.clear()
        self._used.clear()
        if trained is not None:
            self._had_gradient = {name for name, p in trained.items() if p.grad is not None}

    def names(self) -> set[str]:
        """Those that got none, on this rank."""
        return self._missing - self._used

    def note(self, group: Any, *, fills: bool) -> None:
        """The gradients of a unit are about to be reduced; after several forward passes, several times.

        Args:
            group: Of the unit.
            fills: Put zeros where there is no gradient.
        """
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param") and parameter.unsharded_param.requires_grad:
                kept, new = parameter.unsharded_accumulated_grad, parameter.unsharded_param.grad
                (self._missing if kept is None and new is None else self._used).add(parameter._param_fqn)
                if kept is None and new is None and parameter.param_dtype is not None:
                    zeros_for(parameter)
                elif fills and kept is None and new is None:
                    parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)

    def forget(
        self,
        unused: Collection[str],
        trained: Mapping[str, nn.Parameter],
        every: Sequence[str],
        group: dist.ProcessGroup,
    ) -> None:
        """What no rank used has no gradient, as in one process, and not one of zeros.

        Collectives: one all-reduce of a byte per parameter.

        Args:
            unused: Names without gradient on this rank.
            trained: The parameters of this rank.
            every: All names, the same on all ranks, of which this one may have a part, as single experts.
            group: The ranks.
        """
        flags = [name in trained and name not in unused for name in every]
        used = torch.tensor(flags, dtype=torch.uint8, device=self._device_type)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        for name, somewhere in zip(every, used.tolist(), strict=True):
            if name in trained and not somewhere and name not in self._had_gradient:
                trained[name].grad = None


class Noting(Protocol):
    """Learns what FSDP2 is about to reduce."""

    def note(self, group: Any, *, fills: bool) -> None:
        """See `Unused.note`."""


def watch_reductions(groups: Iterable[Any], owner: weakref.ref[Noting]) -> None:
    """Let the owner look at which gradients of a unit are there, whenever FSDP2 is about to reduce them."""
    for group in groups:
        fills = not hasattr(group, "reduce_scatter_unused_params")  # torch before 2.13
        if not fills:
            group.reduce_scatter_unused_params = True
        group.post_backward = _noting(owner, weakref.ref(group), fills=fills)


def _noting(owner: weakref.ref[Noting], group: weakref.ref[Any], *, fills: bool) -> Callable[..., None]:
    """FSDP2's function that reduces the gradients of a unit, after a look at which are there."""

    def post_backward(*unused: Any) -> None:
        alive, reduced = owner(), cast("Any", group())
        if alive is not None and reduced.reduce_grads:
            alive.note(reduced, fills=fills)
        type(reduced).post_backward(reduced, *unused)

    return post_backward
