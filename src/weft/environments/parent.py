"""A process that ends with the one that started it."""

from __future__ import annotations

import os
import signal
import sys


def end_with_parent(parent: int) -> None:
    """Let the system kill this process as soon as its parent is gone, however that ended; on Linux."""
    if sys.platform.startswith("linux"):
        import ctypes  # noqa: PLC0415  (torch imports it too)

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it was too late
            os._exit(1)
