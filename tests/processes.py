"""What tests of launchers look at: processes, through /proc, and the clock."""

import contextlib
import pathlib
import socket
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


def listening(pid):
    """Hosts and ports at which a process listens."""
    sockets = set()
    for path in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            sockets.add(str(path.readlink()))
    found = []
    for family in socket.AF_INET, socket.AF_INET6:
        table = pathlib.Path("/proc/net/tcp" if family == socket.AF_INET else "/proc/net/tcp6").read_text()
        for row in (line.split() for line in table.splitlines()[1:]):
            if row[3] == "0A" and f"socket:[{row[9]}]" in sockets:
                host, _, port = row[1].partition(":")
                words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
                found.append((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found
