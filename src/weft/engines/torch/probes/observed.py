"""What is computed while a probe runs: whether in 16 bits; without dropout, whose numbers differ and may."""

from __future__ import annotations

from typing import Any

import torch

from weft import torch_internals
from weft.engines.torch.probes.compare import LOW
from weft.tensors.nested import tensors

_DRAWS = (torch.ops.aten.bernoulli, torch.ops.aten.bernoulli_)  # all kinds of dropout, but for those with a kernel


class WithoutDropout(torch_internals.dispatch_mode.base):  # type: ignore[name-defined, misc]
    """Leaves dropout out, and notes whether numbers of 16 bits were computed.

    Attributes:
        low: Whether they were.
        dropped: Whether there was dropout.
    """

    def __init__(self) -> None:
        super().__init__()
        self.low = self.dropped = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function, but let draws be ones, and the chance of kernels that drop something be 0."""
        kwargs = kwargs or {}
        if func.overloadpacket in _DRAWS:
            self.dropped = True
            return args[0].fill_(1) if func.overloadpacket is _DRAWS[1] else torch.ones_like(args[0])
        if func.overloadpacket is torch.ops.aten.native_dropout:
            self.dropped = True
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        arguments = torch_internals.schema.of(func).arguments
        at = next((n for n, one in enumerate(arguments) if one.name == "dropout_p"), None)
        if at is not None and at < len(args) and args[at]:
            self.dropped = True
            args = (*args[:at], 0.0, *args[at + 1 :])
        result = func(*args, **kwargs)
        self.low = self.low or any(t.dtype in LOW for t in tensors(result))
        return result
