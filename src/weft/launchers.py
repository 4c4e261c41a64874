"""Where a process stands in its job, as a pure function of environment variables.

Nothing here reads `os.environ`: the caller hands over a mapping, so that recorded environments of
any cluster can be parsed in a test. Sources, best first: torchrun and everything that speaks its
names (Ray Train, submitit, Kubeflow), Open MPI, MPICH / Intel MPI / PMI, SLURM's srun.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from weft.errors import ContextError, listed, message

__all__ = ["Topology", "first_host", "topology"]

_DEFAULT_PORT = 29500
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, kw_only=True)
class Topology:
    """The place of one process in a job.

    Attributes:
        rank: Of this process, 0 <= rank < world_size.
        world_size: Number of processes in the job.
        local_rank: Of this process on its node.
        local_world_size: Number of processes on this node.
        node_rank: Of this node.
        num_nodes: Number of nodes.
        master_addr: Host on which rank 0 (or the launcher) serves the rendezvous store.
        master_port: Its port.
        source: Who said so: "torchrun", "ray", "openmpi", "mpich", "slurm" or "single".
        store_served: Whether the launcher serves the store at that address; otherwise rank 0 does.
        attempt: How often the launcher restarted the job.
        ignored: Sources that were present too, but rank lower.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = _DEFAULT_PORT
    source: str = "single"
    store_served: bool = False
    attempt: int = 0
    ignored: tuple[str, ...] = ()


def topology(env: Mapping[str, str]) -> Topology:
    """Read the place of a process from a mapping of environment variables.

    Changes: nothing. Collectives: none.

    Args:
        env: Usually `os.environ`; any mapping of strings.

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
    readers: tuple[tuple[str, Callable[[_Facts], bool], Callable[[_Facts], Topology]], ...] = (
        ("torchrun", _has_torchrun, _read_torchrun),
        ("openmpi", _has_openmpi, _read_openmpi),
        ("mpich", _has_mpich, _read_mpich),
        ("slurm", _has_slurm, _read_slurm),
    )
    facts = _Facts(env)
    present = [(name, read) for name, has, read in readers if has(facts)]
    if not present:
        return Topology()
    (_, read), rest = present[0], present[1:]
    place = read(facts)
    _check(place, facts)
    return _replace(place, ignored=tuple(name for name, _ in rest))


class _Facts:
    """A mapping of strings, with numbers that name their variable when they are wrong."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env

    def has(self, *names: str) -> bool:
        return all(self.env.get(name, "") != "" for name in names)

    def text(self, *names: str) -> str | None:
        """The first of `names` that is set."""
        return next((self.env[name] for name in names if self.has(name)), None)

    def number(self, *names: str) -> int | None:
        """The first of `names` that is set, as a whole number >= 0."""
        name = next((name for name in names if self.has(name)), None)
        if name is None:
            return None
        text = self.env[name].strip()
        if not text.isdecimal():
            raise ContextError(
                message(
                    f"topology: {name} = {self.env[name]!r} is not a whole number",
                    found=f"{name}={self.env[name]!r}",
                    expected="a whole number >= 0",
                    fix=f"export {name}=0",
                )
            )
        return int(text)

    def required(self, *names: str, beside: str) -> int:
        """As `number`, but one of `names` must be set because `beside` is."""
        value = self.number(*names)
        if value is None:
            raise ContextError(
                message(
                    f"topology: {beside} is set, but {names[0]} is not",
                    found=f"{beside}={self.env[beside]!r}, {names[0]} unset",
                    expected=f"both {beside} and {names[0]}, as a launcher sets them",
                    fix="start the script with `weft launch -n 2 script.py`, or unset " + beside,
                )
            )
        return value


def _has_torchrun(facts: _Facts) -> bool:
    return facts.has("RANK") or facts.has("WORLD_SIZE")


