"""The parameters that DeepSpeed has divided, and their optimizer's state, in the form that all of weft understands.

That form is one tensor per parameter, sharded over the ranks along its first dimension: what the other strategies hold,
so that a checkpoint of one can be read by any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from weft.engines.deepspeed import internals
from weft.engines.deepspeed.buffers import Buffers
from weft.engines.deepspeed.library import Attributes, GroupView
from weft.engines.torch.steps.swapped import SHARED_STATE
from weft.errors import ContractError, listed
from weft.tensors.blocks import as_dtensor, block_of, cut_as, full_tensor


@dataclass(eq=False, repr=False)
class Parameters:
    """The parameters of one module, and the state of its optimizer.

    Args:
        module: Whose.
        _buffers: Where they lie.
        _view: Of the ranks that divide.
        _mesh: Of one axis with these ranks, over which tensors are shown sharded; None for one rank.
        _gathering: DeepSpeed's context that makes parameters whole; None if they are.
        _attributes: What DeepSpeed has hung on the module and its parameters.

    Attributes:
        names: Their names.
    """

    module: InitVar[nn.Module]
    _buffers: Buffers
    _view: GroupView
    _mesh: DeviceMesh | None
    _gathering: Callable[..., Any] | None
    _attributes: Attributes

    def __post_init__(self, module: nn.Module) -> None:
        self.names = {p: name for name, p in module.named_parameters()}
        self._shapes = {p: torch.Size(internals.SHAPE.get(p, p.shape)) for p in self.names}
        self._has_state = False  # DeepSpeed's optimizer was given some
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
        layout = self._layout(whole.shape)
        return whole if layout is None else cut_as(whole, layout)

    def layout(self, name: str) -> torch.Tensor | None:
        """A tensor without values of its own, cut as this parameter is shown; None if it is shown whole."""
        return self._layout(next((self._shapes[p] for p, own in self.names.items() if own == name), torch.Size()))

    def _layout(self, shape: torch.Size) -> torch.Tensor | None:
        if not len(shape) or self._mesh is None:
            return None
        rows = torch.empty(1, device=self._device).expand(block_of(shape, self._mesh, [Shard(0)]).shape)
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

    # -- the optimizer's state, between DeepSpeed's flat tensors and `optimizer.state` ----------------

    @torch.no_grad()
    def show_state(self, optimizer: torch.optim.Optimizer, *, whole: bool = False) -> None:
        """Put the state into `optimizer.state`, by parameter."""
        for group, held in self._buffers.groups().items():
            with self._buffers.opened(group, change=False) as (flat, state):
                for parameter, place in held:
                    shown: dict[str, Any] = {}
                    for key, value in state.items():
                        if _is_flat(value, flat):
                            full = self.whole(parameter, value.view(-1)[place.at : place.at + place.number])
                            shown[key] = full if whole else self.shown(full)
                        else:
                            shown[key] = value.clone() if isinstance(value, torch.Tensor) else value
                    if shown:
                        optimizer.state[parameter] = shown

    @torch.no_grad()
    def take_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the state out of `optimizer.state`.

        What lies on a disk is known there by its tensor: tensors are overwritten and not replaced.
        """
        if not self._has_state and not optimizer.state:
            return
        self._has_state = True
        for group, held in self._buffers.groups().items():
            given = {p: optimizer.state.get(p) or {} for p, _ in held}
            self._check_alike(given)
            with self._buffers.opened(group, change=True) as (flat, state):
                values = next(iter(given.values()))
                for key in set(state) - set(values):
                    del state[key]
                for key, value in values.items():
                    if not isinstance(value, torch.Tensor) or key in SHARED_STATE:
                        state[key] = value.clone() if isinstance(value, torch.Tensor) else value
                    elif not _is_flat(state.get(key), flat):
                        state[key] = torch.zeros_like(flat)
                for parameter, place in held:
                    flats = {key: value for key, value in given[parameter].items() if _is_flat(state[key], flat)}
                    for key, value in flats.items():
                        values = full_tensor(value).reshape(-1)[place.start : place.start + place.number]
                        state[key].view(-1)[place.at : place.at + place.number].copy_(values)

    def _check_alike(self, given: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """All parameters of a flat tensor share one state: raise if they differ."""
        keys = {tuple(state) for state in given.values()}
        counts = {float(state["step"]) for state in given.values() if "step" in state}
        differing = [f"step = {sorted(counts)}"] if len(counts) > 1 else []
        if len(keys) > 1:
            differing.append(f"state of {listed(sorted(self.names[p] for p, state in given.items() if state))} only")
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
        for parameter in self.names:
            with self._gather([parameter], write=False):
                value = parameter.data.clone()
            parameter.data = value
        destroy()
        self._attributes.take_off()


def _is_flat(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == flat.numel()
