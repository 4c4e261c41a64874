"""Meetings of all ranks through the store: values exchanged, facts compared.

[Note: a meeting] Each rank writes down what it brings and adds itself to the number of those that have come. The last
one reads what all have brought and writes one value, for which the others wait; equal values are in it once. So the
ranks of a world of n make 4 n + 3 requests, and where all bring the same, they move as many bytes as n do. Facts are
compared by a digest, and only where that differs the ranks meet again with the facts themselves.

A meeting ends in the same way on all ranks: the first one that knows that it will not take place writes why where the
others wait for its result. Who waits looks after the peers without the store: at the processes of its own host, and at
what its watch has read of those that left. Who waits longer asks now and then what some of the others do.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from weft.errors import ContextError, PeerError, listed
from weft.peers.liveness import (
    SLICE_S,
    dead_on_this_machine,
    find_culprit,
    peer_error,
    rank_to_blame,
    read_notes,
)
from weft.peers.store import RankStore, StoreLost
from weft.peers.world import Watcher, World

_FIX = "compute these values from arguments that are equal on all ranks"
_ASKED = 4  # ranks that somebody who waits long asks what they do, others each time


def agree(world: World, what: str, facts: Mapping[str, object] | None = None, *, fix: str = _FIX) -> None:
    """Wait until every rank has come to this point and brings the same facts.

    Collectives: none; a few messages to the store per rank.

    Args:
        world: Whose ranks meet.
        what: What they meet for; must be the same on all ranks.
        facts: Names and JSON values that must be equal on all ranks.
        fix: What the error suggests if they are not.

    Raises:
        PeerError: A rank failed, died, or did not come within `world.timeout_s`.
        ContextError: The ranks came for different things, or with different facts.
    """
    entries = differing_facts(world, what, facts or {})
    if entries is not None:
        compare(what, entries, fix=fix)


def differing_facts(world: World, what: str, facts: Mapping[str, object]) -> list[dict[str, Any]] | None:
    """Compare facts over the ranks; None if they are equal, else those of every rank, in rank order.

    A fact named "at" may differ, as in `compare`.

    Raises:
        PeerError: A rank failed, died, or did not come within `world.timeout_s`.
        ContextError: The ranks came for different things.
    """
    if world.store is None or world.size == 1:
        return None
    plain = json.loads(json.dumps({name: fact for name, fact in facts.items() if name != "at"}))
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:32]
    mine = {"digest": digest, **({"at": facts["at"]} if "at" in facts else {})}
    if all(theirs["digest"] == digest for theirs in exchange(world, what, mine)):
        return None
    return exchange(world, what, dict(facts))


def compare(
    what: str, entries: Sequence[Mapping[str, object]] | Mapping[int, Mapping[str, object]], *, fix: str = _FIX
) -> None:
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
            f"{what}: the ranks do not agree",
            found=listed(lines),
            expected="the same call with the same settings on every rank",
            fix=f"call {' and '.join(map(str, calls))} on all ranks, without `if ctx.is_main:` around it"
            if len(calls) > 1
            else fix,
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
        alone = json.loads(json.dumps(mine))
        return [alone] * (world.size if world.pretended else 1)
    number = world.next_meeting()
    key = f"meet/{number}"
    with _store_errors(world, what), _report_failed_meeting(world, key):
        store.write(_at(world.rank), {"number": number, "kind": kind or what, "what": what, "value": mine})
        if store.add(f"{key}/count", 1) == world.size:
            done = _joined(world, store, number, to)
            if not store.claim(f"{key}/done", json.dumps(done)):
                done = store.read(f"{key}/done", "found", "failed")
            # Every rank has come to this meeting, so none can still be reading the one before.
            if number > 1:
                store.delete(f"meet/{number - 1}/done")
                store.delete(f"meet/{number - 1}/count")
        else:
            text = wait_for_key(world, f"{key}/done", what, lambda: absentees(world))
            done = store.parsed(f"{key}/done", text, "found", "failed")
    if done["failed"] is not None:
        raise _failed(world, what, done["failed"])
    found = done["found"]
    if to == world.rank and found is None:
        with _store_errors(world, what):
            found = store.read(f"{key}/all")
            store.delete(f"{key}/all")
    entries: list[dict[str, Any]] = [{}] * world.size
    for entry, runs in found or ():
        for first, last in runs:
            entries[first : last + 1] = [entry] * (last + 1 - first)
    if found is None:
        return []
    if len({entry["kind"] for entry in entries}) > 1:
        at = [entry["value"] if isinstance(entry["value"], dict) else {} for entry in entries]
        lines = [{"at": value["at"]} if "at" in value else {} for value in at]
        compare(what, [{"call": entry["what"], **line} for entry, line in zip(entries, lines, strict=True)])
    return [entry["value"] for entry in entries] if to in (None, world.rank) else []


def _at(rank: int) -> str:
    return f"meet/at/{rank}"


def _joined(world: World, store: RankStore, number: int, to: int | None) -> dict[str, Any]:
    """What all ranks have brought to a meeting: each different value once, with the first and last of the ranks."""
    runs: dict[str, list[list[int]]] = {}
    names = ("kind", "what", "value")
    for rank, entry in enumerate(store.all_found([_at(rank) for rank in range(world.size)], "number", *names)):
        same = runs.setdefault(json.dumps({name: entry[name] for name in names}), [])
        if same and same[-1][1] == rank - 1:
            same[-1][1] = rank
        else:
            same.append([rank, rank])
    found = [(json.loads(text), ranks) for text, ranks in runs.items()]
    if to is not None and len({entry["kind"] for entry, _ in found}) == 1:
        store.write(f"meet/{number}/all", found)
        return {"found": None, "failed": None}
    return {"found": found, "failed": None}


def absentees(world: World) -> list[int]:
    """The other ranks that have not come to the meeting that this one is in."""
    assert world.store is not None
    found = world.store.all_found([_at(rank) for rank in range(world.size)], "number")
    came = [entry is not None and entry["number"] >= world.meetings for entry in found]
    return [rank for rank, has_come in enumerate(came) if rank != world.rank and not has_come]


@contextlib.contextmanager
def _report_failed_meeting(world: World, key: str) -> Iterator[None]:
    """Let those that wait for the result of a meeting know that it has none."""
    try:
        yield
    except PeerError as error:
        if not isinstance(error, StoreLost):
            _tell(world, key, error.rank, error.text, str(error))
        raise
    except BaseException as error:
        _tell(world, key, *rank_to_blame(world, error))
        raise


def _tell(world: World, key: str, rank: int, text: str, error: str = "") -> None:
    failed = {"rank": rank, "text": text, "error": error}
    with contextlib.suppress(StoreLost):  # then there are no peers
        if world.store is not None:
            world.store.claim(f"{key}/done", json.dumps({"found": None, "failed": failed}))


def _failed(world: World, what: str, failed: Mapping[str, Any]) -> PeerError:
    """The error of a meeting that did not take place, as another rank has put it."""
    rank, text = failed["rank"], failed["text"]
    if rank == world.ranks[world.rank]:
        return PeerError(f"{what}: others waited for this rank, {rank}, and left: it {text}", rank=rank, text=text)
    return PeerError(failed["error"], rank=rank, text=text) if failed["error"] else peer_error(what, rank, text)


def compare_values(world: World, what: str, mine: str) -> None:
    """Compare how each rank describes its value; all of them call it.

    Raises:
        ContextError: The descriptions differ.
    """
    agree(world, what, {"value": mine})


def disagree(world: World, error: BaseException) -> None:
    """Report to a meeting that this rank will not come because of `error`; the others raise `PeerError`."""
    if world.store is None or world.size == 1 or world.closed:
        return
    _tell(world, f"meet/{world.next_meeting()}", *rank_to_blame(world, error))


def wait_for_key(
    world: World, key: str, what: str, absent: Callable[[], Sequence[int]], *, patient: bool = False
) -> bytes:
    """Wait until `key` is in the store, and return its value.

    Args:
        world: Whose store and peers.
        key: Key to wait for.
        what: What for, in the error text.
        absent: Finds out which of the other ranks have not done their part yet.
        patient: Wait as long as the peers live, not only `world.timeout_s`.

    Raises:
        PeerError: A rank that is waited for failed or died, or the time is over.
    """
    store = world.store
    assert store is not None
    start = time.monotonic()
    left_s, asked = world.timeout_s, 0
    with _store_errors(world, what):
        while True:
            value = store.wait_for(key, SLICE_S if patient else min(SLICE_S, max(left_s, 0.001)))
            if value is not None:
                return value
            error = _blamed(world, what, absent)
            waited_s = time.monotonic() - start
            left_s = world.timeout_s - waited_s
            if error is None and not patient:
                watch = world.watch or world.root.watch
                if watch is not None and waited_s >= watch.patience_s:
                    error = _asked(watch, what, world, absent, asked)
                    asked += _ASKED
                if error is None and left_s <= 0:
                    error = _late_error(world, what, absent())
            if error is not None:
                value = store.wait_for(key, 0)
                if value is None:
                    raise error
                return value


def _blamed(world: World, what: str, absent: Callable[[], Sequence[int]]) -> PeerError | None:
    """The error for a rank that is waited for and has failed, died or left; asks the store only if there is one."""
    root = world.root
    places = {member: rank for rank, member in enumerate(world.members()) if rank != world.rank}
    index = {rank: member for member, rank in enumerate(root.ranks)}
    if root.watch is None:
        read_notes(root)
    left = [note for note in root.notes if note["left"]]
    suspects = (
        {note["from"] for note in left}
        | {index.get(note["rank"], -1) for note in left}
        | set(dead_on_this_machine(root))
    )
    members = [places[member] for member in sorted(suspects) if member in places]
    if not members:
        return None
    missing = absent()  # if all have come and it is not settled, one of them died in between
    guilty = [rank for rank in members if rank in missing] if missing else members
    blamed = find_culprit(world, guilty) if guilty else None
    if blamed is None:  # on another host, its neighbours have seen it
        names = {world.ranks[rank] for rank in guilty}
        blamed = next(((note["rank"], note["error"]) for note in left if note["rank"] in names), None)
    return None if blamed is None else peer_error(what, *blamed)


def _asked(
    watch: Watcher, what: str, world: World, absent: Callable[[], Sequence[int]], first: int
) -> PeerError | None:
    """Ask some ranks whether they wait elsewhere, each time others."""
    others = [rank % world.size for rank in range(world.rank + 1, world.rank + world.size)]
    some = [others[(first + at) % len(others)] for at in range(min(_ASKED, len(others)))]
    try:
        watch.check(what, some, world)
    except PeerError as error:
        if error.rank in [world.ranks[rank] for rank in absent()]:
            return error
    return None


def _late_error(world: World, what: str, missing: Sequence[int]) -> PeerError:
    """The error for peers that show no sign of failure, and do not come either."""
    late = [world.ranks[rank] for rank in missing]
    return PeerError(
        f"{what}: rank {listed(late)} of {world.root.size} did not arrive",
        found=f"waited {world.timeout_s:g} s on rank {world.ranks[world.rank]}; no sign of failure there",
        expected="every rank makes the same calls in the same order",
        fix=f"call {what} on all ranks, without `if ctx.is_main:` around it; or raise start(timeout_s=...)",
        rank=late[0] if late else -1,
        text=f"did not arrive within {world.timeout_s:g} s",
    )


@contextlib.contextmanager
def _store_errors(world: World, what: str) -> Iterator[None]:
    try:
        yield
    except StoreLost as error:
        raise PeerError(f"{what}: {error}", rank=error.rank, text=error.text) from error
