"""Weights that rest in fewer bits than a layer computes in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from weft import torch_internals
from weft.engines.torch.hooks.method_hooks import Removable, attach

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Layers that lose little: their weights are many, and no sum over them is taken.
_LAYERS = (nn.Linear, nn.Embedding, *_CONVOLUTIONS)


class StoredWeights:
    """Frozen weights of layers in a dtype for storage, cast while the layer is called.

    Changes: dtypes of parameters, in place, and hooks.

    Args:
        parts: The modules to look at, without those in them.
        storage: In which weights rest.
        compute: In which a layer sees them.
    """

    def __init__(self, parts: Iterable[nn.Module], storage: torch.dtype, compute: torch.dtype) -> None:
        self._removable = Removable()
        self._compute = compute
        self._before: list[tuple[nn.Parameter, torch.dtype]] = []
        self._resting: dict[nn.Module, dict[str, Any]] = {}
        for part in parts:
            held = torch_internals.PARAMETERS.of(part)
            own = {name: p for name, p in held.items() if p is not None and p.is_floating_point()}
            if not isinstance(part, _LAYERS) or not own or any(p.requires_grad for p in own.values()):
                continue
            for p in own.values():
                if p.dtype is not storage:  # a tied one comes twice
                    self._before.append((p, p.dtype))
                    p.data = p.data.to(storage)
            attach(part, self._removable, before=self._cast, after=self._put_back, always=True)

    def undo(self) -> None:
        """Take the hooks off; weights are in the dtype again that they were given in."""
        self._removable.remove()
        for p, dtype in self._before:
            p.data = p.data.to(dtype)

    def _cast(self, part: nn.Module, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if part not in self._resting:  # else the layer is called inside its own call
            held = torch_internals.PARAMETERS.of(part)
            resting = self._resting[part] = {name: p for name, p in held.items() if p is not None}
            for name, p in resting.items():
                if p.is_floating_point():
                    held[name] = p.detach().to(self._compute)

    def _put_back(self, part: nn.Module, args: Any, output: Any) -> None:
        del args, output
        torch_internals.PARAMETERS.of(part).update(self._resting.pop(part, {}))
