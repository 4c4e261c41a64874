"""Step on whole parameters, each of them on one rank only, its owner.

What ranks hold of a parameter and of its gradient is sent to the owner, who steps as in one process and sends the
parts of the result to everyone: two all-to-alls for a round of parameters, in which each owner has a few. State stays
with the owner, whole, in whatever form the optimizer gives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.steps.rebind import state_as
from weft.engines.torch.steps.swapped import Groups, SwappedStep, check_same_groups, ids_of
from weft.tensors.blocks import Block, divided_as, full_tensor
from weft.tensors.dtensor import local
from weft.tensors.messages import grouped, in_buckets
from weft.tensors.nested import map_tensors

_ALIGNED = 16  # bytes
_ROUND_BYTES = 4 * 2**20


class Owned(NamedTuple):
    """One parameter and its owner.

    Attributes:
        group: The place of its group in the optimizer.
        parameter: Plain or a DTensor.
        owner: The rank that steps on it.
        blocks: What each rank holds of it.
        sources: The ranks whose blocks the owner puts together: the owner alone if it holds all of it.
        nbytes: Of the whole.
    """

    group: int
    parameter: torch.Tensor
    owner: int
    blocks: tuple[Block, ...]
    sources: tuple[int, ...]
    nbytes: int

    @property
    def is_cut(self) -> bool:
        """Whether the owner needs what others hold."""
        return self.sources != (self.owner,)


def assign_owners(groups: Groups, blocks: Sequence[tuple[Block, ...]], num_ranks: int) -> list[Owned]:
    """Choose owners of the parameters in groups so that work and memory are balanced.

    The work is that of a product of the matrix with itself, as Muon and Shampoo do: elements times the shorter side.
    The largest come first, each to the rank with the least work of those that do not hold more than a quarter above
    their share of the memory: so a rank ends with 1.25 times its share and one matrix at most.
    """
    places = [place for place, one in enumerate(groups) for _ in one]
    parameters = [p for one in groups for p in one]
    sizes = [p.numel() * p.element_size() for p in parameters]
    share = sum(sizes) / num_ranks
    work, held = [0.0] * num_ranks, [0] * num_ranks
    chosen = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda at: (-_cost(parameters[at]), at)):
        free = [rank for rank in range(num_ranks) if held[rank] <= 1.25 * share]
        owner = min(free, key=lambda rank: (work[rank], held[rank], rank))
        chosen[place] = owner
        work[owner] += _cost(parameters[place])
        held[owner] += sizes[place]
    return [
        Owned(place, p, owner, found, _sources(found, owner), size)
        for place, p, owner, found, size in zip(places, parameters, chosen, blocks, sizes, strict=True)
    ]


def owner_rounds(every: Sequence[Owned]) -> list[list[Owned]]:
    """Cut the parameters into rounds in which each owner steps on few bytes: one matrix, or several small ones."""
    limit = max([_ROUND_BYTES, *(one.nbytes for one in every)])
    by_owner = grouped(every, lambda one: one.owner).values()
    buckets = (in_buckets(own, lambda one: one.nbytes, limit) for own in by_owner)
    return [list(chain(*together)) for together in zip_longest(*buckets, fillvalue=())]


def _cost(parameter: torch.Tensor) -> int:
    rows = parameter.shape[0] if parameter.dim() > 1 else 1
    return parameter.numel() * max(min(rows, parameter.numel() // max(rows, 1)), 1)


def _sources(blocks: tuple[Block, ...], owner: int) -> tuple[int, ...]:
    """For each block there is, the nearest rank to the owner that holds it."""
    nearest: dict[Block, int] = {}
    for rank in sorted(range(len(blocks)), key=lambda one: (abs(one - owner), one)):
        if math.prod(blocks[rank].shape):
            nearest.setdefault(blocks[rank], rank)
    return tuple(sorted(nearest.values()))


class OwnerStep(SwappedStep):
    """The hooks on one optimizer."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        blocks: Sequence[tuple[Block, ...]],
        share: Callable[..., Any],
        places: Collection[int],
    ) -> None:
        """Hang it on. Collectives: if there is state in shards, which is made whole.

        Args:
            optimizer: Over plain or sharded parameters.
            group: All ranks that hold them.
            blocks: What each rank of it holds, parameter by parameter.
            share: Gives all ranks a nested value of the one that is their `source`.
            places: Of the groups that are stepped on here, whose parameters have owners.
        """
        super().__init__(optimizer, places)
        self._group: dist.ProcessGroup | None = group
        self._rank = dist.get_rank(group)
        self._share = share
        self._held = ids_of(optimizer)
        self._every = assign_owners(self._groups(optimizer), blocks, dist.get_world_size(group))
        self._rounds = owner_rounds(self._every)
        others = {id(one.parameter) for one in self._every if one.owner != self._rank}
        self._mine = {id(p) for p in parameters_of(optimizer)} - others
        self._take_state(optimizer)

    def owns(self, parameter: torch.Tensor) -> bool:
        """Whether this rank keeps the state of a parameter."""
        return id(parameter) in self._mine

    def release(self) -> None:
        """Let the process group go."""
        self._group = None

    @override
    def undo(self) -> None:
        """Take the hooks off and give every rank its part of all state. Collectives: two broadcasts per parameter."""
        optimizer = self._unhook()
        states: Any = {} if optimizer is None else optimizer.state
        for one in self._every:
            state = self._share(states.get(one.parameter), source=one.owner)
            if state:
                states[one.parameter] = map_tensors(partial(state_as, parameter=one.parameter), dict(state))
        self._every, self._rounds = [], []
        self.release()

    @override
    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        for one in self._every:
            state = optimizer.state.pop(one.parameter, None)
            if state:
                whole = map_tensors(full_tensor, dict(state))
                if one.owner == self._rank:
                    optimizer.state[one.parameter] = whole

    @override
    def _step_parts(self, optimizer: torch.optim.Optimizer, groups: Groups) -> None:
        check_same_groups(
            "gather_step: the optimizer got other parameters after its parameters got owners",
            optimizer,
            self._held,
            expected="add_param_group before gather_step",
            fix='optimizer.add_param_group(...); optimizer, ctx = weft.gather_step(optimizer, ctx, by="owner")',
        )
        for every in self._rounds:
            live = [one for one in every if one.parameter.grad is not None]
            if live:
                self._one_round(optimizer, live)

    @torch.no_grad()
    def _one_round(self, optimizer: torch.optim.Optimizer, live: list[Owned]) -> None:
        parts = [(one, _parts(one.parameter)) for one in live]
        mine = [(one, self._whole(one, held)) for one, held in parts if one.owner == self._rank]
        if any(one.is_cut for one, _ in parts):
            self._collect(parts, mine)
        if mine:
            with torch.enable_grad():
                self._step_on(optimizer, [(one.group, one.parameter, whole) for one, whole in mine])
        self._spread(parts, mine)
        # The memory of parameters changed without torch noticing: their version is what tells others.
        torch.autograd.graph.increment_version([one.parameter for one in live])

    def _whole(self, one: Owned, parts: tuple[torch.Tensor, torch.Tensor]) -> nn.Parameter:
        """What the owner steps on: its own memory if it holds all, else memory for the blocks of all."""
        values, gradient = parts
        whole = nn.Parameter(values.new_empty(one.parameter.shape) if one.is_cut else values)
        whole.grad = gradient.new_empty(one.parameter.shape) if one.is_cut else gradient
        return whole

    def _collect(self, parts: list[_Pair], mine: list[tuple[Owned, nn.Parameter]]) -> None:
        """Send blocks of parameters and gradients to the owners."""
        there = self._outlets()
        for one, held in parts:
            if one.is_cut and self._rank in one.sources:
                there[one.owner] += held
        here = self._outlets()
        for one, whole in mine:
            for source in one.sources if one.is_cut else ():
                assert whole.grad is not None
                here[source] += [whole.data[one.blocks[source].slices], whole.grad[one.blocks[source].slices]]
        self._exchange(there, here)

    def _spread(self, parts: list[_Pair], mine: list[tuple[Owned, nn.Parameter]]) -> None:
        """Send blocks of what the owners stepped on to all who hold them."""
        there = self._outlets()
        for one, whole in mine:
            for rank, block in enumerate(one.blocks):
                there[rank].append(whole.data[block.slices])
        here = self._outlets()
        for one, (values, _) in parts:
            here[one.owner].append(values)
        self._exchange(there, here)

    def _outlets(self) -> list[list[torch.Tensor]]:
        assert self._group is not None
        return [[] for _ in range(dist.get_world_size(self._group))]

    def _exchange(self, there: list[list[torch.Tensor]], here: list[list[torch.Tensor]]) -> None:
        """One all-to-all: tensors for each rank, to be copied into tensors of the same shapes and dtypes there."""
        for target, sent in zip(here[self._rank], there[self._rank], strict=True):
            if target.data_ptr() != sent.data_ptr():
                target.copy_(sent)
        there[self._rank], here[self._rank] = [], []
        device = self._every[0].parameter.device
        out_sizes, in_sizes = [sum(map(_room, one)) for one in there], [sum(map(_room, one)) for one in here]
        out = torch.empty(sum(out_sizes), dtype=torch.uint8, device=device)
        into = torch.empty(sum(in_sizes), dtype=torch.uint8, device=device)
        for place, sent in _placed(out, there):
            place.copy_(sent)
        dist.all_to_all_single(into, out, in_sizes, out_sizes, group=self._group)
        for place, target in _placed(into, here):
            target.copy_(place)


_Pair = tuple[Owned, tuple[torch.Tensor, torch.Tensor]]


def _parts(parameter: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank holds of a parameter and of its gradient."""
    assert parameter.grad is not None
    return local(parameter.detach()), local(divided_as(parameter.grad, parameter))


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNED) * _ALIGNED


def _placed(data: torch.Tensor, tensors: list[list[torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The place of each tensor in a message, and the tensor."""
    found = []
    start = 0
    for one in (tensor for some in tensors for tensor in some):
        place = data[start : start + one.numel() * one.element_size()]
        found.append((place.view(one.dtype).view(one.shape), one))
        start += _room(one)
    return found
