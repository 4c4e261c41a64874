"""TCP connections of this process: where it listens, and ending those on which somebody waits in vain.

Neither the client of torch's store nor gloo can be asked to stop waiting. Their waits end when their connection does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

__all__ = ["connections", "cut", "listening_ports"]


def listening_ports() -> list[int]:
    """The ports at which this process listens."""
    found: set[int] = set()
    for each in _sockets():
        with contextlib.suppress(OSError):
            if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                found.add(each.getsockname()[1])
    return sorted(found)


def connections() -> set[tuple[int, int]]:
    """Local and remote port of the connections of this process that neither end has closed."""
    found: set[tuple[int, int]] = set()
    for each in _sockets():
        with contextlib.suppress(OSError):
            ports = each.getsockname()[1], each.getpeername()[1]
            with contextlib.suppress(BlockingIOError):  # nothing has come
                if not each.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                    continue
            found.add(ports)
    return found


def cut(which: Callable[[int, int], bool]) -> None:
    """End the connections for whose local and remote port `which` is true; their owners see them closed."""
    for each in _sockets():
        with contextlib.suppress(OSError):
            if which(each.getsockname()[1], each.getpeername()[1]):
                each.shutdown(socket.SHUT_RDWR)


def _sockets() -> Iterator[socket.socket]:
    """All TCP sockets of this process, as copies."""
    with contextlib.suppress(OSError):  # systems without /dev/fd
        for number in [int(path.name) for path in Path("/dev/fd").iterdir()]:
            with contextlib.suppress(OSError):  # closed meanwhile
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    with socket.socket(fileno=os.dup(number)) as each:
                        if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                            yield each
