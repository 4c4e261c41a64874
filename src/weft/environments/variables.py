"""`topology`: which source speaks, what it says, and whether its facts fit together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from weft.environments.facts import EnvironmentFacts
from weft.environments.frameworks import has_kubeflow, has_tpu, read_kubeflow, read_torchrun, read_tpu
from weft.environments.schedulers import LSF, MPICH, OPENMPI, has_mpich, has_slurm, read_slurm
from weft.environments.topology import Topology
from weft.errors import ContextError, listed


class _Launcher(NamedTuple):
    name: str
    read: Callable[[EnvironmentFacts], Topology]
    rank: str = ""  # variables of rank and world size
    size: str = ""
    is_there: Callable[[EnvironmentFacts], bool] | None = None  # default: if one of them is set


_SOURCES = (  # best first
    _Launcher("kubeflow", read_kubeflow, is_there=has_kubeflow),
    _Launcher("torchrun", read_torchrun, "RANK", "WORLD_SIZE"),
    _Launcher("lsf", LSF.read, LSF.rank, LSF.size),
    _Launcher("openmpi", OPENMPI.read, OPENMPI.rank, OPENMPI.size),
    _Launcher("mpich", MPICH.read, MPICH.rank, MPICH.size, has_mpich),
    _Launcher("slurm", read_slurm, "SLURM_PROCID", "SLURM_NTASKS", has_slurm),
    _Launcher("tpu", read_tpu, is_there=has_tpu),
)


def topology(env: Mapping[str, str], *, read_file: Callable[[str], str] | None = None) -> Topology:
    """Read the place of a process from a mapping of environment variables.

    Changes: nothing. Collectives: none.

    Args:
        env: Usually `os.environ`; any mapping of strings.
        read_file: Gives the text of a file; LSF may name one with the hosts. Default: no file is read.

    Returns:
        The facts of the best source that is present; one process alone if there is none.

    Raises:
        ContextError: A variable is missing, is not a number, or two of them contradict each
            other; the text names both values.

    Example:
        >>> place = topology({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"})
        >>> place.rank, place.world_size, place.source
        (1, 2, 'torchrun')
        >>> topology({}).world_size
        1
    """
    facts = EnvironmentFacts(env, read_file)
    present = [
        source
        for source in _SOURCES
        if (source.is_there(facts) if source.is_there else facts.has(source.rank) or facts.has(source.size))
    ]
    if not present:
        return Topology()
    best, *rest = present
    place = best.read(facts)
    _check(place, facts)
    if place.source == "torchrun" and not facts.has("TORCHELASTIC_RUN_ID"):
        _check_leftover(facts, best, rest)
    return replace(place, ignored=tuple(source.name for source in rest))


def _check_leftover(facts: EnvironmentFacts, best: _Launcher, rest: Sequence[_Launcher]) -> None:
    """Raise if a launcher of as many processes gives this one another rank: somebody exported RANK for all of them."""
    for other in rest:
        if not facts.has(other.rank, other.size) or facts.number(best.size) != facts.number(other.size):
            continue
        if facts.number(best.rank) != facts.number(other.rank):
            names = (best.rank, best.size, other.rank, other.size)
            raise ContextError(
                f"topology: {best.rank} and {other.rank} contradict each other",
                found=", ".join(f"{name}={facts.env[name]!r}" for name in names),
                expected=f"the same rank from both, or {best.rank} unset",
                fix=f"unset {best.rank} {best.size}",
            )


def _check(place: Topology, facts: EnvironmentFacts) -> None:
    """Raise if two facts contradict each other, naming both values."""
    rank, size, local_rank, per_node = place.rank, place.world_size, place.local_rank, place.local_world_size
    # Ray may place different numbers of workers on its nodes.
    stated = facts.has("LOCAL_WORLD_SIZE") or place.source not in ("torchrun", "slurm")
    stated = stated and place.source != "ray"
    product = place.num_nodes * per_node
    # SLURM's tasks per node are an upper bound: fewer tasks than slots are fine there.
    too_few = place.source == "slurm" and product < size and facts.has("SLURM_NTASKS_PER_NODE")
    uneven = (stated and product != size) or too_few
    elsewhere = stated and facts.has("GROUP_RANK") and rank != place.node_rank * per_node + local_rank
    checks = {
        f"world size {size} < 1": size < 1,
        f"rank {rank} >= world size {size}": rank >= size,
        f"local rank {local_rank} >= local world size {per_node}": local_rank >= per_node,
        f"local world size {per_node} > world size {size}": per_node > size,
        f"node rank {place.node_rank} >= {place.num_nodes} nodes": place.node_rank >= place.num_nodes,
        f"{place.num_nodes} nodes x {per_node} processes = {product}, world size {size}": uneven,
        f"rank {rank}, but node {place.node_rank} x {per_node} + local rank {local_rank}": elsewhere and not uneven,
    }
    wrong = [text for text, is_wrong in checks.items() if is_wrong]
    if wrong:
        raise ContextError(
            f"topology: the environment of {place.source} contradicts itself",
            found=listed(wrong),
            expected="rank < world size, local rank < local world size, nodes x processes = world size",
            fix="start every rank with one launcher, e.g. `weft launch -n 2 script.py`",
        )
