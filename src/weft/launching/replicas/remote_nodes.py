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
from typing import Any

from weft.launching.plan import LaunchPlan
from weft.launching.replicas.loss_log import print_line
from weft.launching.replicas.messages import arrived
from weft.launching.replicas.processes import Replica
from weft.peers.store import RankStore

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

    def __init__(self, found: dict[str, Any], board: RankStore, plan: LaunchPlan, now: float) -> None:
        """Begin with what its launcher has said."""
        self.launcher, self.wanted, self.heard = found["launcher"], found["node"], now
        self.number = -1
        self.is_leaving = self.is_gone = self.waits = False
        self.replicas: dict[str, Replica] = {}
        self._board, self._plan = board, plan

    def __str__(self) -> str:
        """For texts."""
        return f"node {self.number} ({self.launcher})"

    def order(self, **what: Any) -> None:
        """Tell its launcher to do something."""
        self._board.push(f"order/{self.launcher}", what)

    def start(self, number: int, attempt: int) -> Replica:
        """Start the processes of a replica."""
        replica = Replica(number, attempt, self, self._plan.ranks_of(number))
        self.replicas[replica.name] = replica
        self.order(start=number, attempt=attempt)
        return replica

    def reports(self, found: dict[str, Any], now: float) -> None:
        """What its launcher has said about it."""
        self.heard = now
        self.is_leaving, self.is_gone = found["leaving"], found["gone"]
        for name, state in found["replicas"].items():
            replica = self.replicas.get(name)
            if replica is not None:
                replica.pids, replica.exits = (
                    {rank: state[what][str(rank)] for rank in replica.ranks if str(rank) in state[what]}
                    for what in ("pids", "exits")
                )
                replica.is_stopped, replica.trace = state["stopped"], state["trace"]

    def kill(self, replica: Replica) -> None:
        """End what is left of a replica."""
        self.order(kill=replica.name)
        self.replicas.pop(replica.name, None)
        codes = {rank: replica.exits.get(rank) for rank in replica.ranks}
        replica.exits = {rank: -signal.SIGKILL if code is None else code for rank, code in codes.items()}


class Nodes:
    """The other nodes of a job."""

    def __init__(self, plan: LaunchPlan, board: RankStore, job: str) -> None:
        self._known: dict[str, RemoteNode] = {}  # by the name of the launcher, in the order in which they came
        self._plan, self._board, self._job = plan, board, job

    @property
    def there(self) -> list[RemoteNode]:
        """Those that have a number."""
        return [node for node in self._known.values() if node.number >= 0]

    @property
    def num_missing(self) -> int:
        """Nodes that may still come."""
        return self._plan.most_nodes - 1 - len(self.there)

    def hear(self, found: dict[str, Any], now: float) -> None:
        """A launcher has said something."""
        name = found["launcher"]
        known = self._known.get(name)
        if known is None:
            known = RemoteNode(found, self._board, self._plan, now)
            refused = self._refusal(found)
            if refused:
                print_line(f"refused: the launcher {name}: {refused}")
                known.order(leave=1, why=refused)
                return
            self._known[name] = known
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
        for name, node in list(self._known.items()):
            silent, has_replicas = now - node.heard > _SILENT_S, node.number >= 0
            if node.is_gone or silent or (node.is_leaving and not has_replicas):
                del self._known[name]
                node.is_leaving = True
                if has_replicas:
                    yield node, f"was not heard from for {_SILENT_S:g} s" if silent else "has left"

    def placed(self) -> Iterator[RemoteNode]:
        """Launchers that get the number of a node."""
        for node in [one for one in self._known.values() if one.number < 0]:
            taken = {other.number for other in self.there}
            free = [number for number in range(1, self._plan.most_nodes) if number not in taken]
            if node.wanted is not None:
                free = [node.wanted] if node.wanted in free else []
            if free:
                node.number = free[0]
                node.order(node=node.number, job=self._job)
                yield node
            elif not node.waits:
                node.waits = True
                node.order(wait=True)

    def send(self, number: int) -> None:
        """Send all processes on these nodes a signal."""
        for node in self.there:
            node.order(signal=number)

    def leave(self, code: int) -> None:
        """Tell all that the job has ended."""
        for node in self._known.values():
            node.order(leave=code, why="")

    def wait_until_gone(self, limit_s: float) -> None:
        """Wait for those that have still to hear that the job has ended."""
        end = time.monotonic() + limit_s
        while (now := time.monotonic()) < end:
            list(self.lost(now))
            if not self._known:
                return
            for kind, found in arrived(self._board):
                if kind == "node":
                    self.hear(found, now)
            time.sleep(TURN_S)


def facts_of_node(plan: LaunchPlan) -> dict[str, Any]:
    """What has to be alike on all nodes."""
    return {"-n": plan.nproc, "--replica-ranks": plan.replica_ranks, "--nnodes": plan.nodes(":")}
