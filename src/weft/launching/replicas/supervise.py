"""Ranks that are started again alone: each is a replica, and the others make steps without it meanwhile.

This launcher serves the store at which replicas meet, and decides about quorums ([Note: quorum]). It sees at once when
a process ends. One that is stopped, or that the others have waited for in vain, is killed: its connections close too.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import pathlib
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weft.launching.failures import PREEMPTED_TEXT, Ending, how_it_ended, report_of
from weft.launching.plan import Plan
from weft.launching.replicas.processes import Replica
from weft.launching.replicas.story import Loss, Story, say
from weft.peers.quorum import Answer, Ask, Quorums
from weft.peers.replica_groups import LAUNCHED, MEMORY, STORE
from weft.peers.world import PREEMPTED

__all__ = ["supervise_replicas"]

_TURN_S = 0.01  # between two looks at what replicas ask
_STOPPED_S = 3.0  # a process that is stopped for so long is killed
_GRACE_S = 10.0  # that processes have to end in good order
_PASSED_ON = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)


def supervise_replicas(
    plan: Plan,
    target: Callable[..., None],
    arguments: Callable[[dict[str, str]], tuple[Any, ...]],
    folder: pathlib.Path,
    memory: pathlib.Path,
) -> Ending:
    """Run `target` on all ranks of this node, and start those again that fail, each by itself.

    Args:
        plan: How many, how often they are started again, and the least that can do without the others.
        target: A function that can be imported.
        arguments: Of the target, of the variables that a rank finds in its environment.
        folder: In which ranks leave their reports.
        memory: In which they leave copies of their state.

    Returns:
        How it ended.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    job = _Job(plan, target, arguments, folder, memory, store)
    before = {number: signal.signal(number, job.pass_on) for number in _PASSED_ON}
    try:
        for number in range(job.most):
            job.start(number)
        while not job.is_over():
            job.turn()
        return job.ending()
    finally:
        job.end_all()
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Job:
    """The replicas of a job, and what it decides about their quorums."""

    plan: Plan
    target: Callable[..., None]
    arguments: Callable[[dict[str, str]], tuple[Any, ...]]
    folder: pathlib.Path
    memory: pathlib.Path
    store: dist.TCPStore
    living: dict[str, Replica] = field(default_factory=dict)
    finished: int = 0  # replicas that have ended in good order
    preempted: int = 0
    restarts: int = 0
    asks_seen: int = 0
    questions: dict[str, int] = field(default_factory=dict)  # the last one of each replica
    missing_since: float | None = None
    signalled: int = 0
    failed: Ending = field(default_factory=Ending)

    def __post_init__(self) -> None:
        self.most = self.plan.nproc // self.plan.replica_ranks
        self.quorums = Quorums(least=self.plan.min_replicas or 1)
        self.story = Story(self.most, None if self.plan.events is None else pathlib.Path(self.plan.events))
        self.board = dist.PrefixStore(STORE, self.store)
        self.board.set(LAUNCHED, str(self.plan.replica_ranks))
        self.board.set(MEMORY, str(self.memory))
        self.board.add("asks", 0)

    # -- processes -------------------------------------------------------------------------------

    def start(self, number: int, attempt: int = 0) -> None:
        replica = Replica(number, attempt)
        method = "forkserver" if sys.platform.startswith("linux") else "spawn"
        context: Any = multiprocessing.get_context(method)
        for rank in range(number * self.plan.replica_ranks, (number + 1) * self.plan.replica_ranks):
            variables = self.plan.variables(rank) | {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
            }
            replica.processes[rank] = context.Process(target=self.target, args=self.arguments(variables))
            replica.processes[rank].start()
        self.living[replica.name] = replica
        self.quorums.started(replica.name)

    def pass_on(self, number: int, frame: object) -> None:
        self.signalled = number
        for replica in list(self.living.values()):
            replica.send(number)

    def turn(self) -> None:
        """Wait a moment, or until a process ends; then see what has changed."""
        running = [one.sentinel for each in self.living.values() for one in each.processes.values() if one.is_alive()]
        multiprocessing.connection.wait(running, timeout=_TURN_S)
        now = time.monotonic()
        for replica in list(self.living.values()):
            if replica.failed() or all(process.exitcode == 0 for process in replica.processes.values()):
                self.took_leave(replica, "", now)
            elif replica.is_stopped:
                replica.stopped_since = replica.stopped_since or now
                if now - replica.stopped_since > _STOPPED_S:
                    self.kill(replica, f"was stopped for {_STOPPED_S:g} s", replica.stopped_since)
            else:
                replica.stopped_since = None
        self.read_asks(now)
        for name in self.quorums.overdue(now):
            since = self.quorums.waiting_since or now
            self.kill(self.living[name], "did not finish its step while others waited", since)
        self.decide(now)

    def kill(self, replica: Replica, why: str, since: float) -> None:
        pids = ", ".join(str(process.pid) for process in replica.processes.values())
        say(f"replica {replica.number} (process {pids}) {why}, and is killed")
        replica.kill()
        self.took_leave(replica, f"it {why}", since)

    def took_leave(self, replica: Replica, why: str, since: float) -> None:
        """A replica has ended: it is done, or it is started again, or it was one too many."""
        del self.living[replica.name]
        was_inside = replica.name in self.quorums.inside
        self.quorums.ended(replica.name)
        culprit = replica.failed()
        if culprit is None:
            self.finished += 1
            self.quorums.is_done = True
            return
        rank, process = culprit
        code: int = process.exitcode
        if code == PREEMPTED:
            self.preempted += 1
            for each in replica.processes.values():  # they have saved together
                each.join(_GRACE_S)
        replica.kill()
        if code == PREEMPTED:
            return
        ended, trace = how_it_ended(code), report_of(self.folder, rank, replica.attempt)
        last_words = next((line for line in reversed(trace.splitlines()) if line[:1].strip()), "")
        loss = Loss(replica.number, rank, process.pid, ended, why or last_words, time.time())
        text = f"{trace}\nweft launch: {loss._replace(why=why)}".lstrip()
        self.failed = Ending(code if code > 0 else 128 - code, text, rank, trace)
        self.story.lost(loss, since, was_inside=was_inside)
        said = f"{loss}; {len(self.living)} of {self.most} replicas left"
        if self.restarts < self.plan.max_restarts and not self.finished and not self.signalled:
            self.restarts += 1
            say(f"{said}; it is started again, {self.restarts} of {self.plan.max_restarts} times")
            self.start(replica.number, replica.attempt + 1)
        else:
            say(said)

    # -- quorums ---------------------------------------------------------------------------------

    def read_asks(self, now: float) -> None:
        while self.asks_seen < self.board.add("asks", 0):
            key = f"ask/{self.asks_seen + 1}"
            if not self.board.check([key]):  # written in a moment, unless the process has died in between
                self.missing_since = self.missing_since or now
                if now - self.missing_since < 1.0:
                    return
            else:
                asked = json.loads(self.board.get(key))
                self.board.delete_key(key)
                name = asked.pop("name")
                refused = self.quorums.ask(name, Ask(**asked), now)
                if refused:
                    say(f"refused: {refused}")
                    self.answer(self.asks_seen + 1, Answer(refused=refused)._asdict())
                else:
                    self.living[name].was_inside |= not asked["fresh"]
                    self.questions[name] = self.asks_seen + 1
            self.missing_since = None
            self.asks_seen += 1

    def answer(self, number: int, found: dict[str, Any]) -> None:
        self.board.set(f"answer/{number}", json.dumps(found))

    def decide(self, now: float) -> None:
        number, before = self.quorums.number, set(self.quorums.inside)
        found = self.quorums.next(now)
        if found is None:
            if self.quorums.calls and not self.board.check([f"called/{number}"]):
                self.board.set(f"called/{number}", "1")
            return
        new = sorted(self.living[name].number for name in set(found.members) - before)
        found = found._replace(lost=self.story.continues(found, new, now))
        for name in found.members:
            self.answer(self.questions.pop(name), found._asdict())
            self.living[name].was_inside = True

    # -- the end ---------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Whether all have ended, or what is left cannot end the job."""
        if not self.living:
            return True
        if self.finished and not any(one.was_inside for one in self.living.values()):
            ranks = ", ".join(str(one.number) for one in self.living.values())
            say(f"the job has ended before replica {ranks} could join it")
            return True
        return len(self.living) < self.quorums.least and not (self.finished or self.signalled or self.preempted)

    def ending(self) -> Ending:
        if self.finished >= 1 and (not self.failed.code or self.finished >= self.quorums.least):
            return Ending()
        if self.preempted and not self.failed.code:
            return Ending(PREEMPTED, PREEMPTED_TEXT)
        if self.signalled:
            return Ending(128 + self.signalled, f"weft launch: ended by {signal.Signals(self.signalled).name}")
        return self.failed

    def end_all(self) -> None:
        self.story.end(len(self.living))
        for replica in self.living.values():
            replica.send(signal.SIGCONT)
            replica.send(signal.SIGTERM)
        end = time.monotonic() + _GRACE_S
        for replica in self.living.values():
            for process in replica.processes.values():
                process.join(max(end - time.monotonic(), 0))
            replica.kill()
