"""What is computed while a probe runs: whether in 16 bits; without dropout, whose numbers differ and may."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812  (as everywhere)
from torch.overrides import TorchFunctionMode

from weft.tensors.nested import tensors

__all__ = ["Observed"]

_LOW = (torch.bfloat16, torch.float16)
_DROPOUT = (
    torch.dropout,
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
)


class Observed(TorchFunctionMode):
    """Leaves dropout out, and notes whether numbers of 16 bits were computed.

    Attributes:
        low: Whether they were.
        dropped: Whether there was dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.low = self.dropped = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, but for dropout."""
        kwargs = kwargs or {}
        if func in _DROPOUT:
            self.dropped = True
            return args[0] if args else kwargs["input"]
        result = func(*args, **kwargs)
        self.low = self.low or any(t.dtype in _LOW for t in tensors(result))
        return result
