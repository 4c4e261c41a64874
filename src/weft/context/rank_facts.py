"""`RankFacts`: which rank this is, of how many, and its place on the mesh. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft.environments.topology import Place
from weft.errors import ContextError


@dataclass(frozen=True, kw_only=True)
class RankFacts(Place):
    """The part of a `DistContext` that is plain numbers and names; its fields are documented there."""

    axes: tuple[tuple[str, int], ...] = (("data", 1),)
    data_axes: tuple[str, ...] = ("data",)
    ranks: tuple[int, ...] = (0,)

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0 of this context."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is the first process of its node."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last rank of this context."""
        return self.rank == self.world_size - 1

    @property
    def coordinates(self) -> dict[str, int]:
        """Place of this rank on each mesh axis.

        Example:
            >>> import weft
            >>> weft.testing.fake(rank=5, world_size=8, mesh={"replica": 2, "shard": 4}).coordinates
            {'replica': 1, 'shard': 1}
        """
        return self.coordinates_of(max(self.rank, 0))

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Place of any rank of this context on each mesh axis."""
        rest = rank
        places: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rest, places[name] = divmod(rest, size)
        return {name: places[name] for name, _ in self.axes}

    @property
    def data_rank(self) -> int:
        """Place of this rank among those that see different batches."""
        return self.data_rank_of(max(self.rank, 0))

    def data_rank_of(self, rank: int) -> int:
        """Place of any rank of this context among those that see different batches."""
        at, place = self.coordinates_of(rank), 0
        for name, size in self.axes:
            if name in self.data_axes:
                place = place * size + at[name]
        return place

    @property
    def data_size(self) -> int:
        """Number of ranks that see different batches."""
        return math.prod(size for name, size in self.axes if name in self.data_axes)

    def axis_size(self, axis: str) -> int:
        """Size of a mesh axis.

        Raises:
            ContextError: There is no such axis.
        """
        sizes = dict(self.axes)
        if axis not in sizes:
            names = ", ".join(repr(name) for name, _ in self.axes)
            raise ContextError(
                f"axis = {axis!r} is not an axis of this context",
                found=f"axes {names}",
                expected="the name of a mesh axis",
                fix=f"weft.start(mesh={{{axis!r}: -1}}), or axis={self.axes[0][0]!r}",
            )
        return sizes[axis]


def on_nodes(rank: int, size: int, per_node: int) -> dict[str, Any]:
    """The facts of a rank where each node, but perhaps the last one, has as many ranks as another."""
    node, per_node = rank // min(per_node, size), min(per_node, size)
    return {
        "rank": rank,
        "world_size": size,
        "local_rank": rank % per_node,
        "local_world_size": min(per_node, size - node * per_node),
        "node_rank": node,
        "num_nodes": -(-size // per_node),
    }


def rank_groups(facts: RankFacts, names: Sequence[str]) -> list[list[int]]:
    """Sort the ranks into groups whose members differ along `names` only."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank in range(facts.world_size):
        place = facts.coordinates_of(rank)
        groups.setdefault(tuple(at for name, at in place.items() if name not in names), []).append(rank)
    return list(groups.values())
