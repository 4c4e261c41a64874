"""Groups of NCCL, or of what the device has; with a launcher's variables in the environment."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from tests.gpu.device import BACKEND, DEVICE

pytestmark = pytest.mark.gpu


def _place(rank, n):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def test_gradients_and_shards_travel_through_a_group_of_the_device():
    script = pathlib.Path(__file__).with_name("one_rank.py")
    command = [sys.executable, str(script), DEVICE]
    environment = {**os.environ, **_place(0, 1)}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "all ok" in done.stdout, done.stdout + done.stderr


@pytest.mark.skipif(BACKEND != "nccl", reason="NCCL alone splits a communicator, and can be told of other hosts")
def test_groups_of_four_ranks_on_one_device():
    place = _place(0, 4)
    command = [sys.executable, str(pathlib.Path(__file__).with_name("groups_of_four.py")), DEVICE]
    ranks = []
    for rank in range(4):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks.append(subprocess.Popen(command, env={**os.environ, **place, **own}, **pipes))
    try:
        said = [each.communicate(timeout=90)[0] for each in ranks]
    finally:
        for each in ranks:
            each.kill()
    assert all("all ok" in text for text in said), "\n".join(said)
