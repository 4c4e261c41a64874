"""`XlaEngine`: what transforms ask, answered by torch-xla; see [Note: one view] in the package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from weft.engines.options import RecomputeOptions, ReduceOptions, ShardOptions
from weft.engines.results import ReducedModule, Undoable
from weft.engines.torch.engine import TorchEngine
from weft.engines.xla.activation_checkpoint import RecomputedOnXla
from weft.engines.xla.device_layout import Laid, lay
from weft.engines.xla.devices import XlaDevices
from weft.peers.ledger import Ledger


@dataclass(frozen=True)
class XlaEngine(XlaDevices, TorchEngine):
    """torch-xla; the devices of all processes are one mesh."""

    # -- strategies are layouts ------------------------------------------------------------------

    def apply_layout(self, module: nn.Module, axes: Sequence[str], cut: str) -> Undoable | None:
        """Divide a module among the devices: "no", "state" or "all" of it."""
        return None if self._mesh is None else Laid(self._mesh, module, axes, cut)

    def values_replaced(self, objects: Iterable[object]) -> None:
        """Lay modules and optimizers out again, whose values came from elsewhere."""
        if self._mesh is not None:
            lay(self._mesh, objects)
        self._lib.torch_xla.sync(wait=True)

    @override
    def broadcast_state(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Give parameters and buffers the values of the first host."""
        for tensor in tensors:
            values = tensor.detach().cpu()
            dist.broadcast(values, group=group, group_src=0)
            with torch.no_grad():
                tensor.copy_(values)

    @override
    def reduce_gradients(
        self, module: nn.Module, group: dist.ProcessGroup, options: ReduceOptions, peers: Ledger
    ) -> ReducedModule:
        """A copy of `module` on every device of all hosts."""
        return _of_hosts(self, module, [name for name, _ in self.axes], "no", group)

    @override
    def shard(
        self, module: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, options: ShardOptions, peers: Ledger
    ) -> ReducedModule:
        """Cut a module over the devices of all hosts."""
        return _of_hosts(self, module, list(mesh.mesh_dim_names or ()), "all", group)

    @contextlib.contextmanager
    def gathered(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, *, write: bool
    ) -> Iterator[None]:
        """Parameters are whole as they are; what is written gets its layout back."""
        yield
        if write:
            if group is not None:
                self.broadcast_state([*module.parameters(), *module.buffers()], group)
            self.values_replaced([module])

    # -- what is computed ------------------------------------------------------------------------

    @override
    def recompute(self, blocks: Mapping[str, nn.Module], options: RecomputeOptions) -> Undoable:
        """Compute what `blocks` compute again in backward, instead of keeping it."""
        return RecomputedOnXla(blocks, options)


def _of_hosts(engine: XlaEngine, module: nn.Module, axes: Sequence[str], cut: str, group: dist.ProcessGroup) -> Laid:
    assert engine._mesh is not None
    laid = Laid(engine._mesh, module, axes, cut)
    # Each host counts the samples of all of them, as it sees them all.
    laid.mean_over = dist.get_world_size(group)
    return laid
