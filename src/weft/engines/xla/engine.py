"""`XlaEngine`: what transforms ask, answered by torch-xla; see [Note: one view] in the package."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from weft.engines.options import RecomputeOptions, ReduceOptions, ShardOptions
from weft.engines.results import Axes, ReducedModule, Undoable
from weft.engines.torch.engine import TorchEngine
from weft.engines.torch.hooks.every_optimizer import StepHook, after_every_step, parameters_of
from weft.engines.xla.activation_checkpoint import RecomputedOnXla
from weft.engines.xla.device_layout import Laid, lay, lay_state
from weft.engines.xla.device_transfer import fetch, place, prefetch, send
from weft.engines.xla.library import TorchXLA, check_processes, library, use_spmd
from weft.errors import ContextError, value_error
from weft.peers.ledger import Ledger


@dataclass(frozen=True)
class XlaEngine(TorchEngine):
    """torch-xla; the devices of all processes are one mesh, and the memory of these devices lies elsewhere.

    Attributes:
        axes: Names and sizes of the mesh of devices.
        data_axes: Those along which batches are cut.
    """

    name: str = "xla"
    axes: Axes = ()
    data_axes: tuple[str, ...] = ()
    _mesh: Any = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.axes, self.data_axes)

    @property
    def _lib(self) -> TorchXLA:
        return library()

    # -- devices ---------------------------------------------------------------------------------

    @override
    def device(self, request: str | None, local_rank: int, world_size: int) -> torch.device:
        """The one device that stands for all of this process."""
        if request is not None and torch.device(request).index not in (None, 0):
            raise ContextError(
                f"start: device = {request!r} cannot be chosen",
                found=request,
                expected='"xla": all devices of this host are one mesh, which the process drives alone',
                fix='weft.start(device="xla")',
            )
        check_processes(self._lib, world_size)
        return torch.device("xla", 0)

    def num_devices(self) -> int:
        """The devices of all hosts."""
        return int(self._lib.runtime.global_runtime_device_count())

    def on_mesh(self, axes: Axes, data_axes: tuple[str, ...], world_size: int) -> tuple[Self, Axes]:
        """This engine over a mesh of devices; of the ranks, each of which has several, the outermost axis consists."""
        size = math.prod(size for _, size in axes)
        if world_size > 1 and axes[0][1] % world_size:
            raise ContextError(
                f"start: mesh = {dict(axes)} does not fit {world_size} hosts",
                found=f"{axes[0][1]} devices along {axes[0][0]!r}",
                expected=f"an outermost axis that {world_size} hosts can share",
                fix='weft.start(device="xla", mesh={"data": -1})',
            )
        ranks = tuple((name, world_size if place == 0 else 1) for place, (name, _) in enumerate(axes))
        mesh = None
        if size > 1:
            use_spmd(self._lib)
            spmd = self._lib.spmd
            mesh = spmd.Mesh(list(range(size)), tuple(size for _, size in axes), tuple(name for name, _ in axes))
        return replace(self, axes=axes, data_axes=data_axes, _mesh=mesh), ranks

    @override
    def select(self, device: torch.device) -> None:
        """There is one."""

    def begin(self, device: torch.device, seed: int) -> StepHook[Self]:
        """End the graph with every step of an optimizer; draw random numbers from `seed` on."""
        self.seed(device, seed)
        return after_every_step(self, XlaEngine._end_step)

    def _end_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Other optimizers than those of XLA are left alone."""
        if any(p.device.type == "xla" for p in parameters_of(optimizer)):
            if self._mesh is not None:
                # State that this step has made, while it is a part of the graph; see [Note: marks get lost].
                lay_state(self._mesh, optimizer)
            self._lib.torch_xla.sync()

    @override
    def backend(self, device: torch.device) -> str:
        """What hosts tell each other; tensors travel by XLA."""
        return "gloo"

    def check_dtype(self, what: str, dtype: torch.dtype | None) -> None:
        """Raise if this is float16.

        Raises:
            ValueError: It is.
        """
        if dtype is torch.float16:
            raise value_error(
                f"{what}: xla does not support this policy",
                found="float16, which XLA has no autocast and TPUs have no arithmetic for",
                expected='"bf16", whose range is that of float32 and needs no scale',
                fix='model, ctx = weft.with_precision(model, ctx, "bf16")',
            )

    @override
    def place(self, module: nn.Module, device: torch.device) -> None:
        """Bring a module to the devices; its parameters stay the same objects."""
        place(module, device)

    @override
    def move(self, value: Any, device: torch.device, *, skip: frozenset[str] = frozenset()) -> Any:
        """Put a nested value on the devices, the rows of tensors shared out among them."""
        data_axes = {name: size for name, size in self.axes if name in self.data_axes}
        return send(value, device, skip, self._lib, self._mesh, data_axes)

    @override
    def prefetch(self, batches: Iterable[Any], device: torch.device) -> Iterator[Any]:
        """Yield batches on the devices, copied ahead of use."""
        return prefetch(batches, lambda batch: self.move(batch, device), self._lib)

    @override
    def check_devices(self, what: str, places: Sequence[str]) -> None:
        """Refused: one device stands for all of them.

        Raises:
            ValueError: Always.
        """
        raise value_error(
            f"{what}: not supported on xla",
            found=f"places {', '.join(places)}",
            expected="an engine whose devices are addressed one by one",
            fix="weft.start(device='cpu')",
        )

    @override
    def seed(self, device: torch.device, number: int) -> None:
        """Seed the devices, which `torch.manual_seed` does not reach."""
        self._lib.model.set_rng_state(number % 2**63, str(device))

    @override
    def rng_state(self, device: torch.device) -> torch.Tensor | None:
        """The random state of the devices, one number, as its bytes."""
        number = int(self._lib.model.get_rng_state(str(device))) % 2**64
        return torch.frombuffer(bytearray(number.to_bytes(8, "little")), dtype=torch.uint8)

    @override
    def check_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Raise if this is no random state of XLA."""
        if state.shape != (8,):
            raise ValueError(f"{state.numel()} bytes, where the one number that XLA draws from has 8")

    @override
    def set_rng_state(self, device: torch.device, state: torch.Tensor) -> None:
        """Resume from a random state."""
        self._lib.model.set_rng_state(int.from_bytes(bytes(state.tolist()), "little"), str(device))

    def fetch(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The values of tensors in the memory of the CPU."""
        return fetch(tensors)

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
