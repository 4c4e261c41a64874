"""`XlaEngine`: what transforms ask, answered by torch-xla; see [Note: one view] in the package."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from weft.engines.options import (
    CompileOptions,
    PipelineOptions,
    RecomputeOptions,
    ReduceOptions,
    ShardOptions,
    StepMeshes,
)
from weft.engines.peers import Peers
from weft.engines.results import ReducedModule, Undoable
from weft.engines.torch.engine import TorchEngine
from weft.engines.xla.activation_checkpoint import RecomputedOnXla
from weft.engines.xla.device_layout import Laid, lay
from weft.engines.xla.devices import XlaDevices
from weft.errors import value_error
from weft.tensors.blocks import Block


class _Nothing:
    """Where the torch engine has to do something and XLA sees whole tensors anyway."""

    def undo(self) -> None:
        """There is nothing to take back."""


@dataclass(frozen=True)
class XlaEngine(XlaDevices, TorchEngine):
    """torch-xla; the devices of all processes are one mesh."""

    # -- strategies are layouts ------------------------------------------------------------------

    def apply_layout(self, module: nn.Module, axes: Sequence[str], cut: str) -> Undoable | None:
        """Divide a module among the devices: "no", "state" or "all" of it."""
        return None if self._mesh is None else Laid(self._lib, self._mesh, module, axes, cut)

    def values_replaced(self, objects: Iterable[object]) -> None:
        """Lay modules and optimizers out again, whose values came from elsewhere."""
        if self._mesh is not None:
            lay(self._lib, self._mesh, objects)
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
        self, module: nn.Module, group: dist.ProcessGroup, options: ReduceOptions, peers: Peers
    ) -> ReducedModule:
        """A copy of `module` on every device of all hosts."""
        return _of_hosts(self, module, [name for name, _ in self.axes], "no", group)

    @override
    def shard(
        self, module: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, options: ShardOptions, peers: Peers
    ) -> ReducedModule:
        """Cut a module over the devices of all hosts."""
        return _of_hosts(self, module, list(mesh.mesh_dim_names or ()), "all", group)

    @override
    def pipeline(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None,
        device: torch.device,
        options: PipelineOptions,
        peers: Peers | None = None,
        *,
        guard: Any = None,
        share: Any = None,
    ) -> Undoable:
        """Refused: torch's schedules send tensors of their own.

        Raises:
            ValueError: Always.
        """
        raise value_error(
            "pipeline: not supported on xla",
            found=f"schedule {options.schedule!r} for {type(module).__name__}",
            expected="an engine whose ranks send tensors to each other",
            fix="model, ctx = weft.fully_shard(model, ctx)",
        )

    @override
    def whole_step(
        self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, others: StepMeshes | None = None
    ) -> Undoable:
        """Every optimizer sees whole parameters."""
        return _Nothing()

    @override
    def owner_step(
        self,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        blocks: Sequence[tuple[Block, ...]],
        share: Callable[[Any, int], Any],
    ) -> Undoable:
        """Refused: every device does the same work.

        Raises:
            ValueError: Always.
        """
        raise value_error(
            "gather_step: by='owner' not supported on xla",
            found=f"by='owner' for {type(optimizer).__name__}",
            expected="an engine whose ranks send tensors to each other",
            fix="optimizer, ctx = weft.gather_step(optimizer, ctx)",
        )

    @override
    def backward_step(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> Undoable:
        """Refused: a step is computed as a whole.

        Raises:
            ValueError: Always.
        """
        raise value_error(
            "step_in_backward: not supported on xla",
            found=f"{type(optimizer).__name__} on a device that compiles a step as a whole",
            expected="an engine that runs backward operation by operation",
            fix="optimizer.step()",
        )

    @override
    def partition_step(
        self, optimizer: torch.optim.Optimizer, mesh: DeviceMesh | None, others: StepMeshes | None = None
    ) -> Undoable:
        """State is laid out in the first step, see [Note: marks get lost]."""
        return _Nothing()

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

    @override
    def compile(self, parts: Mapping[str, nn.Module], options: CompileOptions) -> Undoable:
        """Refused: the whole step is compiled anyway.

        Raises:
            ValueError: Always.
        """
        raise value_error(
            "compile: not supported on xla",
            found=f"backend {options.backend!r} for {type(next(iter(parts.values()))).__name__}",
            expected="no torch.compile: XLA compiles forward, backward and step as one graph",
            fix="leave weft.compile out",
        )


def _of_hosts(engine: XlaEngine, module: nn.Module, axes: Sequence[str], cut: str, group: dist.ProcessGroup) -> Laid:
    assert engine._mesh is not None
    laid = Laid(engine._lib, engine._mesh, module, axes, cut)
    # Each host counts the samples of all of them, as it sees them all.
    laid.mean_over = dist.get_world_size(group)
    return laid
