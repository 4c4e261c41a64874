"""SLURM's srun, LSF's jsrun, and MPI's mpirun."""

from __future__ import annotations

from typing import NamedTuple

from weft.environments.facts import EnvironmentFacts, port_of
from weft.environments.hosts import main_host, tasks_per_node
from weft.environments.topology import Topology
from weft.errors import ContextError


class Mpi(NamedTuple):
    """The variables of an MPI; the first host is known to the scheduler around it.

    Attributes:
        source: Name of the launcher.
        rank: Variable of the rank.
        size: Variable of the world size.
        local_rank: Variables of the rank on its node.
        local_size: Variables of the number of ranks on the node.
    """

    source: str
    rank: str
    size: str
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]

    def read(self, facts: EnvironmentFacts) -> Topology:
        """Ranks from the MPI; one node if nothing else is said, as `mpirun -n 4` on a workstation."""
        rank, world_size = facts.both(self.rank, self.size)
        local_world_size = facts.number_or(world_size, *self.local_size)
        per_node = max(local_world_size, 1)
        num_nodes = -(-world_size // per_node)
        addr = facts.text("MASTER_ADDR") or (main_host(facts, num_nodes) if num_nodes > 1 else None)
        if addr is None and num_nodes > 1:
            raise ContextError(
                f"topology: {self.source} runs on {num_nodes} nodes and does not say where rank 0 is",
                found=f"{world_size} ranks, {local_world_size} on this node, MASTER_ADDR unset",
                expected="MASTER_ADDR, the host name of rank 0, on every rank",
                fix="mpirun -x MASTER_ADDR=$(hostname) -x MASTER_PORT=29500 ... python script.py"
                if self.source == "openmpi"
                else "export MASTER_ADDR=<host of rank 0>",
            )
        return Topology(
            rank=rank,
            world_size=world_size,
            local_rank=facts.number_or(rank % per_node, *self.local_rank),
            local_world_size=local_world_size,
            node_rank=rank // per_node,
            num_nodes=num_nodes,
            master_addr=addr or "127.0.0.1",
            master_port=port_of(facts),
            source=self.source,
        )


# In a job of LSF without jsrun there is one process, or those of an MPI.
LSF = Mpi(
    "lsf", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", ("JSM_NAMESPACE_LOCAL_RANK",), ("JSM_NAMESPACE_LOCAL_SIZE",)
)
OPENMPI = Mpi(
    "openmpi",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    # OMPI_COMM_WORLD_NODE_RANK is a rank *within* the node, not the rank of the node.
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE",),
)
MPICH = Mpi(
    "mpich",
    "PMI_RANK",
    "PMI_SIZE",
    ("MPI_LOCALRANKID", "PMI_LOCAL_RANK", "PALS_LOCAL_RANKID"),
    ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE"),
)


def has_mpich(facts: EnvironmentFacts) -> bool:
    """Whether a PMI started this process: MPICH, Intel MPI, and their relatives."""
    if not facts.has("PMI_RANK", "PMI_SIZE"):  # one alone: a mistake, unless SLURM knows more
        return (facts.has("PMI_RANK") or facts.has("PMI_SIZE")) and not has_slurm(facts)
    # Under `srun --mpi=pmi2` both speak of the same process, and SLURM knows the nodes as well.
    same = facts.text("PMI_RANK") == facts.text("SLURM_PROCID") and facts.text("PMI_SIZE") == facts.text(*_TASKS)
    return not (same and has_slurm(facts))


_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")  # of the step that this process is in, or of the job


def has_slurm(facts: EnvironmentFacts) -> bool:
    """Whether srun started this process as one of several; not a batch script, and not a shell in an allocation.

    A shell, a batch script and what they start see the number of tasks of the whole job, which they are not. What tells
    them apart is the step: a batch script is in none that says how many tasks it has, and a shell is alone in its own.
    """
    if not facts.has("SLURM_PROCID") or facts.text(*_TASKS) is None:
        return False
    if facts.has("SLURM_STEP_NUM_TASKS"):
        return facts.number("SLURM_STEP_NUM_TASKS") != 1 or not _is_in_shell(facts)
    in_batch_shell = facts.has("SLURM_SUBMIT_DIR") and facts.text("SLURM_STEP_ID", "SLURM_STEPID") is None
    return not (in_batch_shell or _is_in_shell(facts))


def _is_in_shell(facts: EnvironmentFacts) -> bool:
    """Whether this looks like a shell that somebody types into: by what it is called where a step has one task."""
    return facts.text("SLURM_JOB_NAME") in ("bash", "interactive") or facts.has("SLURM_PTY_PORT")


def read_slurm(facts: EnvironmentFacts) -> Topology:
    """Everything from SLURM: ranks, nodes, the first host, and a port from the number of the job."""
    rank = facts.required("SLURM_PROCID", beside="SLURM_NTASKS")
    world_size = facts.required(*_TASKS, beside="SLURM_PROCID")
    num_nodes = facts.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES") or 1
    node_rank = facts.number("SLURM_NODEID") or 0
    per_node = tasks_per_node(facts.text("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE") or "")
    if per_node and node_rank < len(per_node):
        local_world_size = per_node[node_rank]
    else:
        local_world_size = facts.number("SLURM_NTASKS_PER_NODE") or -(-world_size // num_nodes)
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=facts.number_or(rank % max(local_world_size, 1), "SLURM_LOCALID"),
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=num_nodes,
        master_addr=facts.text("MASTER_ADDR") or main_host(facts, num_nodes) or "127.0.0.1",
        master_port=port_of(facts),
        source="slurm",
    )
