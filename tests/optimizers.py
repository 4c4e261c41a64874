"""How optimizers step that are not told: on a CPU one tensor after the other, on CUDA in lists of tensors."""

import functools
import importlib
from typing import Any

import torch

_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_OF_PLAIN = (
    torch.optim.SGD,
    torch.optim.Adagrad,
)  # torch has kernels for plain tensors only


def choose(how):
    """Let optimizers step in this process as on CUDA ("foreach"), or in one kernel where they have it ("fused")."""
    if how == "foreach":
        for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):  # of steps, and of clipping
            module: Any = importlib.import_module(name)
            module._get_foreach_kernels_supported_devices  # noqa: B018  (a torch that calls it otherwise raises here)
            module._get_foreach_kernels_supported_devices = lambda: ["cuda", "xpu", "cpu"]
    elif how == "fused":
        for kind in _FUSED:
            kind.__init__ = _fused(kind.__init__)
    elif how:
        raise ValueError(f"OPTIMIZERS={how}: foreach, fused, or not set")


def _fused(init):
    @functools.wraps(init)
    def fused_init(self, params, *args, **kwargs):
        params = list(params)
        told = any(kwargs.get(name) is not None for name in ("foreach", "fused", "differentiable"))
        groups = [entry["params"] if isinstance(entry, dict) else [entry] for entry in params]
        tensors = [one for group in groups for one in ([group] if isinstance(group, torch.Tensor) else list(group))]
        plain = not isinstance(self, _OF_PLAIN) or not any(hasattr(one, "device_mesh") for one in tensors)
        if not told and plain and all(isinstance(one, torch.Tensor) and one.is_floating_point() for one in tensors):
            kwargs["fused"] = True
        init(self, params, *args, **kwargs)

    return fused_init
