"""Which replicas make the next steps together: decided by the launcher, from what replicas ask and which of them live.

Pure: no store, no process, no clock. `launching/replicas/` has these; `replica_groups.py` is the side of a replica.

[Note: quorum] A *quorum* is a set of replicas that make steps together; each one has a number. A replica that has
lost another one in a step asks for the next quorum, and so does a new one. The next quorum begins when all that live of
the present one have asked: none is in the middle of a step then. A new replica lets the launcher call the present
ones together, which come when their step is done. Those that have made the most steps hold the truth: a step that
one of them has finished had the gradients of all. The others take over its state, or have the same.

[Note: the end of the work] A replica that leaves its context in good order says after how many steps. Exit code 0 alone
means nothing. It is the end of the job if none goes past it: another one that asks for the next quorum after as many
steps shows that it has left too early. If the others are gone from within their loops, that is unknown; so it has not
ended the work, unless its own loop came to the end of an epoch that none of them has gone past.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

_START_S = 30.0  # after so long replicas begin from nothing, or a copy, without those that have not come
_FACT = "start the same program with the same model on every replica"


class Ask(NamedTuple):
    """What a replica brings when it asks for a quorum.

    Attributes:
        step: Steps that it has made.
        fresh: It was in no quorum yet, or has not received a state since.
        facts: What has to be alike in all, as far as both have it: a text by name.
        patience_s: How long it lets others take to finish their step.
        failed: It was in the middle of a step, in which another one was lost.
    """

    step: int
    fresh: bool
    facts: dict[str, str]
    patience_s: float
    failed: bool = False


class Answer(NamedTuple):
    """The quorum that a replica is in.

    Attributes:
        number: From 1 on.
        members: Names, in order.
        source: Index of the member that has the state.
        receivers: Indices of those that take it over.
        step: Steps that were made.
        refused: Why this replica is in none; "" if it is in one.
        again: A step that was begun is made again.
        lost: Who was lost since the last one, and how, in words.
    """

    number: int = 0
    members: tuple[str, ...] = ()
    source: int = 0
    receivers: tuple[int, ...] = ()
    step: int = 0
    refused: str = ""
    again: bool = False
    lost: tuple[str, ...] = ()


class LoopPosition(NamedTuple):
    """Where the loop of a replica stands.

    Attributes:
        step: Steps that it has made.
        inside: It is in its loop, as far as it has said.
        whole: It has left its loop at the end of an epoch.
    """

    step: int = 0
    inside: bool = True
    whole: bool = False


@dataclass
class Quorums:
    """What the launcher knows of the replicas of a job.

    Attributes:
        least: Replicas without which no step is made.
        number: Of the present quorum; 0 before the first.
        living: Names of the replicas that were started and have not ended.
        inside: Those of the present quorum that live.
        asking: What those bring that wait for the next one.
        facts: What all have in common; of those that came first.
        is_broken: A member of the present quorum is gone, or has asked for the next one.
        loops: Where the loop of each replica stands, as far as it has said so.
        ends: The same of those that have ended in good order.
        early: Those of them that were found to have left too early.
        vanished: The most steps of a member of the present quorum that is gone from within its loop; None if none is.
        waiting_since: When the first of those that wait now has asked.
    """

    least: int = 1
    number: int = 0
    living: set[str] = field(default_factory=set)
    inside: set[str] = field(default_factory=set)
    asking: dict[str, Ask] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    is_broken: bool = False
    loops: dict[str, LoopPosition] = field(default_factory=dict)
    ends: dict[str, LoopPosition] = field(default_factory=dict)
    early: list[str] = field(default_factory=list)
    vanished: int | None = None
    waiting_since: float | None = None

    def started(self, name: str) -> None:
        """A replica was started."""
        self.living.add(name)

    def note_position(self, name: str, loop: LoopPosition) -> None:
        """A replica says where its loop stands."""
        if name in self.living:
            self.loops[name] = loop

    def ended(self, name: str, *, done: bool = False, lost: bool = True) -> None:
        """The process of a replica is gone: its work was `done`, or it was `lost`."""
        loop = self.loops.get(name, LoopPosition())
        if done:
            self.ends[name] = loop
        elif lost and name in self.inside and loop.inside:
            self.vanished = max(loop.step, self.vanished or 0)
        self.is_broken |= name in self.inside
        self.living.discard(name)
        self.inside.discard(name)
        self.asking.pop(name, None)
        self._look_for_early()

    def _look_for_early(self) -> None:
        """Find those that have ended in good order but have not ended the work."""
        asked = max((ask.step for ask in self.asking.values() if not ask.fresh), default=-1)
        for name, end in list(self.ends.items()):
            if asked >= end.step or not (self.inside or self._is_sure(name, end)):
                del self.ends[name]
                self.early.append(name)

    def _is_sure(self, name: str, end: LoopPosition) -> bool:
        """Whether none has gone past it: none has vanished, or another one agrees, or those that did are behind."""
        agrees = any(n != name and not loop.inside and loop.step == end.step for n, loop in self.loops.items())
        return self.vanished is None or agrees or (end.whole and self.vanished < end.step)

    def ask(self, name: str, ask: Ask, now: float) -> str:
        """A replica asks for a quorum; returns why it is refused, or ""."""
        if name not in self.living:
            return f"{name} is no replica that this launcher has started and that has not been replaced"
        self.facts = self.facts or ask.facts
        both = [key for key in self.facts if key in ask.facts]
        differing = [key for key in both if self.facts[key] != ask.facts[key]]
        if differing:
            said = [f"{key}: {ask.facts[key]}, where the others have {self.facts[key]}" for key in differing]
            return f"{name} is another program: {'; '.join(said)}; {_FACT}"
        self.asking[name] = ask
        self._look_for_early()
        self.is_broken |= name in self.inside
        self.waiting_since = now if self.waiting_since is None else self.waiting_since
        return ""

    @property
    def waiting_for(self) -> set[str]:
        """Members of the present quorum that live and have not asked for the next one."""
        return self.inside - set(self.asking)

    @property
    def calls(self) -> bool:
        """Whether the members of the present quorum are to come together after their step: somebody is new."""
        return bool(set(self.asking) - self.inside) and bool(self.inside)

    def overdue(self, now: float) -> set[str]:
        """Members that have not come although one of them has long waited: they hang."""
        asked = [self.asking[name].patience_s for name in self.inside if name in self.asking]
        if not asked or self.waiting_since is None or now - self.waiting_since <= max(asked):
            return set()
        return self.waiting_for

    def next(self, now: float) -> Answer | None:
        """The next quorum, if it can begin."""
        least = 1 if self.ends else self.least  # who is behind may make the last step again alone
        if not self.asking or len(self.asking) < least or self.waiting_for:
            return None
        from_nothing = all(ask.fresh for ask in self.asking.values())
        if self.ends and from_nothing:
            return None  # the work is done
        late = self.living - set(self.asking) if from_nothing else set()  # one of them may have the newest copy
        if late and self.waiting_since is not None and now - self.waiting_since < _START_S:
            return None
        members = tuple(sorted(self.asking, key=_order))
        asks = [self.asking[name] for name in members]
        old = [index for index, ask in enumerate(asks) if not ask.fresh] or list(range(len(members)))
        step = max(asks[index].step for index in old)
        source = next(index for index in old if asks[index].step == step)
        receivers = tuple(i for i, ask in enumerate(asks) if i != source and (ask.fresh or ask.step < step))
        again = any(ask.failed and ask.step == step for ask in asks)
        self.number, self.vanished = self.number + 1, None
        self.inside, self.asking, self.waiting_since, self.is_broken = set(members), {}, None, False
        return Answer(self.number, members, source, receivers, step, again=again)


def _order(name: str) -> tuple[int, str]:
    """By the number of the replica."""
    head = name.partition(".")[0]
    return (int(head) if head.isdecimal() else -1, name)
