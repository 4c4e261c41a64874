"""Which ranks live, which left, and which is to blame."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import pathlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from weft.errors import ContextError, PeerError, listed
from weft.peers.gloo_connections import connections, listening_ports
from weft.peers.store import RankStore, StoreLost
from weft.peers.world import PREEMPTED, STUCK_S, World

SLICE_S = 0.5  # how long a key is waited for before the peers are checked for life

_GONE = (
    "its process is gone (killed, out of memory, ended by os._exit, or crashed; gloo crashes on a collective to which "
    "ranks bring other sizes, which weft.start(debug=True) names)"
)
_LEFT = (
    "left the job while others still work; if it left a loop by values of its own, let all ranks leave it together: "
    "if weft.collectives.any_rank(stop, ctx): break"
)


def announce(world: World) -> None:
    """Write down who this rank is, so that the others can see whether it lives.

    Raises:
        ContextError: Another process was this rank before, or is: the others would wait for connections to both.
    """
    store, key, pid = world.store, f"peer/{world.rank}", os.getpid()
    if store is None:
        return
    me: dict[str, Any] = {
        "host": socket.gethostname(),
        "machine": machine_id(),
        "pid": pid,
        "born": _process_start_time(pid),
    }
    me["ports"] = [local for local, remote in connections() if remote == store.port]
    if not store.claim(key, json.dumps(me)):
        first = store.read(key, "host", "pid")
        raise ContextError(
            f"start: rank {world.rank} of this job has been started before",
            found=f"process {first['pid']} on {first['host']}",
            expected="each rank started once for each launch",
            fix="weft.local() in a process that a rank starts; one weft.start() for all of a program",
        )


def find_absent_rank(world: World) -> tuple[int, str] | None:
    """Find a rank that has already reported to the next meeting that it will not come, and why."""
    done = None if world.store is None else world.store.found(f"meet/{world.meetings + 1}/done", "failed")
    failed = None if done is None else done["failed"]
    return None if failed is None else (failed["rank"], failed["text"])


def find_late_rank(world: World, what: str) -> tuple[int, str] | None:
    """After a collective timed out: find the rank of `world` that is not waiting in it."""
    store, root = world.store, world.root
    if store is None or root.store is None:
        return None
    blamed = find_culprit(world)
    if blamed is not None:
        return blamed
    store.set(f"stuck/{world.meetings}/{world.rank}", what)
    root.store.add("watch/asked", 1)
    time.sleep(STUCK_S)  # the others' time is over at the same moment, give or take
    missing = [
        world.ranks[rank]
        for rank, member in enumerate(world.members())
        if not store.has(f"stuck/{world.meetings}/{rank}") and _is_missing(root.store, member, root.collectives())
    ]
    if not missing:
        return None
    return missing[0], f"rank {listed(missing)} did not arrive within {world.timeout_s:g} s"


def _is_missing(store: RankStore, member: int, mine: Mapping[str, int]) -> bool:
    """Whether a rank of the root that has not left has begun fewer collectives, or does not say how many."""
    if store.has(f"parted/{member}"):
        return False
    theirs = store.found(f"watch/at/{member}", "collectives")
    return theirs is None or is_behind(theirs["collectives"], mine)


def is_behind(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Whether `one` has begun fewer collectives than `other` on a group that both belong to."""
    return any(other.get(name, 0) > count for name, count in one.items())


def find_culprit(world: World, ranks: Sequence[int] | None = None) -> tuple[int, str] | None:
    """Find a rank that is the reason why this one waits in vain, and what it said.

    Args:
        world: The ranks that wait for each other.
        ranks: Those that have not come to a meeting; None: in a collective.

    Returns:
        The global rank and a text. At a meeting: one of `ranks` that failed, died or left. In a collective: any rank of
        the job that failed or died; or one of `world` that left and has begun fewer collectives than this one.
    """
    root, members = world.root, world.members()
    store = root.store
    if store is None or root.failure is not None:
        return root.failure
    dead = dead_on_this_machine(root)
    left: tuple[int, str] | None = None
    for rank in range(root.size) if ranks is None else [members[each] for each in ranks]:
        if rank == root.rank:
            continue
        note = store.found(f"parted/{rank}", "rank", "error", "collectives")
        if note is None:
            if rank in dead:
                return root.ranks[rank], _GONE
        elif note["error"] is not None:
            return note["rank"], note["error"]
        elif ranks is not None or (rank in members and is_behind(note["collectives"], root.collectives())):
            left = left or (root.ranks[rank], _LEFT)
    return left


