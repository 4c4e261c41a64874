"""Parameters and the optimizer's state, between DeepSpeed's flat tensors and the form all of weft understands.

That form is one tensor per parameter and name, cut over the ranks along its first dimension: what the other
strategies hold, so that a checkpoint of one can be read by any other.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from weft.engines.deepspeed.buffers import Buffers, Place, chunks_of
from weft.engines.deepspeed.library import Attributes
from weft.engines.torch.optim.flat_step import SHARED_STATE
from weft.errors import ContractError, listed

__all__ = ["State"]


class State:
    """The parameters of one module, and the state of its optimizer."""

    def __init__(
        self,
        module: nn.Module,
        buffers: Buffers,
        group: dist.ProcessGroup,
        mesh: DeviceMesh | None,
        gathering: Callable[..., Any] | None,
        attributes: Attributes,
    ) -> None:
        """Remember where things are.

        Args:
            module: Whose.
            buffers: Where they lie.
            group: The ranks that divide.
            mesh: Of one axis with these ranks, over which state is shown cut; None for one rank.
            gathering: DeepSpeed's context that makes parameters whole; None if they are.
            attributes: What was hung on the module and its parameters.
        """
        self._module = weakref.ref(module)
        self._buffers = buffers
        self._group: dist.ProcessGroup | None = group
        self._mesh = mesh
        self._gathering = gathering
        self._attributes = attributes
        self._names = {p: name for name, p in module.named_parameters()}
        self._shapes: dict[nn.Parameter, torch.Size] = {
            p: torch.Size(getattr(p, "ds_shape", p.shape)) for p in self._names
        }
        self._is_new = True  # nobody has given state to DeepSpeed's optimizer
        self._device = next((p.device for p in self._names), torch.device("cpu"))

    def release(self) -> None:
        """Let the process group go."""
        self._group = self._mesh = None

    # -- single tensors --------------------------------------------------------------------------

    @torch.no_grad()
    def whole(self, parameter: nn.Parameter, piece: torch.Tensor) -> torch.Tensor:
        """All of something of which this rank has `piece`, in the parameter's shape."""
        place, shape = self._buffers.places[parameter], self._shapes[parameter]
        flat = torch.zeros(shape.numel(), dtype=piece.dtype, device=self._device)
        flat[place.start : place.start + place.number].copy_(piece.reshape(-1))
        dist.all_reduce(flat, group=self._group)  # one rank has each element, the others zeros
        return flat.view(shape)

    def _shown(self, whole: torch.Tensor) -> torch.Tensor:
        """The form in which others see it: this rank's rows."""
        if not whole.dim() or self._mesh is None:
            return whole
        cut: Any = distribute_tensor(whole, self._mesh, [Shard(0)], src_data_rank=None)
        local = cut.to_local().clone()
        shown: torch.Tensor = DTensor.from_local(
            local, self._mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return shown

    def layout(self, name: str) -> torch.Tensor | None:
        """A tensor without values of its own, cut as this parameter is shown; None if it is shown whole."""
        shape = next((self._shapes[p] for p, own in self._names.items() if own == name), torch.Size())
        if not len(shape) or self._mesh is None:
            return None
        rows = torch.arange(shape[0]).chunk(self._mesh.size())
        place = self._mesh.get_local_rank()
        local = (len(rows[place]) if place < len(rows) else 0, *shape[1:])
        memory = torch.empty(1, device=self._device).expand(local)
        stride = torch.empty(shape, device="meta").stride()
        found: torch.Tensor = DTensor.from_local(
            memory, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )
        return found

    # -- parameters ------------------------------------------------------------------------------

    @torch.no_grad()
    def parameter_shards(self) -> dict[str, torch.Tensor]:
        """All parameters of stage 3, as others see them."""
        shards = {}
        for parameter, name in self._names.items():
            with self._gather([parameter], write=False):
                shards[name] = self._shown(parameter.data.clone())
        return shards

    @torch.no_grad()
    def set_parameters(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Write what `parameter_shards` gave, changed or not."""
        for parameter, name in self._names.items():
            if name in shards:
                value = _full(shards[name])
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
        with self._gather(list(self._names), write=write):
            yield
            for parameter in self._names if write else ():
                dist.broadcast(parameter.data, group=self._group, group_src=0)
        if write:
            then()

    # -- the optimizer's state -------------------------------------------------------------------

    @torch.no_grad()
    def show(self, optimizer: torch.optim.Optimizer, *, whole: bool = False) -> None:
        """Put the state into `optimizer.state`, by parameter."""
        buffers = self._buffers
        for group in range(buffers.groups()):
            flat, state = buffers.opened(group)
            for parameter, place in chunks_of(buffers.places, group):
                shown: dict[str, Any] = {}
                for key, value in state.items():
                    if _is_flat(value, flat):
                        full = self.whole(parameter, value.view(-1)[place.at : place.at + place.number])
                        shown[key] = full if whole else self._shown(full)
                    else:
                        shown[key] = value.clone() if isinstance(value, torch.Tensor) else value
                if shown:
                    optimizer.state[parameter] = shown
            buffers.close(group, changed=False)

    @torch.no_grad()
    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the state out of `optimizer.state`.

        What lies on a disk is known there by its tensor: tensors are overwritten and not replaced.
        """
        buffers = self._buffers
        if self._is_new and not optimizer.state:
            return
        self._is_new = False
        for group in range(buffers.groups()):
            given = {p: optimizer.state.get(p) or {} for p, _ in chunks_of(buffers.places, group)}
            self._check(given)
            flat, state = buffers.opened(group)
            values = next(iter(given.values()), {})
            for key in set(state) - set(values):
                del state[key]
            for key, value in values.items():
                if not isinstance(value, torch.Tensor) or key in SHARED_STATE:
                    state[key] = value.clone() if isinstance(value, torch.Tensor) else value
                elif not _is_flat(state.get(key), flat):
                    state[key] = torch.zeros_like(flat)
            for parameter, place in chunks_of(buffers.places, group):
                self._fill(flat, state, given[parameter], place)
            buffers.close(group, changed=True)

    def _fill(self, flat: torch.Tensor, state: Mapping[str, Any], given: Mapping[str, Any], place: Place) -> None:
        for key, value in given.items():
            target = state[key]
            if _is_flat(target, flat):
                values = _full(value).reshape(-1)[place.start : place.start + place.number]
                target.view(-1)[place.at : place.at + place.number].copy_(values)

    def _check(self, given: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """All parameters of a flat tensor share one state: raise if they differ."""
        keys = {tuple(state) for state in given.values()}
        counts = {float(state["step"]) for state in given.values() if "step" in state}
        differing = [f"step = {sorted(counts)}"] if len(counts) > 1 else []
        if len(keys) > 1:
            differing.append(f"state of {listed(sorted(self._names[p] for p, state in given.items() if state))} only")
        if differing:
            raise ContractError(
                "zero_partition: the parameters of one group have been trained differently",
                found=listed(differing),
                expected="one count of steps per group of the optimizer: DeepSpeed steps on all of it together",
                fix="a group of its own for each kind of parameters",
            )

    # -- the end ---------------------------------------------------------------------------------

    @torch.no_grad()
    def make_plain(self, destroy: Callable[[], None]) -> None:
        """Give the parameters memory of their own, let the engine go, and take off what it hung on them."""
        if self._gathering is not None:
            for parameter in self._names:
                with self._gather([parameter], write=False):
                    value = parameter.data.clone()
                parameter.data = value
        else:
            for parameter in self._names:
                parameter.data = parameter.data.clone()
        destroy()
        self._attributes.take_off()


def _is_flat(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == flat.numel()


def _full(value: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return found