def _read_torchrun(facts: _Facts) -> Topology:
    rank = facts.required("RANK", beside="WORLD_SIZE")
    world_size = facts.required("WORLD_SIZE", beside="RANK")
    addr = facts.text("MASTER_ADDR") or "127.0.0.1"
    one_node = addr in _LOOPBACK and not facts.has("LOCAL_WORLD_SIZE")
    # Without LOCAL_* (Kubeflow, hand-made scripts) a loopback master means that all share this node.
    local_rank = facts.number("LOCAL_RANK")
    local_world_size = facts.number("LOCAL_WORLD_SIZE")
    if local_world_size is None:
        local_world_size = world_size if one_node else 1
    if local_rank is None:
        local_rank = rank if one_node else rank % max(local_world_size, 1)
    node_rank = facts.number("GROUP_RANK", "NODE_RANK")
    num_nodes = facts.number("GROUP_WORLD_SIZE", "NNODES")
    if num_nodes is None:
        num_nodes = -(-world_size // max(local_world_size, 1))
    if node_rank is None:
        node_rank = rank // max(local_world_size, 1)
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=addr,
        master_port=_port(facts),
        store_served=facts.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=facts.number("TORCHELASTIC_RESTART_COUNT") or 0,
        source="ray" if facts.has("RAY_NODE_ID") or facts.has("RAY_JOB_ID") else "torchrun",
    )


def _has_openmpi(facts: _Facts) -> bool:
    return facts.has("OMPI_COMM_WORLD_RANK") or facts.has("OMPI_COMM_WORLD_SIZE")


def _read_openmpi(facts: _Facts) -> Topology:
    return _read_mpi(
        facts,
        source="openmpi",
        rank=facts.required("OMPI_COMM_WORLD_RANK", beside="OMPI_COMM_WORLD_SIZE"),
        world_size=facts.required("OMPI_COMM_WORLD_SIZE", beside="OMPI_COMM_WORLD_RANK"),
        # OMPI_COMM_WORLD_NODE_RANK is a rank *within* the node, not the rank of the node.
        local_rank=facts.number("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK"),
        local_world_size=facts.number("OMPI_COMM_WORLD_LOCAL_SIZE"),
    )


def _has_mpich(facts: _Facts) -> bool:
    if not facts.has("PMI_RANK", "PMI_SIZE"):  # one alone: a mistake, unless SLURM knows more
        return (facts.has("PMI_RANK") or facts.has("PMI_SIZE")) and not _has_slurm(facts)
    # Under `srun --mpi=pmi2` both speak of the same process, and SLURM knows the nodes as well.
    same = facts.text("PMI_RANK") == facts.text("SLURM_PROCID") and facts.text("PMI_SIZE") == facts.text("SLURM_NTASKS")
    return not (same and _has_slurm(facts))