class Neighbours:
    """The ranks whose end this one can see without asking: those of its machine, and of others whose store it serves.

    Ranks of NCCL wait for one that died until the group is aborted, and those of other machines do not see it die.
    Asked while this rank stands still: a few requests for each of them, once.
    """

    def __init__(self) -> None:
        self._far: dict[int, set[int]] | None = None  # ports by rank, of other machines; None: not asked yet
        self._connected: set[int] = set()

    def report_dead(self, world: World, store: RankStore) -> None:
        """Tell all ranks of those that have died."""
        for rank in [*dead_on_this_machine(world), *self._cut_off(world, store)]:
            if not store.has(f"parted/{rank}") and store.add(f"dead/{rank}", 1) == 1:
                _leave_note(world, world.ranks[rank], _GONE, left=True, over=True, of=rank)

    def _cut_off(self, world: World, store: RankStore) -> list[int]:
        """Ranks of other machines whose connections to the store, which lives in this process, are closed."""
        if self._far is None:
            keys = [f"peer/{rank}" for rank in range(world.size)] if store.port in listening_ports() else []
            found = store.all_found(keys, "machine", "ports")
            if None in found:
                return []
            mine = machine_id()
            self._far = {rank: set(peer["ports"]) for rank, peer in enumerate(found) if peer["machine"] != mine}
        if not self._far:
            return []
        alive = {remote for local, remote in connections() if local == store.port}
        connected = {rank for rank, ports in self._far.items() if alive & ports}
        self._connected |= connected  # where addresses are translated on the way, none is ever found
        return sorted(self._connected - connected)


def part(world: World, error: BaseException | None = None) -> None:
    """Write down that this rank leaves, and why if it failed."""
    if world.store is None:
        return
    rank, text = (world.ranks[world.rank], None) if error is None else rank_to_blame(world, error)
    with contextlib.suppress(StoreLost):
        note = {"rank": rank, "error": text, "collectives": world.collectives()}
        world.store.write(f"parted/{world.rank}", note)
        if world.store.add("parted/count", 1) == world.size:
            world.store.set("parted/all", "1")
        if error is not None:
            world.store.set(f"gone/{world.rank}", "1")  # and asks nothing any more
        _leave_note(world, rank, text or _LEFT, left=True, over=text is not None)


def report_failure(world: World, error: BaseException) -> None:
    """Report an error of this rank to the others, which they would otherwise wait for in a collective.

    For errors that torch does not know of: a rank in a collective to which this one does not come ends with a
    `PeerError` that has the text. Nothing happens to ranks that do not wait, to those that had an error of their own,
    and if this rank continues and begins another collective. Does not wait.
    """
    root = world.root
    if root.store is not None and root.size > 1 and not root.closed:
        root.failures += 1
        with contextlib.suppress(StoreLost):
            _leave_note(root, *rank_to_blame(root, error), left=False, over=False)


def check_failed(world: World) -> None:
    """Raise if this rank would wait for another one in vain in a collective.

    Raises:
        PeerError: The other one left, or has reported an error.
    """
    if world.root.failure is not None:
        raise peer_error("", *world.root.failure)


def _leave_note(world: World, blamed: int, text: str, *, left: bool, over: bool, of: int | None = None) -> None:
    """Tell of this rank, or of one that cannot; `over`: the job cannot continue, whichever rank waits."""
    if world.store is None:
        return
    note = {
        "from": world.rank if of is None else of,
        "rank": blamed,
        "error": text,
        "left": left,
        "over": over,
        "failures": world.failures,
        "collectives": world.collectives() if of is None else {},
        "ports": listening_ports() if of is None else [],
    }
    world.store.write(f"note/{world.store.add('note/count', 1)}", note)


