"""Layers of other stages on this rank, with parameters and buffers that the rank of the stage lends for one call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.engines.torch.probes.compare import largest_over
from weft.tensors.dtensor import is_fsdp_unit, is_sharded

__all__ = ["LentLayers"]


class LentLayers:
    """What the layers of one module have."""

    def __init__(
        self,
        module: nn.Module,
        stages: Sequence[Sequence[str]],
        owners: Sequence[int],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._module = module
        self._owners = owners
        self._group = group
        self._device = device
        self._slots = {name: _slots(module, name) for names in stages for name in names}

    def can_lend(self) -> bool:
        """Whether no rank has shards. Collectives: one all-reduce."""
        cut = any(map(is_sharded, self._module.parameters())) or any(map(is_fsdp_unit, self._module.modules()))
        return not largest_over(self._group, [float(cut)], self._device)[0]

    @contextlib.contextmanager
    def of(self, stage: int, name: str) -> Iterator[None]:
        """Let all ranks have what a layer of a stage has. Collectives: one broadcast per parameter and buffer.

        Yields:
            Nothing.
        """
        mine = self._owners[stage] == dist.get_rank(self._group)
        before = []
        try:
            for held, key in self._slots[name]:
                like = held[key]
                value = torch.empty(like.shape, dtype=like.dtype, device=self._device)
                if mine:
                    value.copy_(like.detach())
                dist.broadcast(value, group=self._group, group_src=self._owners[stage])
                if not mine:
                    before.append((held, key, like))
                    held[key] = nn.Parameter(value, requires_grad=False) if isinstance(like, nn.Parameter) else value
            yield
        finally:
            for held, key, like in before:
                held[key] = like


def _slots(module: nn.Module, name: str) -> list[tuple[dict[str, Any], str]]:
    place, _, own = name.rpartition(".")
    if own in module.get_submodule(place)._parameters:
        return [(module.get_submodule(place)._parameters, own)]
    parts = module.get_submodule(name).modules()
    dicts: list[dict[str, Any]] = [held for part in parts for held in (part._parameters, part._buffers)]
    return [(held, key) for held in dicts for key, tensor in held.items() if tensor is not None]
