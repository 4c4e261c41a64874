"""`TorchEngine`: what torch and torch-xla do in their own ways, as torch does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from weft.engines.options import RecomputeOptions, ReduceOptions, ShardOptions
from weft.engines.results import ReducedModule, Undoable
from weft.engines.torch.compute.activation_checkpoint import Recomputed
from weft.engines.torch.device.devices import TorchDevices
from weft.engines.torch.reducing.reducer import GradientReducer
from weft.peers.ledger import Ledger
from weft.tensors.dtensor import local
from weft.tensors.messages import broadcast


@dataclass(frozen=True)
class TorchEngine(TorchDevices):
    """Plain torch on whatever device it has; the same code for CPU, CUDA, MPS and XPU."""

    name: str = "torch"

    def broadcast_state(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Give parameters and buffers the values of the group's first rank, where they have any."""
        state = [local(tensor) for tensor in tensors if not tensor.is_meta]
        if state:
            broadcast(state, group)

    def reduce_gradients(
        self, module: nn.Module, group: dist.ProcessGroup, options: ReduceOptions, peers: Ledger
    ) -> ReducedModule:
        """Average the gradients of `module` over `group` in every backward pass."""
        return GradientReducer(module, group, options, peers)

    def shard(
        self, module: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, options: ShardOptions, peers: Ledger
    ) -> ReducedModule:
        """Shard a module over a mesh of one axis, or two (replica, shard), whose ranks form `group`."""
        from weft.engines.torch.fsdp.fsdp2 import ShardedModule  # noqa: PLC0415  (half a second of imports in torch)

        return ShardedModule(module, mesh, group, options, peers)

    def gathered(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, *, write: bool
    ) -> AbstractContextManager[None]:
        """Let a module have whole parameters inside the body; see `full_params.gathered`."""
        from weft.engines.torch.fsdp.full_params import gathered  # noqa: PLC0415  (as above)

        return gathered(module, parameters, group, write=write)

    def recompute(self, blocks: Mapping[str, nn.Module], options: RecomputeOptions) -> Undoable:
        """Compute what `blocks` compute again in backward, instead of keeping it."""
        return Recomputed(blocks, options)