def _read_mpich(facts: _Facts) -> Topology:
    return _read_mpi(
        facts,
        source="mpich",
        rank=facts.required("PMI_RANK", beside="PMI_SIZE"),
        world_size=facts.required("PMI_SIZE", beside="PMI_RANK"),
        local_rank=facts.number("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        local_world_size=facts.number("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
    )


def _read_mpi(
    facts: _Facts, *, source: str, rank: int, world_size: int, local_rank: int | None, local_world_size: int | None
) -> Topology:
    if local_world_size is None:
        local_world_size = world_size  # nothing said: one node, as `mpirun -n 4` on a workstation
    if local_rank is None:
        local_rank = rank % max(local_world_size, 1)
    num_nodes = -(-world_size // max(local_world_size, 1))
    addr = facts.text("MASTER_ADDR")
    if addr is None and num_nodes > 1:
        raise ContextError(
            message(
                f"topology: {source} runs on {num_nodes} nodes and does not say where rank 0 is",
                found=f"{world_size} ranks, {local_world_size} on this node, MASTER_ADDR unset",
                expected="MASTER_ADDR, the host name of rank 0, on every rank",
                fix="mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 ... python script.py",
            )
        )
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=rank // max(local_world_size, 1),
        num_nodes=num_nodes,
        master_addr=addr or "127.0.0.1",
        master_port=_port(facts),
        source=source,
    )


def _has_slurm(facts: _Facts) -> bool:
    if not facts.has("SLURM_PROCID") or not (facts.has("SLURM_NTASKS") or facts.has("SLURM_NPROCS")):
        return False
    if facts.text("SLURM_JOB_NAME") in ("bash", "interactive"):
        return False  # a shell inside an allocation, not a task of srun
    # A batch script's own shell has the task counts of the job too, but no step: srun was not used.
    in_batch_shell = facts.has("SLURM_SUBMIT_DIR") and not (facts.has("SLURM_STEP_ID") or facts.has("SLURM_STEPID"))
    return not in_batch_shell


def _read_slurm(facts: _Facts) -> Topology:
    rank = facts.required("SLURM_PROCID", beside="SLURM_NTASKS")
    world_size = facts.required("SLURM_NTASKS", "SLURM_NPROCS", beside="SLURM_PROCID")
    nodelist = facts.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    num_nodes = facts.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    node_rank = facts.number("SLURM_NODEID") or 0
    per_node = _tasks_per_node(facts.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or "")
    if per_node and node_rank < len(per_node):
        local_world_size = per_node[node_rank]
    else:
        local_world_size = facts.number("SLURM_NTASKS_PER_NODE") or -(-world_size // num_nodes)
    local_rank = facts.number("SLURM_LOCALID")
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=rank % local_world_size if local_rank is None else local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=facts.text("MASTER_ADDR") or (first_host(nodelist) if nodelist else "127.0.0.1"),
        master_port=_port(facts),
        source="slurm",
    )


def _tasks_per_node(text: str) -> list[int]:
    """Expand SLURM's `2(x3),1` into [2, 2, 2, 1].

    Example:
        >>> _tasks_per_node("2(x3),1")
        [2, 2, 2, 1]
    """
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodelist: str) -> str:
    """Name the first host of a SLURM node list.

    Args:
        nodelist: For example `gpu[03-05,9],login1` or `node7`.

    Returns:
        The first host, leading zeros kept.

    Raises:
        ContextError: The list is empty or its brackets do not match.

    Example:
        >>> first_host("gpu[03-05,9]"), first_host("a[1-2]b[7,8],c"), first_host("node7,node8")
        ('gpu03', 'a1b7', 'node7')
    """
    depth = 0
    first = ""
    for char in nodelist.strip():
        if char == "," and depth == 0:
            break
        depth += (char == "[") - (char == "]")
        first += char
    host = re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first)
    if not host or depth != 0 or "[" in host or "]" in host:
        raise ContextError(
            message(
                "topology: the SLURM node list cannot be read",
                found=repr(nodelist),
                expected="a list such as node[1-4,7],login1",
                fix="export MASTER_ADDR=<host of rank 0>",
            )
        )
    return host


def _port(facts: _Facts) -> int:
    port = facts.number("MASTER_PORT")
    if port is not None and not 1 <= port <= 65535:
        raise ContextError(
            message(
                f"topology: MASTER_PORT = {port} is no port",
                found=f"MASTER_PORT={facts.env['MASTER_PORT']!r}",
                expected="1 to 65535",
                fix=f"export MASTER_PORT={_DEFAULT_PORT}",
            )
        )
    if port is not None:
        return port
    job = facts.text("SLURM_JOB_ID", "SLURM_JOBID")
    # Two jobs on one node must not meet: derive the port from the job when there is one.
    return 15000 + int(job) % 20000 if job is not None and job.isdecimal() else _DEFAULT_PORT


def _check(place: Topology, facts: _Facts) -> None:
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
    stated = facts.has("LOCAL_WORLD_SIZE") or place.source not in ("torchrun", "ray", "slurm")
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
            message(
                f"topology: the environment of {place.source} contradicts itself",
                found=listed(wrong),
                expected="rank < world size, local rank < local world size, nodes x processes = world size",
                fix="start every rank with one launcher, e.g. `weft launch -n 2 script.py`",
            )
        )


def _replace(place: Topology, *, ignored: tuple[str, ...]) -> Topology:
    return Topology(**{**place.__dict__, "ignored": ignored})
