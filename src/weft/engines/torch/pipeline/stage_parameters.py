"""The parameters of stages: aliases of this rank's for the passes of a schedule, and those that another rank lends.

[Note: aliases] A schedule runs backward passes inside a call. Their gradients are not those of the module yet: what
arrives at the loss later multiplies them, and strategies and hooks on the parameters may see them only then. So a
pass runs on aliases: parameters of their own that share memory with the module's.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft import torch_internals
from weft.engines.torch.hooks.every_optimizer import before_every_step, parameters_of
from weft.engines.torch.probes.compare import largest_over
from weft.private_names import replaced
from weft.tensors.blocks import divided_as
from weft.tensors.dtensor import is_fsdp_unit, is_sharded, local, replace_parameters, resting_parameters, state_of


class Aliases:
    """The aliases of the parameters of one module."""

    def __init__(self) -> None:
        self._made: dict[nn.Parameter, nn.Parameter] = {}

    @contextlib.contextmanager
    def in_place(self, module: nn.Module) -> Iterator[Mapping[nn.Parameter, nn.Parameter]]:
        """Let a module compute with aliases inside the body; those on meta stay.

        Yields:
            The parameters of the module, each with its alias, whose gradient is None.
        """
        made = self._made = {p: self._alias(p) for p in module.parameters() if not p.is_meta}
        replace_parameters(module, made)
        try:
            yield made
        finally:
            replace_parameters(module, {alias: p for p, alias in made.items()})

    def forget(self) -> None:
        """Let go of what was made."""
        self._made = {}

    def _alias(self, parameter: nn.Parameter) -> nn.Parameter:
        made = self._made.get(parameter)
        if made is None or not _same_memory(parameter, made):
            made = nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            vars(made).update(vars(parameter))
        made.requires_grad_(parameter.requires_grad)
        made.grad = None
        return made


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = local(one), local(other)
    address = torch_internals.STORAGE_ADDRESS.of
    return address(first.untyped_storage()) == address(second.untyped_storage()) and first.shape == second.shape


@contextlib.contextmanager
def gather_units_once(module: nn.Module) -> Iterator[None]:
    """Let FSDP2 gather all units of a module at once, and not for each micro-batch.

    Inside, its hooks on the units take the calls for those of a second run in backward, for which backward has
    gathered the parameters. What was gathered is freed by the end of backward.

    Yields:
        Nothing.
    """
    units: list[Any] = [part for part in module.modules() if part is not module and is_fsdp_unit(part)]
    for unit in units:
        unit.unshard()
    with contextlib.ExitStack() as stack:
        for state in {id(state): state for state in map(state_of, units)}.values():
            training = {torch_internals.STATE_TRAINING.name: torch_internals.BEFORE_BACKWARD.found}
            stack.enter_context(replaced(state, **training))
        yield


class TiedGradients:
    """The gradients of parameters that stages of several ranks use: what one process adds up in one backward pass.

    Strategies reduce the gradients of each stage in messages of other sizes, and so add up in another order. Before a
    step, all copies get the bits of the first one's gradient: what they are is then equal for ever.

    Args:
        ranks: Of the group: those that have a copy of a parameter, by its name.
        group: The ranks of the pipeline.
    """

    def __init__(self, ranks: Mapping[str, Sequence[int]], group: dist.ProcessGroup) -> None:
        self._mine = dist.get_rank(group)
        self._ranks = {name: there for name, there in ranks.items() if self._mine in there}
        self._group = group
        self._module: weakref.ref[nn.Module] | None = None
        self._hook: Any = None

    def add_up(self, module: nn.Module) -> None:
        """Let the parameters of a module have the sum of the gradients of all copies, with the same bits on each.

        Collectives: for each parameter that is trained, a message from each of its ranks to each other one.
        """
        for name, ranks in self._ranks.items():
            parameter = module.get_parameter(name)
            if parameter.requires_grad:
                own = _like_parameter(parameter)
                found = {rank: own if rank == self._mine else torch.empty_like(own) for rank in ranks}
                others = [rank for rank in ranks if rank != self._mine]
                self._exchange(dict.fromkeys(others, own), {rank: found[rank] for rank in others})
                own.copy_(functools.reduce(torch.add, found.values()))
        if self._ranks and self._hook is None:  # now: strategies, which come later, have their hooks before this one
            self._module = weakref.ref(module)
            self._hook = before_every_step(self, TiedGradients._take_first)

    @torch.no_grad()
    def _take_first(self, optimizer: torch.optim.Optimizer) -> None:
        """Before a step: let all copies have the gradient of the first. Collectives: a message to each other rank."""
        module = None if self._module is None else self._module()
        if module is None:
            return
        names = [name for name, _ in module.named_parameters()]
        named, held = dict(zip(names, resting_parameters(module), strict=True)), set(map(id, parameters_of(optimizer)))
        for name, (first, *others) in self._ranks.items():
            if id(named[name]) in held and named[name].grad is not None:
                own = _like_parameter(named[name])
                is_first = self._mine == first
                self._exchange(dict.fromkeys(others, own) if is_first else {}, {} if is_first else {first: own})

    def release(self) -> None:
        """Take the hook off."""
        if self._hook is not None:
            self._hook.release()

    def _exchange(self, sent: Mapping[int, torch.Tensor], received: Mapping[int, torch.Tensor]) -> None:
        pairs = [(dist.isend, *one) for one in sent.items()] + [(dist.irecv, *one) for one in received.items()]
        messages = [
            dist.P2POp(kind, tensor, group=self._group, group_peer=rank)
            for kind, rank, tensor in pairs
            if tensor.numel()
        ]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()


def _like_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """What of the gradient of a parameter lies on this rank, dense and divided as the parameter is, in its memory."""
    gradient: Any = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    gradient = divided_as(gradient.to_dense() if gradient.is_sparse else gradient, parameter)
    if not local(gradient).is_contiguous():
        gradient = gradient.contiguous()
    parameter.grad = gradient
    return local(gradient)


@dataclass(eq=False, repr=False)
class LentLayers:
    """Layers of other stages on this rank, with what the rank of their stage lends for one call."""

    _module: nn.Module
    stages: InitVar[Sequence[Sequence[str]]]
    _owners: Sequence[int]
    _group: dist.ProcessGroup
    _device: torch.device

    def __post_init__(self, stages: Sequence[Sequence[str]]) -> None:
        self._slots = {name: _slots(self._module, name) for names in stages for name in names}

    def can_lend(self) -> bool:
        """Whether no rank has shards. Collectives: one all-reduce."""
        cut = any(map(is_sharded, self._module.parameters())) or any(map(is_fsdp_unit, self._module.modules()))
        return not largest_over(self._group, [float(cut)], self._device)[0]

    @contextlib.contextmanager
    def lend(self, stage: int, name: str) -> Iterator[None]:
        """Let all ranks have what a layer of a stage has. Collectives: one broadcast per parameter and buffer.

        Yields:
            Nothing.
        """
        mine = self._owners[stage] == dist.get_rank(self._group)
        before = []
        try:
            for held, key in self._slots[name]:
                like = held[key]
                value = torch.empty(like.shape, dtype=like.dtype, device=self._device)
                if mine:
                    value.copy_(like.detach())
                dist.broadcast(value, group=self._group, group_src=self._owners[stage])
                if not mine:
                    before.append((held, key, like))
                    held[key] = nn.Parameter(value, requires_grad=False) if isinstance(like, nn.Parameter) else value
            yield
        finally:
            for held, key, like in before:
                held[key] = like


def _slots(module: nn.Module, name: str) -> list[tuple[dict[str, Any], str]]:
    place, _, own = name.rpartition(".")
    slots = torch_internals.PARAMETERS.of(module.get_submodule(place))
    if own in slots:
        return [(slots, own)]
    parts = module.get_submodule(name).modules()
    kinds = (torch_internals.PARAMETERS, torch_internals.BUFFERS)
    dicts: list[dict[str, Any]] = [kind.of(part) for part in parts for kind in kinds]
    return [(held, key) for held in dicts for key, tensor in held.items() if tensor is not None]
