"""`TorchEngine`: what transforms ask of torch, in one value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.engines.options import CastOptions, CompileOptions, RecomputeOptions, ReduceOptions, ShardOptions
from weft.engines.peers import Peers
from weft.engines.torch.amp.autocast import PreciseModule
from weft.engines.torch.amp.loss_scale import LossScale
from weft.engines.torch.compute.activation_checkpoint import Recomputed, already_recomputed, saved_ops
from weft.engines.torch.compute.compile_module import Compiled, already_compiled, check_backend
from weft.engines.torch.ddp.buckets import sparse_gradients
from weft.engines.torch.ddp.reducer import GradientReducer, check_hooks, is_reduced
from weft.engines.torch.ddp.sync_batch_norm import Synchronized, synchronize_batch_norms
from weft.engines.torch.device.choose import choose_device, default_backend, select_device
from weft.engines.torch.device.prefetch import move, prefetch
from weft.engines.torch.optim.ema import WeightAverages, drop_gathered
from weft.engines.torch.optim.flat_step import FlatStep, check_elementwise, flat_buffer_of, is_elementwise
from weft.engines.torch.optim.grad_norm import Gradients, with_nonfinite_gradient
from weft.engines.torch.optim.skip_step import SkippingStep
from weft.engines.torch.optim.step_watch import optimizers_of
from weft.tensors.dtensor import axes_of, is_fsdp, is_sharded

__all__ = ["Axes", "Held", "Sharded", "TorchEngine", "Undoable"]

Axes = tuple[tuple[str, int], ...]  # names and sizes, outermost first


class Undoable(Protocol):
    """Something on an object that can be taken off again."""

    def undo(self) -> None:
        """Take it off."""


class Held(Protocol):
    """Something that a context keeps until it is closed."""

    def release(self) -> None:
        """Let it go."""


class Sharded(Undoable, Protocol):
    """A module that was cut, for later transforms: `GradSync` and `Undoable` of the contract."""

    mean_over: int

    def begin_window(self) -> None:
        """A window of micro-batches begins."""

    def last_backward(self) -> None:
        """The next backward pass is the last one of the window."""

    def end_window(self, *, left: bool = False) -> None:
        """The window is over, or was left early."""


@dataclass(frozen=True)
class TorchEngine:
    """Plain torch on whatever device it has; the same code for CPU, CUDA, MPS and XPU."""

    name: str = "torch"

    def device(self, request: str | None, local_rank: int, world_size: int) -> torch.device:
        """The device of a rank; see `choose_device`."""
        return choose_device(request, local_rank, world_size)

    def select(self, device: torch.device) -> None:
        """Make `device` the current one; see `select_device`."""
        select_device(device)

    def num_devices(self, world_size: int) -> int:
        """How many devices a mesh has: one per rank."""
        return world_size

    def on_mesh(
        self, axes: Axes, data_axes: tuple[str, ...], device: torch.device, world_size: int
    ) -> tuple[TorchEngine, Axes]:
        """The engine that computes on a mesh of devices, and the axes of the ranks, which are the same."""
        return self, axes

    def begin(self, device: torch.device, seed: int) -> Held | None:
        """What has to be there as long as a context lives: nothing."""
        return None

    def backend(self, device: torch.device) -> str:
        """The process-group backend for tensors on `device`."""
        return default_backend(device)

    def place(self, module: nn.Module, device: torch.device) -> None:
        """Bring a module to `device`; its parameters stay the same objects."""
        module.to(device)

    def move(self, value: Any, device: torch.device, *, skip: frozenset[str] = frozenset()) -> Any:
        """Put a nested value on `device`."""
        return move(value, device, skip=skip)

    def prefetch(self, batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
        """Yield batches on `device`, copied ahead of use."""
        return prefetch(batches, device)

    def reduce_gradients(
        self, module: nn.Module, group: dist.ProcessGroup, options: ReduceOptions, peers: Peers
    ) -> GradientReducer:
        """Average the gradients of `module` over `group` in every backward pass."""
        return GradientReducer(module, group, options, peers)

    def broadcast_state(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        """Give parameters and buffers the values of the group's first rank, where they have any."""
        state = [tensor.detach() for tensor in (*module.parameters(), *module.buffers()) if not tensor.is_meta]
        if state:
            dist._broadcast_coalesced(group, state, 250 * 2**20, 0)

    def lay_out(self, module: nn.Module, axes: Sequence[str], cut: str) -> Undoable | None:
        """Divide a module among the devices of this one rank, "no", "state" or "all" of it; it has one."""
        return None

    def relay(self, objects: Iterable[object]) -> None:
        """Values of modules and optimizers were put in place by somebody else: nothing to be done."""

    def refusal(self, dtype: torch.dtype | None) -> str | None:
        """Why the device cannot compute in a dtype; None if it can."""
        return None

    def precise(self, module: nn.Module, device: torch.device, options: CastOptions) -> PreciseModule:
        """Cast and scale at the borders of `module`."""
        return PreciseModule(module, device, options)

    def skip_steps(
        self, optimizer: torch.optim.Optimizer, scales: Sequence[LossScale], group: dist.ProcessGroup | None
    ) -> SkippingStep:
        """Skip steps with non-finite gradients on all ranks of `group`."""
        return SkippingStep(optimizer, scales, group)

    def flat_step(self, optimizer: torch.optim.Optimizer, reducers: Sequence[object]) -> FlatStep:
        """Step on the flat buffer that one of `reducers` keeps, instead of on single parameters."""
        return FlatStep(optimizer, flat_buffer_of(optimizer, reducers))

    def check_elementwise(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if the optimizer looks at whole tensors, so that it cannot step on a flat buffer."""
        check_elementwise(optimizer)

    def shard(
        self, module: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, options: ShardOptions, peers: Peers
    ) -> Sharded:
        """Cut a module over a mesh of one axis, or two (replica, shard), whose ranks form `group`."""
        from weft.engines.torch.fsdp.fsdp2 import ShardedModule  # noqa: PLC0415  (half a second of imports in torch)

        return ShardedModule(module, mesh, group, options, peers)

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is cut over ranks."""
        return is_sharded(tensor)

    def axes_of(self, tensor: torch.Tensor) -> str:
        """The names of the mesh axes over which a tensor that is cut lies."""
        return axes_of(tensor)

    def is_fsdp(self, module: nn.Module) -> bool:
        """Whether torch's FSDP2 was applied to a part of a module, or to one around it, by whomever."""
        return is_fsdp(module)

    def optimizers_of(self, parameters: Sequence[nn.Parameter]) -> list[torch.optim.Optimizer]:
        """The living optimizers that hold one of these parameters."""
        return optimizers_of(parameters)

    def rebind(self, optimizers: Sequence[torch.optim.Optimizer], new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Move optimizers from old parameters to new ones, with groups, state and gradients."""
        from weft.engines.torch.optim.rebind import rebind  # noqa: PLC0415  (as in `shard`)

        rebind(optimizers, new)

    def partition_step(self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None) -> Undoable:
        """Step on this rank's shards, and on its rows of whole parameters, of which the others' are gathered."""
        from weft.engines.torch.optim.zero1_step import PartitionedStep  # noqa: PLC0415  (as in `shard`)

        return PartitionedStep(optimizer, mesh)

    def is_elementwise(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether its update of an element is known to depend on that element alone."""
        return is_elementwise(optimizer)

    def whole_step(self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None) -> Undoable:
        """Step on whole parameters, one after the other; keep state cut, over `mesh` where they are not."""
        from weft.engines.torch.optim.full_param_step import WholeStep  # noqa: PLC0415  (as in `shard`)

        return WholeStep(optimizer, mesh)

    def sparse_gradients(self, module: nn.Module) -> list[str]:
        """Names of the trained parameters whose gradients are sparse tensors."""
        return sparse_gradients(module)

    def is_reduced(self, parameter: nn.Parameter) -> bool:
        """Whether `reduce_gradients` watches this parameter already."""
        return is_reduced(parameter)

    def check_hooks(self, what: str, module: nn.Module) -> None:
        """Raise if a hook of the user's would see gradients before they are averaged."""
        check_hooks(what, type(module).__name__, module.named_parameters())

    def averages(self, module: nn.Module, *, buffers: bool) -> WeightAverages:
        """Keep averages of what this rank holds of the weights of `module`."""
        return WeightAverages(module, buffers=buffers)

    def drop_gathered(self, module: nn.Module) -> None:
        """Let `module.parameters()` be what is trained, and not the whole copies FSDP2 computes with."""
        drop_gathered(module)

    def gathered(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, *, write: bool
    ) -> AbstractContextManager[None]:
        """Let a module have whole parameters inside of the body; see `gathering.gathered`."""
        from weft.engines.torch.fsdp.full_params import gathered  # noqa: PLC0415  (as in `shard`)

        return gathered(module, parameters, group, write=write)

    def whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """All of a tensor, also if it is cut over the ranks."""
        from weft.engines.torch.fsdp.full_params import whole  # noqa: PLC0415  (as in `shard`)

        return whole(tensor)

    def gradients(self, parameters: Iterable[torch.Tensor], device: torch.device) -> Gradients:
        """The gradients of `parameters` as this rank holds them, to take their norm and clip them."""
        return Gradients(parameters, device)

    def with_nonfinite_gradient(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those whose gradient is not finite on this rank."""
        return with_nonfinite_gradient(parameters)

    def sync_batch_norms(self, module: nn.Module, group: dist.ProcessGroup | None) -> Synchronized:
        """Compute batch statistics over `group`."""
        return synchronize_batch_norms(module, group)

    def recompute(self, blocks: Mapping[str, nn.Module], options: RecomputeOptions) -> Recomputed:
        """Compute what `blocks` compute again in backward, instead of keeping it."""
        return Recomputed(blocks, options)

    def already_recomputed(self, module: nn.Module) -> list[str]:
        """Names of the parts of `module` that are checkpointed in any way."""
        return already_recomputed(module)

    def saved_ops(self, save: Iterable[object]) -> tuple[object, ...]:
        """The operations that names and operations to save stand for."""
        return saved_ops(save)

    def seed(self, device: torch.device, number: int) -> None:
        """Seed what `torch.manual_seed` does not reach: nothing."""

    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """The random state of a device, uint8 on the CPU; None if that is the CPU's own."""
        return None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device).cpu()

    def check_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Raise if this is no random state of the device."""
        torch.Generator(device).set_state(state)

    def set_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Go on from a random state."""
        torch.get_device_module(device).set_rng_state(state, device)

    def host_of(self, device: torch.device) -> torch.device:
        """Where the program makes and reads values of a device: there, or on the CPU."""
        return device

    def readable(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors whose bytes can be copied, one by one, to the memory of the CPU."""
        return tensors

    def compile(self, parts: Mapping[str, nn.Module], options: CompileOptions) -> Compiled:
        """Compile the forward of each part."""
        return Compiled(parts, options)

    def already_compiled(self, module: nn.Module) -> list[str]:
        """Names of the parts of `module` that are compiled in any way."""
        return already_compiled(module)

    def check_backend(self, backend: str) -> None:
        """Raise if there is no compiler of this name."""
        check_backend(backend)
