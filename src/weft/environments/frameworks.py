"""Launchers that speak torchrun's names, and those that start one process per machine: Kubeflow, TPU pods."""

from __future__ import annotations

import math

from weft.environments.facts import EnvironmentFacts, port_of
from weft.environments.topology import DEFAULT_PORT, Topology
from weft.errors import ContextError

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def read_torchrun(facts: EnvironmentFacts) -> Topology:
    """Rank and world size are needed, the rest may be worked out."""
    rank, world_size = facts.both("RANK", "WORLD_SIZE")
    addr = facts.text("MASTER_ADDR") or "127.0.0.1"
    # Without LOCAL_* (Kubeflow, hand-made scripts) a loopback master means that all share this node.
    one_node = addr in LOOPBACK and not facts.has("LOCAL_WORLD_SIZE")
    local_world_size = facts.number_or(world_size if one_node else 1, "LOCAL_WORLD_SIZE")
    per_node = max(local_world_size, 1)
    node_rank = facts.number_or(rank // per_node, "GROUP_RANK", "NODE_RANK")
    source = "ray" if facts.has("RAY_NODE_ID") or facts.has("RAY_JOB_ID") else "torchrun"
    num_nodes = -(-world_size // per_node)
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=facts.number_or(rank if one_node else rank % per_node, "LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=node_rank,
        num_nodes=facts.number_or(
            max(num_nodes, node_rank + 1) if source == "ray" else num_nodes, "GROUP_WORLD_SIZE", "NNODES"
        ),
        master_addr=addr,
        master_port=port_of(facts),
        store_served=facts.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=facts.number("TORCHELASTIC_RESTART_COUNT") or 0,
        source=source,
    )


def has_kubeflow(facts: EnvironmentFacts) -> bool:
    """Whether a pod of a PyTorchJob or TrainJob says where it is, and no launcher inside it does."""
    alone = facts.text("PET_NNODES") == "1" and facts.text("PET_NPROC_PER_NODE") in (None, "1", "auto")
    return facts.has("PET_NNODES") and not facts.has("LOCAL_RANK") and not alone


def read_kubeflow(facts: EnvironmentFacts) -> Topology:
    """One process per pod; several need a launcher in the pod, which reads the same variables."""
    # "auto" is what the operator writes where more than one was not asked for.
    nodes, per_node = facts.text("PET_NNODES") or "1", facts.text("PET_NPROC_PER_NODE") or "1"
    if not nodes.isdecimal() or per_node not in ("1", "auto"):
        raise ContextError(
            "topology: the pod asks for a launcher, and this process was started without one",
            found=f"PET_NNODES={nodes!r}, PET_NPROC_PER_NODE={per_node!r}, LOCAL_RANK unset",
            expected="torchrun in the pod, or one process per pod and a fixed number of pods",
            fix="command: [torchrun, train.py]",
        )
    rank = facts.required("PET_NODE_RANK", "RANK", beside="PET_NNODES")
    for ours, theirs in (("PET_NODE_RANK", "RANK"), ("PET_NNODES", "WORLD_SIZE")):
        if facts.has(ours, theirs) and facts.number(ours) != facts.number(theirs):
            raise ContextError(
                f"topology: {ours} and {theirs} of the pod contradict each other",
                found=f"{ours}={facts.env[ours]!r}, {theirs}={facts.env[theirs]!r}",
                expected="the same number, as there is one process per pod",
                fix=f"unset {theirs}, or start torchrun in the pod",
            )
    return Topology(
        rank=rank,
        world_size=int(nodes),
        node_rank=rank,
        num_nodes=int(nodes),
        master_addr=facts.text("PET_MASTER_ADDR", "MASTER_ADDR") or "127.0.0.1",
        master_port=facts.number("PET_MASTER_PORT") or port_of(facts),
        source="kubeflow",
    )


def has_tpu(facts: EnvironmentFacts) -> bool:
    """Whether this is a host of a TPU pod; a single TPU machine is a world of one."""
    return facts.has("TPU_WORKER_HOSTNAMES") or facts.text("TPU_WORKER_ID") not in (None, "", "0")


def read_tpu(facts: EnvironmentFacts) -> Topology:
    """One process per host, or per chip where TPU_PROCESS_BOUNDS says so."""
    worker = facts.required("TPU_WORKER_ID", beside="TPU_WORKER_HOSTNAMES")
    if not facts.has("TPU_WORKER_HOSTNAMES"):
        facts.required("TPU_WORKER_HOSTNAMES", beside="TPU_WORKER_ID")
    hosts = [name.strip() for name in facts.env["TPU_WORKER_HOSTNAMES"].split(",") if name.strip()]
    rank, world_size = worker, len(hosts)
    if facts.has("TPU_PROCESS_BOUNDS", "CLOUD_TPU_TASK_ID"):
        rank = facts.required("CLOUD_TPU_TASK_ID", beside="TPU_PROCESS_BOUNDS")
        bounds = facts.env["TPU_PROCESS_BOUNDS"].split(",")
        world_size = math.prod(int(bound) for bound in bounds if bound.strip().isdecimal())
    if worker >= len(hosts) or world_size % len(hosts):
        raise ContextError(
            "topology: the environment of tpu contradicts itself",
            found=f"TPU_WORKER_ID={worker}, {len(hosts)} hosts in TPU_WORKER_HOSTNAMES, {world_size} processes",
            expected="worker < hosts, and as many processes on each host",
            fix="start every host with the same command, or unset TPU_WORKER_ID and TPU_WORKER_HOSTNAMES",
        )
    per_host = max(world_size // len(hosts), 1)
    return Topology(
        rank=rank,
        world_size=world_size,
        local_rank=rank % per_host,
        local_world_size=per_host,
        node_rank=worker,
        num_nodes=len(hosts),
        master_addr=facts.text("MASTER_ADDR") or hosts[0],
        master_port=facts.number("MASTER_PORT") or DEFAULT_PORT,
        source="tpu",
    )
