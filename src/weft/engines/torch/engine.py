"""`TorchEngine`: what transforms ask of torch, in one value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.engines.options import CastOptions, ReduceOptions
from weft.engines.torch.batch_norm import Synchronized, synchronize_batch_norms
from weft.engines.torch.devices import choose_device, default_backend
from weft.engines.torch.flat_step import FlatStep, check_elementwise, flat_buffer_of
from weft.engines.torch.loss_scale import LossScale
from weft.engines.torch.precision import PreciseModule
from weft.engines.torch.prefetch import move, prefetch
from weft.engines.torch.reducer import GradientReducer, is_reduced
from weft.engines.torch.skipping import SkippingStep

__all__ = ["TorchEngine"]


@dataclass(frozen=True)
class TorchEngine:
    """Plain torch on whatever device it has; the same code for CPU, CUDA, MPS and XPU."""

    name: str = "torch"

    def device(self, request: str | None, local_rank: int, world_size: int) -> torch.device:
        """The device of a rank; see `choose_device`."""
        return choose_device(request, local_rank, world_size)

    def backend(self, device: torch.device) -> str:
        """The process-group backend for tensors on `device`."""
        return default_backend(device)

    def move(self, value: Any, device: torch.device, *, skip: frozenset[str] = frozenset()) -> Any:
        """Put a nested value on `device`."""
        return move(value, device, skip=skip)

    def prefetch(self, batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
        """Yield batches on `device`, copied ahead of use."""
        return prefetch(batches, device)

    def reduce_gradients(self, module: nn.Module, group: dist.ProcessGroup, options: ReduceOptions) -> GradientReducer:
        """Average the gradients of `module` over `group` in every backward pass."""
        return GradientReducer(module, group, options)

    def broadcast_state(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        """Give parameters and buffers the values of the group's first rank."""
        state = [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]
        if state:
            dist._broadcast_coalesced(group, state, 250 * 2**20, 0)

    def precise(self, module: nn.Module, device: torch.device, options: CastOptions) -> PreciseModule:
        """Cast and scale at the borders of `module`."""
        return PreciseModule(module, device.type, options)

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

    def is_reduced(self, parameter: nn.Parameter) -> bool:
        """Whether `reduce_gradients` watches this parameter already."""
        return is_reduced(parameter)

    def sync_batch_norms(self, module: nn.Module, group: dist.ProcessGroup | None) -> Synchronized:
        """Compute batch statistics over `group`."""
        return synchronize_batch_norms(module, group)
