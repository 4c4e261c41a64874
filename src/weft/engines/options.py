"""What transforms tell an engine: options that travel together, the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["CastOptions", "ReduceOptions", "ScaleOptions"]


@dataclass(frozen=True, kw_only=True)
class ReduceOptions:
    """How gradients travel.

    Attributes:
        bucket_bytes: Gradient bytes per all-reduce.
        flat: One buffer for all parameters and one for all gradients, instead of buckets.
        unused: "error" raises when a parameter got no gradient; "zero" counts it as zero on the
            ranks that did not use it.
        buffers: "broadcast" gives all ranks rank 0's buffers after each reduced backward; "local"
            lets them differ.
        dtype: Gradients are rounded to it for the way; None sends them as they are.
        methods: Methods besides forward through which gradients may flow.
    """

    bucket_bytes: int = 25 * 2**20
    flat: bool = False
    unused: Literal["error", "zero"] = "error"
    buffers: Literal["broadcast", "local"] = "broadcast"
    dtype: torch.dtype | None = None
    methods: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScaleOptions:
    """How the fp16 scale S moves; all factors are powers of two, so that scaling is exact.

    Attributes:
        init: First scale.
        growth: Factor after `growth_every` good steps in a row.
        backoff: Factor after a step with a non-finite gradient.
        growth_every: Good steps until the scale grows.
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_every: int = 2000


@dataclass(frozen=True, kw_only=True)
class CastOptions:
    """What happens at the borders of a module.

    Attributes:
        autocast: dtype for torch's autocast inside; None: no autocast.
        inputs: Floating-point inputs are cast to it; None: left alone.
        outputs: Floating-point outputs are cast to it; None: left alone.
        scale: For fp16: scale the gradients inside.
        methods: Methods besides forward to treat alike.
    """

    autocast: torch.dtype | None = None
    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None
    scale: ScaleOptions | None = None
    methods: tuple[str, ...] = ()
