"""Experts divided among the ranks of an axis: which rank holds which, and everybody's again when it is undone.

Every token belongs to one rank, every expert to one rank of the axis. A row, which is a token for one of its experts,
is computed where the expert is; so the gradient of an expert is complete there, for the tokens of all ranks of the
axis: the all-to-all's backward has brought them. Numbers are those of one process: no row is dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from weft import torch_internals
from weft.engines.probes import Probe
from weft.engines.torch.hooks.every_optimizer import before_every_step
from weft.engines.torch.hooks.function_transforms import refuse_torch_func
from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.engines.torch.parallel.experts.all_to_all import Line
from weft.engines.torch.parallel.experts.listed import ListedExperts
from weft.engines.torch.parallel.experts.local_losses import refuse_local_losses
from weft.engines.torch.parallel.experts.stacked import StackedExperts
from weft.engines.torch.parallel.experts.whole_experts import ExpertUnits, SplitRows
from weft.engines.torch.parts.dtensor_reads import ReadChecks
from weft.engines.torch.parts.part_gradients import PartGradients
from weft.engines.torch.parts.refuse_pickle import refuse_states
from weft.engines.torch.probes.whole_unit import called_around
from weft.engines.torch.sharded_step.full_params import check_steps_on_shards
from weft.engines.torch.sharded_step.one_kind import step_on_one_kind
from weft.tensors.blocks import as_dtensor, unsharded_parameter
from weft.tensors.dtensor import replace_parameters
from weft.tensors.messages import broadcast
from weft.tensors.remote_parameter import empty_elsewhere


class DividedExperts:
    """The experts of one module, of which each rank of an axis holds equally many, one after the other.

    Attributes:
        owners: By parameter of an expert, by qualified name: the rank that has it; None: each has a part.
        probes: Measure that they compute what all experts on one rank would.

    Args:
        module: Contains them.
        packed: Modules with stacked experts, by qualified name.
        lists: Qualified names of lists with a module per expert.
        mesh: Of the axis.
    """

    def __init__(
        self, module: nn.Module, packed: Mapping[str, nn.Module], lists: Sequence[str], mesh: DeviceMesh
    ) -> None:
        self._module = weakref.ref(module)
        self._removable = Removable()
        self._line = Line(mesh.get_group())
        self.owners = _owners(module, packed, lists, self._line.size)
        named = [(self.owners[n], p) for n, p in _named(module) if n in self.owners]
        real = list(dict.fromkeys(p for _, p in named if not p.is_meta))
        if real:
            broadcast(real, self._line.group)
        replace_parameters(module, {p: _cut(p, mesh) for owner, p in named if owner is None})
        away = [p for owner, p in named if owner not in (None, self._line.place)]
        replace_parameters(module, {p: cast("nn.Parameter", empty_elsewhere(p)) for p in away})
        units: dict[str, nn.Module] = dict(packed)
        self._removable.add(ReadChecks().release)
        refuse_states("expert_parallel", module, self._removable)
        self._gradients = gradients = PartGradients("expert_parallel", module)
        layers: dict[str, StackedExperts | ListedExperts] = {}
        routing = {called_around(module, name.rpartition(".")[0]) for name in packed}
        for name, part in packed.items():
            layers[name] = StackedExperts(name, part, self._line)
            attach(part, self._removable, around=layers[name], methods=["forward"])
        for name in lists:
            around, _, own = name.rpartition(".")
            part, experts = module.get_submodule(around), module.get_submodule(name)
            assert isinstance(experts, nn.ModuleList)
            layer = ListedExperts(name, part, own, experts, self._line)
            attach(part, self._removable, around=layer, methods=["forward"])
            units[around], layers[around] = part, layer
            attach(part, self._removable, after=lambda *called: gradients.follow(called[2]))
            routing.add(around)
        rows = SplitRows({n: module.get_submodule(n) for n in sorted(routing)}, self._line.group, layers, self.owners)
        attach(module, self._removable, before=rows.note_rows, first=True)
        self.probes: tuple[Probe, ...] = (ExpertUnits(units, self._line.group, layers, self.owners), rows)
        refuse_local_losses("expert_parallel", module, self._removable)
        refuse_torch_func("expert_parallel", module, self._removable)
        self._every_step = before_every_step(self, DividedExperts._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps, which no strategy may see: the ranks of the axis can have the same batches."""
        module = self._module()
        held = {id(p) for entry in optimizer.param_groups for p in entry["params"]}
        if module is not None and any(
            id(module.get_parameter(name)) in held for name, owner in self.owners.items() if owner is None
        ):
            check_steps_on_shards("expert_parallel", optimizer)
            for hook in step_on_one_kind(optimizer):
                self._removable.add(hook.remove)

    def release(self) -> None:
        """Let the process group go."""
        self._line.release()
        self._every_step.release()
        self._gradients.release()

    def undo(self) -> None:
        """Give every rank all experts again. Collectives: an all-gather per stacked parameter, a broadcast per rank."""
        module = self._module()
        self._removable.remove()
        if module is not None:
            cut = [p for n, p in _named(module) if self.owners.get(n, 0) is None and isinstance(p, DTensor)]
            replace_parameters(module, {p: unsharded_parameter(p, None) for p in cut})
            for owner in sorted({owner for owner in self.owners.values() if owner is not None}):
                self._bring(module, owner)
        self.release()

    def _bring(self, module: nn.Module, owner: int) -> None:
        """Give every rank the listed experts of one."""
        own = owner == self._line.place
        theirs = list(dict.fromkeys(p for n, p in _named(module) if self.owners.get(n) == owner))
        device = next((p.device for p in module.parameters() if not p.is_meta), torch.device("cpu"))
        whole = {p: p if own else _like(p, device) for p in theirs}
        broadcast(list(whole.values()), self._line.group, owner)
        if not own:
            replace_parameters(module, whole)


def _owners(
    module: nn.Module, packed: Mapping[str, nn.Module], lists: Sequence[str], ranks: int
) -> dict[str, int | None]:
    """By parameter of an expert: the rank that has it; None: each has a part."""
    found: dict[str, int | None] = {}
    for name, part in packed.items():
        found |= dict.fromkeys(f"{name}.{own}".lstrip(".") for own in torch_internals.PARAMETERS.of(part))
    for name in lists:
        experts: Any = module.get_submodule(name)
        for number, expert in enumerate(experts):
            owner = number // (len(experts) // ranks)
            found |= {f"{name}.{number}.{own}": owner for own, _ in _named(expert)}
    return found


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)


def _cut(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    held = len(parameter) // mesh.size()
    first = mesh.get_local_rank() * held
    with torch.no_grad():
        mine = parameter[first : first + held].clone(memory_format=torch.contiguous_format)
        cut = as_dtensor(mine, mesh, [Shard(0)])
    return nn.Parameter(cut, parameter.requires_grad)


def _like(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
