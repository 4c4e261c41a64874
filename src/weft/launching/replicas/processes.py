"""The processes of the replicas on this node: those of one replica are started and ended together."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from weft.launching.failures import report_text
from weft.launching.plan import LaunchPlan
from weft.peers.liveness import process_fields
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

    def start(self, number: int, attempt: int) -> Replica:
        """Start the processes of a replica."""
        ...

    def kill(self, replica: Replica) -> None:
        """End what is left of a replica."""
        ...


@dataclass
class Replica:
    """A replica that was started, and what its node last said of it.

    Attributes:
        number: Of the replica.
        attempt: How often it was started before.
        node: On which it runs.
        ranks: Of its processes.
        processes: By rank, if they are of this node.
        pids: The ids of its processes, by rank.
        exits: Exit codes by rank; None of a process that runs, minus the number of a signal. What a process has said,
            it has said before.
        is_stopped: Whether one of its processes is stopped, as by SIGSTOP.
        trace: The traceback that the first rank which failed has left.
        done: The ranks that have said that their work is done.
        stopped_since: When one of its processes was first seen stopped; None if none is.
        was_inside: It was in some quorum.
        refused: Why it may be in none; "" if it may.
    """

    number: int
    attempt: int
    node: Node
    ranks: range
    processes: dict[int, Any] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    exits: dict[int, int | None] = field(default_factory=dict)
    is_stopped: bool = False
    trace: str = ""
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
    def is_done(self) -> bool:
        """Whether all its ranks have said so."""
        return self.done.issuperset(self.ranks)

    def ended(self) -> Ended | None:
        """How it has ended; None if it has not. Whoever ends without having done its work has failed, with any code."""
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
        return Ended(rank, self.pids.get(rank, 0), codes[rank] or 0, self.trace)


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
        self.replicas: dict[str, Replica] = {}
        self._target, self._arguments, self._folder = target, arguments, folder
        self._job: dict[str, str] = {}
        self._sent = 0

    def joins(self, job: str, host: str, port: int) -> None:
        """The name of the job, and where its store is."""
        facts = {"job": job, "ranks": self.plan.replica_ranks, "memory": str(self.memory), "folder": str(self._folder)}
        self._job = {"MASTER_ADDR": host, "MASTER_PORT": str(port), REPLICA_VARIABLE: json.dumps(facts)}

    def prepare(self) -> None:
        """Import what all processes begin with; `start` takes seconds else, in which nothing is heard of this node."""
        first = _CONTEXT.Process(target=int)
        first.start()
        first.join()

    def start(self, number: int, attempt: int) -> Replica:
        """Start the processes of a replica."""
        replica = Replica(number, attempt, self, self.plan.ranks_of(number))
        # All replicas that there can be count, also those of nodes that are not there.
        plan = self.plan._replace(node_rank=self.number, least_nodes=self.plan.most_nodes)
        for rank in replica.ranks:
            variables = plan.variables(rank - self.number * plan.nproc) | {
                **self._job,
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
            }
            process = _CONTEXT.Process(target=self._target, args=self._arguments(variables))
            replica.processes[rank] = process
            process.start()
            replica.pids[rank], replica.exits[rank] = process.pid, None
        self.replicas[replica.name] = replica
        if self._sent:  # meanwhile
            _send(replica, self._sent)
        return replica

    def wait(self, limit_s: float) -> None:
        """Wait until a process ends, at most so long; then see what has become of all."""
        running = [one for each in self.replicas.values() for one in each.processes.values() if one.is_alive()]
        multiprocessing.connection.wait([process.sentinel for process in running], timeout=limit_s)
        for replica in self.replicas.values():
            self._look(replica)

    def _look(self, replica: Replica) -> None:
        before, replica.exits = replica.exits, {rank: one.exitcode for rank, one in replica.processes.items()}
        running = [pid for rank, pid in replica.pids.items() if replica.exits[rank] is None]
        replica.is_stopped = any(map(_is_stopped, running))
        failed = next((rank for rank, code in replica.exits.items() if code), None)
        if failed is not None and replica.exits != before:
            replica.trace = report_text(self._folder, failed, replica.attempt)

    def send(self, number: int) -> None:
        """Send all processes a signal, also those that are about to start."""
        self._sent = number
        for replica in list(self.replicas.values()):
            _send(replica, number)

    def kill(self, replica: Replica) -> None:
        """End what is left of a replica."""
        _send(replica, signal.SIGKILL)
        for process in replica.processes.values():
            process.join()
        self._look(replica)

    def end(self) -> None:
        """End all processes, which have some time to do so in good order."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGTERM)
        end = time.monotonic() + GRACE_S
        for replica in self.replicas.values():
            for process in replica.processes.values():
                process.join(max(end - time.monotonic(), 0))
            self.kill(replica)


def _send(replica: Replica, number: int) -> None:
    for process in replica.processes.values():
        if process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped, as by SIGSTOP; on Linux."""
    with suppress(OSError):
        return process_fields(pid)[:1] == ["T"]
    return False
