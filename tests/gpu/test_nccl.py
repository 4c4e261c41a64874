"""One process whose group is of NCCL, or of what the device has; with a launcher's variables in the environment."""

import os
import pathlib
import socket
import subprocess
import sys

import pytest

from tests.gpu.device import DEVICE

pytestmark = pytest.mark.gpu


def test_gradients_and_shards_travel_through_a_group_of_the_device():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    script = pathlib.Path(__file__).with_name("one_rank.py")
    command = [sys.executable, str(script), DEVICE]
    environment = {**os.environ, **place}
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "all ok" in done.stdout, done.stdout + done.stderr
