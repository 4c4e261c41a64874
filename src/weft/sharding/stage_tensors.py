"""Which rank of a pipeline keeps which parameters; on the others they are on meta, under their own names.

[Note: tied over stages] A tensor that layers of several stages use, as an embedding that is the head as well, is on
each of their ranks, and there it is one tensor under all its names. The ranks begin with the same values, the calls of
the module add up the gradients, and so each rank updates its copy alike. The first of them owns it: its gradient counts
in norms and is the one that all step on, and its values are what `undo` gives to all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import attrgetter
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
from weft.sharding.meta import Materializer, own_tensors, tensor_slots
from weft.sharding.stages import PipelinePlan, stages_of
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
        self._ranks = _ranks_of(module, plan, owners)
        # What no rank of the line has, as an expert of another rank.
        self._missing = frozenset(
            name for name, p in module.named_parameters(remove_duplicate=False) if is_elsewhere(p)
        )
        self._layers = frozenset(name for names in plan.stages for name in names)

    @property
    def copies(self) -> dict[str, tuple[int, ...]]:
        """The ranks that have a copy of a tied parameter, by one of its names; see [Note: tied over stages]."""
        module = self._module()
        named = () if module is None else module.named_parameters()
        return {name: ranks for name, _ in named if len(ranks := self._ranks.get(name, ())) > 1}

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
        if source is not None:
            source.leave(part for name, part in module.named_modules() if self._is_elsewhere(name, part))
            source.make_real(module)
            source.forget()
        for name, part, tensors in list(self._parts(module)):
            if source is None:
                place_module("pipeline", part, self._ctx)
                self._ctx.engine.broadcast_state([attrgetter(one)(part) for one in tensors], _group(self._line))
            self._let_go(name, part, made)
        for name, parameter in list(module.named_parameters(remove_duplicate=False)):
            is_loose = not any(name.startswith(f"{layer}.") for layer in self._layers)
            if name in self._layers and is_loose:
                self._keep_loose(module, name, parameter, made)

    def undo(self) -> None:
        """Give every rank all parameters and buffers, and the state of optimizers for them. Collectives: broadcasts."""
        module = self._module()
        assert module is not None
        bring_state(module, self._owner, self._line)
        made: dict[int, torch.Tensor] = {}
        for prefix, part in module.named_modules():
            for kind, name, tensor in tensor_slots(part):
                full_name = f"{prefix}.{name}" if prefix else name
                owner = self._owner(full_name)
                if owner is None or full_name in self._missing:
                    continue
                if id(tensor) not in made:
                    made[id(tensor)] = self._brought(tensor, owner)
                kind[name] = made[id(tensor)]

    # -- how -------------------------------------------------------------------------------------

    def _owner(self, name: str) -> int | None:
        return next(iter(self._ranks.get(name, ())), None)

    def _is_elsewhere(self, name: str, part: nn.Module | None = None) -> bool:
        """Whether other ranks have a tensor, or all of a module's own ones."""
        names = [name] if part is None else [f"{name}.{own}" if name else own for own, _ in own_tensors(part)]
        return bool(names) and all(self._line.rank not in self._ranks.get(one, (self._line.rank,)) for one in names)

    def _parts(self, module: nn.Module) -> Iterator[tuple[str, nn.Module, list[str]]]:
        """The layers, and the modules outside of all layers that have no children.

        Yields:
            The name of each, itself, and the names in it of the tensors that no part before it has.
        """
        inside: set[int] = set()
        for name, part in module.named_modules():
            if id(part) in inside:
                continue
            if name in self._layers:
                inside |= {id(one) for one in part.modules()}
            if name in self._layers or not any(True for _ in part.children()):
                named = dict((*part.named_parameters(), *part.named_buffers()))
                yield name, part, [own for own, tensor in named.items() if id(tensor) not in inside]
                inside |= set(map(id, named.values()))

    def _let_go(self, prefix: str, part: nn.Module, made: dict[int, Any]) -> None:
        """Put tensors without memory in the place of those that other ranks have."""
        for path, one in part.named_modules(prefix=prefix):
            for kind, own, tensor in tensor_slots(one):
                if not is_elsewhere(tensor) and self._is_elsewhere(f"{path}.{own}"):
                    kind[own] = made.setdefault(id(tensor), empty_elsewhere(tensor))

    def _keep_loose(self, module: nn.Module, name: str, parameter: nn.Parameter, made: dict[int, Any]) -> None:
        prefix, _, own = name.rpartition(".")
        if parameter.device != self._ctx.device and not parameter.is_meta:
            parameter.data = parameter.data.to(self._ctx.device)
        if not parameter.is_meta:
            dist.broadcast(local(parameter.detach()), group=_group(self._line), group_src=0)
        if self._is_elsewhere(name):
            part = module.get_submodule(prefix)
            torch_internals.PARAMETERS.of(part)[own] = made.setdefault(id(parameter), empty_elsewhere(parameter))

    def _brought(self, tensor: torch.Tensor, owner: int) -> torch.Tensor:
        real = tensor
        if is_elsewhere(tensor):
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


def _ranks_of(module: nn.Module, plan: PipelinePlan, owners: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The ranks that have each tensor of the stages, in their order, by each of its names."""
    kinds = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    named = {name: tensor for kind in kinds for name, tensor in kind}
    stages: dict[int, set[int]] = {}
    for name, tensor in named.items():
        stages.setdefault(id(tensor), set()).update(stages_of(plan, name))
    ranks = {one: tuple(dict.fromkeys(owners[number] for number in sorted(found))) for one, found in stages.items()}
    return {name: ranks[id(tensor)] for name, tensor in named.items() if ranks[id(tensor)]}


def _group(line: DistContext) -> dist.ProcessGroup:
    assert line.group is not None
    return line.group
