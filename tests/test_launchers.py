"""Recorded environments of launchers give the right place, or an error that names both values."""

import pytest

from weft import ContextError, topology
from weft.launchers import first_host

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node-a", "MASTER_PORT": "1234", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "x",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_NNODES": "2",
    "SLURM_JOB_NODELIST": "gpu[03-05,9]", "SLURM_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "0", "SLURM_SUBMIT_DIR": "/home/a", "SLURM_JOB_NAME": "train",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "MASTER_ADDR": "node-a",
}  # fmt: skip
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}

# name -> (environment, rank, world, local rank, local world, node, nodes, address, port, source)
PLACES = {
    "nothing": ({}, 0, 1, 0, 1, 0, 1, "127.0.0.1", 29500, "single"),
    "two on one node": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, 1, 2, 1, 2, 0, 1, "127.0.0.1", 29500, "torchrun",
    ),
    "torchrun": (TORCHRUN, 5, 8, 1, 4, 1, 2, "node-a", 1234, "torchrun"),
    "torchrun beats slurm": ({**SLURM, **TORCHRUN}, 5, 8, 1, 4, 1, 2, "node-a", 1234, "torchrun"),
    "kubeflow": (
        {"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"},
        2, 3, 0, 1, 2, 3, "job-master-0", 23456, "torchrun",
    ),
    "ray": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0",
         "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000", "RAY_JOB_ID": "01000000"},
        1, 2, 1, 2, 0, 1, "10.0.0.1", 5000, "ray",
    ),
    "submitit": (
        {**SLURM, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
         "MASTER_ADDR": "gpu03", "MASTER_PORT": "20000"},
        3, 4, 1, 2, 1, 2, "gpu03", 20000, "torchrun",
    ),
    "slurm": (SLURM, 3, 4, 1, 2, 1, 2, "gpu03", 15000 + 123456 % 20000, "slurm"),
    "slurm, short": (
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"},
        1, 2, 1, 2, 0, 1, "127.0.0.1", 29500, "slurm",
    ),
    "slurm, uneven nodes": (
        {**SLURM, "SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "3,2", "SLURM_PROCID": "4"},
        4, 5, 1, 2, 1, 2, "gpu03", 15000 + 123456 % 20000, "slurm",
    ),
    "slurm interactive shell": (
        {**SLURM, "SLURM_JOB_NAME": "bash"}, 0, 1, 0, 1, 0, 1, "127.0.0.1", 29500, "single",
    ),
    "slurm batch shell without srun": (
        {k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, 0, 1, 0, 1, 0, 1, "127.0.0.1", 29500, "single",
    ),
    "openmpi": (OPENMPI, 3, 4, 1, 2, 1, 2, "node-a", 29500, "openmpi"),
    "openmpi, one node": (
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
         "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        1, 2, 1, 2, 0, 1, "127.0.0.1", 29500, "openmpi",
    ),
    "openmpi in slurm": ({**SLURM, **OPENMPI}, 3, 4, 1, 2, 1, 2, "node-a", 15000 + 123456 % 20000, "openmpi"),
    "mpich": (MPICH, 1, 2, 1, 2, 0, 1, "127.0.0.1", 29500, "mpich"),
    "pmi alone": ({"PMI_RANK": "0", "PMI_SIZE": "3"}, 0, 3, 0, 3, 0, 1, "127.0.0.1", 29500, "mpich"),
    "srun --mpi=pmi2": (
        {**SLURM, "PMI_RANK": "3", "PMI_SIZE": "4"}, 3, 4, 1, 2, 1, 2, "gpu03", 15000 + 123456 % 20000, "slurm",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_recorded_environment(name):
    env, *expected = PLACES[name]
    place = topology(env)
    found = [
        place.rank, place.world_size, place.local_rank, place.local_world_size, place.node_rank, place.num_nodes,
        place.master_addr, place.master_port, place.source,
    ]  # fmt: skip
    assert found == expected


def test_torchrun_facts_about_the_store():
    place = topology({**SLURM, **TORCHRUN})
    assert place.store_served and place.attempt == 2
    assert place.ignored == ("slurm",)


CONTRADICTIONS = {
    "rank too large": ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 >= world size 2"),
    "world missing": ({"RANK": "0"}, "WORLD_SIZE unset"),
    "rank missing": ({"WORLD_SIZE": "2"}, "RANK unset"),
    "not a number": ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one'"),
    "local rank too large": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
        "local rank 2 >= local world size 2",
    ),
    "product": (
        {**TORCHRUN, "WORLD_SIZE": "12"}, "2 nodes x 4 processes = 8, world size 12",
    ),
    "place": ({**TORCHRUN, "RANK": "4"}, "rank 4, but node 1 x 4 \\+ local rank 1"),
    "node rank": ({**TORCHRUN, "GROUP_RANK": "2"}, "node rank 2 >= 2 nodes"),
    "slurm slots": (
        {**SLURM, "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "2"}, "2 nodes x 2 processes = 4, world size 8",
    ),
    "openmpi without address": (
        {k: v for k, v in OPENMPI.items() if k != "MASTER_ADDR"}, "MASTER_ADDR unset",
    ),
    "openmpi half": ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE unset"),
    "mpich half": ({"PMI_RANK": "1"}, "PMI_SIZE unset"),
    "port": ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "70000"}, "MASTER_PORT='70000'"),
    "nodelist": ({**SLURM, "SLURM_JOB_NODELIST": "gpu[03"}, "gpu\\[03"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradiction_names_both_values(name):
    env, text = CONTRADICTIONS[name]
    with pytest.raises(ContextError, match=f"(?s){text}.*fix:"):
        topology(env)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("a[1-3,7]", "a1"),
        ("a[001-3]", "a001"),
        ("n[2,4]-ib,x", "n2-ib"),
        ("a[1-2]b[7]", "a1b7"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host
