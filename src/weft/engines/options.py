"""What transforms tell an engine: options that travel together, the same for every engine.

An option of a strategy is written once, here: the class checks it, the engine reads it, and `facts` are what the ranks
have to agree on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.checks import check_choice, check_count
from weft.engines.probes import ProbeMode
from weft.precision import LossScaling

Compress = Callable[[dist.ProcessGroup, dist.GradBucket], torch.futures.Future[torch.Tensor]]
Place = str | os.PathLike[str]
# By parameter: over which mesh the rows of what a rank holds are cut, if they are, and which has cut the parameter.
StepMeshes = Mapping[nn.Parameter, tuple[DeviceMesh | None, DeviceMesh | None]]
# Where state lies: "cpu" or a directory. With torch also "optimizer": that of the optimizer alone, on the CPU.
Offload = Place | Mapping[Literal["optimizer", "parameters"], Place] | None


class Reduction(NamedTuple):
    """How the gradient of one parameter is reduced that is not reduced together with the others.

    Attributes:
        group: The ranks over which it is summed, and those that hold copies of the parameter, a DTensor, along other
            axes, where the gradient may arrive as partial sums; None: this rank alone.
        divide: The number of ranks over which it is summed: what arrives is divided by it.
        first: Whether this rank counts where those with copies have equal gradients.
        scale: What arrives is multiplied by it, where fewer ranks add up than gradients are averaged over.
    """

    group: dist.ProcessGroup | None
    divide: int
    first: bool = True
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class StrategyOptions:
    """What strategies have in common.

    Attributes:
        unused: "error" raises when a parameter got no gradient; "zero" counts it as zero on the
            ranks that did not use it.
        buffers: "broadcast" gives all ranks the first rank's buffers after each reduced backward; "local"
            lets them differ.
        methods: Methods besides forward that use the parameters.
        dtype: Gradients are rounded to it for the way; None sends them as they are.
        apart: Parameters by name that are not reduced with the others: DTensors over other axes, and those
            whose gradients are summed over other ranks.
        strategy: Name of the transform, for errors.

    Raises:
        ValueError: An option is out of range.
    """

    unused: Literal["error", "zero"] = "error"
    buffers: Literal["broadcast", "local"] = "broadcast"
    methods: tuple[str, ...] = ()
    dtype: torch.dtype | None = field(default=None, compare=False)  # that of `with_precision`, which has agreed on it
    apart: Mapping[str, Reduction] = field(default_factory=dict, compare=False)
    strategy: str = field(compare=False)

    def __post_init__(self) -> None:
        check_choice(self.strategy, "unused", self.unused, ("error", "zero"))
        check_choice(self.strategy, "buffers", self.buffers, ("broadcast", "local"))

    def facts(self) -> dict[str, object]:
        """What has to be equal on all ranks, as JSON values."""
        values = {one.name: getattr(self, one.name) for one in fields(self) if one.compare}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


@dataclass(frozen=True, kw_only=True)
class ReduceOptions(StrategyOptions):
    """How gradients travel.

    Attributes:
        bucket_bytes: Gradient bytes per all-reduce.
        flat: One buffer for all parameters and one for all gradients, instead of buckets.
        at_end: One buffer for all gradients, sent when backward has ended; the engine chooses it, and with `flat`.
        compress: Averages a bucket in a way of its own: torch's communication hook, whose state is the group.
    """

    bucket_bytes: int = 25 * 2**20
    flat: bool = False
    at_end: bool = False
    compress: Compress | None = field(default=None, compare=False)
    strategy: str = field(default="replicate", compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count(
            self.strategy, "bucket_bytes", self.bucket_bytes, fix=f"weft.{self.strategy}(..., bucket_bytes=25 * 2**20)"
        )


class CastOptions(NamedTuple):
    """What happens at the borders of a module.

    Attributes:
        autocast: dtype for torch's autocast inside; None: no autocast.
        inputs: Floating-point inputs are cast to it; None: left alone.
        outputs: Floating-point outputs are cast to it; None: left alone.
        scale: For fp16: scale the gradients inside.
        methods: Methods besides forward to treat alike.
        products: Linear layers in it that multiply matrices of 8-bit numbers.
    """

    autocast: torch.dtype | None = None
    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None
    scale: LossScaling | None = None
    methods: tuple[str, ...] = ()
    products: tuple[nn.Module, ...] = ()


class OtherMesh(NamedTuple):
    """Where one unit is sharded that is sharded over other ranks than the others.

    Attributes:
        mesh: Of one axis, or two (replica, shard).
        divide: Gradients are summed over its ranks and divided by this.
    """

    mesh: DeviceMesh
    divide: int


@dataclass(frozen=True, kw_only=True)
class ShardOptions(StrategyOptions):
    """How a module is sharded.

    Attributes:
        reshard_after_forward: Free the full parameters after forward and gather them again in
            backward, except those that backward needs first; a number: keep them sharded over so many
            ranks in between.
        offload: Keep the shards in CPU memory between uses.
        ignored: Names of parameters that stay whole on every rank; their gradients are averaged.
        reshard_units: The same for units by number where it is another; that of the module itself is `len(units)`.
        units: The parts that are gathered and freed together, inner ones first; a unit of several
            modules shares parameters. The module itself is the last unit and is not listed.
        other_meshes: Of units, by number; that of the module itself is `len(units)`.
        specs: Mesh and placements with which the module computes, by name of parameters that are DTensors over other
            axes.
        gather: The dtypes in which parameters are gathered, by name, where they are not gathered as they are.
        make_real: Called with a part before it is sharded, if the module is on meta.
    """

    reshard_after_forward: bool | int = True
    reshard_units: Mapping[int, bool | int] = field(default_factory=dict)
    offload: bool = False
    ignored: tuple[str, ...] = ()
    units: tuple[tuple[nn.Module, ...], ...] = field(default=(), compare=False)
    other_meshes: Mapping[int, OtherMesh] = field(default_factory=dict, compare=False)
    specs: Mapping[str, object] = field(default_factory=dict, compare=False)
    gather: Mapping[str, torch.dtype] = field(default_factory=dict, compare=False)
    make_real: Callable[[nn.Module], None] | None = field(default=None, compare=False)
    strategy: str = field(default="fully_shard", compare=False)


class FusedPart(NamedTuple):
    """One of several projections that a column layer holds side by side.

    Attributes:
        width: Its outputs.
        pieces: Into how many equal pieces they are divided: one per rank, or fewer, which ranks share.
    """

    width: int
    pieces: int


@dataclass(frozen=True, kw_only=True)
class TensorOptions(StrategyOptions):
    """How the layers of a module are cut over ranks; all by the names of parts.

    Attributes:
        styles: A word or a `ParallelStyle` of torch for each part that is cut.
        gathers: The parts around them whose first argument is made a DTensor once, for all layers in them.
        blocks: The blocks between which the sequence is cut; empty: it is not.
        inside: What lies in these blocks.
        summed: Names of whole parameters of whose gradients each rank has a part.
        fused: What columns hold of which no rank gets an equal part: several projections, or heads that ranks share.
        attributes: Of parts whose attributes have other values while a rank computes its share, these values.
        head_tables: Whether there are tables with a number per head, which become masks of attention.
        transposed: Layers whose weight is [inputs, outputs].
        make_real: Called with a part before it is cut, if the module is on meta.
        told: Called with (module, styles, rank, ranks, what to undo, first_block=) when the layers are cut.
    """

    styles: Mapping[str, Any] = field(default_factory=dict, compare=False)
    gathers: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()
    inside: frozenset[str] = field(default=frozenset(), compare=False)
    summed: tuple[str, ...] = ()
    fused: Mapping[str, tuple[FusedPart, ...]] = field(default_factory=dict, compare=False)
    attributes: Mapping[str, Mapping[str, int]] = field(default_factory=dict, compare=False)
    head_tables: bool = False
    transposed: frozenset[str] = field(default=frozenset(), compare=False)
    make_real: Callable[[nn.Module], None] | None = field(default=None, compare=False)
    told: Sequence[Callable[..., None]] = field(default=(), compare=False)
    buffers: Literal["broadcast", "local"] = "local"
    strategy: str = field(default="tensor_parallel", compare=False)


class RecomputeOptions(NamedTuple):
    """How blocks are computed again in backward.

    Attributes:
        save: Operations whose results are kept, or a policy that says so for each; empty: none.
        keep_rng: Give the second run the random state of the first.
        determinism_check: "default" compares shapes, dtypes and devices of both runs; "none": no.
        early_stop: End the second run when all that backward needs is there.
        offload: Keep the inputs of the blocks in the memory of the CPU between forward and backward.
        probes: As for `weft.start`.
    """

    save: tuple[object, ...] | Callable[..., object] = ()
    keep_rng: bool = True
    determinism_check: Literal["default", "none"] = "default"
    early_stop: bool = True
    offload: bool = False
    probes: ProbeMode = "auto"


class CompileOptions(NamedTuple):
    """What is passed to `torch.compile`, under its names.

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


class PipelineOptions(NamedTuple):
    """How a module is cut into the stages of a pipeline.

    Attributes:
        stages: Names of the layers of each stage, in the order of forward.
        micro_batches: Into how many a batch is cut.
        schedule: In which order forwards and backwards run.
        loss: (output, target) -> the loss, or its sum and number of terms; None if forward returns the loss.
        probes: As for `weft.start`.
    """

    stages: tuple[tuple[str, ...], ...]
    micro_batches: int
    schedule: str
    loss: Callable[[Any, Any], Any] | None = None
    probes: ProbeMode = "auto"
