"""What the launcher of another node does: it starts replicas as it is ordered to, and reports what becomes of them.

See [Note: nodes of replicas] in remote_nodes.py.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import uuid
from typing import Any

from weft.errors import ContextError
from weft.launching.failures import HAS_PREEMPTED, Ending, ended_by
from weft.launching.plan import LaunchPlan
from weft.launching.replicas.forms import fits
from weft.launching.replicas.loss_log import print_line
from weft.launching.replicas.processes import LocalNode, Replica
from weft.launching.replicas.remote_nodes import facts_of_node
from weft.peers.connect import store_of_launcher
from weft.peers.replica_groups import STORE
from weft.peers.store import SECRET_VARIABLE, RankStore, StoreLost
from weft.peers.world import PREEMPTED

_TURN_S = 0.03  # between two looks at the orders
_REPORT_S = 1.0
_ANSWER_S = 15.0  # within which the store answers
_FIRST_S = 30.0  # within which the launcher that decides does, which may be about to start its own replicas
_TRACE = 30_000  # characters of a traceback that are passed on
_NUMBER = range(2**31)
_ORDERS = (
    {"node": _NUMBER, "job": str},
    {"wait": bool},
    {"start": _NUMBER, "attempt": _NUMBER},
    {"kill": str},
    {"signal": _NUMBER},
    {"leave": _NUMBER, "why": str},
)


class JoinedNode:
    """A node of a job that another launcher decides about."""

    def __init__(self, plan: LaunchPlan, here: LocalNode, host: str, port: int, secret: str) -> None:
        """Find the store of the launcher that decides.

        Raises:
            ContextError: No store is served there.
        """
        self.signalled = 0
        self._plan, self._here, self._host, self._port = plan, here, host, port
        self._where = f"{host}:{port}"
        store = store_of_launcher(host, port, _ANSWER_S)
        self._board = RankStore(store, limit_s=_ANSWER_S, secret=secret).below(STORE)
        self._launcher = f"{socket.gethostname()[:50]}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._is_known = False
        self._began_s = time.monotonic()
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
        """Do it until the job ends, or this node is to leave it.

        Raises:
            ContextError: No launcher there decides about replicas.
        """
        is_over = threading.Event()
        threading.Thread(target=self._guard, args=(is_over,), name="weft launch", daemon=True).start()
        try:
            self._here.prepare()
            self._report(first=True)
            while self._ending is None:
                self._here.wait(_TURN_S)
                self._obey()
                self._report()
                self._forget_ended()
                if self.signalled and not self._here.replicas:
                    self._ending = HAS_PREEMPTED if self._preempted else ended_by(self.signalled)
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

    def _obey(self) -> None:
        while self._ending is None and (order := self._board.pop(f"order/{self._launcher}")) is not None:
            if not fits(order, _ORDERS):
                self._board.warn("order")
                continue
            self._is_known = True
            if "node" in order:
                self._here.number = order["node"]
                self._here.joins(order["job"], self._host, self._port)
                numbers = ", ".join(map(str, self._plan.replicas_of(self._here.number)))
                print_line(f"node {self._here.number} of the job at {self._where}, with replicas {numbers}")
            elif "wait" in order:
                print_line(f"the job at {self._where} has all its nodes; this launcher waits until one of them is lost")
            elif "start" in order and not self.signalled:
                self._here.start(order["start"], order["attempt"])
            elif "leave" in order:
                why = f": {order['why']}" if order["why"] else ""
                text = f"weft launch: the job at {self._where} has ended{why}" if order["leave"] else ""
                self._ending = Ending(order["leave"], text)
            elif "signal" in order and not self.signalled:  # else it has come here, too
                self.pass_on(order["signal"], None)
            elif "kill" in order and order["kill"] in self._here.replicas:
                self._here.kill(self._here.replicas[order["kill"]])
        if not self._is_known and time.monotonic() - self._began_s > _FIRST_S:
            raise ContextError(
                "launch: this is not the address of an elastic job",
                found=f"{self._where}, where no launcher answers",
                expected=f"a launcher with --min-replicas, and the same {SECRET_VARIABLE}, if any, on all nodes",
                fix=f"the same options of weft launch, and the same {SECRET_VARIABLE}, on all nodes",
            )

    def _forget_ended(self) -> None:
        exits = {name: state["exits"].values() for name, state in self._reported["replicas"].items()}
        self._preempted |= any(PREEMPTED in codes for codes in exits.values())
        for name, codes in exits.items():
            if None not in codes:
                del self._here.replicas[name]

    def _report(self, *, first: bool = False, gone: bool = False) -> None:
        state = {
            "replicas": {name: _state_of(one) for name, one in self._here.replicas.items()},
            "leaving": self._here.is_leaving,
            "gone": gone,
        }
        now = time.monotonic()
        if first or state != self._reported or now - self._reported_s > _REPORT_S:
            self._reported, self._reported_s = state, now
            about = {"launcher": self._launcher, "node": self._plan.node_rank, "first": first}
            self._board.push("asks", {"kind": "node", **about, "facts": facts_of_node(self._plan), **state})


def _state_of(replica: Replica) -> dict[str, Any]:
    return {
        "pids": {str(rank): pid for rank, pid in replica.pids.items()},
        "exits": {str(rank): code for rank, code in replica.exits.items()},
        "stopped": replica.is_stopped,
        "trace": replica.trace[-_TRACE:],
    }
