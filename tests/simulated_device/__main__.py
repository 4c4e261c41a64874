"""Runs a command that has the simulated device: `python -m tests.simulated_device weft launch -n 2 train.py`."""

import os
import sys

from tests.simulated_device.device import environment

devices = int(os.environ.get("SIMULATED_DEVICES", "4"))
os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **environment(devices)})
