"""The other nodes of a job, as the launcher sees them that decides.

[Note: nodes of replicas] Each node has a launcher, which starts the processes there; they end with it. One launcher
serves the store and decides. The others come with a message, and get the number of a node that is free; if there is
none, they wait until one is. From then on they report once a second, and at once when something has changed, what has
become of their processes, and do what they are ordered to: start a replica, send it a signal, end it, leave. One that
has not reported for five seconds is lost, with all that it has started, and its number is free for another one.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from weft.launching.plan import LaunchPlan
from weft.launching.replicas.loss_log import print_line
from weft.launching.replicas.messages import LauncherMessages
from weft.launching.replicas.processes import Node, Replica

TURN_S = 0.01  # between two looks at what launchers and replicas ask
_SILENT_S = 5.0


class RemoteNode:
    """A node whose replicas another launcher starts.

    Attributes:
        launcher: Its name: the host, and the id of the process.
        number: Of the node; -1 while the launcher waits for one.
        wanted: The number that it has asked for; None: any.
        heard: When it last reported, on the monotonic clock of this process.
        is_leaving: It was asked to end, or is gone.
        is_gone: It has ended.
        waits: It was told that there is no free number.
        replicas: That it was ordered to start, by name.
    """

    def __init__(self, found: dict[str, Any], messages: LauncherMessages, replica_ranks: int, now: float) -> None:
        """Begin with what its launcher has said."""
        self.launcher, self.wanted, self.heard = found["launcher"], found["node"], now
        self.number = -1
        self.is_leaving = self.is_gone = self.waits = False
        self.replicas: dict[str, RemoteReplica] = {}
        self._messages, self._replica_ranks = messages, replica_ranks

    def __str__(self) -> str:
        """For texts."""
        return f"node {self.number} ({self.launcher})"

    def order(self, **what: Any) -> None:
        """Tell its launcher to do something."""
        self._messages.order(self.launcher, what)

    def start(self, number: int, attempt: int) -> RemoteReplica:
        """Start the processes of a replica."""
        ranks = range(number * self._replica_ranks, (number + 1) * self._replica_ranks)
        replica = RemoteReplica(number, attempt, self, ranks)
        self.replicas[replica.name] = replica
        self.order(start=number, attempt=attempt)
        return replica

    def reports(self, found: dict[str, Any], now: float) -> None:
        """What its launcher has said about it."""
        self.heard = now
        self.is_leaving, self.is_gone = found["leaving"], found["gone"]
        for name, state in found["replicas"].items():
            if name in self.replicas:
                self.replicas[name].is_now(state)


@dataclass
class RemoteReplica(Replica[RemoteNode]):
    """A replica that another launcher has started."""

    _pids: dict[int, int] = field(default_factory=dict)
    _stopped: bool = False
    _trace: str = ""

    def is_now(self, state: dict[str, Any]) -> None:
        """What its launcher sees."""
        self._pids = {rank: state["pids"][str(rank)] for rank in self.ranks if str(rank) in state["pids"]}
        self.exits = {rank: state["exits"][str(rank)] for rank in self.ranks if str(rank) in state["exits"]}
        self._stopped, self._trace = state["stopped"], state["trace"]

    @property
    def pids(self) -> dict[int, int]:
        """See `Replica`."""
        return self._pids

    @property
    def sentinels(self) -> list[int]:
        """See `Replica`."""
        return []

    @property
    def is_stopped(self) -> bool:
        """See `Replica`."""
        return self._stopped

    def look(self) -> None:
        """See `Replica`: its launcher does."""

    def trace(self, rank: int) -> str:
        """See `Replica`."""
        del rank  # the first that has failed
        return self._trace

    def kill(self) -> None:
        """See `Replica`."""
        self.node.order(kill=self.name)
        self.node.replicas.pop(self.name, None)
        codes = {rank: self.exits.get(rank) for rank in self.ranks}
        self.exits = {rank: -signal.SIGKILL if code is None else code for rank, code in codes.items()}


class Nodes:
    """The other nodes of a job.

    Attributes:
        there: Whose launchers have a number, by the name of the launcher.
        waiting: Those that wait for one, in the order in which they came.
    """

    def __init__(self, plan: LaunchPlan, messages: LauncherMessages, job: str) -> None:
        self.there: dict[str, RemoteNode] = {}
        self.waiting: dict[str, RemoteNode] = {}
        self._plan, self._messages, self._job = plan, messages, job

    @property
    def num_missing(self) -> int:
        """Nodes that may still come."""
        return self._plan.most_nodes - 1 - len(self.there)

    def hear(self, found: dict[str, Any], now: float) -> None:
        """A launcher has said something."""
        name = found["launcher"]
        known = self.there.get(name) or self.waiting.get(name)
        if known is None:
            known = RemoteNode(found, self._messages, self._plan.replica_ranks, now)
            refused = self._refusal(found)
            if refused:
                print_line(f"refused: the launcher {name}: {refused}")
                known.order(leave=1, why=refused)
                return
            self.waiting[name] = known
        known.reports(found, now)

    def _refusal(self, found: dict[str, Any]) -> str:
        if not found["first"]:
            return f"it was not heard from for {_SILENT_S:g} s, and its replicas were given up"
        mine = facts_of_node(self._plan)
        return "; ".join(
            f"{key} {value}, where the first node has {mine[key]}"
            for key, value in found["facts"].items()
            if mine.get(key) != value
        )

    def lost(self, now: float) -> Iterator[tuple[RemoteNode, str]]:
        """Nodes that are no longer there, each once, and why."""
        for name, node in list(self.waiting.items()):
            if node.is_gone or node.is_leaving or now - node.heard > _SILENT_S:
                del self.waiting[name]
        for name, node in list(self.there.items()):
            silent = now - node.heard > _SILENT_S
            if node.is_gone or silent:
                del self.there[name]
                node.is_leaving = True
                yield node, f"was not heard from for {_SILENT_S:g} s" if silent else "has left"

    def placed(self) -> Iterator[RemoteNode]:
        """Launchers that get the number of a node."""
        for name, node in list(self.waiting.items()):
            taken = {other.number for other in self.there.values()}
            free = [number for number in range(1, self._plan.most_nodes) if number not in taken]
            if node.wanted is not None:
                free = [node.wanted] if node.wanted in free else []
            if free:
                del self.waiting[name]
                node.number = free[0]
                self.there[name] = node
                node.order(node=node.number, job=self._job)
                yield node
            elif not node.waits:
                node.waits = True
                node.order(wait=True)

    def send(self, number: int) -> None:
        """Send all processes on these nodes a signal."""
        for node in self.there.values():
            node.order(signal=number)

    def numbers_of(self, node: Node) -> range:
        """The replicas of a node."""
        each = self._plan.nproc // self._plan.replica_ranks
        return range(node.number * each, (node.number + 1) * each)

    def leave(self, code: int) -> None:
        """Tell all that the job has ended."""
        for node in (*self.there.values(), *self.waiting.values()):
            node.order(leave=code, why="")

    def wait_until_gone(self, limit_s: float) -> None:
        """Wait for those that have still to hear that the job has ended."""
        end = time.monotonic() + limit_s
        while not self._forget_gone(now := time.monotonic()) and now < end:
            for kind, found in self._messages.arrived():
                if kind == "node":
                    self.hear(found, now)
            time.sleep(TURN_S)

    def _forget_gone(self, now: float) -> bool:
        """Whether none is left."""
        for some in (self.there, self.waiting):
            for name, node in list(some.items()):
                if node.is_gone or now - node.heard > _SILENT_S:
                    del some[name]
        return not self.there and not self.waiting


def facts_of_node(plan: LaunchPlan) -> dict[str, Any]:
    """What has to be alike on all nodes."""
    return {"-n": plan.nproc, "--replica-ranks": plan.replica_ranks, "--nnodes": plan.nodes(":")}
