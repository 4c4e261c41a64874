"""`fake`: the context of any rank of any world, in one process and without a process group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from weft.context import DistContext, World
from weft.context.rank_facts import on_nodes
from weft.context.settings import mesh_axes
from weft.engines import TorchEngine
from weft.errors import ContextError


def fake(
    rank: int = 0,
    world_size: int = 1,
    *,
    mesh: Mapping[str, int] | None = None,
    data_axes: Sequence[str] | None = None,
    seed: int = 0,
    local_world_size: int | None = None,
) -> DistContext:
    """Pretend to be one rank of a world: for tests of plans, meshes and data, never of numbers.

    Everything that is arithmetic works, `shard_data` for example; a collective raises.

    Changes: nothing. Collectives: none possible.

    Args:
        rank: Which rank to be.
        world_size: Of how many.
        mesh: As for `weft.start`.
        data_axes: As for `weft.start`.
        seed: As for `weft.start`.
        local_world_size: Ranks per node; default: all on one.

    Returns:
        A context without process group.

    Raises:
        ContextError: `rank` is not in the world, or the mesh does not fit.

    Example:
        >>> fake(rank=1000, world_size=1024, mesh={"replica": 128, "shard": 8}).coordinates
        {'replica': 125, 'shard': 0}
    """
    per_node = world_size if local_world_size is None else local_world_size
    if not 0 <= rank < world_size or per_node < 1 or world_size % per_node:
        raise ContextError(
            f"fake: rank {rank} of {world_size} with {per_node} per node cannot be",
            found=f"rank={rank}, world_size={world_size}, local_world_size={per_node}",
            expected="0 <= rank < world_size, a multiple of local_world_size",
            fix="weft.testing.fake(rank=0, world_size=2)",
        )
    axes, data = mesh_axes(mesh, data_axes, world_size)
    return DistContext(
        **on_nodes(rank, world_size, per_node),
        device=torch.device("cpu"),
        axes=axes,
        data_axes=data,
        seed=seed,
        ranks=tuple(range(world_size)),
        engine=TorchEngine(),
        world=World(ranks=tuple(range(world_size)), rank=rank),
    )
