"""`RankStore`: the key-value store of a job, whose requests have a time limit and whose values strangers cannot write.

torch's clients wait for an answer of the store without a limit. A store whose process is stopped, or that is cut off,
would hold every rank that uses it, and with them the very ranks that could say who is to blame. So each request has a
deadline; a thread that makes no requests itself (see straggler_watch.py) watches the deadlines, and cuts the connection
when one has passed. What waits for an answer then ends with an error, as do all later requests.

[Note: the secret] torch's store lets anyone who reaches its port read, write and delete everything. A job that has a
secret keeps its keys below a prefix that follows from it, and each value begins with an HMAC of name and value. What
does not fit is taken for absent: it is of a stranger. Messages are in queues of the store; its names cannot be listed:
they can be neither seen nor removed.

[Note: waiting] Who waits for a key asks once: the store answers when it is there. torch's client holds its connection
meanwhile, cannot be interrupted, and complains when it gives up. So a thread waits, on a connection of its own, and
the caller waits for that thread: as long as it likes, with a look at the peers now and then, and with
signals handled. A thread that is not needed any more ends when its key comes, or before the interpreter does: a thread
that came back from torch's code after that would abort the process.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import hmac
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from weft.errors import ContextError, PeerError
from weft.peers.gloo_connections import close_connections

R = TypeVar("R")

SECRET_VARIABLE = "WEFT_SECRET"  # noqa: S105  (its name in the environment; `weft launch` sets it for its ranks)
_NOTHING = b"\0nothing"  # stands for a value that is not there
_SEAL = 32  # bytes of an HMAC
_DIGITS = 20  # of a number, at most
_MOST_BYTES = 2**20  # of a message
_MOST_FORGED = 1000  # messages that are passed over at once, before anything else has its turn
_PAUSE_S = 0.02  # longest pause between two looks at a queue, or a file
_END_S = 2.0  # threads that wait are given so long to end
_LONG = timedelta(days=20)  # torch has its timeouts in milliseconds as an int


class StoreLost(PeerError):
    """The store does not answer any more, and with it the rank that serves it."""


class _Connection:
    """The connection to the store, which several boards share."""

    def __init__(self, store: dist.Store, limit_s: float, server: int) -> None:
        self.store: Any = store  # torch's stubs lack methods
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        self.process = os.getpid()
        self.limit_s = limit_s
        self.server = server
        self.port = store.port if isinstance(store, dist.TCPStore) else None
        self.deadlines: dict[int, float] = {}  # by thread
        self.waits: dict[str, Future[None]] = {}  # by key
        self.spare: list[dist.Store] = []  # on which no thread waits
        self.silent = False
        self.warned = False

    def lost(self, error: Exception | None = None) -> StoreLost:
        text = "the process that serves the store " + (
            f"has not answered for {self.limit_s:g} s (stopped, or cut off)" if self.silent else "is gone"
        )
        problem = text if self.server < 0 else f"rank {self.server} failed: {text}"
        said = "" if error is None or self.silent else f" ({str(error).partition('Exception raised from')[0].strip()})"
        return StoreLost(problem + said, rank=self.server, text=text)

    def request(self, request: Callable[..., R], *arguments: object) -> R:
        thread = threading.get_ident()
        if self.silent:
            raise self.lost()
        self.deadlines[thread] = time.monotonic() + self.limit_s
        try:
            return request(*arguments)
        except dist.QueueEmptyError:
            raise
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise self.lost(error) from error
        finally:
            self.deadlines.pop(thread, None)

    def end_waits(self) -> None:
        """Let the threads end that wait for a key still."""
        pending = {name: wait for name, wait in list(self.waits.items()) if not wait.done()}
        if os.getpid() != self.process:
            return
        with contextlib.suppress(StoreLost):  # then they end with an error
            for name in pending:
                self.request(self.store.append, name, "")  # answers who waits, changes no value, and none is empty
        futures.wait(pending.values(), _END_S)


class RankStore:
    """Values of a job by name; see `torch.distributed.Store` for what its methods do.

    Every request raises `StoreLost` if the store is gone or does not answer in time.

    Attributes:
        port: Where the store listens; None if it is no TCPStore.
    """

    def __init__(self, store: dist.Store, *, limit_s: float, server: int = -1, secret: str = "") -> None:
        """Remember the store.

        Args:
            store: Of torch.
            limit_s: How long it may take to answer.
            server: The rank in whose process it lives; -1 if that is another process, or not known.
            secret: What only the processes of the job know; without it, anybody may write.
        """
        self._connection = _Connection(store, limit_s, server)
        self._store = self._connection.store
        atexit.register(_end_waits, weakref.ref(self._connection))
        self._secret = secret.encode()
        self._path = f"{self._mac(b'names').hex()[:_SEAL]}/" if secret else ""
        self.port = self._connection.port

    def below(self, prefix: str) -> RankStore:
        """The part of it whose names begin with a prefix."""
        part = object.__new__(RankStore)
        part.__dict__.update(self.__dict__, _path=f"{self._path}{prefix}/")
        return part

    @property
    def name(self) -> str:
        """A text that no other part of the store has."""
        return hashlib.sha256(self._path.encode()).hexdigest()[:_SEAL]

    def for_torch(self, prefix: str) -> dist.Store:
        """A part of the store for torch, which writes into it as it likes."""
        return dist.PrefixStore(self._path + prefix, self._store)

    def set(self, key: str, value: str) -> None:
        """Write a value, which is not empty: an empty one counts as none."""
        self._request(self._store.set, self._path + key, self._sealed(key, value.encode()))

    def get(self, key: str) -> bytes:
        """The value of a key that is there.

        Raises:
            ContextError: It is not: a stranger has removed it.
        """
        value = self._look(key)
        if value is None:
            raise _strange(key, "nothing", "what was there before")
        return value

    def has(self, key: str) -> bool:
        """Whether a key is there."""
        return self._look(key) is not None

    def values(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values of some keys, None for those that are not there: in two requests if all are, and torch can."""
        names = [self._path + key for key in keys]
        if not self._store.has_extended_api() or not self._request(self._store.check, names):
            return [self._look(key) for key in keys]
        found = self._request(self._store.multi_get, names)
        return [self._opened(key, data) for key, data in zip(keys, found, strict=True)]

    def has_all(self, keys: Sequence[str]) -> bool:
        """Whether there are such keys, without a look at their values."""
        return bool(self._request(self._store.check, [self._path + key for key in keys]))

    def wait_for(self, key: str, limit_s: float) -> bytes | None:
        """Wait for a value, at most so long; None if it does not come. Asks again only what was not answered yet."""
        connection, name, start = self._connection, self._path + key, time.monotonic()
        while True:
            left_s = start + limit_s - time.monotonic()
            if limit_s > 0 and self._store.has_extended_api():
                wait = connection.waits.get(name) or connection.waits.setdefault(name, self._begin_wait(name))
                if not futures.wait([wait], max(left_s, 0.0)).done:
                    if connection.silent:
                        raise connection.lost()
                    return None
                connection.waits.pop(name, None)
                wait.result()  # raises what the thread has met
            value = self._look(key)
            if value is not None or left_s <= 0:
                return value
            time.sleep(min((limit_s - left_s) / 16 + 1e-4, _PAUSE_S, left_s))  # a file, or a value of a stranger

    def _begin_wait(self, name: str) -> Future[None]:
        """Let a thread wait for a key; see the note above."""
        over: Future[None] = Future()

        def wait() -> None:
            try:
                self._wait_here(name)
                over.set_result(None)
            except Exception as error:  # noqa: BLE001  (raised where it is waited for)
                over.set_exception(error)

        threading.Thread(target=wait, name="weft wait", daemon=True).start()
        return over

    def _wait_here(self, name: str) -> None:
        """Wait for a key as long as it takes, on a connection that is not used for anything else."""
        spare = self._connection.spare
        store = spare.pop() if spare else self._request(self._store.clone)

        def wait() -> None:
            self._connection.deadlines.pop(threading.get_ident(), None)
            store.wait([name], _LONG)

        self._request(wait)
        spare.append(store)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which begins with 0 and has no seal, and return it."""
        if amount:
            return int(self._request(self._store.add, self._path + key, amount))
        found = self._request(self._store.compare_set, self._path + key, _NOTHING, _NOTHING)
        return int(found) if found.isdigit() and len(found) < _DIGITS else 0

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        self._request(self._store.delete_key, self._path + key)

    def claim(self, key: str, value: str) -> bool:
        """Write a value, unless there is one; whether the value is now this one."""
        sealed = self._sealed(key, value.encode())
        found = self._request(self._store.compare_set, self._path + key, "", sealed)
        if found != sealed and self._opened(key, found) is None:
            self.set(key, value)
            return True
        return bool(found == sealed)

    def read(self, key: str, *names: str) -> Any:
        """The JSON value of a key that is there, which has such fields, if any are given.

        Raises:
            ContextError: It is something else: a stranger has written to the store.
        """
        return self.parsed(key, self.get(key), *names)

    def found(self, key: str, *names: str) -> Any:
        """As `read`, but None if the key is not there."""
        text = self._look(key)
        return None if text is None else self.parsed(key, text, *names)

    def all_found(self, keys: Sequence[str], *names: str) -> list[Any]:
        """As `found`, for some keys; see `values`."""
        found = zip(keys, self.values(keys) if keys else (), strict=True)
        return [None if text is None else self.parsed(key, text, *names) for key, text in found]

    def parsed(self, key: str, text: bytes | None, *names: str) -> Any:
        """The JSON value of a key that was found to have this text; as `read`."""
        if text is None:
            raise _strange(key, "nothing", "what was there before")
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(text)
            if not names or (isinstance(value, dict) and all(name in value for name in names)):
                return value
        raise _strange(key, repr(text[:60]), f"JSON with {', '.join(names)}" if names else "JSON")

    def write(self, key: str, value: object) -> None:
        """Write a value as JSON."""
        self.set(key, json.dumps(value))

    def push(self, key: str, value: object) -> None:
        """Append a JSON value to a queue."""
        self._request(self._store.queue_push, self._path + key, self._sealed(key, json.dumps(value).encode()))

    def pop(self, key: str, limit_s: float = 0.0) -> Any:
        """Take the first JSON value out of a queue, what is of a stranger apart; None if none comes in time."""
        start = time.monotonic()
        while True:
            for data in self._taken(key):
                value = self._opened(key, data) if len(data) <= _MOST_BYTES else None
                with contextlib.suppress(ValueError, RecursionError):
                    if value is not None and (found := json.loads(value)) is not None:
                        return found
                self.warn(key)
            waited = time.monotonic() - start
            if waited >= limit_s:
                return None
            time.sleep(min(waited / 16 + 1e-4, _PAUSE_S, limit_s - waited))

    def _taken(self, key: str) -> Iterator[bytes]:
        with contextlib.suppress(dist.QueueEmptyError):
            for _ in range(_MOST_FORGED):
                yield self._request(self._store.queue_pop, self._path + key, False)  # noqa: FBT003  (torch's)

    def warn(self, key: str) -> None:
        """Say once that a value was passed over."""
        if not self._connection.warned:
            self._connection.warned = True
            logging.getLogger("weft").warning(
                "the store of this job holds what none of its processes has written (%s): it is ignored; whoever "
                "reaches the port %s can write there", key, self.port,
            )  # fmt: skip

    def _look(self, key: str) -> bytes | None:
        """The value of a key, or None: in one request, and without waiting."""
        found = self._request(self._store.compare_set, self._path + key, _NOTHING, _NOTHING)
        return None if found == _NOTHING else self._opened(key, found)

    def _mac(self, value: bytes, key: str = "") -> bytes:
        return hmac.digest(self._secret, f"{key}\0".encode() + value, "sha256")

    def _sealed(self, key: str, value: bytes) -> bytes:
        return self._mac(value, self._path + key) + value if self._secret else value

    def _opened(self, key: str, data: bytes) -> bytes | None:
        """A value without its seal; None if that does not fit."""
        if not data:  # see `end_waits`
            return None
        if not self._secret:
            return data
        if hmac.compare_digest(data[:_SEAL], self._mac(data[_SEAL:], self._path + key)):
            return data[_SEAL:]
        self.warn(key)
        return None

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
            close_connections(lambda _, remote: remote == connection.port)

    def end_waits(self) -> None:
        """Let the threads end that wait for a key still, of all parts of the store."""
        self._connection.end_waits()

    def _request(self, request: Callable[..., R], *arguments: object) -> R:
        return self._connection.request(request, *arguments)


def _end_waits(connection: weakref.ref[_Connection]) -> None:
    if (found := connection()) is not None:
        found.end_waits()


def _strange(key: str, found: str, expected: str) -> ContextError:
    return ContextError(
        f"the store of the job holds a value that no rank has written: {key}",
        found=found,
        expected=expected,
        fix="give each job a store of its own: another MASTER_PORT, closed to others",
    )
