"""What the launcher of another node does: it starts replicas as it is ordered to, and reports what becomes of them.

See [Note: nodes of replicas] in remote_nodes.py.
"""

from __future__ import annotations

import multiprocessing.connection
import os
import signal
import socket
import threading
import time
import uuid
from typing import Any

import torch.distributed as dist

from weft.environments import Topology
from weft.errors import ContextError
from weft.launching.failures import PREEMPTED_TEXT, Ending
from weft.launching.plan import Plan
from weft.launching.replicas.processes import LocalNode
from weft.launching.replicas.remote_nodes import facts_of_node
from weft.launching.replicas.story import say
from weft.peers.board import Board, StoreLost
from weft.peers.connect import open_store
from weft.peers.replica_groups import LAUNCHED, MEMORY, STORE
from weft.peers.world import PREEMPTED, arrives

__all__ = ["JoinedNode"]

_TURN_S = 0.03  # between two looks at the orders
_REPORT_S = 1.0
_ANSWER_S = 15.0  # within which the store answers


class JoinedNode:
    """A node of a job that another launcher decides about."""

    def __init__(self, plan: Plan, here: LocalNode, host: str, port: int) -> None:
        """Find the launcher that decides.

        Raises:
            ContextError: Nobody serves a store there, or that of something else.
        """
        self.signalled = 0
        self._plan, self._here, self._where = plan, here, f"{host}:{port}"
        place = Topology(master_addr=host, master_port=port, source="--rdzv", store_served=True)
        store = open_store(place, _ANSWER_S, serves=False, who="launch: this node")
        self._board = Board(dist.PrefixStore(STORE, store), limit_s=_ANSWER_S)
        if not arrives(self._board, LAUNCHED, _ANSWER_S):
            raise ContextError(
                "launch: this is not the address of an elastic job",
                found=f"{host}:{port}, whose store knows no replicas",
                expected="a launcher with --min-replicas",
                fix="the same options of weft launch on all nodes",
            )
        here.meets_at(host, port)
        self._launcher = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._orders = 0
        self._reported: dict[str, Any] = {}
        self._reported_s = 0.0
        self._ending: Ending | None = None
        self._preempted = False

    def pass_on(self, number: int, frame: object) -> None:
        """A signal has come."""
        del frame
        self.signalled, self._here.is_leaving = number, True
        self._here.send(number)

    def run(self) -> Ending:
        """Do it until the job ends, or this node is to leave it."""
        is_over = threading.Event()
        threading.Thread(target=self._guard, args=(is_over,), name="weft launch", daemon=True).start()
        try:
            self._here.prepare()
            self._report(first=True)
            while self._ending is None:
                sentinels = [one for replica in self._here.replicas.values() for one in replica.sentinels]
                multiprocessing.connection.wait(sentinels, timeout=_TURN_S) if sentinels else time.sleep(_TURN_S)
                self._obey()
                self._report()
                self._forget_ended()
                if self.signalled and not self._here.replicas:
                    self._ending = self._left()
            self._here.end()
            self._report(gone=True)
        except StoreLost as error:
            self._ending = Ending(1, f"weft launch: the launcher at {self._where} is lost: {error.text}")
        finally:
            is_over.set()
            self._here.end()
        return self._ending

    def _guard(self, is_over: threading.Event) -> None:
        while not is_over.wait(1.0):
            self._board.guard()

    def _left(self) -> Ending:
        if self._preempted:
            return Ending(PREEMPTED, PREEMPTED_TEXT)
        return Ending(128 + self.signalled, f"weft launch: ended by {signal.Signals(self.signalled).name}")

    def _obey(self) -> None:
        while self._ending is None and self._board.has(key := f"order/{self._launcher}/{self._orders + 1}"):
            order = self._board.read(key)
            self._board.delete(key)
            self._orders += 1
            if "node" in order:
                self._here.number = order["node"]
                self._board.set(f"{MEMORY}/{self._here.number}", str(self._here.memory))
                numbers = ", ".join(map(str, self._here.numbers()))
                say(f"node {self._here.number} of the job at {self._where}, with replicas {numbers}")
            elif "wait" in order:
                say(f"the job at {self._where} has all its nodes; this launcher waits until one of them is lost")
            elif "start" in order and not self.signalled:
                self._here.start(*order["start"])
            elif "leave" in order:
                why = f": {order['why']}" if order["why"] else ""
                text = f"weft launch: the job at {self._where} has ended{why}" if order["leave"] else ""
                self._ending = Ending(order["leave"], text)
            elif "signal" in order and not self.signalled:  # else it has come here, too
                self.pass_on(order["signal"], None)
            elif "kill" in order and order["kill"] in self._here.replicas:
                self._here.replicas[order["kill"]].kill()

    def _forget_ended(self) -> None:
        states = self._reported["replicas"]
        said = [name for name, state in states.items() if state["ended"] is not None]
        self._preempted |= any(state["ended"] and state["ended"].code == PREEMPTED for state in states.values())
        for name in said:
            if self._here.replicas[name].is_gone:
                del self._here.replicas[name]

    def _report(self, *, first: bool = False, gone: bool = False) -> None:
        state = {
            "replicas": {
                name: {"pids": one.pids, "stopped": one.is_stopped, "ended": one.ended()}
                for name, one in self._here.replicas.items()
            },
            "leaving": self._here.is_leaving,
            "gone": gone,
            "orders": self._orders,
        }
        now = time.monotonic()
        if first or state != self._reported or now - self._reported_s > _REPORT_S:
            self._reported, self._reported_s = state, now
            about = {"launcher": self._launcher, "node": self._plan.node_rank, "first": first}
            number = self._board.add("asks", 1)
            self._board.write(f"ask/{number}", {**about, "facts": facts_of_node(self._plan), **state})
