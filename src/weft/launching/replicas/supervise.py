"""Ranks that are started again alone: each is a replica, and the others make steps without it meanwhile.

This launcher serves the store at which replicas meet, and decides about quorums ([Note: quorum]). It sees at once when
a process ends. One that is stopped, or that the others have waited for in vain, is killed: its connections close too.
Launchers of other nodes start processes for it ([Note: nodes of replicas]).
"""

from __future__ import annotations

import pathlib
import secrets
import signal
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from weft.errors import ContextError
from weft.launching.agent import PASSED_ON
from weft.launching.failures import HAS_PREEMPTED, Ending, ended_by, exit_in_words, last_words
from weft.launching.plan import MEETING_S, LaunchPlan
from weft.launching.replicas.joined_node import JoinedNode
from weft.launching.replicas.loss_log import LossLog, LostReplica, print_line
from weft.launching.replicas.messages import arrived
from weft.launching.replicas.processes import GRACE_S, Ended, LocalNode, Node, Replica
from weft.launching.replicas.remote_nodes import TURN_S, Nodes
from weft.peers.connect import is_here, store_at
from weft.peers.quorum import Answer, Ask, LoopPosition, Quorums
from weft.peers.replica_groups import STORE
from weft.peers.store import RankStore
from weft.peers.world import PREEMPTED

_STOPPED_S = 3.0  # a process that is stopped for so long is killed
_ANSWER_S = 30.0  # within which the store of this process answers
_UNDONE = "its work was not done: it ended before weft.resilient, or within the loop over it"
_EARLY = "its work was not done: it left the loop over weft.resilient before the others"


def supervise_replicas(plan: LaunchPlan, here: LocalNode, secret: str) -> Ending:
    """Run the replicas of this node, and start those again that fail, each by itself.

    The launcher of the first node decides for all; those of the others do what it says.

    Args:
        plan: How many, how often they are started again, and the least that can do without the others.
        here: This node.
        secret: Of the job; "" if it has none.

    Returns:
        How it ended.
    """
    several = plan.most_nodes > 1
    host, _, port = (plan.rdzv if several and plan.rdzv else "127.0.0.1:0").rpartition(":")
    store = _serve(plan, host, int(port))
    job: JoinedNode | _ElasticJob
    if store is None:
        job = JoinedNode(plan, here, host, int(port), secret)
    else:
        here.joins(name := secrets.token_hex(8), host, store.port)
        board = RankStore(store, limit_s=_ANSWER_S, secret=secret).below(STORE)
        job = _ElasticJob(plan, here, board, Nodes(plan, board, name))
    for number in PASSED_ON:
        signal.signal(number, job.pass_on)
    try:
        return job.run()
    finally:
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_IGN)  # nothing is left to end but this process, which has an exit code


def _serve(plan: LaunchPlan, host: str, port: int) -> dist.TCPStore | None:
    """The store of the job; None if another launcher serves it."""
    if not (is_here(host) if plan.node_rank is None else plan.node_rank == 0):
        return None
    limit = timedelta(seconds=_ANSWER_S)
    try:
        return store_at(host, port, _ANSWER_S, wait_for_workers=False, timeout=limit)
    except ContextError:
        if plan.most_nodes == 1 or plan.node_rank == 0:
            raise
        return None  # another launcher on this machine was first


