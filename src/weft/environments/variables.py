"""`topology`: which source speaks, what it says, and whether its facts fit together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from weft.environments.facts import Facts
from weft.environments.frameworks import has_kubeflow, has_torchrun, has_tpu, read_kubeflow, read_torchrun, read_tpu
from weft.environments.schedulers import (
    has_lsf,
    has_mpich,
    has_openmpi,
    has_slurm,
    read_lsf,
    read_mpich,
    read_openmpi,
    read_slurm,
)
from weft.environments.topology import Topology
from weft.errors import ContextError, listed

__all__ = ["topology"]


class _Source(NamedTuple):
    name: str
    is_there: Callable[[Facts], bool]
    read: Callable[[Facts], Topology]
    names: tuple[str, str] = ("", "")  # of the variables for rank and world size


_SOURCES = (  # best first
    _Source("kubeflow", has_kubeflow, read_kubeflow),
    _Source("torchrun", has_torchrun, read_torchrun, ("RANK", "WORLD_SIZE")),
    _Source("lsf", has_lsf, read_lsf, ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE")),
    _Source("openmpi", has_openmpi, read_openmpi, ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
    _Source("mpich", has_mpich, read_mpich, ("PMI_RANK", "PMI_SIZE")),
    _Source("slurm", has_slurm, read_slurm, ("SLURM_PROCID", "SLURM_NTASKS")),
    _Source("tpu", has_tpu, read_tpu),
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
    facts = Facts(env, read_file)
    present = [source for source in _SOURCES if source.is_there(facts)]
    if not present:
        return Topology()
    best, *rest = present
    place = best.read(facts)
    _check(place, facts)
    if place.source == "torchrun" and not facts.has("TORCHELASTIC_RUN_ID"):
        _check_leftover(facts, best, rest)
    return replace(place, ignored=tuple(source.name for source in rest))


def _check_leftover(facts: Facts, best: _Source, rest: Sequence[_Source]) -> None:
    """Raise if a launcher of as many processes gives this one another rank: somebody exported RANK for all of them."""
    for other in rest:
        if not facts.has(*other.names) or facts.number(best.names[1]) != facts.number(other.names[1]):
            continue
        if facts.number(best.names[0]) != facts.number(other.names[0]):
            found = [f"{name}={facts.env[name]!r}" for name in (*best.names, *other.names)]
            raise ContextError(
                f"topology: {best.names[0]} and {other.names[0]} contradict each other",
                found=", ".join(found),
                expected=f"the same rank from both, or {best.names[0]} unset",
                fix=f"unset {best.names[0]} {best.names[1]}",
            )


def _check(place: Topology, facts: Facts) -> None:
    """Raise if two facts contradict each other, naming both values."""
    wrong: list[str] = []
    if place.world_size < 1:
        wrong.append(f"world size {place.world_size} < 1")
    if place.rank >= place.world_size:
        wrong.append(f"rank {place.rank} >= world size {place.world_size}")
    if place.local_rank >= place.local_world_size:
        wrong.append(f"local rank {place.local_rank} >= local world size {place.local_world_size}")
    if place.local_world_size > place.world_size:
        wrong.append(f"local world size {place.local_world_size} > world size {place.world_size}")
    if place.node_rank >= place.num_nodes:
        wrong.append(f"node rank {place.node_rank} >= {place.num_nodes} nodes")
    # Ray may place different numbers of workers on its nodes.
    stated = facts.has("LOCAL_WORLD_SIZE") or place.source not in ("torchrun", "slurm")
    stated = stated and place.source != "ray"
    product = place.num_nodes * place.local_world_size
    # SLURM's tasks per node are an upper bound: fewer tasks than slots are fine there.
    too_few = place.source == "slurm" and product < place.world_size and facts.has("SLURM_NTASKS_PER_NODE")
    if (stated and product != place.world_size) or too_few:
        wrong.append(
            f"{place.num_nodes} nodes x {place.local_world_size} processes = {product}, world size {place.world_size}"
        )
    elif (
        stated
        and facts.has("GROUP_RANK")
        and place.rank != (place.node_rank * place.local_world_size + place.local_rank)
    ):
        wrong.append(
            f"rank {place.rank}, but node {place.node_rank} x {place.local_world_size} + local rank {place.local_rank}"
        )
    if wrong:
        raise ContextError(
            f"topology: the environment of {place.source} contradicts itself",
            found=listed(wrong),
            expected="rank < world size, local rank < local world size, nodes x processes = world size",
            fix="start every rank with one launcher, e.g. `weft launch -n 2 script.py`",
        )
