"""`Engine`: what transforms ask of an engine; `Devices`: the part of it about devices.

`Spmd` is what is asked, besides, where one process drives several devices.

What needs no device is not asked of an engine: it is a function in `weft.tensors`, or beside the work it is about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:  # an engine is imported when it is chosen
    from weft.engines.options import (
        CastOptions,
        CompileOptions,
        Compress,
        PipelineOptions,
        RecomputeOptions,
        ReduceOptions,
        ShardOptions,
        StepMeshes,
        StrategyOptions,
        TensorOptions,
    )
    from weft.engines.peers import Peers, Replicas
    from weft.engines.results import Axes, Held, Probed, ReducedModule, TensorParallel, Undoable
    from weft.engines.torch.amp.autocast import PreciseModule
    from weft.engines.torch.amp.loss_scale import LossScale
    from weft.engines.torch.compute.ema import WeightAverages
    from weft.engines.torch.compute.grad_norm import Gradients
    from weft.engines.torch.steps.local import LocalStepOptions
    from weft.engines.torch.steps.skip import SkippingStep
    from weft.engines.torch.streaming.slots import Fill
    from weft.engines.torch.streaming.stream import StreamOptions
    from weft.precision import PowerSGD
    from weft.tensors.blocks import Block


class Devices(Protocol):
    """Where a rank computes: the devices of an engine, what is brought there, and their random numbers.

    Attributes:
        name: Shown to users.
    """

    @property
    def name(self) -> str:
        """Shown to users."""
        ...

    def device(self, request: str | None, local_rank: int, world_size: int) -> torch.device:
        """The device of a rank."""
        ...

    def select(self, device: torch.device) -> None:
        """Make `device` the current one."""

    def backend(self, device: torch.device) -> str:
        """The process-group backend for tensors on `device`."""
        ...

    def place(self, module: nn.Module, device: torch.device) -> None:
        """Bring a module to `device`; its parameters stay the same objects."""

    def move(self, value: Any, device: torch.device, *, skip: frozenset[str] = frozenset()) -> Any:
        """Put a nested value on `device`."""

    def prefetch(self, batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
        """Yield batches on `device`, copied ahead of use."""
        ...

    def check_devices(self, what: str, places: Sequence[str]) -> None:
        """Raise if there is no such device."""

    def seed(self, device: torch.device, number: int) -> None:
        """Seed what `torch.manual_seed` does not reach."""

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """The random state of a device, uint8 on the CPU; None if that is the CPU's own."""

    def check_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Raise if this is no random state of the device."""

    def set_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Resume from a random state."""


