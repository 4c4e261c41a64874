"""What the user asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from weft.contract.select_modules import Selection

__all__ = ["Request", "WeightSource", "Weights"]

Weights = Mapping[str, torch.Tensor]
WeightSource = Weights | Callable[[], Weights] | Literal["later"] | None


class Request(NamedTuple):
    """What the user asked for; see `fully_shard`.

    Attributes:
        units: What is gathered together.
        reshard_after_forward: Whether to free it between forward and backward.
        rebind: Optimizers over the module's parameters.
        ignored: Parts that stay whole.
        weights: State for a module on meta; "later": it stays there, for `load_weights`.
        unused: What a parameter without gradient means.
        buffers: Whether buffers are kept equal.
        methods: Methods besides forward.
        offload: Keep shards in CPU memory.
    """

    units: Selection | None = None
    reshard_after_forward: bool | int = True
    rebind: Sequence[torch.optim.Optimizer] = ()
    ignored: Selection | None = None
    weights: WeightSource = None
    unused: Literal["error", "zero"] = "error"
    buffers: Literal["broadcast", "local"] = "broadcast"
    methods: Sequence[str] = ()
    offload: bool = False
