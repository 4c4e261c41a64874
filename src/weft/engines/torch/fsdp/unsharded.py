"""The trained parameters of a sharded module that stay full on every rank: their gradients are averaged here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.engines.torch.hooks.method_hooks import Removable

__all__ = ["Unsharded"]


class Unsharded:
    """Such parameters.

    Attributes:
        named: Those that are trained now, by name.
    """

    def __init__(self, names: Collection[str], dtype: torch.dtype | None) -> None:
        self.named: dict[str, nn.Parameter] = {}
        self._names = frozenset(names)
        self._dtype = dtype  # in which gradients travel
        self._hooks = Removable()

    def take(self, module: nn.Module, entrance: Callable[[], Callable[[torch.Tensor], Any]]) -> None:
        """Average the gradients of those that are trained now; `entrance()` is a hook that sees a gradient."""
        self.release()
        self.named = {n: p for n, p in module.named_parameters() if n in self._names and p.requires_grad}
        for p in self.named.values():
            self._hooks.add(p.register_post_accumulate_grad_hook(entrance()).remove)

    def release(self) -> None:
        """Take the hooks off."""
        self._hooks.remove()

    def average(self, group: dist.ProcessGroup) -> list[str]:
        """Average the gradients; returns the names of the parameters without one, which count as zero."""
        missing = [name for name, p in self.named.items() if p.grad is None]
        for name in missing:
            self.named[name].grad = torch.zeros_like(self.named[name])
        # All of a gradient: what was reduced before is equal on all ranks, and stays what it is.
        gradients = [p.grad for p in self.named.values() if p.grad is not None]
        for dtype in dict.fromkeys(g.dtype for g in gradients):
            same = [g for g in gradients if g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in same]) / dist.get_world_size(group)
            flat = flat if self._dtype is None else flat.to(self._dtype)
            dist.all_reduce(flat, group=group)
            for gradient, part in zip(same, flat.split([g.numel() for g in same]), strict=True):
                gradient.copy_(part.view_as(gradient))
        for p in self.named.values():
            if not p.numel():
                p.grad = None  # torch's clip_grad_norm_ would refuse a plain one among DTensors
        return missing
