"""The live side of a context, and how its ranks meet.

A `World` holds what cannot be a value: the process group, the key-value store, counters. Contexts
that speak for the same ranks share one. Everything in this file talks through the *store*, never
through a collective, so it works while a peer is busy, late, failed or dead, and always ends:
either all ranks come together, or every one of them learns which rank is to blame. Who waits in a
collective instead is looked after by a thread, see straggler_watch.py.

[Note: the board] Keys, below the prefix of the world:
    peer/<rank>         machine, process id and its start time, written once
    dead/<rank>         how many have seen that a rank has died, of whom the first reports it; on a root
    parted/<rank>       written by a rank that leaves: what made it fail, if it did, and how far it had come
    parted/count        how many have left; the last one writes parted/all
    gone/<rank>         written by a rank that asks nothing any more
    meet/at/<rank>      the last meeting to which the rank has come, and what it brought; each is over before the next
    meet/<n>/count      how many have come to meeting n; counters make n equal on all ranks
    meet/<n>/done       what all have brought, by the last one; or who is to blame, by the first one who knows
    meet/<n>/all        what all have brought, for the one rank that is to get it
    note/count          how many ranks have left, failed or died; on a root
    note/<k>            which one, why, and how far it had come
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft import torch_internals
from weft.peers.pretended import PretendedGroup
from weft.peers.store import RankStore

SAME_SIGNAL_S = 1.0  # a scheduler and a launcher may send the same signal both, one right after the other
PREEMPTED = 75  # exit code of a job that was asked to end and can be resumed; EX_TEMPFAIL of sysexits.h
STUCK_S = 1.0  # how far apart the ranks may notice that a collective timed out


@runtime_checkable
class GroupHolder(Protocol):
    """Something that keeps the process group alive and can let it go."""

    def release(self) -> None:
        """Drop the group; what was built on it stops working."""


class Watcher(GroupHolder, Protocol):
    """Knows of ranks that will not come to a meeting because they wait elsewhere; see straggler_watch.py.

    Attributes:
        patience_s: How long somebody waits before it is asked.
    """

    patience_s: float

    def check(self, what: str, ranks: Sequence[int], world: World) -> None:
        """Raise `PeerError` if one of `ranks`, of `world`, does."""


class Background(Protocol):
    """Work beside the program, such as a save; leaving the job waits for it."""

    def finish(self, limit_s: float) -> BaseException | None:
        """Wait for it at most so long, then stop it; its error, if it was not raised yet."""


class Comparison(Protocol):
    """Facts that are compared now and then; see ledger.py."""

    def finish(self, limit_s: float = 0.0) -> None:
        """Compare what was noted last, and wait so long for it; raise `ContextError` if it differs."""


@dataclass(eq=False, repr=False, kw_only=True)
class World:
    """Group, store and counters of one set of ranks in this process.

    Attributes:
        ranks: Global rank of every member; a member's index is its rank in this world.
        rank: This process's index, or -1 when it is not a member.
        group: The process group; None when the world has one rank, or is only pretended.
        store: Values that the ranks write for each other; None as `group`.
        timeout_s: How long to wait for a peer that shows no sign of failure.
        owner: Whether `close` destroys the group.
        closed: Whether this rank has left.
        serves_store: Whether the store lives in this process.
        joined: Whether the environment says that this process is the rank; see environments/joined.py.
        root: The world that was started or adopted; this one is a part of it.
        axis_groups: The worlds of this rank's mesh axes by name.
        made: On a root, every smaller world made of it.
        disposable: On a root, the groups of those worlds that can be destroyed by themselves.
        meshes: torch's meshes over the groups above.
        messages: What is prepared for messages that are sent again and again, by their shape.
        compared: Calls of collectives, with their arguments and shapes, that all ranks have made.
        meetings: How many meetings there were.
        numbers: How many smaller worlds and ledgers were made of it, by kind.
        loaders: On a root, the places of the loaders of the program; see data/order/loader_place.py.
        watch: On a root, separates late ranks from those that took another path.
        near: On a root, the ranks that may be on this host; empty if that is not known.
        peers: On a root, what those have written down of themselves, as far as it was read.
        notes: On a root, what ranks that left or failed have said, as far as it was read; see `read_notes`.
        failures: On a root, how many errors this rank has reported to the others; see `report_failure`.
        failure: On a root, the rank for which this one would wait in vain in a collective, and why.
        process: Which one this is; a fork of it has nothing to do with the job.
        background: On a root, what runs beside the program.
        checkpoints: On a root, what the job knows of directories of checkpoints; see checkpoint/history.py.
        abandoned: On a root, whether a collective was left that not all ranks came to.
        message_bytes: Bytes for values in the first message of a collective, if not the usual; the same on all ranks.
        holders: On a root, whatever keeps the group alive (gradient reducers) and can let go.
        uncounted: How many messages of its group do not count as collectives; see `between_pairs`.
        frozen: How many collectives were begun, while such messages are sent.
        reductions: How often gradients were reduced over these ranks.
        ledgers: On a root, what is compared once more before the ranks part.
        inside: Of the thread that is in a collective: who it is and what it does.
        clash: What two threads tried to do at once; ends the wait of the first one.
        on_close: On a root, called once this rank has left in good order; with the SystemExit by which, if it was one.
    """

    ranks: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None = None
    store: RankStore | None = None
    timeout_s: float = 600.0
    owner: bool = False
    closed: bool = False
    serves_store: bool = False
    joined: bool = False
    root: World = field(init=False)
    axis_groups: dict[str, World] = field(default_factory=dict)
    made: list[World] = field(default_factory=list)
    disposable: list[dist.ProcessGroup] = field(default_factory=list)
    meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = field(default_factory=dict)
    message_bytes: int | None = None
    messages: dict[object, Any] = field(default_factory=dict)
    compared: set[object] = field(default_factory=set)
    holders: weakref.WeakSet[GroupHolder] = field(default_factory=weakref.WeakSet)
    ledgers: weakref.WeakSet[Comparison] = field(default_factory=weakref.WeakSet)
    meetings: int = 0
    numbers: Counter[str] = field(default_factory=Counter)
    loaders: list[Any] = field(default_factory=list)
    uncounted: int = 0
    frozen: int | None = None
    reductions: int = 0
    watch: Watcher | None = None
    near: Sequence[int] = ()
    peers: dict[int, dict[str, Any]] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)
    failures: int = 0
    failure: tuple[int, str] | None = None
    process: int = field(default_factory=os.getpid)
    background: Background | None = None
    checkpoints: object = None
    abandoned: bool = False
    inside: dict[str, tuple[int, str]] = field(default_factory=dict)
    clash: str | None = None
    on_close: Callable[[BaseException | None], None] = lambda error: None  # noqa: ARG005

    def __post_init__(self) -> None:
        self.root = self

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def pretended(self) -> bool:
        """Whether the other ranks are not there, and bring what this one brings; see pretended.py."""
        return isinstance(self.group, PretendedGroup)

    def members(self) -> list[int]:
        """The ranks that these ones are in the root."""
        places = {rank: place for place, rank in enumerate(self.root.ranks)}
        return [places[rank] for rank in self.ranks]

    def next_meeting(self) -> int:
        """Count the meetings; all ranks make the same ones, so the number is the same everywhere."""
        self.meetings += 1
        return self.meetings

    def next_number(self, kind: str) -> int:
        """Count what is made of this world, such as smaller ones, likewise."""
        self.numbers[kind] += 1
        return self.numbers[kind]

    def collectives(self) -> dict[str, int]:
        """How many collectives this rank has begun on each group."""
        return {str(group.group_name): each._begun(group) for each, group in self._groups()}

    def sent(self) -> int:
        """How many collectives and messages to one rank this one has begun."""
        return sum(torch_internals.MESSAGES_BEGUN.of(group)() for _, group in self._groups())

    @contextlib.contextmanager
    def between_pairs(self) -> Iterator[None]:
        """Around messages from one rank of the group to another, which gloo counts as it counts collectives.

        A rank in the middle has more of them than the others. All come here, so together they count as one collective,
        of which a rank that fails in it has no part.
        """
        group, begun = self.group, self._begun(self.group)
        self.frozen = begun + 1
        try:
            yield
            begun += 1
        finally:
            self.frozen = None
            self.uncounted += self._begun(group) - begun

    def _groups(self) -> list[tuple[World, Any]]:
        worlds = (self.root, *list(self.root.axis_groups.values()), *list(self.root.made))
        groups = {each.group: each for each in worlds}
        return [(each, group) for group, each in groups.items() if group is not None]

    def _begun(self, group: Any) -> int:
        """How many collectives this rank has begun on its group."""
        return int(torch_internals.MESSAGES_BEGUN.of(group)()) - self.uncounted if self.frozen is None else self.frozen
