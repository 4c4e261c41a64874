"""Which rank of a pipeline keeps which parameters; on the others they are on meta, under their own names."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft import torch_internals
from weft.collectives import broadcast
from weft.context import DistContext
from weft.context.placement import place_module
from weft.contract import Layout, gradient_axes
from weft.engines.torch.hooks.every_optimizer import optimizers_of, parameters_of
from weft.sharding.meta import Materializer
from weft.sharding.stages import PipelinePlan, stage_of
from weft.tensors.blocks import full_tensor
from weft.tensors.dtensor import local
from weft.tensors.nested import map_tensors
from weft.tensors.remote_parameter import empty_elsewhere, forget_elsewhere, is_elsewhere


class StageTensors:
    """The parameters and buffers of a module whose layers lie on the ranks of a pipeline; `Placed` of the contract."""

    def __init__(
        self, module: nn.Module, ctx: DistContext, axis: str, plan: PipelinePlan, owners: Sequence[int]
    ) -> None:
        self._module = weakref.ref(module)
        self._ctx = ctx
        self._line = ctx.on(axis)
        self._axis = axis
        self._plan = plan
        self._owners = owners
        # What no rank of the line has, as an expert of another rank.
        self._missing = frozenset(
            name for name, p in module.named_parameters(remove_duplicate=False) if is_elsewhere(p)
        )

    def layout(self, name: str) -> Layout | None:
        """The ranks that have a parameter."""
        module, owner = self._module(), self._owner(name)
        if owner is None or module is None:
            return None
        return Layout(owner=((self._axis, owner),), reduce_over=gradient_axes(module, self._ctx))

    def keep(self, source: Materializer | None) -> None:
        """Keep the stages of this rank, with the values of the first one; leave no memory for the others.

        Args:
            source: Of values for a module on meta, each read or drawn where it is kept.
        """
        module = self._module()
        assert module is not None
        made: dict[int, Any] = {}
        parts = list(self._parts(module))
        if source is not None:
            for part, owner in parts:
                if owner not in (None, self._line.rank):
                    source.leave(part)
            source.make_real(module)
            source.forget()
        for part, owner in parts:
            if source is None:
                place_module("pipeline", part, self._ctx)
                tensors = [*part.parameters(), *part.buffers()]
                self._ctx.engine.broadcast_state(tensors, _group(self._line))
            if owner not in (None, self._line.rank):
                _let_go(part, made)
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            if name in {layer for stage in self._plan.stages for layer in stage}:  # a parameter of no layer
                self._keep_loose(module, name, parameter, made)

    def undo(self) -> None:
        """Give every rank all parameters and buffers, and the state of optimizers for them. Collectives: broadcasts."""
        module = self._module()
        assert module is not None
        bring_state(module, self._owner, self._line)
        made: dict[int, torch.Tensor] = {}
        for prefix, part in module.named_modules():
            kinds: tuple[dict[str, Any], ...] = (torch_internals.PARAMETERS.of(part), torch_internals.BUFFERS.of(part))
            for kind in kinds:
                for name, tensor in kind.items():
                    full_name = f"{prefix}.{name}" if prefix else name
                    owner = self._owner(full_name)
                    if tensor is None or owner is None or full_name in self._missing:
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = self._brought(tensor, owner)
                    kind[name] = made[id(tensor)]

    # -- how -------------------------------------------------------------------------------------

    def _owner(self, name: str) -> int | None:
        stage = stage_of(self._plan, name)
        return None if stage is None else self._owners[stage]

    def _parts(self, module: nn.Module) -> Iterator[tuple[nn.Module, int | None]]:
        """The layers, and the modules outside of all layers without their children; each with its owner."""
        inside: set[int] = set()
        for name, part in module.named_modules():
            if id(part) in inside:
                continue
            owner = self._owner(name) if name else None
            if owner is not None:
                inside |= {id(one) for one in part.modules()}
                yield part, owner
            elif not any(True for _ in part.children()):
                yield part, None

    def _keep_loose(self, module: nn.Module, name: str, parameter: nn.Parameter, made: dict[int, Any]) -> None:
        prefix, _, own = name.rpartition(".")
        owner = self._owner(name)
        if parameter.device != self._ctx.device and not parameter.is_meta:
            parameter.data = parameter.data.to(self._ctx.device)
        if not parameter.is_meta:
            dist.broadcast(local(parameter.detach()), group=_group(self._line), group_src=0)
        if owner != self._line.rank:
            part = module.get_submodule(prefix)
            torch_internals.PARAMETERS.of(part)[own] = made.setdefault(id(parameter), empty_elsewhere(parameter))

    def _brought(self, tensor: torch.Tensor, owner: int) -> torch.Tensor:
        real = tensor
        if owner != self._line.rank:
            forget_elsewhere(tensor)
            empty = torch.empty_like(tensor.detach(), device=self._ctx.device)
            real = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
        values = local(real.detach()).contiguous()
        dist.broadcast(values, group=_group(self._line), group_src=owner)
        if owner != self._line.rank:
            local(real.detach()).copy_(values)
        return real


def bring_state(module: nn.Module, owner_of: Callable[[str], int | None], line: DistContext) -> None:
    """Give all ranks the state that optimizers have for a parameter where it is.

    Collectives: a broadcast of each; where it is cut over other axes, all-gathers before that.

    Args:
        module: Whose parameters.
        owner_of: The rank of `line` that has a parameter, by name; None if all have it.
        line: The ranks among which they lie.
    """
    from weft.engines.torch.steps.rebind import state_as  # noqa: PLC0415  (half a second of imports in torch)

    named = {id(p): name for name, p in module.named_parameters()}
    found = {
        str([[named.get(id(p), "") for p in entry["params"]] for entry in one.param_groups]): one
        for one in optimizers_of(list(module.parameters()))
    }
    for _, optimizer in sorted(found.items()):
        for parameter in [p for p in parameters_of(optimizer) if id(p) in named]:
            owner = owner_of(named[id(parameter)])
            if owner is None:
                continue
            mine = optimizer.state.get(parameter, {}) if owner == line.rank else {}
            state = broadcast(map_tensors(full_tensor, dict(mine)), line, source=owner)
            if state and owner != line.rank:
                optimizer.state[parameter] = map_tensors(partial(state_as, parameter=parameter), state)


def forget_state(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Let optimizers forget the state of parameters that are elsewhere now."""
    for parameter in module.parameters():
        if parameter.is_meta:
            parameter.grad = None
            for optimizer in optimizers:
                optimizer.state.pop(parameter, None)


def _let_go(part: nn.Module, made: dict[int, Any]) -> None:
    for one in part.modules():
        for name, parameter in torch_internals.PARAMETERS.of(one).items():
            if parameter is not None:
                torch_internals.PARAMETERS.of(one)[name] = made.setdefault(id(parameter), empty_elsewhere(parameter))
        for name, buffer in torch_internals.BUFFERS.of(one).items():
            if buffer is not None:
                torch_internals.BUFFERS.of(one)[name] = empty_elsewhere(buffer)


def _group(line: DistContext) -> dist.ProcessGroup:
    assert line.group is not None
    return line.group
