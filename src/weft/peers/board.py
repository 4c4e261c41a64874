"""`Board`: the key-value store of a job, whose requests have a time limit.

torch's clients wait for an answer of the store without a limit. A store whose process is stopped, or that is cut off,
would hold every rank that uses it, and with them the very ranks that could say who is to blame. So each request has a
deadline; a thread that makes no requests itself (see straggler_watch.py) watches the deadlines, and cuts the connection
when one has passed. What waits for an answer then ends with an error, as do all later requests.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch.distributed as dist

from weft.errors import ContextError, PeerError
from weft.peers.gloo_connections import cut

__all__ = ["Board", "StoreLost"]

R = TypeVar("R")


class StoreLost(PeerError):
    """The store does not answer any more, and with it the rank that serves it."""


class _Connection:
    """The connection to the store, which several boards share."""

    def __init__(self, store: dist.Store, limit_s: float, server: int) -> None:
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self.limit_s = limit_s
        self.server = server
        self.port = store.port if isinstance(store, dist.TCPStore) else None
        self.deadlines: dict[int, float] = {}  # by thread
        self.silent = False

    def lost(self, error: Exception | None = None) -> StoreLost:
        text = "the process that serves the store " + (
            f"has not answered for {self.limit_s:g} s (stopped, or cut off)" if self.silent else "is gone"
        )
        problem = text if self.server < 0 else f"rank {self.server} failed: {text}"
        said = "" if error is None or self.silent else f" ({str(error).partition('Exception raised from')[0].strip()})"
        return StoreLost(problem + said, rank=self.server, text=text)


class Board:
    """Values of a job by name; see `torch.distributed.Store` for what its methods do.

    Every request raises `StoreLost` if the store is gone or does not answer in time.

    Attributes:
        port: Where the store listens; None if it is no TCPStore.
    """

    def __init__(self, store: dist.Store, *, limit_s: float, server: int = -1) -> None:
        """Remember the store.

        Args:
            store: Of torch.
            limit_s: How long it may take to answer.
            server: The rank in whose process it lives; -1 if that is another process, or not known.
        """
        self._store = store
        self._connection = _Connection(store, limit_s, server)
        self.port = self._connection.port

    def below(self, prefix: str) -> Board:
        """The part of it whose names begin with a prefix."""
        part = object.__new__(Board)
        part._store, part._connection, part.port = dist.PrefixStore(prefix, self._store), self._connection, self.port
        return part

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._request(self._store.set, key, value)

    def get(self, key: str) -> bytes:
        """The value of a key that is there."""
        return self._request(self._store.get, key)

    def has(self, key: str) -> bool:
        """Whether a key is there."""
        return bool(self._request(self._store.check, [key]))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins with 0, and return it."""
        return int(self._request(self._store.add, key, amount))

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        self._request(self._store.delete_key, key)

    def claim(self, key: str, value: str) -> None:
        """Write a value, unless there is one."""
        self._request(self._store.compare_set, key, "", value)

    def read(self, key: str, *names: str) -> Any:
        """The JSON value of a key that is there, which has such fields, if any are given.

        Raises:
            ContextError: It is something else: a stranger has written to the store.
        """
        text = self.get(key)
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text)
            if not names or (isinstance(value, dict) and all(name in value for name in names)):
                return value
        raise ContextError(
            f"the store of the job holds a value that no rank has written: {key}",
            found=repr(text[:60]),
            expected=f"JSON with {', '.join(names)}" if names else "JSON",
            fix="give each job a store of its own: another MASTER_PORT, closed to others",
        )

    def write(self, key: str, value: object) -> None:
        """Write a value as JSON."""
        self.set(key, json.dumps(value))

    @contextlib.contextmanager
    def limited(self, limit_s: float) -> Iterator[None]:
        """Let the body, which uses the store directly, take so long at most."""
        thread = threading.get_ident()
        self._connection.deadlines[thread] = time.monotonic() + limit_s
        try:
            yield
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            if self._connection.silent:
                raise self._connection.lost(error) from error
            raise
        finally:
            self._connection.deadlines.pop(thread, None)

    def guard(self) -> None:
        """Cut the connection if the deadline of a request has passed."""
        connection, now = self._connection, time.monotonic()
        if connection.port is not None and any(deadline < now for deadline in list(connection.deadlines.values())):
            connection.silent = True
            cut(lambda _, remote: remote == connection.port)

    def _request(self, request: Callable[..., R], *arguments: object) -> R:
        connection, thread = self._connection, threading.get_ident()
        if connection.silent:
            raise connection.lost()
        connection.deadlines[thread] = time.monotonic() + connection.limit_s
        try:
            return request(*arguments)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise connection.lost(error) from error
        finally:
            connection.deadlines.pop(thread, None)
