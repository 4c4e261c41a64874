"""The live side of a context, and how its ranks meet.

A `World` holds what cannot be a value: the process group, the key-value store, counters. Contexts
that speak for the same ranks share one. Everything in this file talks through the *store*, never
through a collective, so it works while a peer is busy, late, failed or dead, and always ends:
either all ranks come together, or every one of them learns which rank is to blame. Who waits in a
collective instead is looked after by a thread, see watching.py.

[Note: the board] Keys, below the prefix of the world:
    peer/<rank>         host, process id and its start time, written once
    parted/<rank>       written by a rank that leaves: null, or what made it fail
    meet/<n>/<rank>     what the rank brings to meeting n; counters make n equal on all ranks
    meet/<n>/count      how many have come; the last one compares and writes meet/<n>/done
    note/count          how many ranks have left or failed; on a root
    note/<k>            which one, why, and how far it had come
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import socket
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.context.board import Board, StoreLost
from weft.context.connections import listening_ports
from weft.errors import ContextError, PeerError, listed, message

__all__ = [
    "PREEMPTED",
    "Background",
    "Holder",
    "Watcher",
    "World",
    "absent",
    "agree",
    "announce",
    "arrives",
    "check_failed",
    "compare",
    "culprit",
    "disagree",
    "exception_text",
    "exchange",
    "is_communication_error",
    "late",
    "part",
    "peer_error",
    "report_failure",
    "wait_for_key",
    "wait_for_parting",
]

PREEMPTED = 75  # exit code of a job that was told to end and can go on later; EX_TEMPFAIL of sysexits.h

_SLICE_S = 0.5  # how long a key is waited for before the peers are checked for life
_PAUSE_S = 0.02  # longest pause between two looks at the store
_STUCK_S = 1.0  # how far apart the ranks may notice that a collective timed out
_LEFT = "left the job while others still work"


class Holder(Protocol):
    """Something that keeps the process group alive and can let it go."""

    def release(self) -> None:
        """Drop the group; what was built on it stops working."""


class Watcher(Holder, Protocol):
    """Knows of ranks that will not come to a meeting because they wait elsewhere; see watching.py."""

    def check(self, what: str, missing: Sequence[int], world: World) -> None:
        """Raise `PeerError` if one of `missing`, ranks of `world`, does."""


class Background(Protocol):
    """Work that goes on beside the program, such as a save; whoever leaves waits for it."""

    def finish(self, limit_s: float) -> BaseException | None:
        """Wait for it at most so long, then stop it; the error that nobody has seen yet."""


class Comparison(Protocol):
    """Facts that are compared now and then; see ledger.py."""

    def finish(self, limit_s: float = 0.0) -> None:
        """Compare what was noted last, and wait so long for it; raise `ContextError` if it differs."""


class World:
    """Group, store and counters of one set of ranks in this process.

    Attributes:
        ranks: Global rank of every member; a member's index is its rank in this world.
        rank: This process's index, or -1 when it is not a member.
        group: The process group; None when the world has one rank, or is only pretended.
        store: Values that the ranks write for each other; None as `group`.
        timeout_s: How long to wait for a peer that shows no sign of failure.
        owner: Whether `close` destroys the group.
        serves_store: Whether the store lives in this process.
        root: The world that was started or adopted; this one is a part of it.
        lines: The worlds of this rank's mesh axes by name.
        made: On a root, every smaller world made of it.
        disposable: On a root, the groups of those worlds that can be destroyed by themselves.
        meshes: torch's meshes over the groups above.
        meetings: How many meetings there were.
        watch: On a root, tells late ranks from those that went another way.
        failures: On a root, how many errors this rank has told the others of; see `report_failure`.
        failure: On a root, the rank for which this one would wait in vain in a collective, and why.
        process: Which one this is; a fork of it has nothing to do with the job.
        background: On a root, what goes on beside the program.
        checkpoints: On a root, what the job knows of directories of checkpoints; see checkpoint/history.py.
        abandoned: On a root, whether a collective was left that not all ranks came to.
        room: Bytes for values in the first message of a collective, if not the usual; the same on all ranks.
        heads: What a collective told of its values the last time, by their structure.
        holders: On a root, whatever keeps the group alive (gradient reducers) and can let go.
        reductions: How often gradients were reduced over these ranks.
        ledgers: On a root, what is compared once more before the ranks part.
        inside: Of the thread that is in a collective: who it is and what it does.
        clash: What two threads tried to do at once; ends the wait of the first one.
    """

    def __init__(
        self,
        *,
        ranks: Sequence[int],
        rank: int,
        group: dist.ProcessGroup | None = None,
        store: Board | None = None,
        timeout_s: float = 1800.0,
        owner: bool = False,
        serves_store: bool = False,
    ) -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.group = group
        self.store = store
        self.timeout_s = timeout_s
        self.owner = owner
        self.closed = False
        self.serves_store = serves_store
        self.root: World = self
        self.lines: dict[str, World] = {}
        self.made: list[World] = []
        self.disposable: list[dist.ProcessGroup] = []
        self.meshes: dict[tuple[tuple[str, int], ...], DeviceMesh] = {}
        self.room: int | None = None
        self.messages: dict[object, Any] = {}
        self.holders: weakref.WeakSet[Holder] = weakref.WeakSet()
        self.ledgers: weakref.WeakSet[Comparison] = weakref.WeakSet()
        self.meetings = 0
        self.reductions = 0
        self.watch: Watcher | None = None
        self.failures = 0
        self.failure: tuple[int, str] | None = None
        self.process = os.getpid()
        self.background: Background | None = None
        self.checkpoints: object = None
        self.abandoned = False
        self.inside: dict[str, tuple[int, str]] = {}
        self.clash: str | None = None
        self._lines = 0
        self._num_ledgers = 0

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def next_meeting(self) -> int:
        """Count the meetings; all ranks make the same ones, so the number is the same everywhere."""
        self.meetings += 1
        return self.meetings

    def next_line(self) -> int:
        """Count the smaller worlds made of this one, likewise."""
        self._lines += 1
        return self._lines

    def next_ledger(self) -> int:
        """Count what strategies note in the store, likewise."""
        self._num_ledgers += 1
        return self._num_ledgers

    def collectives(self) -> dict[str, int]:
        """How many collectives this rank has begun on each group."""
        found = {}
        for each in (self.root, *list(self.root.lines.values()), *list(self.root.made)):
            group: Any = each.group
            if group is not None:
                found[str(group.group_name)] = int(group._get_sequence_number_for_group())
        return found


def announce(world: World) -> None:
    """Write down who this rank is, so that the others can tell whether it lives."""
    if world.store is not None:
        me = {"host": _host(), "pid": os.getpid(), "born": _born(os.getpid())}
        world.store.write(f"peer/{world.rank}", me)


def agree(world: World, what: str, facts: Mapping[str, object] | None = None) -> None:
    """Wait until every rank has come to this point and brings the same facts.

    Collectives: none; a few messages to the store per rank.

    Args:
        world: Whose ranks meet.
        what: What they meet for; must be the same on all ranks.
        facts: Names and JSON values that must be equal on all ranks.

    Raises:
        PeerError: A rank failed, died, or did not come within `world.timeout_s`.
        ContextError: The ranks came for different things, or with different facts.
    """
    if world.store is None or world.size == 1:
        return
    compare(what, exchange(world, what, {"call": what, **(facts or {})}))


def compare(what: str, entries: Sequence[Mapping[str, object]] | Mapping[int, Mapping[str, object]]) -> None:
    """Check that the facts of the ranks, one mapping each, are all equal; of some ranks only, by rank.

    A fact named "at" is not compared: it is the line of each rank's call, shown when others differ.

    Raises:
        ContextError: They are not; the text shows each difference.
    """
    by_rank = entries if isinstance(entries, Mapping) else dict(enumerate(entries))
    names = [name for name in dict.fromkeys(name for entry in by_rank.values() for name in entry) if name != "at"]
    first = next(iter(by_rank.values()))
    different = [name for name in names if any(entry.get(name) != first.get(name) for entry in by_rank.values())]
    if different:
        calls = list(dict.fromkeys(entry.get("call") for entry in by_rank.values()))
        lines = [
            f"{name}: " + listed(f"{entry.get(name)!r} on rank {rank}{_line(entry)}" for rank, entry in by_rank.items())
            for name in different
        ]
        raise ContextError(
            message(
                f"{what}: the ranks do not agree",
                found=listed(lines),
                expected="the same call with the same settings on every rank",
                fix=f"call {' and '.join(map(str, calls))} on all ranks, without `if ctx.is_main:` around it"
                if len(calls) > 1
                else "compute these values from arguments that are equal on all ranks",
            )
        )


def _line(entry: Mapping[str, object]) -> str:
    return f" at {entry['at']}" if "at" in entry else ""


def exchange(world: World, what: str, mine: Any, *, to: int | None = None, kind: str | None = None) -> list[Any]:
    """Bring a JSON value and get every rank's, in rank order.

    Args:
        world: Whose ranks meet.
        what: What they meet for.
        mine: The value of this rank.
        to: The rank that alone gets the values; the others get an empty list.
        kind: Stands for `what` in the check that all ranks came for the same, where `what` may differ.

    Raises:
        PeerError: A rank failed, died, or did not come within `world.timeout_s`.
        ContextError: The ranks came for different things.
    """
    store = world.store
    if store is None or world.size == 1:
        return [json.loads(json.dumps(mine))]
    number = world.next_meeting()
    key = f"meet/{number}"
    with _store_errors(world, what):
        store.write(f"{key}/{world.rank}", {"ok": mine, "kind": kind or what, "what": what})
        if store.add(f"{key}/count", 1) == world.size:
            store.set(f"{key}/done", "ok")
        wait_for_key(world, f"{key}/done", what, [f"{key}/{rank}" for rank in range(world.size)])
        if store.get(f"{key}/done") != b"ok":
            _raise_failed_meeting(world, what, key)
        wanted = range(world.size) if to in (None, world.rank) else ()
        entries = [store.read(f"{key}/{rank}", "ok", "kind", "what") for rank in wanted]
        # Everybody has come to this meeting, so nobody can still be reading the one before.
        if number > 1:
            store.delete(f"meet/{number - 1}/{world.rank}")
    values = [entry["ok"] for entry in entries]
    if len({entry["kind"] for entry in entries}) > 1:
        lines = [{"at": value["at"]} if isinstance(value, dict) and "at" in value else {} for value in values]
        compare(what, [{"call": entry["what"], **line} for entry, line in zip(entries, lines, strict=True)])
    return values


def disagree(world: World, error: BaseException) -> None:
    """Tell a meeting that this rank will not come because of `error`; the others raise `PeerError`."""
    if world.store is None or world.size == 1 or world.closed:
        return
    key = f"meet/{world.next_meeting()}"
    rank, text = _blame(world, error)
    with contextlib.suppress(StoreLost):  # then there are no peers to tell
        world.store.write(f"{key}/{world.rank}", {"error": text, "rank": rank})
        world.store.set(f"{key}/done", "failed")


def wait_for_key(world: World, key: str, what: str, expected: Sequence[str] = (), *, patient: bool = False) -> None:
    """Wait until `key` is in the store.

    Args:
        world: Whose store and peers.
        key: Key to wait for.
        what: What for, in the error text.
        expected: One key per rank that shows it has come; those without are named on failure.
        patient: Wait as long as the peers live, not only `world.timeout_s`.

    Raises:
        PeerError: A rank that is waited for failed or died, or the time is over.
    """  # noqa: DOC501  (errors made by functions)
    assert world.store is not None
    end = time.monotonic() + world.timeout_s
    with _store_errors(world, what):
        while not arrives(world.store, key, _SLICE_S if patient else min(_SLICE_S, max(end - time.monotonic(), 0.001))):
            missing = [
                r for r in range(world.size) if r != world.rank and not (expected and world.store.has(expected[r]))
            ]
            # All have come and it is not settled: one of them died in between.
            blamed = culprit(world, missing or None)
            if world.store.has(key):
                return
            if blamed is not None:
                raise peer_error(what, *blamed)
            watch = world.watch or world.root.watch
            if watch is not None and not patient:
                watch.check(what, missing, world)
            if not patient and time.monotonic() >= end:
                raise _late(world, what, missing)


def arrives(store: Board, key: str, limit_s: float) -> bool:
    """Wait for `key` at most `limit_s`; say whether it is there.

    Not by `Store.wait`: torch prints two warnings whenever the time of that is over.
    """
    start = time.monotonic()
    while not store.has(key):
        waited = time.monotonic() - start
        if waited >= limit_s:
            return False
        time.sleep(min(waited / 16 + 1e-4, _PAUSE_S, limit_s - waited))
    return True


def _late(world: World, what: str, missing: Sequence[int]) -> PeerError:
    """The error for peers that show no sign of failure, and do not come either."""
    return PeerError(
        message(
            f"{what}: rank {listed(missing)} of {world.size} did not arrive",
            found=f"waited {world.timeout_s:g} s on rank {world.rank}; no sign of failure there",
            expected="every rank makes the same calls in the same order",
            fix=f"call {what} on all ranks, without `if ctx.is_main:` around it; or raise start(timeout_s=...)",
        ),
        rank=missing[0] if missing else -1,
        text=f"did not arrive within {world.timeout_s:g} s",
    )


def absent(world: World) -> tuple[int, str] | None:
    """Find a rank that already told the next meeting that it will not come, and why."""
    key = f"meet/{world.meetings + 1}"
    if world.store is None or not world.store.has(f"{key}/done") or world.store.get(f"{key}/done") == b"ok":
        return None
    return _said(world, key)


def _said(world: World, key: str) -> tuple[int, str] | None:
    """The rank that told a meeting that it will not come, and why."""
    store = world.store
    for rank in range(world.size) if store is not None else ():
        assert store is not None
        if store.has(f"{key}/{rank}"):
            entry = store.read(f"{key}/{rank}")
            if isinstance(entry, dict) and "error" in entry:
                return int(entry["rank"]), str(entry["error"])
    return None


def late(world: World, what: str) -> tuple[int, str] | None:
    """After a collective timed out: find the rank that is not waiting in it."""
    store = world.store
    if store is None:
        return None
    blamed = culprit(world)
    if blamed is not None:
        return blamed
    store.set(f"stuck/{world.meetings}/{world.rank}", what)
    time.sleep(_STUCK_S)  # the others' time is over at the same moment, give or take
    missing = [rank for rank in range(world.size) if not store.has(f"stuck/{world.meetings}/{rank}")]
    if not missing:
        return None
    return missing[0], f"rank {listed(missing)} did not arrive within {world.timeout_s:g} s"


def culprit(world: World, ranks: Sequence[int] | None = None) -> tuple[int, str] | None:
    """Find a rank that failed, left or died, and what it said; None if all of `ranks` look well."""
    store = world.store
    if store is None:
        return None
    left: tuple[int, str] | None = None
    for rank in range(world.size) if ranks is None else ranks:
        if rank == world.rank:
            continue
        if store.has(f"parted/{rank}"):
            note = store.read(f"parted/{rank}", "rank", "error")
            if note["error"] is not None:
                return note["rank"], note["error"]
            left = left or (rank, _LEFT)
        elif _is_dead(store, rank):
            return rank, "its process is gone (killed, out of memory, or crashed)"
    return left


def part(world: World, error: BaseException | None = None) -> None:
    """Write down that this rank leaves, and why if it failed."""
    if world.store is None:
        return
    rank, text = (world.rank, None) if error is None else _blame(world, error)
    with contextlib.suppress(StoreLost):
        world.store.write(f"parted/{world.rank}", {"rank": rank, "error": text})
        if error is not None:
            world.store.set(f"gone/{world.rank}", "1")  # and asks nothing any more
        _leave_note(world, rank, text or _LEFT, left=True)


def report_failure(world: World, error: BaseException) -> None:
    """Tell the others of an error of this rank, which they would otherwise wait for in a collective.

    For errors that torch does not know of: whoever waits in a collective that this rank does not come to ends with a
    `PeerError` that has the text. Nothing happens to ranks that do not wait, to those that had an error of their own,
    and if this rank goes on and begins another collective. Waits for nobody.
    """
    root = world.root
    if root.store is not None and root.size > 1 and not root.closed:
        root.failures += 1
        with contextlib.suppress(StoreLost):
            _leave_note(root, *_blame(root, error), left=False)


def check_failed(world: World) -> None:
    """Raise if this rank would wait for another one in vain in a collective.

    Raises:
        PeerError: The other one left, or has told of an error.
    """  # noqa: DOC501  (an error made by a function)
    if world.root.failure is not None:
        raise peer_error("", *world.root.failure)


def _leave_note(world: World, blamed: int, text: str, *, left: bool) -> None:
    if world.store is None or world.group is None:
        return
    note = {
        "from": world.rank,
        "rank": blamed,
        "error": text,
        "left": left,
        "failures": world.failures,
        "collectives": world.collectives(),
        "ports": listening_ports(),
    }
    world.store.write(f"note/{world.store.add('note/count', 1)}", note)


def wait_for_parting(world: World, limit_s: float) -> None:
    """Wait until every rank has parted or died, at most `limit_s`; never raises.

    A gloo group that is destroyed while a peer still talks to it aborts that peer.
    """
    store = world.store
    if store is None:
        return
    end = time.monotonic() + limit_s
    waiting = [rank for rank in range(world.size) if rank != world.rank]
    with contextlib.suppress(StoreLost):
        while waiting and time.monotonic() < end:
            arrives(store, f"parted/{waiting[0]}", _SLICE_S)
            waiting = [r for r in waiting if not store.has(f"parted/{r}") and not _is_dead(store, r)]
        # The store lives in one of these processes: it may go only when all have read it.
        store.set(f"gone/{world.rank}", "1")
        for rank in range(world.size):
            while not store.has(f"gone/{rank}") and not _is_dead(store, rank) and time.monotonic() < end:
                time.sleep(0.01)


def exception_text(error: BaseException) -> str:
    """`Type: text` of an exception, with the notes on it."""
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


_COMMUNICATION_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Socket Timeout",
    "NCCL",
    "ProcessGroup",
    "gloo",
)


def is_communication_error(error: BaseException) -> bool:
    """Say whether `error` is what torch.distributed raises when a peer is lost."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _COMMUNICATION_SIGNS)


