"""Parameters that get no gradient in a backward pass.

They count as zero, so that all ranks reduce the same units, and are noted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft import torch_internals
from weft.engines.torch.hooks.parameter_watch import ParameterWatch


class Unused:
    """What one backward pass left without gradient.

    Attributes:
        reduced: The names of those that had a gradient when their unit was reduced, in all backward passes since the
            last that began.
    """

    def __init__(self, device_type: str, watch: ParameterWatch) -> None:
        self._device_type = device_type
        self._watch = watch
        self._missing: set[str] = set()  # no gradient when a unit was reduced in this backward pass
        self.reduced: set[str] = set()
        self._had_gradient: set[str] = set()

    def begin(self, trained: Mapping[str, nn.Parameter] | None) -> None:
        """A backward pass begins; with `trained`, note which of these parameters have a gradient before it."""
        self._missing.clear()
        self.reduced.clear()
        if trained is not None:
            self._had_gradient = {name for name, p in trained.items() if p.grad is not None}

    def names(self) -> set[str]:
        """Those that got none, on this rank."""
        return self._missing - self.reduced

    def note(self, group: Any, *, fills: bool) -> list[torch.Tensor]:
        """The gradients of a unit are about to be reduced; after several forward passes, several times.

        Args:
            group: Of the unit.
            fills: Put zeros where there is no gradient.

        Returns:
            Parameters that were frozen in the forward pass, and are not any more: they get none, as in one process.
        """
        thawed = []
        for parameter in group.fsdp_params:
            full = torch_internals.PARAM_WHOLE.get(parameter)
            if full is None:  # the unit was never gathered
                continue
            if full.grad is not None or torch_internals.PARAM_KEPT.of(parameter) is not None:
                self.reduced.add(torch_internals.PARAM_NAME.of(parameter))
            elif full.requires_grad and torch_internals.PARAM_NAME.of(parameter) in self._watch.frozen:
                thawed.append(full)
            elif full.requires_grad:
                self._missing.add(torch_internals.PARAM_NAME.of(parameter))
                if parameter.param_dtype is not None:  # it is gathered in a lower dtype
                    torch_internals.PARAM_KEPT.set(parameter, torch.zeros_like(full, dtype=parameter.orig_dtype))
                elif fills:
                    full.grad = torch.zeros_like(full)
        return thawed

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


def watch_reductions(groups: Iterable[Any], unused: Unused, enter: Callable[[], None]) -> None:
    """Note which gradients of a unit are there, whenever FSDP2 is about to reduce them.

    Args:
        groups: What FSDP2 keeps of the units.
        unused: Notes them.
        enter: Called before that; the gradients of a unit may be the first that a backward pass meets.
    """
    for group in groups:
        unit = group.modules[0]
        fills = not hasattr(unit, "set_reduce_scatter_unused_params")  # torch before 2.13
        if not fills:
            unit.set_reduce_scatter_unused_params(True, recurse=False)
        noting = partial(_post_backward, weakref.ref(group), unused, enter, fills=fills)
        torch_internals.GROUP_AFTER_BACKWARD.set(group, noting)


def _post_backward(
    group: weakref.ref[Any], unused: Unused, enter: Callable[[], None], *arguments: Any, fills: bool
) -> None:
    """FSDP2's function that reduces the gradients of a unit, after a look at which are there."""
    reduced: Any = group()
    thawed: list[torch.Tensor] = []
    if reduced.reduce_grads:
        enter()
        thawed = unused.note(reduced, fills=fills)
    for full in thawed:
        full.requires_grad_(False)  # noqa: FBT003  (torch's signature)
    type(reduced).post_backward(reduced, *arguments)
    for full in thawed:
        full.requires_grad_(True)  # noqa: FBT003