def read_notes(root: World) -> None:
    """Read what ranks have said since that left or failed; called by one thread, that of the watch if there is one."""
    store = root.store
    if store is not None:
        numbers = range(len(root.notes) + 1, store.add("note/count", 0) + 1)
        names = ("from", "rank", "error", "left", "over", "failures", "collectives", "ports")
        found = store.all_found([f"note/{number}" for number in numbers], *names)
        root.notes += itertools.takewhile(lambda note: note is not None, found)  # the next one is being written


def wait_for_leaving(world: World, limit_s: float) -> None:
    """Wait until every rank has parted or died, at most `limit_s`; never raises.

    A gloo group that is destroyed while a peer still talks to it aborts that peer.
    """
    store = world.store
    if store is None:
        return
    end = time.monotonic() + limit_s
    with contextlib.suppress(StoreLost):
        while time.monotonic() < end and store.wait_for("parted/all", min(SLICE_S, limit_s)) is None:
            died = [rank for rank in dead_on_this_machine(world) if not store.has(f"parted/{rank}")]
            if died and store.add("parted/count", 0) + len(died) >= world.size:
                store.set("parted/all", "1")
        store.set(f"gone/{world.rank}", "1")
        # The store may live in the process of the first rank: it may go only when all have read it.
        others = [f"gone/{rank}" for rank in range(1, world.size)]
        while world.ranks[world.rank] == 0 and time.monotonic() < end and not store.has_all(others):
            others = [f"gone/{rank}" for rank in range(1, world.size) if rank not in dead_on_this_machine(world)]
            time.sleep(0.01)


def dead_on_this_machine(root: World) -> list[int]:
    """Ranks whose processes ran on this machine and do not any more. What does not change is read once."""
    unknown = [rank for rank in root.near or range(root.size) if rank not in root.peers and rank != root.rank]
    if unknown and root.store is not None:
        found = root.store.all_found([f"peer/{rank}" for rank in unknown], "machine", "pid", "born")
        root.peers |= {rank: peer for rank, peer in zip(unknown, found, strict=True) if peer is not None}
    return [rank for rank, peer in root.peers.items() if _is_gone(peer)]


def exception_text(error: BaseException) -> str:
    """`Type: text` of an exception, with the notes on it."""
    return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def rank_to_blame(world: World, error: BaseException) -> tuple[int, str]:
    """The global rank that is at fault when this rank fails with `error`: the peer it names, or this one."""
    if isinstance(error, PeerError) and error.rank >= 0:
        return error.rank, error.text
    if isinstance(error, SystemExit) and error.code in (None, 0, PREEMPTED):
        return world.ranks[world.rank], _LEFT
    return world.ranks[world.rank], exception_text(error)


def _is_gone(peer: Mapping[str, Any]) -> bool:
    """Whether the process that has written down this of itself ran on this machine and does not any more."""
    return bool(peer["machine"] == machine_id() and _process_start_time(peer["pid"]) != peer["born"])


@functools.cache
def machine_id() -> str:
    """What processes have in common whose ids mean the same; containers may share a host's name, and its kernel."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):  # systems without /proc, and sandboxes
        parts.append(pathlib.Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with contextlib.suppress(OSError):
        parts.append(str(pathlib.Path("/proc/self/ns/pid").readlink()))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _process_start_time(pid: int) -> str | None:
    """Start time of a process, which distinguishes a recycled process id; None if there is none."""
    fields = process_fields(pid)
    if fields:
        return None if fields[0] in ("Z", "X") else fields[19]  # a zombie is dead
    if pathlib.Path("/proc/self").is_dir():
        return None
    try:  # systems without /proc: the process id alone has to do
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "alive"


def process_fields(pid: int) -> list[str]:
    """What Linux says of a process, from its state on; nothing if there is none, or no /proc."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, NotADirectoryError):
        text = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return text.rpartition(")")[2].split()
    return []


def peer_error(what: str, rank: int, text: str) -> PeerError:
    """The error of `what` for a rank that is to blame; -1 for another process."""
    problem = f"rank {rank} failed: {text}" if rank >= 0 else text
    return PeerError(f"{what}: {problem}" if what else problem, rank=rank, text=text)
