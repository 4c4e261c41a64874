"""Which rank owns which parameter, and who sends what of it: known from shapes alone, alike on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

_ROUND_BYTES = 4 * 2**20


class Block(NamedTuple):
    """What a rank holds of a tensor: where it begins and how large it is."""

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Where it lies in the tensor, as an index."""
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.shape, strict=True))


class Owned(NamedTuple):
    """One parameter and its owner.

    Attributes:
        parameter: Plain or a DTensor.
        owner: The rank that steps on it.
        blocks: What each rank holds of it.
        sources: The ranks whose blocks the owner puts together: the owner alone if it holds all of it.
        nbytes: Of the whole.
    """

    parameter: torch.Tensor
    owner: int
    blocks: tuple[Block, ...]
    sources: tuple[int, ...]
    nbytes: int

    @property
    def is_cut(self) -> bool:
        """Whether the owner needs what others hold."""
        return self.sources != (self.owner,)


def owned(parameters: Sequence[torch.Tensor], blocks: Sequence[tuple[Block, ...]], num_ranks: int) -> list[Owned]:
    """Choose owners so that work and memory are balanced.

    The work is that of a product of the matrix with itself, as Muon and Shampoo do: elements times the shorter side.
    The largest come first, each to the rank with the least work of those that do not hold more than a quarter above
    their share of the memory: so a rank ends with 1.25 times its share and one matrix at most.
    """
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
        Owned(p, owner, found, _sources(found, owner), size)
        for p, owner, found, size in zip(parameters, chosen, blocks, sizes, strict=True)
    ]


def rounds(every: Sequence[Owned], num_ranks: int) -> list[list[int]]:
    """Cut the parameters into rounds in which each owner steps on few bytes: one matrix, or several small ones.

    Returns:
        Places in `every`, round by round.
    """
    limit = max([_ROUND_BYTES, *(one.nbytes for one in every)])
    number, filled = [0] * num_ranks, [0] * num_ranks
    found: list[list[int]] = []
    for place, one in enumerate(every):
        if filled[one.owner] and filled[one.owner] + one.nbytes > limit:
            number[one.owner] += 1
            filled[one.owner] = 0
        filled[one.owner] += one.nbytes
        while len(found) <= number[one.owner]:
            found.append([])
        found[number[one.owner]].append(place)
    return found


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
