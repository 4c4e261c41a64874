"""The place of a process in a job, as a value."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_PORT = 29500


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which rank a process is, and on which node; the fields are documented in `Topology` and `DistContext`."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    attempt: int = 0


@dataclass(frozen=True, kw_only=True)
class Topology(Place):
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
        source: Who said so: "torchrun", "ray", "kubeflow", "lsf", "openmpi", "mpich", "slurm", "tpu"
            or "single".
        store_served: Whether the launcher serves the store at that address; otherwise rank 0 does.
        attempt: How often the launcher restarted the job.
        ignored: Sources that were present too, but rank lower.
    """

    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT
    source: str = "single"
    store_served: bool = False
    ignored: tuple[str, ...] = ()