def _blame(world: World, error: BaseException) -> tuple[int, str]:
    """Who is at fault when this rank fails with `error`: the peer it names, or this rank."""
    if isinstance(error, PeerError) and error.rank >= 0:
        return error.rank, error.text
    return world.rank, exception_text(error)


def _raise_failed_meeting(world: World, what: str, key: str) -> None:
    said = _said(world, key)
    if said is not None:
        raise peer_error(what, *said)
    raise PeerError(f"{what}: a rank failed and could not say why")


def peer_error(what: str, rank: int, text: str) -> PeerError:
    """The error of `what` for a rank that is to blame; -1 for another process."""
    problem = f"rank {rank} failed: {text}" if rank >= 0 else text
    return PeerError(f"{what}: {problem}" if what else problem, rank=rank, text=text)


@contextlib.contextmanager
def _store_errors(world: World, what: str) -> Iterator[None]:
    try:
        yield
    except StoreLost as error:
        raise PeerError(f"{what}: {error}", rank=error.rank, text=error.text) from error


def _is_dead(store: Board, rank: int) -> bool:
    """Whether the process of `rank` ran on this host and does not any more."""
    key = f"peer/{rank}"
    if not store.has(key):
        return False
    peer = store.read(key, "host", "pid", "born")
    return bool(peer["host"] == _host() and _born(peer["pid"]) != peer["born"])


def _host() -> str:
    return socket.gethostname()


def _born(pid: int) -> str | None:
    """Start time of a process, which tells a recycled process id apart; None if there is none."""
    try:
        with pathlib.Path(f"/proc/{pid}/stat").open(encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else fields[19]  # a zombie is dead
    except (FileNotFoundError, ProcessLookupError, NotADirectoryError):
        pass
    if pathlib.Path("/proc/self").is_dir():
        return None
    try:  # systems without /proc: the process id alone has to do
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return "alive"
    return "alive"
