"""The parameters of a module that DeepSpeed has divided, whole or in the form that all of weft understands.

That form is one tensor per parameter, sharded over the ranks along its first dimension: what the other strategies hold,
so that a checkpoint of one can be read by any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from weft.engines.deepspeed import internals
from weft.engines.deepspeed.buffers import Buffers
from weft.engines.deepspeed.library import Attributes, GroupView
from weft.tensors.blocks import as_dtensor, block_of, full_tensor


class Parameters:
    """The parameters of one module.

    Attributes:
        names: Their names.
    """

    def __init__(
        self,
        module: nn.Module,
        buffers: Buffers,
        view: GroupView,
        mesh: DeviceMesh | None,
        gathering: Callable[..., Any] | None,
        attributes: Attributes,
    ) -> None:
        """Remember where things are.

        Args:
            module: Whose.
            buffers: Where they lie.
            view: Of the ranks that divide.
            mesh: Of one axis with these ranks, over which tensors are shown sharded; None for one rank.
            gathering: DeepSpeed's context that makes parameters whole; None if they are.
            attributes: What DeepSpeed has hung on the module and its parameters.
        """
        self.names = {p: name for name, p in module.named_parameters()}
        self._buffers = buffers
        self._view = view
        self._mesh = mesh
        self._gathering = gathering
        self._attributes = attributes
        self._shapes = {p: torch.Size(internals.SHAPE.get(p, p.shape)) for p in self.names}
        self._device = next((p.device for p in self.names), torch.device("cpu"))

    def release(self) -> None:
        """Let the mesh go."""
        self._mesh = None

    # -- single tensors --------------------------------------------------------------------------

    @torch.no_grad()
    def whole(self, parameter: nn.Parameter, piece: torch.Tensor) -> torch.Tensor:
        """All of something of which this rank has `piece`, in the parameter's shape."""
        place, shape = self._buffers.places[parameter], self._shapes[parameter]
        flat = torch.zeros(shape.numel(), dtype=piece.dtype, device=self._device)
        flat[place.start : place.start + place.number].copy_(piece.reshape(-1))
        dist.all_reduce(flat, group=self._view.group)  # one rank has each element, the others zeros
        return flat.view(shape)

    def shown(self, whole: torch.Tensor) -> torch.Tensor:
        """The form in which others see it: this rank's rows."""
        if not whole.dim() or self._mesh is None:
            return whole
        return self._sharded(whole[self._rows(whole.shape)].clone(), whole.shape)

    def layout(self, name: str) -> torch.Tensor | None:
        """A tensor without values of its own, cut as this parameter is shown; None if it is shown whole."""
        shape = next((self._shapes[p] for p, own in self.names.items() if own == name), torch.Size())
        if not len(shape) or self._mesh is None:
            return None
        rows = self._rows(shape)
        memory = torch.empty(1, device=self._device)
        return self._sharded(memory.expand(rows.stop - rows.start, *shape[1:]), shape)

    def _rows(self, shape: torch.Size) -> slice:
        """Those that this rank shows."""
        assert self._mesh is not None
        return block_of(shape, self._mesh, [Shard(0)]).slices[0]

    def _sharded(self, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        stride = torch.empty(shape, device="meta").stride()
        found: torch.Tensor = as_dtensor(rows, self._mesh, [Shard(0)], shape, stride)
        return found

    # -- all of them --------------------------------------------------------------------------------

    @torch.no_grad()
    def parameter_shards(self) -> dict[str, torch.Tensor]:
        """All parameters of stage 3, as others see them."""
        shards = {}
        for parameter, name in self.names.items():
            with self._gather([parameter], write=False):
                shards[name] = self.shown(parameter.data.clone())
        return shards

    @torch.no_grad()
    def set_parameters(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Write what `parameter_shards` gave, changed or not."""
        for parameter, name in self.names.items():
            if name in shards:
                value = full_tensor(shards[name])
                with self._gather([parameter], write=True):
                    parameter.data.copy_(value)

    @contextlib.contextmanager
    def _gather(self, parameters: list[nn.Parameter], *, write: bool) -> Iterator[None]:
        """Whole parameters; with `write`, this rank's values are kept."""
        if self._gathering is None:
            yield
            return
        with self._gathering(parameters, modifier_rank=None):
            yield
            if write:
                first: Any = parameters[0]
                first.partition(param_list=parameters, has_been_updated=True)

    @contextlib.contextmanager
    def gathered(self, *, write: bool, then: Callable[[], None]) -> Iterator[None]:
        """Whole parameters; with `write`, rank 0's are those of all ranks afterwards."""
        with self._gather(list(self.names), write=write):
            yield
            for parameter in self.names if write else ():
                dist.broadcast(parameter.data, group=self._view.group, group_src=0)
        if write:
            then()

    # -- the end ---------------------------------------------------------------------------------

    @torch.no_grad()
    def make_plain(self, destroy: Callable[[], None]) -> None:
        """Give the parameters memory of their own, let the engine go, and take off what it hung on them."""
        for parameter in self.names:
            with self._gather([parameter], write=False):
                value = parameter.data.clone()
            parameter.data = value
        destroy()
        self._attributes.take_off()
