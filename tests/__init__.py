"""Tests; `OPTIMIZERS=foreach pytest` and `OPTIMIZERS=fused pytest` run them with other defaults, see `optimizers.py`.

A rank that runs a function of a test imports this package too, and has the environment of the test.
"""

import os

from tests.optimizers import choose

choose(os.environ.get("OPTIMIZERS"))
