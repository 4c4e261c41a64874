"""What ends a wait in vain: of gloo and of the client of torch's store, its connection; of any other group, an abort.

Neither the client of torch's store nor gloo can be asked to stop waiting. Their waits end when their connection does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft import torch_internals

_ABORT_LIMIT_S = 3.0


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


def close_connections(which: Callable[[int, int], bool]) -> None:
    """End the connections for whose local and remote port `which` is true; their owners see them closed."""
    for each in _sockets():
        with contextlib.suppress(OSError):
            if which(each.getsockname()[1], each.getpeername()[1]):
                # Ends the connection itself and wakes the thread that waits in it; `close` would only drop this copy.
                each.shutdown(socket.SHUT_RDWR)


def groups_among(ranks: Sequence[int]) -> list[dist.ProcessGroup]:
    """The groups of this process that have no other members than these ranks, made by weft or not."""
    known: list[dist.ProcessGroup] = list(torch_internals.world.found.pg_map)
    return [group for group in known if set(dist.get_process_group_ranks(group)) <= set(ranks)]


def abort_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Abort groups, but for those of gloo, which cannot be.

    A collective that somebody waits for then ends *without an error*; one that begins later raises torch's.
    """
    # All at once: NCCL frees memory when it aborts a group, which waits for the kernels of all others on the device.
    threads = [
        threading.Thread(target=_abort, args=(group,), name="weft abort", daemon=True)
        for group in groups
        if dist.get_backend(group) != "gloo"
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + _ABORT_LIMIT_S
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.0))


def _abort(group: Any) -> None:
    with contextlib.suppress(RuntimeError):
        group.abort()


def never_destroy(groups: Sequence[dist.ProcessGroup]) -> None:
    """Keep groups until the process ends, because of what their destructors wait for.

    NCCL's waits for its watchdog, and that for half a minute; gloo's for a collective that not all ranks came to.
    A thread that never ends holds them, so that the end of the interpreter does not destroy them either.
    """
    if groups:
        threading.Thread(target=_hold, args=(groups,), name="weft aborted groups", daemon=True).start()


def _hold(groups: Sequence[dist.ProcessGroup]) -> None:
    threading.Event().wait()
    del groups


def _sockets() -> Iterator[socket.socket]:
    """All TCP sockets of this process, as copies."""
    with contextlib.suppress(OSError):  # systems without /dev/fd
        for number in [int(path.name) for path in Path("/dev/fd").iterdir()]:
            with contextlib.suppress(OSError):  # closed meanwhile
                if stat.S_ISSOCK(os.fstat(number).st_mode):
                    with socket.socket(fileno=os.dup(number)) as each:
                        if each.family in (socket.AF_INET, socket.AF_INET6) and each.type == socket.SOCK_STREAM:
                            yield each
