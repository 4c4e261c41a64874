"""`TorchEngine`: what transforms ask of torch, in one value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

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
from weft.engines.results import Probed, ReducedModule, TensorParallel, Undoable
from weft.engines.torch.amp.autocast import PreciseModule
from weft.engines.torch.amp.loss_scale import LossScale
from weft.engines.torch.compute.activation_checkpoint import Recomputed
from weft.engines.torch.compute.compile_module import Compiled
from weft.engines.torch.compute.ema import WeightAverages
from weft.engines.torch.compute.grad_norm import Gradients
from weft.engines.torch.compute.sync_batch_norm import synchronize_batch_norms
from weft.engines.torch.device.devices import TorchDevices
from weft.engines.torch.pipeline.single_stage import WithLoss
from weft.engines.torch.reducing.flat_step import FlatStep, flat_buffer_of
from weft.engines.torch.reducing.power_sgd import PowerSgdHook
from weft.engines.torch.reducing.reducer import GradientReducer
from weft.engines.torch.reducing.strategy import Strategy
from weft.engines.torch.steps.skip import SkippingStep
from weft.precision import PowerSGD
from weft.tensors.dtensor import local
from weft.tensors.messages import broadcast

if TYPE_CHECKING:
    from weft.engines.torch.steps.local import LocalStepOptions
    from weft.engines.torch.streaming.slots import Fill
    from weft.engines.torch.streaming.stream import StreamOptions
    from weft.tensors.blocks import Block


def _mine(value: Any, rank: int) -> Any:
    """What one rank alone is told: its own value."""
    del rank
    return value


@dataclass(frozen=True)
class TorchEngine(TorchDevices):
    """Plain torch on whatever device it has; the same code for CPU, CUDA, MPS and XPU."""

    name: str = "torch"

    def reduce_gradients(
        self, module: nn.Module, group: dist.ProcessGroup, options: ReduceOptions, peers: Peers
    ) -> ReducedModule:
        """Average the gradients of `module` over `group` in every backward pass."""
        return GradientReducer(module, group, options, peers)

    def power_sgd(
        self, options: PowerSGD, place: int, num_ranks: int, stacked: Callable[[torch.Tensor], torch.Tensor]
    ) -> Compress:
        """Average buckets of gradients as products of thin matrices; see `PowerSgdHook`."""
        return PowerSgdHook(options, place, num_ranks, stacked)

    def broadcast_state(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Give parameters and buffers the values of the group's first rank, where they have any."""
        state = [local(tensor) for tensor in tensors if not tensor.is_meta]
        if state:
            broadcast(state, group)

    def apply_precision(self, module: nn.Module, device: torch.device, options: CastOptions) -> PreciseModule:
        """Cast and scale at the borders of `module`."""
        return PreciseModule(module, device, options)

    def skip_steps(
        self, optimizer: torch.optim.Optimizer, scales: Sequence[LossScale], group: dist.ProcessGroup | None
    ) -> SkippingStep:
        """Skip steps with non-finite gradients on all ranks of `group`."""
        return SkippingStep(optimizer, scales, group)

    def flat_step(self, optimizer: torch.optim.Optimizer, reducers: Sequence[object]) -> Undoable:
        """Step on the flat buffer that one of `reducers` keeps, instead of on single parameters."""
        return FlatStep(optimizer, flat_buffer_of(optimizer, reducers))

    def shard(
        self, module: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, options: ShardOptions, peers: Peers
    ) -> ReducedModule:
        """Shard a module over a mesh of one axis, or two (replica, shard), whose ranks form `group`."""
        from weft.engines.torch.fsdp.fsdp2 import ShardedModule  # noqa: PLC0415  (half a second of imports in torch)

        return ShardedModule(module, mesh, group, options, peers)

    def tensor_parallel(
        self, module: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, options: TensorOptions, peers: Peers
    ) -> TensorParallel:
        """Cut layers over a mesh of one axis, whose ranks form `group`."""
        from weft.engines.torch.parallel.tensor_module import TensorParallelModule  # noqa: PLC0415  (as in `shard`)

        return TensorParallelModule(module, mesh, group, options, peers)

    def divide_experts(
        self, module: nn.Module, packed: Mapping[str, nn.Module], lists: Sequence[str], mesh: DeviceMesh
    ) -> Probed:
        """Divide the experts of a module among the ranks of a mesh, and send tokens to them."""
        from weft.engines.torch.parallel.experts.divided import DividedExperts  # noqa: PLC0415  (as in `shard`)

        return DividedExperts(module, packed, lists, mesh)

    def pipeline(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        device: torch.device,
        options: PipelineOptions,
        peers: Peers | None = None,
        *,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
        share: Callable[[Any, int], Any] = _mine,
    ) -> Undoable:
        """Run the stages of a module on the ranks of `group`; see `PipelinedModule`."""
        if group is None:
            return WithLoss(module, options.loss)
        from weft.engines.torch.pipeline.pipelined import PipelinedModule  # noqa: PLC0415  (as in `shard`)

        assert peers is not None
        return PipelinedModule(module, group, device, options, peers, guard, share)

    def partition_step(
        self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, others: StepMeshes | None = None
    ) -> Undoable:
        """Step on this rank's shards, and on its rows of whole parameters, of which the others' are gathered."""
        from weft.engines.torch.steps.shards import PartitionedStep  # noqa: PLC0415  (as in `shard`)

        return PartitionedStep(optimizer, mesh, others or {})

    def whole_step(
        self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, others: StepMeshes | None = None
    ) -> Undoable:
        """Step on whole parameters, one after the other; keep state cut, over `mesh` where they are not."""
        from weft.engines.torch.steps.full_params import WholeStep  # noqa: PLC0415  (as in `shard`)

        return WholeStep(optimizer, mesh, others or {})

    def owner_step(
        self,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        blocks: Sequence[tuple[Block, ...]],
        share: Callable[[Any, int], Any],
    ) -> Undoable:
        """Step on whole parameters, each on one rank of `group`, of which each holds these blocks; see `OwnerStep`."""
        from weft.engines.torch.steps.by_owner import OwnerStep  # noqa: PLC0415  (as in `shard`)

        return OwnerStep(optimizer, group, blocks, share)

    def backward_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Undoable:
        """Step on each of these parameters inside backward; see `BackwardStep`."""
        from weft.engines.torch.steps.in_backward import BackwardStep  # noqa: PLC0415  (as in `shard`)

        return BackwardStep(optimizer, parameters)

    def reduced_in_backward(self, strategy: object) -> Sequence[torch.Tensor]:
        """The parameters whose gradients a strategy reduces and hands over while backward runs, each once."""
        return strategy.reduced_in_backward() if isinstance(strategy, Strategy) else ()

    def step_apart(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup | None,
        options: LocalStepOptions,
        peers: Peers | None,
        stacked: Callable[[torch.Tensor], torch.Tensor],
    ) -> Undoable:
        """Step on the gradients of this rank, and exchange parameters over `group` now and then."""
        from weft.engines.torch.steps.local import LocalSteps  # noqa: PLC0415  (few programs need it)

        return LocalSteps(module, optimizer, group, options, peers, stacked)

    def average_replicas(
        self, module: nn.Module, replicas: Replicas, options: StrategyOptions, *, alone: bool
    ) -> ReducedModule:
        """Average the gradients of `module` over the replicas of an elastic job, as long as none is lost."""
        from weft.engines.torch.reducing.replica_average import ReplicaAverage  # noqa: PLC0415  (few programs need it)

        return ReplicaAverage(module, replicas, options, alone=alone)

    def averages(self, module: nn.Module, *, buffers: bool) -> WeightAverages:
        """Keep averages of what this rank holds of the weights of `module`."""
        return WeightAverages(module, buffers=buffers)

    def gathered(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, *, write: bool
    ) -> AbstractContextManager[None]:
        """Let a module have whole parameters inside the body; see `full_params.gathered`."""
        from weft.engines.torch.fsdp.full_params import gathered  # noqa: PLC0415  (as in `shard`)

        return gathered(module, parameters, group, write=write)

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
        return Gradients(parameters, device, partly or {})

    def sync_batch_norms(self, module: nn.Module, group: dist.ProcessGroup | None) -> Undoable:
        """Compute batch statistics over `group`."""
        return synchronize_batch_norms(module, group)

    def recompute(self, blocks: Mapping[str, nn.Module], options: RecomputeOptions) -> Undoable:
        """Compute what `blocks` compute again in backward, instead of keeping it."""
        return Recomputed(blocks, options)

    def stream(self, options: StreamOptions, fill: Fill) -> Undoable:
        """Give parts of a module memory for their parameters while they are called; see `Streamed`."""
        from weft.engines.torch.streaming.stream import Streamed  # noqa: PLC0415  (as above)

        return Streamed(options, fill)

    def compile(self, parts: Mapping[str, nn.Module], options: CompileOptions) -> Undoable:
        """Compile the forward of each part."""
        return Compiled(parts, options)
