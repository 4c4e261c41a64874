"""Recorded environments of launchers give the right place, or an error that names both values."""

import itertools

import pytest

from weft.environments import (
    first_host,
    topology,  #
)
from weft.errors import ContextError

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
# As srun sets them for each task: those of the step besides those of the job.
STEP = {
    **SLURM, "SLURM_STEPID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_STEP_NODELIST": "gpu[03-04]",
}  # fmt: skip
ALONE = {
    "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "gpu03",
}  # fmt: skip
OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_NODE_RANK": "1", "MASTER_ADDR": "node-a",
}  # fmt: skip
# srun on two nodes with a long list of hosts, `scontrol show hostnames` in the comment.
SLURM_HOSTS = {
    **SLURM,
    "SLURM_STEP_NODELIST": "a[1-3,7],b05",
    "SLURM_STEP_NUM_NODES": "5",
    "SLURM_NTASKS": "10",
    "SLURM_STEP_TASKS_PER_NODE": "2(x5)",
    "SLURM_NODEID": "4",
    "SLURM_PROCID": "9",
}  # a1 a2 a3 a7 b05
# jsrun -n 8 -r 4 on Summit: the first host is the one of the batch script.
JSRUN = {
    "LSB_JOBID": "774411", "LSB_MCPU_HOSTS": "batch3 1 h36n03 42 h36n05 42", "LSB_DJOB_NUMPROC": "85",
    "LSB_DJOB_HOSTFILE": "/u/.lsbatch/774411.hostfile", "JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "8",
    "JSM_NAMESPACE_LOCAL_RANK": "1", "JSM_NAMESPACE_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_RANK": "5", "PMIX_NAMESPACE": "1:1:1",
}  # fmt: skip
# bsub -n 8 -R span[ptile=4] mpirun python train.py
LSF_MPI = {
    "LSB_JOBID": "31", "LSB_MCPU_HOSTS": "a01 4 a02 4", "LSB_HOSTS": "a01 a01 a01 a01 a02 a02 a02 a02",
    "OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}  # fmt: skip
INTEL = {
    "PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "I_MPI_INFO_NP": "4",
    "HYDRA_LOCALHOST": "x", "MASTER_ADDR": "n0", "MASTER_PORT": "777",
}  # fmt: skip
# A worker of a PyTorchJob whose specification says nothing of nprocPerNode.
PYTORCHJOB = {
    "PYTHONUNBUFFERED": "1", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "3", "RANK": "2",
    "PET_MASTER_ADDR": "job-master-0", "PET_MASTER_PORT": "23456", "PET_NODE_RANK": "2", "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto", "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}  # fmt: skip
TRAINJOB = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "run-node-0-0.run",
    "PET_MASTER_PORT": "29400",
}  # fmt: skip
# Two workers on one node and one on another.
RAY = {
    "RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "41397", "RAY_JOB_ID": "02000000", "RAY_NODE_ID": "9f",
}  # fmt: skip
TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t1v-n-0,t1v-n-1", "TPU_ACCELERATOR_TYPE": "v5litepod-8"}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}

# name -> (environment, rank, world, local rank, local world, node, nodes, address, port, source)
PLACES = {
    "nothing": ({}, 0, 1, 0, 1, 0, 1, "127.0.0.1", 29500, "single"),
    "two on one node": (
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, 1, 2, 1, 2, 0, 1, "127.0.0.1", 29500, "torchrun",
    ),
    "torchrun": (TORCHRUN, 5, 8, 1, 4, 1, 2, "node-a", 1234, "torchrun"),
    "torchrun beats what another number means": (
        {**TORCHRUN, "TPU_WORKER_ID": "x"}, 5, 8, 1, 4, 1, 2, "node-a", 1234, "torchrun",
    ),
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
    # srun -n 4 bash run.sh, in which python is started: the job has the name of the shell.
    "slurm, a script that srun starts": (
        {**STEP, "SLURM_JOB_NAME": "bash"}, 3, 4, 1, 2, 1, 2, "gpu03", 15000 + 123456 % 20000, "slurm",
    ),
    # srun -n 4 python train.py, typed into the shell of salloc.
    "slurm, srun in an interactive allocation": (
        {**STEP, "SLURM_JOB_NAME": "interactive"}, 3, 4, 1, 2, 1, 2, "gpu03", 15000 + 123456 % 20000, "slurm",
    ),
    # The shell of salloc, which sees the tasks of the allocation; and srun -n 1 --pty bash in it.
    "slurm, shell of an interactive allocation": (
        {**STEP, "SLURM_JOB_NAME": "interactive", "SLURM_STEP_ID": "4294967290", **ALONE},
        0, 1, 0, 1, 0, 1, "127.0.0.1", 29500, "single",
    ),
    "slurm, terminal": (
        {**STEP, "SLURM_PTY_PORT": "40101", **ALONE}, 0, 1, 0, 1, 0, 1, "127.0.0.1", 29500, "single",
    ),
    # srun -n 1 python train.py in a job of four tasks, and srun -n 2 in one of four.
    "slurm, a step of one task": (
        {**STEP, **ALONE}, 0, 1, 0, 1, 0, 1, "gpu03", 15000 + 123456 % 20000, "slurm",
    ),
    "slurm, a step of fewer tasks than the job": (
        {**STEP, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1",
         "SLURM_LOCALID": "0"},
        1, 2, 0, 1, 1, 2, "gpu03", 15000 + 123456 % 20000, "slurm",
    ),
    # sbatch train.sh, which starts python without srun; also if it was submitted from a terminal of another job.
    "slurm, batch script": (
        {k: v for k, v in {**STEP, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}.items() if "STEP" not in k},
        0, 1, 0, 1, 0, 1, "127.0.0.1", 29500, "single",
    ),
    "slurm, batch script from a terminal": (
        {**STEP, **ALONE, "SLURM_JOB_NAME": "train.sh", "SLURM_PTY_PORT": "40101"},
        0, 1, 0, 1, 0, 1, "127.0.0.1", 29500, "single",
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
    "slurm, list of hosts": (SLURM_HOSTS, 9, 10, 1, 2, 4, 5, "a1", 15000 + 123456 % 20000, "slurm"),
    "slurm, one launcher per node": (
        {**SLURM, **TORCHRUN, "SLURM_NTASKS": "8", "SLURM_PROCID": "1"}, 5, 8, 1, 4, 1, 2, "node-a", 1234, "torchrun",
    ),
    "slurm, a sweep of single processes": (
        {**SLURM, "RANK": "0", "WORLD_SIZE": "1"}, 0, 1, 0, 1, 0, 1, "127.0.0.1", 15000 + 123456 % 20000, "torchrun",
    ),
    "openmpi in slurm, address from slurm": (
        {**SLURM, **{k: v for k, v in OPENMPI.items() if k != "MASTER_ADDR"}},
        3, 4, 1, 2, 1, 2, "gpu03", 15000 + 123456 % 20000, "openmpi",
    ),
    "lsf, jsrun": (JSRUN, 5, 8, 1, 4, 1, 2, "h36n03", 15000 + 774411 % 20000, "lsf"),
    "lsf, jsrun on one node": (
        {"LSB_JOBID": "9", "JSM_NAMESPACE_RANK": "1", "JSM_NAMESPACE_SIZE": "2", "JSM_NAMESPACE_LOCAL_RANK": "1",
         "JSM_NAMESPACE_LOCAL_SIZE": "2"},
        1, 2, 1, 2, 0, 1, "127.0.0.1", 15009, "lsf",
    ),
    "lsf, mpirun": (LSF_MPI, 6, 8, 2, 4, 1, 2, "a01", 15031, "openmpi"),
    "lsf, one process": (
        {"LSB_JOBID": "31", "LSB_MCPU_HOSTS": "a01 4"}, 0, 1, 0, 1, 0, 1, "127.0.0.1", 29500, "single",
    ),
    "intel mpi": (INTEL, 2, 4, 0, 2, 1, 2, "n0", 777, "mpich"),
    "pytorchjob": (PYTORCHJOB, 2, 3, 0, 1, 2, 3, "job-master-0", 23456, "kubeflow"),
    "pytorchjob, torchrun in the pod": (
        {**PYTORCHJOB, **TORCHRUN, "PET_NPROC_PER_NODE": "4"}, 5, 8, 1, 4, 1, 2, "node-a", 1234, "torchrun",
    ),
    "pytorchjob, one pod": (
        {**PYTORCHJOB, "WORLD_SIZE": "1", "RANK": "0", "PET_NNODES": "1", "PET_NODE_RANK": "0"},
        0, 1, 0, 1, 0, 1, "job-master-0", 23456, "torchrun",
    ),
    "trainjob": (TRAINJOB, 1, 2, 0, 1, 1, 2, "run-node-0-0.run", 29400, "kubeflow"),
    "ray, uneven": (RAY, 2, 3, 0, 1, 1, 3, "10.0.0.1", 41397, "ray"),
    "ray, the larger node": (
        {**RAY, "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0"},
        1, 3, 1, 2, 0, 2, "10.0.0.1", 41397, "ray",
    ),
    "tpu pod": (TPU, 1, 2, 0, 1, 1, 2, "t1v-n-0", 29500, "tpu"),
    "tpu, one machine": (
        {"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": "localhost"}, 0, 1, 0, 1, 0, 1, "localhost", 29500, "tpu",
    ),
    "tpu, one process per chip": (
        {**TPU, "TPU_PROCESS_BOUNDS": "2,4,1", "CLOUD_TPU_TASK_ID": "6", "TPU_VISIBLE_CHIPS": "2"},
        6, 8, 2, 4, 1, 2, "t1v-n-0", 29500, "tpu",
    ),
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
    "left over from another job": (
        {**SLURM, "RANK": "0", "WORLD_SIZE": "4"}, "RANK='0', WORLD_SIZE='4', SLURM_PROCID='3', SLURM_NTASKS='4'",
    ),
    "exported for all of mpirun": (
        {**OPENMPI, "RANK": "0", "WORLD_SIZE": "4"}, "RANK='0'.*OMPI_COMM_WORLD_RANK='3'",
    ),
    "jsrun half": ({"JSM_NAMESPACE_RANK": "1"}, "JSM_NAMESPACE_SIZE unset"),
    "jsrun product": ({**JSRUN, "JSM_NAMESPACE_SIZE": "9"}, "3 nodes x 4 processes = 12, world size 9"),
    "lsf hosts": ({**JSRUN, "LSB_MCPU_HOSTS": "batch3 1 h36n03"}, "LSB_MCPU_HOSTS='batch3 1 h36n03'"),
    "pod wants a launcher": (
        {**PYTORCHJOB, "PET_NPROC_PER_NODE": "4", "WORLD_SIZE": "12"}, "PET_NPROC_PER_NODE='4', LOCAL_RANK unset",
    ),
    "elastic pod": ({"PET_NNODES": "1:3", "PET_RDZV_ENDPOINT": "a:1"}, "PET_NNODES='1:3'"),
    "pod and world": ({**PYTORCHJOB, "WORLD_SIZE": "4"}, "PET_NNODES='3', WORLD_SIZE='4'"),
    "pod and rank": ({**PYTORCHJOB, "RANK": "1"}, "PET_NODE_RANK='2', RANK='1'"),
    "pod without rank": ({"PET_NNODES": "2"}, "PET_NODE_RANK unset"),
    "tpu worker": ({**TPU, "TPU_WORKER_ID": "2"}, "TPU_WORKER_ID=2, 2 hosts in TPU_WORKER_HOSTNAMES"),
    "tpu without hosts": ({"TPU_WORKER_ID": "1"}, "TPU_WORKER_HOSTNAMES unset"),
    "tpu without id": ({"TPU_WORKER_HOSTNAMES": "a,b"}, "TPU_WORKER_ID unset"),
    "ray": ({**RAY, "LOCAL_RANK": "1"}, "local rank 1 >= local world size 1"),
    "nodelist": ({**SLURM, "SLURM_JOB_NODELIST": "gpu[03"}, "gpu\\[03"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradiction_names_both_values(name):
    env, text = CONTRADICTIONS[name]
    with pytest.raises(ContextError, match=f"(?s){text}.*fix:"):
        topology(env)


def test_there_are_thirty_of_them_and_of_every_kind():
    assert len(PLACES) >= 30 and len(CONTRADICTIONS) >= 20
    sources = {expected[-1] for _, *expected in PLACES.values()}
    assert sources == {"single", "torchrun", "ray", "kubeflow", "lsf", "openmpi", "mpich", "slurm", "tpu"}


def test_ranks_of_one_job_are_all_different():
    """Every rank of a job of LSF, of SLURM and of a TPU pod, as each of them sees it."""
    jobs = {
        "lsf": [
            {**JSRUN, "JSM_NAMESPACE_RANK": str(rank), "JSM_NAMESPACE_LOCAL_RANK": str(rank % 4)} for rank in range(8)
        ],
        "slurm": [
            {**SLURM, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2), "SLURM_NODEID": str(rank // 2)}
            for rank in range(4)
        ],
        "tpu": [{**TPU, "TPU_WORKER_ID": str(rank)} for rank in range(2)],
    }
    for source, job in jobs.items():
        places = [topology(env) for env in job]
        size = len(job)
        assert [place.rank for place in places] == list(range(size))
        spots = [(place.node_rank, place.local_rank) for place in places]
        per_node = places[0].local_world_size
        assert spots == list(itertools.product(range(size // per_node), range(per_node)))
        assert len({(p.world_size, p.num_nodes, p.master_addr, p.master_port) for p in places}) == 1, source


def test_lsf_may_name_its_hosts_in_a_file(tmp_path):
    env = {name: value for name, value in JSRUN.items() if name != "LSB_MCPU_HOSTS"}
    with pytest.raises(ContextError, match="(?s)lsf runs on 2 nodes and does not say where rank 0 is.*fix:"):
        topology(env)
    texts = {env["LSB_DJOB_HOSTFILE"]: "batch3\nh36n03\nh36n03\nh36n05\nh36n05\n"}
    assert topology(env, read_file=texts.__getitem__).master_addr == "h36n03"

    def gone(path):
        raise FileNotFoundError(2, "No such file or directory", path)

    with pytest.raises(ContextError, match=r"(?s)LSB_DJOB_HOSTFILE='/u/.lsbatch.*No such file.*fix:"):
        topology(env, read_file=gone)


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("a", "a"),
        ("a,b", "a"),
        ("a[1-3,7]", "a1"),
        ("a[001-3]", "a001"),
        ("n[2,4]-ib,x", "n2-ib"),
        ("a[1-2]b[7]", "a1b7"),
        ("a[1-3,7],b05", "a1"),
        ("b05,a[1-3,7]", "b05"),
        ("rack[2]-n[08-12]", "rack2-n08"),
    ],
)
def test_first_host(nodelist, host):
    assert first_host(nodelist) == host
