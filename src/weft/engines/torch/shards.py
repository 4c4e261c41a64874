"""Ask about DTensors without importing them.

`torch.distributed.tensor` takes half a second to import. Who has a DTensor has imported it already, so
the answers here come from `sys.modules`; what works on DTensors in earnest is imported when it is used.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["forget_groups", "is_sharded", "local"]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor: cut over ranks, or known to be equal on them."""
    loaded: Any = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, in the same memory; the tensor itself if it is not cut."""
    if not is_sharded(tensor):
        return tensor
    cut: Any = tensor.detach()
    part: torch.Tensor = cut.to_local()
    return part


def forget_groups() -> None:
    """Let DTensor forget the process groups it has seen.

    It remembers how operations are cut up by mesh, and takes a mesh with new groups for the old one of
    the same ranks, whose groups are gone.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug  # noqa: PLC0415  (see above)

        # The first is torch 2.13's and clears two memories, the other is older and there is one.
        clear: Any = getattr(debug, "_clear_sharding_prop_cache", None) or getattr(
            debug, "_clear_python_sharding_prop_cache", None
        )
        if clear is not None:
            clear()