class Engine(Devices, Protocol):
    """Who does the work of the transforms; held by a context as a value."""

    # -- strategies

    def power_sgd(
        self, options: PowerSGD, place: int, num_ranks: int, stacked: Callable[[torch.Tensor], torch.Tensor]
    ) -> Compress:
        """Average buckets of gradients as products of thin matrices; see `PowerSgdHook`."""
        ...

    def broadcast_state(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Give parameters and buffers the values of the group's first rank, where they have any."""

    def reduce_gradients(
        self, module: nn.Module, group: dist.ProcessGroup, options: ReduceOptions, peers: Peers
    ) -> ReducedModule:
        """Average the gradients of `module` over `group` in every backward pass."""
        ...

    def shard(
        self, module: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, options: ShardOptions, peers: Peers
    ) -> ReducedModule:
        """Shard a module over a mesh of one axis, or two (replica, shard), whose ranks form `group`."""
        ...

    def tensor_parallel(
        self, module: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, options: TensorOptions, peers: Peers
    ) -> TensorParallel:
        """Cut layers over a mesh of one axis, whose ranks form `group`."""
        ...

    def divide_experts(
        self, module: nn.Module, packed: Mapping[str, nn.Module], lists: Sequence[str], mesh: DeviceMesh
    ) -> Probed:
        """Divide experts among the ranks of a mesh: stacked ones in parameters, and those in the named lists."""
        ...

    def gathered(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, *, write: bool
    ) -> AbstractContextManager[None]:
        """Let a module have whole parameters inside the body; with `write`, the first rank's are kept."""
        ...

    def sync_batch_norms(self, module: nn.Module, group: dist.ProcessGroup | None) -> Undoable:
        """Compute batch statistics over `group`."""
        ...

    # -- optimizers and gradients

    def pipeline(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        device: torch.device,
        options: PipelineOptions,
        peers: Peers | None = None,
        *,
        guard: Callable[[], AbstractContextManager[None]] = ...,
        share: Callable[[Any, int], Any] = ...,
    ) -> Undoable:
        """Run the stages of a module on the ranks of `group`; without one, only give its calls the loss.

        Args:
            module: Whose parameters of other stages are on meta.
            group: The ranks of the pipeline.
            device: Of this rank.
            options: How it is cut.
            peers: The other ranks, for errors.
            guard: A context for what waits for other ranks, which names the one to blame.
            share: Gives all ranks the value of one: (value, its rank) -> the value.
        """
        ...

    def partition_step(
        self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, others: StepMeshes | None = None
    ) -> Undoable:
        """Step on this rank's shards, and on its rows of whole parameters, of which the others' are gathered."""
        ...

    def whole_step(
        self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, others: StepMeshes | None = None
    ) -> Undoable:
        """Step on whole parameters, one after the other; keep state sharded, over `mesh` where they are not."""
        ...

    def flat_step(self, optimizer: torch.optim.Optimizer, reducers: Sequence[object]) -> Undoable:
        """Step on the flat buffer that one of `reducers` keeps, instead of on single parameters."""
        ...

    def skip_steps(
        self, optimizer: torch.optim.Optimizer, scales: Sequence[LossScale], group: dist.ProcessGroup | None
    ) -> SkippingStep:
        """Skip steps with non-finite gradients on all ranks of `group`."""
        ...

    def gradients(
        self,
        parameters: Iterable[torch.Tensor],
        device: torch.device,
        partly: Mapping[int, dist.ProcessGroup] | None = None,
    ) -> Gradients:
        """The gradients of `parameters` as this rank holds them, to take their norm and clip them.

        Args:
            parameters: With gradients or without.
            device: Of this rank.
            partly: For parameters that only some ranks have, the ranks whose norms add up, by the id.
        """
        ...

    def owner_step(
        self,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        blocks: Sequence[tuple[Block, ...]],
        share: Callable[[Any, int], Any],
    ) -> Undoable:
        """Step on whole parameters, each on one rank of `group`, of which each holds these blocks; see `OwnerStep`."""
        ...

    def backward_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Undoable:
        """Step on each of these parameters inside backward; see `BackwardStep`."""
        ...

    def reduced_in_backward(self, strategy: object) -> Sequence[torch.Tensor]:
        """The parameters whose gradients a strategy reduces and hands over while backward runs, each once."""
        ...

    def step_apart(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None,
        options: LocalStepOptions,
        peers: Peers | None,
        stacked: Callable[[torch.Tensor], torch.Tensor],
    ) -> Undoable:
        """Step on the gradients of this rank, and exchange parameters over `group` now and then.

        Args:
            module: Whose parameters.
            optimizer: Over these parameters, now or once a strategy has exchanged them.
            group: The ranks that step apart; None: this one alone.
            options: When they meet, and what they do then.
            peers: The other ranks.
            stacked: See `StepsApart`.
        """
        ...

    def average_replicas(
        self, module: nn.Module, replicas: Replicas, options: StrategyOptions, *, alone: bool
    ) -> ReducedModule:
        """Average the gradients of `module` over the replicas of an elastic job, as long as none is lost.

        If one is, gradients are zero until the replicas have met again.

        Args:
            module: Whole, or this rank's part of it.
            replicas: Their ranks that have the same part.
            options: Of the strategy inside the replica.
            alone: The replica has one rank; otherwise the strategy reduces the gradients inside it first.
        """
        ...

    def averages(self, module: nn.Module, *, buffers: bool) -> WeightAverages:
        """Keep averages of what this rank holds of the weights of `module`."""
        ...

    # -- what is computed

    def apply_precision(self, module: nn.Module, device: torch.device, options: CastOptions) -> PreciseModule:
        """Cast and scale at the borders of `module`."""
        ...

    def recompute(self, blocks: Mapping[str, nn.Module], options: RecomputeOptions) -> Undoable:
        """Compute what `blocks` compute again in backward, instead of keeping it."""
        ...

    def compile(self, parts: Mapping[str, nn.Module], options: CompileOptions) -> Undoable:
        """Compile the forward of each part."""
        ...

    def stream(self, options: StreamOptions, fill: Fill) -> Undoable:
        """Give parts of a module memory for their parameters while they are called."""
        ...


@runtime_checkable
class Spmd(Protocol):
    """An engine of which one process drives several devices, as torch-xla does.

    Its ranks are processes, its mesh consists of devices, and a strategy on one rank is a layout. The memory of its
    devices cannot be written in place: values are made on the CPU and read there.
    """

    def num_devices(self) -> int:
        """How many devices all processes drive together."""
        ...

    def on_mesh(self, axes: Axes, data_axes: tuple[str, ...], world_size: int) -> tuple[Engine, Axes]:
        """The engine that computes on a mesh of devices, and the axes of the ranks."""
        ...

    def begin(self, device: torch.device, seed: int) -> Held:
        """What has to be there as long as a context lives."""
        ...

    def check_dtype(self, what: str, dtype: torch.dtype | None) -> None:
        """Raise if the devices cannot compute in a dtype.

        Raises:
            ValueError: They cannot.
        """

    def apply_layout(self, module: nn.Module, axes: Sequence[str], cut: str) -> Undoable | None:
        """Divide a module among the devices of this rank: "no", "state" or "all" of it; None if there is one."""

    def values_replaced(self, objects: Iterable[object]) -> None:
        """Lay out modules and optimizers again, whose values were put in place by somebody else."""

    def fetch(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values of tensors in the memory of the CPU."""
        ...
