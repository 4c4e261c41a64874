"""`Engine`: where a rank computes, and the few things that torch and torch-xla do in their own ways.

`Spmd` is what is asked, besides, where one process drives several devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

if TYPE_CHECKING:  # an engine is imported when it is chosen
    from weft.engines.options import RecomputeOptions, ReduceOptions, ShardOptions
    from weft.engines.results import Axes, ReducedModule, Undoable
    from weft.engines.torch.hooks.every_optimizer import StepHook
    from weft.peers.ledger import Ledger


class Engine(Protocol):
    """What torch and torch-xla do in their own ways; held by a context as a value.

    Most of it is about where a rank computes: the devices, what is brought there, and their random numbers. For
    everything else, transforms name the class of `weft.engines.torch` that does it.

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

    def broadcast_state(self, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
        """Give parameters and buffers the values of the group's first rank, where they have any."""

    def reduce_gradients(
        self, module: nn.Module, group: dist.ProcessGroup, options: ReduceOptions, peers: Ledger
    ) -> ReducedModule:
        """Average the gradients of `module` over `group` in every backward pass."""
        ...

    def shard(
        self, module: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, options: ShardOptions, peers: Ledger
    ) -> ReducedModule:
        """Shard a module over a mesh of one axis, or two (replica, shard), whose ranks form `group`."""
        ...

    def gathered(
        self, module: nn.Module, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None, *, write: bool
    ) -> AbstractContextManager[None]:
        """Let a module have whole parameters inside the body; with `write`, the first rank's are kept."""
        ...

    def recompute(self, blocks: Mapping[str, nn.Module], options: RecomputeOptions) -> Undoable:
        """Compute what `blocks` compute again in backward, instead of keeping it."""
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

    def begin(self, device: torch.device, seed: int) -> StepHook[Any]:
        """What has to be done in all steps as long as a context lives."""
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
