"""The processes of the replicas on this node: those of one replica are started and ended together."""

from __future__ import annotations

import json
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from weft.launching.failures import report_text
from weft.launching.plan import LaunchPlan
from weft.peers.replica_groups import REPLICA_VARIABLE
from weft.peers.world import PREEMPTED

GRACE_S = 10.0  # that processes have to end in good order
_CONTEXT: Any = multiprocessing.get_context("forkserver" if sys.platform.startswith("linux") else "spawn")


class Ended(NamedTuple):
    """How a replica has ended: by the first of its processes that failed.

    Attributes:
        rank: Of that process.
        process: Its id.
        code: Its exit code, or minus the number of a signal.
        trace: Its traceback, if it has left one.
    """

    rank: int
    process: int
    code: int
    trace: str = ""


class Node(Protocol):
    """A node of the job, as the launcher sees it that decides.

    Attributes:
        number: Of the node, from 0 on.
        is_leaving: Nothing is started there any more.
    """

    number: int
    is_leaving: bool

    def start(self, number: int, attempt: int) -> Replica[Any]:
        """Start the processes of a replica."""
        ...


N = TypeVar("N", bound=Node)


@dataclass
class Replica(ABC, Generic[N]):
    """A replica that was started.

    Attributes:
        number: Of the replica.
        attempt: How often it was started before.
        node: On which it runs.
        ranks: Of its processes.
        exits: Exit codes by rank, as last seen; None of a process that runs, minus the number of a signal.
        done: The ranks that have said that their work is done.
        stopped_since: When one of its processes was first seen stopped; None if none is.
        was_inside: It was in some quorum.
        refused: Why it may be in none; "" if it may.
    """

    number: int
    attempt: int
    node: N
    ranks: range
    exits: dict[int, int | None] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    stopped_since: float | None = None
    was_inside: bool = False
    refused: str = ""
    _saving_since: float | None = None

    @property
    def name(self) -> str:
        """Of this replica, and of none that takes its place."""
        return f"{self.number}.{self.attempt}"

    @property
    @abstractmethod
    def pids(self) -> dict[int, int]:
        """The ids of its processes, by rank."""

    @property
    @abstractmethod
    def sentinels(self) -> list[int]:
        """What `multiprocessing.connection.wait` waits for: a process of this node ends."""

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """Whether one of its processes is stopped, as by SIGSTOP."""

    @abstractmethod
    def look(self) -> None:
        """See which of its processes have ended; what they have said, they have said before."""

    @abstractmethod
    def trace(self, rank: int) -> str:
        """The traceback that a rank has left."""

    @abstractmethod
    def kill(self) -> None:
        """End what is left of it."""

    @property
    def is_done(self) -> bool:
        """Whether all its ranks have said so."""
        return self.done.issuperset(self.ranks)

    def ended(self) -> Ended | None:
        """How it has ended; None if it has not. One that ends before its work is done has failed, with any code."""
        codes = self.exits
        failed = next((rank for rank, code in codes.items() if code not in (None, 0)), None)
        if failed is None:
            failed = next((rank for rank, code in codes.items() if code == 0 and rank not in self.done), None)
        elif codes[failed] == PREEMPTED and None in codes.values():  # its ranks save together
            self._saving_since = self._saving_since or time.monotonic()
            if time.monotonic() - self._saving_since < GRACE_S:
                return None
        if not codes or (failed is None and None in codes.values()):
            return None
        rank = next(iter(codes)) if failed is None else failed
        return Ended(rank, self.pids.get(rank, 0), codes[rank] or 0, self.trace(rank))


