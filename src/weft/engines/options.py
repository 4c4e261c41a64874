"""What transforms tell an engine: options that travel together, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import nn

__all__ = ["CastOptions", "CompileOptions", "RecomputeOptions", "ReduceOptions", "ScaleOptions", "ShardOptions"]


class ReduceOptions(NamedTuple):
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
        strategy: Name of the transform, for errors.
    """

    bucket_bytes: int = 25 * 2**20
    flat: bool = False
    unused: Literal["error", "zero"] = "error"
    buffers: Literal["broadcast", "local"] = "broadcast"
    dtype: torch.dtype | None = None
    methods: tuple[str, ...] = ()
    strategy: str = "replicate"


class ScaleOptions(NamedTuple):
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


class CastOptions(NamedTuple):
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


class ShardOptions(NamedTuple):
    """How a module is cut into shards.

    Attributes:
        units: The parts that are gathered and freed together, inner ones first; a unit of several
            modules shares parameters. The module itself is the last unit and is not listed.
        reshard_after_forward: Free the full parameters after forward and gather them again in
            backward; a number: keep them sharded over so many ranks in between.
        dtype: Gradients are rounded to it for the way; None sends them as they are.
        ignored: Names of parameters that stay whole on every rank; their gradients are averaged.
        unused: "error" raises when a parameter got no gradient; "zero" counts it as zero.
        buffers: "broadcast" gives all ranks the first rank's buffers after each reduced backward;
            "local" lets them differ.
        methods: Methods besides forward that use the parameters.
        offload: Keep the shards in CPU memory between uses.
        make_real: Called with a part before it is cut, if the module is on meta.
        strategy: Name of the transform, for errors.
    """

    units: tuple[tuple[nn.Module, ...], ...] = ()
    reshard_after_forward: bool | int = True
    dtype: torch.dtype | None = None
    ignored: tuple[str, ...] = ()
    unused: Literal["error", "zero"] = "error"
    buffers: Literal["broadcast", "local"] = "broadcast"
    methods: tuple[str, ...] = ()
    offload: bool = False
    make_real: Callable[[nn.Module], None] | None = None
    strategy: str = "fully_shard"


class RecomputeOptions(NamedTuple):
    """How blocks are computed again in backward.

    Attributes:
        save: Operations whose results are kept, or a policy that says so for each; empty: none.
        keep_rng: Give the second run the random state of the first.
        determinism_check: "default" compares shapes, dtypes and devices of both runs; "none": no.
        early_stop: End the second run when all that backward needs is there.
    """

    save: tuple[object, ...] | Callable[..., object] = ()
    keep_rng: bool = True
    determinism_check: Literal["default", "none"] = "default"
    early_stop: bool = True


class CompileOptions(NamedTuple):
    """What is told to `torch.compile`, under its names.

    Attributes:
        backend: Name of a backend, or a function (graph module, example inputs) -> callable.
        fullgraph: Raise where one graph is not enough.
        dynamic: Sizes as unknowns: always (True), never (False), where they were seen to change (None).
        mode: A set of options of the backend; None: its default.
        options: Single options of the backend.
    """

    backend: str | Callable[..., object] = "inductor"
    fullgraph: bool = False
    dynamic: bool | None = None
    mode: str | None = None
    options: Mapping[str, object] | None = None
