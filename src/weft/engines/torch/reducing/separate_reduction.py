"""Parameters whose gradients are averaged at the end of a backward pass, separately from the others.

Those are DTensors over axes that are not the strategy's own, parameters whose gradients are summed over other ranks
than the others', and what `fully_shard` leaves whole. Parts that lie on this rank travel, all of those that go to
the same ranks in one message.

[Note: gradients that are there] All of a gradient is averaged: what was reduced before is equal on all ranks, and
stays what it is. So a gradient that is summed over fewer ranks than the strategy averages over is scaled when it
arrives, and not at the end.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft import torch_internals
from weft.engines.options import Reduction
from weft.engines.torch.hooks.method_hooks import Removable
from weft.tensors.blocks import as_dtensor
from weft.tensors.dtensor import is_sharded
from weft.tensors.messages import grouped
from weft.tensors.pairwise import as_real
from weft.tensors.remote_parameter import is_elsewhere


class _Scaled(partial[torch.Tensor]):
    """A hook on gradients: it is told from those of programs by its type."""


class SeparateReduction:
    """Such parameters of one module.

    Attributes:
        named: Those that are trained now, by name.
    """

    def __init__(self, how: Mapping[str, Reduction], dtype: torch.dtype | None) -> None:
        self.named: dict[str, nn.Parameter] = {}
        self.how = dict(how)
        self._dtype = dtype  # in which gradients travel
        self._hooks = Removable()

    def take(
        self,
        named: Mapping[str, nn.Parameter],
        entrance: Callable[[], Callable[[torch.Tensor], Any]] | None = None,
    ) -> None:
        """Average the gradients of those that are trained now; `entrance()` is a hook that sees a gradient."""
        self.release()
        here = {name: p for name, p in named.items() if name in self.how and not is_elsewhere(p)}
        self.named = {name: p for name, p in here.items() if p.requires_grad}
        for name, p in self.named.items():
            if entrance is not None:
                self._hooks.add(p.register_post_accumulate_grad_hook(entrance()).remove)
            if self.how[name].scale != 1:
                self._hooks.add(p.register_hook(_Scaled(operator.mul, self.how[name].scale)).remove)

    def release(self) -> None:
        """Take the hooks off."""
        self._hooks.remove()

    @torch.no_grad()
    def average(self, *, forget_unused: bool = False) -> list[str]:
        """Average the gradients; returns the names of the parameters without one, which count as zero.

        Args:
            forget_unused: A parameter that has no gradient on any rank keeps none.
        """
        missing = [name for name, p in self.named.items() if p.grad is None]
        for name in missing:
            self.named[name].grad = torch.zeros_like(self.named[name])
        how = self.how
        messages = grouped(self.named, lambda name: (how[name].group, how[name].divide, self.named[name].dtype))
        for (group, divide, _), names in messages.items():
            flags = [float(name not in missing) for name in names] if forget_unused else []
            if group is not None:
                flags = self._send(names, flags, group, divide)
            for name, somewhere in zip(names, flags, strict=False):
                if not somewhere:
                    self.named[name].grad = None
        for p in self.named.values():
            if not p.numel():
                p.grad = None  # torch's clip_grad_norm_ would refuse a plain one among DTensors
        return missing

    def _send(self, names: list[str], flags: list[float], group: dist.ProcessGroup, divide: int) -> list[float]:
        """Average the gradients of some parameters over a group; returns how many ranks set each flag."""
        found = [self._part(name) for name in names]
        parts = [part for part, _ in found]
        mine = torch.cat([(part if counts else torch.zeros_like(part)).reshape(-1) for part, counts in found])
        flat = as_real(mine.div_(divide))
        length = flat.numel()
        flat = torch.cat([flat, flat.new_tensor(flags)]) if flags else flat
        flat = flat if self._dtype is None else flat.to(self._dtype)
        dist.all_reduce(flat, group=group)
        as_real(mine).copy_(flat[:length])
        values = mine.split([part.numel() for part in parts])
        torch_internals.foreach_copy(parts, [one.view_as(part) for one, part in zip(values, parts, strict=True)])
        for name, part in zip(names, parts, strict=True):
            _put(self.named[name], part)
        return flat[length:].tolist() if flags else []

    def _part(self, name: str) -> tuple[torch.Tensor, bool]:
        """What of one gradient lies here, in its memory, and whether it counts."""
        parameter: Any = self.named[name]
        gradient: Any = parameter.grad
        if not is_sharded(gradient):
            return gradient, True
        is_partial = any(placement.is_partial() for placement in gradient.placements)
        if not is_partial and gradient.placements != parameter.placements:
            parameter.grad = gradient = gradient.redistribute(placements=parameter.placements)
        return gradient.to_local(), is_partial or self.how[name].first


def _put(parameter: Any, part: torch.Tensor) -> None:
    """Let a gradient that arrived as partial sums be what it is now, when they have been added up."""
    gradient: Any = parameter.grad
    if is_sharded(gradient) and gradient.placements != parameter.placements:
        mesh, size, stride = gradient.device_mesh, gradient.shape, gradient.stride()
        parameter.grad = as_dtensor(part, mesh, parameter.placements, size, stride)