@dataclass
class LocalReplica(Replica["LocalNode"]):
    """A replica whose processes this launcher has started.

    Attributes:
        folder: In which they leave reports.
        processes: By rank.
    """

    folder: pathlib.Path = field(default_factory=pathlib.Path)
    processes: dict[int, Any] = field(default_factory=dict)

    @property
    def pids(self) -> dict[int, int]:
        """See `Replica`."""
        return {rank: process.pid for rank, process in self.processes.items()}

    @property
    def sentinels(self) -> list[int]:
        """See `Replica`."""
        return [process.sentinel for process in self.processes.values() if process.is_alive()]

    @property
    def is_stopped(self) -> bool:
        """See `Replica`."""
        return any(process.exitcode is None and _is_stopped(process.pid) for process in self.processes.values())

    def look(self) -> None:
        """See `Replica`."""
        self.exits = {rank: process.exitcode for rank, process in self.processes.items()}

    def trace(self, rank: int) -> str:
        """See `Replica`."""
        return report_text(self.folder, rank, self.attempt)

    @property
    def is_gone(self) -> bool:
        """Whether none of its processes is left."""
        return all(process.exitcode is not None for process in self.processes.values())

    def send(self, number: int) -> None:
        """Send all its processes a signal."""
        for process in self.processes.values():
            if process.exitcode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def kill(self) -> None:
        """See `Replica`."""
        self.send(signal.SIGKILL)
        for process in self.processes.values():
            process.join()
        self.look()

    def join(self, end: float) -> None:
        """Wait for its processes until a moment of the monotonic clock."""
        for process in self.processes.values():
            process.join(max(end - time.monotonic(), 0))


class LocalNode:
    """The node of this launcher.

    Attributes:
        number: Of the node, from 0 on.
        is_leaving: The launcher was asked to end.
        replicas: That were started and are not gone, by name.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        target: Callable[..., None],
        arguments: Callable[[dict[str, str]], tuple[Any, ...]],
        folder: pathlib.Path,
        memory: pathlib.Path,
    ) -> None:
        """Prepare it.

        Args:
            plan: How many processes.
            target: A function that can be imported: what each of them does.
            arguments: Of the target, of the variables that a rank finds in its environment.
            folder: In which ranks leave their reports.
            memory: In which they leave copies of their state.
        """
        self.plan, self.memory = plan, memory
        self.number, self.is_leaving = 0, False
        self.replicas: dict[str, LocalReplica] = {}
        self._target, self._arguments, self._folder = target, arguments, folder
        self._job: dict[str, str] = {}

    def joins(self, job: str, host: str, port: int) -> None:
        """The name of the job, and where its store is."""
        facts = {"job": job, "ranks": self.plan.replica_ranks, "memory": str(self.memory), "folder": str(self._folder)}
        self._job = {"MASTER_ADDR": host, "MASTER_PORT": str(port), REPLICA_VARIABLE: json.dumps(facts)}

    def prepare(self) -> None:
        """Import what all processes begin with; `start` takes seconds else, in which nothing is heard of this node."""
        first = _CONTEXT.Process(target=int)
        first.start()
        first.join()

    def start(self, number: int, attempt: int) -> LocalReplica:
        """Start the processes of a replica."""
        ranks = range(number * self.plan.replica_ranks, (number + 1) * self.plan.replica_ranks)
        replica = LocalReplica(number, attempt, self, ranks, folder=self._folder)
        # All replicas that there can be count, also those of nodes that are not there.
        plan = self.plan._replace(node_rank=self.number, least_nodes=self.plan.most_nodes)
        for rank in ranks:
            variables = plan.variables(rank - self.number * plan.nproc) | {
                **self._job,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
            }
            process = _CONTEXT.Process(target=self._target, args=self._arguments(variables))
            replica.processes[rank] = process
            process.start()
        self.replicas[replica.name] = replica
        return replica

    def send(self, number: int) -> None:
        """Send all processes a signal."""
        for replica in list(self.replicas.values()):
            replica.send(number)

    def end(self) -> None:
        """End all processes, which have some time to do so in good order."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        for replica in self.replicas.values():
            replica.join(end)
            replica.kill()

    def numbers(self) -> range:
        """The numbers of its replicas."""
        each = self.plan.nproc // self.plan.replica_ranks
        return range(self.number * each, (self.number + 1) * each)


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; on Linux."""
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] == "T"