@dataclass
class _ElasticJob:
    """The replicas of a job, and what this launcher decides about them."""

    plan: LaunchPlan
    here: LocalNode
    board: RankStore
    nodes: Nodes
    living: dict[str, Replica] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)  # how often each replica was started
    given_up: set[int] = field(default_factory=set)  # replicas that have failed too often
    finished: dict[str, tuple[Replica, Ended]] = field(default_factory=dict)  # those that have done their work
    waiting: list[Replica] = field(default_factory=list)  # lost since, and not started again as the work is done
    preempted: int = 0
    restarts: int = 0
    short_since: float | None = None
    signalled: int = 0
    failed: Ending = field(default_factory=Ending)

    def __post_init__(self) -> None:
        self.most = self.plan.nproc * self.plan.most_nodes // self.plan.replica_ranks
        self.quorums = Quorums(least=self.plan.min_replicas or 1)
        self.story = LossLog(self.most, None if self.plan.events is None else pathlib.Path(self.plan.events))

    def run(self) -> Ending:
        """Do it until the job has ended."""
        code = 1
        try:
            for number in self.plan.replicas_of(self.here.number):
                self.start(number, self.here)
            while not self.is_over():
                self.wait_and_update()
            ending = _ending_of(self)
            code = ending.code
            return ending
        finally:
            self.end_all(code)

    # -- processes -------------------------------------------------------------------------------

    def start(self, number: int, node: Node) -> None:
        attempt = self.attempts.get(number, -1) + 1
        self.attempts[number] = attempt
        self.given_up.discard(number)
        replica = node.start(number, attempt)
        self.living[replica.name] = replica
        self.quorums.started(replica.name)

    def pass_on(self, number: int, frame: object) -> None:
        self.signalled = number
        self.here.send(number)
        self.nodes.send(number)

    def wait_and_update(self) -> None:
        """Wait a moment, or until a process ends; then see what has changed."""
        self.here.wait(TURN_S)
        now = time.monotonic()
        self.read_messages(now)
        self.see_nodes(now)
        for replica in list(self.living.values()):
            if replica.ended() is not None:
                self.handle_ended(replica, "", now)
            elif replica.is_stopped:
                replica.stopped_since = replica.stopped_since or now
                if now - replica.stopped_since > _STOPPED_S:
                    self.kill(replica, f"was stopped for {_STOPPED_S:g} s", replica.stopped_since)
            else:
                replica.stopped_since = None
        for name in self.quorums.overdue(now):
            since = self.quorums.waiting_since or now
            self.kill(self.living[name], "did not finish its step while others waited", since)
        self.look_for_early(now)
        self.decide(now)

    def see_nodes(self, now: float) -> None:
        """Let go of nodes that are lost, and begin with new ones."""
        for node, why in self.nodes.lost(now):
            print_line(f"{node} {why}")
            for replica in [one for one in self.living.values() if one.node is node]:
                node.kill(replica)
                self.handle_ended(replica, f"its launcher {why}", node.heard)
            self.given_up.difference_update(self.plan.replicas_of(node.number))
        for node in self.nodes.placed():
            numbers = self.plan.replicas_of(node.number)
            print_line(f"{node} has come, with replicas {', '.join(map(str, numbers))}")
            for number in numbers:
                self.start(number, node)

    def kill(self, replica: Replica, why: str, since: float) -> None:
        pids = ", ".join(map(str, replica.pids.values()))
        print_line(f"replica {replica.number} (process {pids}) {why}, and is killed")
        replica.node.kill(replica)
        self.handle_ended(replica, f"it {why}", since)

    def handle_ended(self, replica: Replica, why: str, since: float) -> None:
        """A replica has ended: it is done, or it is started again, or it was one too many."""
        del self.living[replica.name]
        self.here.replicas.pop(replica.name, None)
        was_inside = replica.name in self.quorums.inside
        ended = replica.ended()
        assert ended is not None
        done = ended.code == 0 and replica.is_done
        self.quorums.ended(replica.name, done=done, lost=ended.code != PREEMPTED)
        if done:
            self.finished[replica.name] = replica, ended
            return
        replica.node.kill(replica)
        if ended.code == PREEMPTED:
            self.preempted += not replica.node.is_leaving  # else the job does without that node
            return
        undone = _UNDONE if ended.code == 0 else ""
        self.lose(replica, ended, why or replica.refused or undone, since, was_inside=was_inside)

    def lose(self, replica: Replica, ended: Ended, why: str, since: float, *, was_inside: bool) -> None:
        how, trace = exit_in_words(ended.code), ended.trace
        loss = LostReplica(replica.number, ended.rank, ended.process, how, why or last_words(trace), time.time())
        text = f"{trace}\nweft launch: {loss._replace(why=why)}".lstrip()
        code = ended.code if ended.code > 0 else 128 - ended.code
        self.failed = Ending(code if ended.code else 1, text, ended.rank, trace)
        self.story.lost(loss, since, was_inside=was_inside)
        self.replace(replica, f"{loss}; {len(self.living)} of {self.most} replicas left")

    def replace(self, replica: Replica, said: str) -> None:
        """Start a replica again that was lost, if that is of use."""
        if replica.node.is_leaving or self.signalled:
            print_line(said)
        elif self.finished:
            print_line(said)
            self.waiting.append(replica)
        elif self.restarts < self.plan.max_restarts and not replica.refused:  # the next one would be refused, too
            self.restarts += 1
            print_line(f"{said}; it is started again, {self.restarts} of {self.plan.max_restarts} times")
            self.start(replica.number, replica.node)
        else:
            print_line(said)
            self.given_up.add(replica.number)

    def look_for_early(self, now: float) -> None:
        """Those that have left too early are lost after all."""
        early = [self.finished.pop(name) for name in self.quorums.early]
        self.quorums.early.clear()
        for replica, ended in early:
            self.lose(replica, ended, _EARLY, now, was_inside=True)
        if early and not self.finished:
            again, self.waiting = self.waiting, []
            for replica in again:
                self.replace(replica, f"replica {replica.number} is needed after all")

    # -- quorums ---------------------------------------------------------------------------------

    def read_messages(self, now: float) -> None:
        for kind, found in arrived(self.board):
            if kind == "node":
                self.nodes.hear(found, now)
            elif kind == "ask":
                self.ask(found.pop("name"), Ask(**found), now)
            elif found["name"] in self.living:
                replica = self.living[found["name"]]
                if found["rank"] in replica.ranks and found["done"]:
                    replica.done.add(found["rank"])
                if found["rank"] == replica.ranks[0]:
                    loop = LoopPosition(found["step"], found["inside"], found["whole"])
                    self.quorums.note_position(replica.name, loop)

    def ask(self, name: str, ask: Ask, now: float) -> None:
        refused = self.quorums.ask(name, ask, now)
        if refused:
            print_line(f"refused: {refused}")
            self.answer(name, Answer(refused=refused))
            if name in self.living:
                self.living[name].refused = refused
        else:
            self.living[name].was_inside |= not ask.fresh

    def answer(self, name: str, found: Answer) -> None:
        for rank in range(self.plan.replica_ranks):
            self.board.push(f"answer/{name}/{rank}", found._asdict())

    def decide(self, now: float) -> None:
        if self.waits_for_nodes:
            return
        number, before = self.quorums.number, set(self.quorums.inside)
        found = self.quorums.next(now)
        if found is None:
            if self.quorums.calls:
                self.board.set(f"called/{number}", "1")
            if self.quorums.is_broken:
                self.board.set(f"broken/{number}", "1")
            return
        new = sorted(self.living[name].number for name in set(found.members) - before)
        found = found._replace(lost=self.story.continues(found, new, now))
        for name in found.members:
            self.answer(name, found)
            self.living[name].was_inside = True

    # -- the end ---------------------------------------------------------------------------------

    @property
    def waits_for_nodes(self) -> bool:
        """Whether the nodes have not come without which the job does not begin."""
        return not self.quorums.number and len(self.nodes.there) + 1 < self.plan.least_nodes

    def is_over(self) -> bool:
        """Whether all have ended, or what is left cannot end the job."""
        ends = bool(self.finished or self.signalled or self.preempted)
        if ends and not self.living:
            return True
        if self.finished and not any(one.was_inside for one in self.living.values()):
            ranks = ", ".join(str(one.number) for one in self.living.values())
            print_line(f"the job has ended before replica {ranks} could join it")
            return True
        if ends or (len(self.living) >= self.quorums.least and not self.waits_for_nodes):
            self.short_since = None
            return False
        now = time.monotonic()
        self.short_since = self.short_since or now
        if self.given_up or not self.nodes.num_missing:
            return len(self.living) < self.quorums.least
        if now - self.short_since > MEETING_S:
            there = f"{len(self.nodes.there) + 1} of {self.plan.nodes(' to ')} nodes are there"
            self.failed = Ending(1, f"weft launch: {there} after {MEETING_S} s\n{self.failed.text}".rstrip())
            return True
        return False

    def end_all(self, code: int) -> None:
        self.story.end(len(self.living))
        self.nodes.leave(code)
        self.here.end()
        self.nodes.wait_until_gone(2 * GRACE_S)


def _ending_of(job: _ElasticJob) -> Ending:
    if job.finished and (not job.failed.code or len(job.finished) >= job.quorums.least):
        return Ending()
    if job.preempted and not job.failed.code:
        return HAS_PREEMPTED
    return ended_by(job.signalled) if job.signalled else job.failed
