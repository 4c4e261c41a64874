"""SLURM's srun, LSF's jsrun, and MPI's mpirun."""

from __future__ import annotations

from weft.environments.facts import Facts, port_of
from weft.environments.hosts import first_host, main_host, tasks_per_node
from weft.environments.topology import Topology
from weft.errors import ContextError

__all__ = [
    "has_lsf", "has_mpich", "has_openmpi", "has_slurm", "read_lsf", "read_mpich", "read_openmpi", "read_slurm",
]  # fmt: skip


def has_openmpi(facts: Facts) -> bool:
    """Whether Open MPI's mpirun started this process."""
    return facts.has("OMPI_COMM_WORLD_RANK") or facts.has("OMPI_COMM_WORLD_SIZE")


def read_openmpi(facts: Facts) -> Topology:
    """Ranks from Open MPI, the first host from the scheduler around it."""
    return _read_mpi(
        facts,
        source="openmpi",
        rank=facts.required("OMPI_COMM_WORLD_RANK", beside="OMPI_COMM_WORLD_SIZE"),
        world_size=facts.required("OMPI_COMM_WORLD_SIZE", beside="OMPI_COMM_WORLD_RANK"),
        # OMPI_COMM_WORLD_NODE_RANK is a rank *within* the node, not the rank of the node.
        local_rank=facts.number("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK"),
        local_world_size=facts.number("OMPI_COMM_WORLD_LOCAL_SIZE"),
    )


def has_mpich(facts: Facts) -> bool:
    """Whether a PMI started this process: MPICH, Intel MPI, and their relatives."""
    if not facts.has("PMI_RANK", "PMI_SIZE"):  # one alone: a mistake, unless SLURM knows more
        return (facts.has("PMI_RANK") or facts.has("PMI_SIZE")) and not has_slurm(facts)
    # Under `srun --mpi=pmi2` both speak of the same process, and SLURM knows the nodes as well.
    same = facts.text("PMI_RANK") == facts.text("SLURM_PROCID") and facts.text("PMI_SIZE") == facts.text("SLURM_NTASKS")
    return not (same and has_slurm(facts))


def read_mpich(facts: Facts) -> Topology:
    """Ranks from the PMI, the first host from the scheduler around it."""
    return _read_mpi(
        facts,
        source="mpich",
        rank=facts.required("PMI_RANK", beside="PMI_SIZE"),
        world_size=facts.required("PMI_SIZE", beside="PMI_RANK"),
        local_rank=facts.number("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
        local_world_size=facts.number("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
    )


def _read_mpi(
    facts: Facts, *, source: str, rank: int, world_size: int, local_rank: int | None, local_world_size: int | None
) -> Topology:
    if local_world_size is None:
        local_world_size = world_size  # nothing said: one node, as `mpirun -n 4` on a workstation
    if local_rank is None:
        local_rank = rank % max(local_world_size, 1)
    num_nodes = -(-world_size // max(local_world_size, 1))
    addr = facts.text("MASTER_ADDR") or (main_host(facts, num_nodes) if num_nodes > 1 else None)
    if addr is None and num_nodes > 1:
        raise ContextError(
            f"topology: {source} runs on {num_nodes} nodes and does not say where rank 0 is",
            found=f"{world_size} ranks, {local_world_size} on this node, MASTER_ADDR unset",
            expected="MASTER_ADDR, the host name of rank 0, on every rank",
            fix="mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 ... python script.py",
        )
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=rank // max(local_world_size, 1),
        num_nodes=num_nodes,
        master_addr=addr or "127.0.0.1",
        master_port=port_of(facts),
        source=source,
    )


def has_slurm(facts: Facts) -> bool:
    """Whether srun started this process; not a batch script, and not a shell in an allocation."""
    if not facts.has("SLURM_PROCID") or not (facts.has("SLURM_NTASKS") or facts.has("SLURM_NPROCS")):
        return False
    if facts.text("SLURM_JOB_NAME") in ("bash", "interactive"):
        return False  # a shell inside an allocation, not a task of srun
    # A batch script's own shell has the task counts of the job too, but no step: srun was not used.
    in_batch_shell = facts.has("SLURM_SUBMIT_DIR") and not (facts.has("SLURM_STEP_ID") or facts.has("SLURM_STEPID"))
    return not in_batch_shell


def read_slurm(facts: Facts) -> Topology:
    """Everything from SLURM: ranks, nodes, the first host, and a port from the number of the job."""
    rank = facts.required("SLURM_PROCID", beside="SLURM_NTASKS")
    world_size = facts.required("SLURM_NTASKS", "SLURM_NPROCS", beside="SLURM_PROCID")
    nodelist = facts.text("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    num_nodes = facts.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    node_rank = facts.number("SLURM_NODEID") or 0
    per_node = tasks_per_node(facts.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or "")
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
        master_port=port_of(facts),
        source="slurm",
    )


def has_lsf(facts: Facts) -> bool:
    """Whether jsrun started this process; in a job of LSF without it there is one process, or those of an MPI."""
    return facts.has("JSM_NAMESPACE_RANK") or facts.has("JSM_NAMESPACE_SIZE")


def read_lsf(facts: Facts) -> Topology:
    """Ranks from jsrun, hosts from LSF."""
    return _read_mpi(
        facts,
        source="lsf",
        rank=facts.required("JSM_NAMESPACE_RANK", beside="JSM_NAMESPACE_SIZE"),
        world_size=facts.required("JSM_NAMESPACE_SIZE", beside="JSM_NAMESPACE_RANK"),
        local_rank=facts.number("JSM_NAMESPACE_LOCAL_RANK"),
        local_world_size=facts.number("JSM_NAMESPACE_LOCAL_SIZE"),
    )
