"""Groups of NCCL, or of what the device has: of one process, and of several that share the device.

NCCL refuses two ranks of one machine on one card, and takes ranks with other values of NCCL_HOSTID for ranks of other
machines. On a CPU a group stands for it that waits as NCCL does; see tests/peers/waiting_group.py.
"""

import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import pytest

from tests.gpu.device import DEVICE, DRY

pytestmark = pytest.mark.gpu


def _port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_gradients_and_shards_travel_through_a_group_of_the_device():
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port()}
    script = pathlib.Path(__file__).with_name("one_rank.py")
    command = [sys.executable, str(script), DEVICE]
    environment = {**os.environ, **place}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "all ok" in done.stdout, done.stdout + done.stderr


_LIMIT_S = 400 if DRY else 40  # most of it is the import of torch, by all ranks at once
_RAISES_S = 60 if DRY else 10  # in miniature beside other tests
_CASES = [(2, "none"), (2, "raise"), (2, "kill"), (4, "raise"), (4, "kill")][: 2 if DRY else None]


def _start(ranks, fault, folder):
    """The ranks of one job; each writes into a file."""
    name = "groups_of_four.py" if fault == "groups" else "nccl_ranks.py"
    script = pathlib.Path(__file__).with_name(name)
    root = str(pathlib.Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    place = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port(), "PYTHONPATH": path}
    started = []
    for rank in range(ranks):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"rank {rank}", "NCCL_SOCKET_IFNAME": "lo"}
        with (folder / f"{ranks}_{fault}_{rank}").open("wb") as file:
            command = [sys.executable, str(script), *([] if fault == "groups" else [fault]), DEVICE, str(ranks)]
            environment = {**os.environ, **place, **own}
            started.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
    return started


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """All jobs, started at once: what they do is to wait."""
    folder = tmp_path_factory.mktemp("nccl")
    cases = [*_CASES, (4, "groups")] if DEVICE.startswith("cuda") else _CASES
    started = {case: _start(*case, folder) for case in cases}
    end = time.monotonic() + _LIMIT_S
    codes = {}
    for case, processes in started.items():
        codes[case] = []
        for process in processes:
            try:
                codes[case].append(process.wait(max(end - time.monotonic(), 0.1)))
            except subprocess.TimeoutExpired:
                process.kill()
                codes[case].append("still running")
    outputs = {
        case: [(folder / f"{case[0]}_{case[1]}_{rank}").read_text() for rank in range(case[0])] for case in codes
    }
    return codes, outputs


@pytest.mark.parametrize(("ranks", "fault"), _CASES)
def test_several_ranks_step_as_one_process_does_and_end_in_seconds_when_one_fails(jobs, ranks, fault):
    codes, outputs = (each[ranks, fault] for each in jobs)
    said = "\n".join(f"---- rank {rank}: exit code {codes[rank]}\n{outputs[rank]}" for rank in range(ranks))
    assert all(" s: equal\n" in each for each in outputs), said
    if fault == "none":
        assert codes == [0] * ranks, said
        return
    text = {"raise": "ValueError: bad data", "kill": "its process is gone"}[fault]
    for rank in range(ranks):
        if rank != 1:
            found = re.search(rf"([0-9.]+) s: PeerError of rank 1: {text}", outputs[rank])
            assert found and float(found[1]) < _RAISES_S, said
            assert codes[rank] == 1 and "has changed" not in outputs[rank], said


@pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="NCCL alone splits a communicator")
def test_groups_of_four_ranks_on_one_device(jobs):
    codes, outputs = (each[4, "groups"] for each in jobs)
    assert codes == [0] * 4 and all("all ok" in text for text in outputs), "\n".join(outputs)
