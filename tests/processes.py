"""What tests of launchers look at: processes, through /proc, and the clock."""

import pathlib
import time


def is_alive(pid):
    """Whether a process runs, and is no zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(condition, limit_s):
    """Wait until something holds, and say whether it does."""
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()
