"""Meetings of all ranks through the store: values exchanged, facts compared."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.errors import ContextError, PeerError, listed
from weft.peers.board import StoreLost
from weft.peers.liveness import SLICE_S, blame, culprit, failure_at, peer_error
from weft.peers.world import World, arrives

__all__ = ["SLICE_S", "agree", "compare", "compare_values", "disagree", "exchange", "peer_error", "wait_for_key"]


_FIX = "compute these values from arguments that are equal on all ranks"


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
    if world.store is None or world.size == 1:
        return
    compare(what, exchange(world, what, {"call": what, **(facts or {})}), fix=fix)


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
    with _store_errors(world, what):
        store.write(f"{key}/{world.rank}", {"ok": mine, "kind": kind or what, "what": what})
        if store.add(f"{key}/count", 1) == world.size:
            store.set(f"{key}/done", "ok")
        wait_for_key(world, f"{key}/done", what, [f"{key}/{rank}" for rank in range(world.size)])
        if store.get(f"{key}/done") != b"ok":
            said = failure_at(world, key)
            raise peer_error(what, *said) if said else PeerError(f"{what}: a rank failed and could not say why")
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


def compare_values(world: World, what: str, mine: str) -> None:
    """Compare how each rank describes its value; all of them call it.

    Raises:
        ContextError: The descriptions differ.
    """
    compare(what, [{"value": one} for one in exchange(world, what, mine)])


def disagree(world: World, error: BaseException) -> None:
    """Report to a meeting that this rank will not come because of `error`; the others raise `PeerError`."""
    if world.store is None or world.size == 1 or world.closed:
        return
    key = f"meet/{world.next_meeting()}"
    rank, text = blame(world, error)
    with contextlib.suppress(StoreLost):  # then there are no peers
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
    """
    assert world.store is not None
    end = time.monotonic() + world.timeout_s
    with _store_errors(world, what):
        while not arrives(world.store, key, SLICE_S if patient else min(SLICE_S, max(end - time.monotonic(), 0.001))):
            missing = [
                r for r in range(world.size) if r != world.rank and not (expected and world.store.has(expected[r]))
            ]
            # If all have come and it is not settled, one of them died in between.
            blamed = culprit(world, missing or range(world.size))
            if world.store.has(key):
                return
            if blamed is not None:
                raise peer_error(what, *blamed)
            watch = world.watch or world.root.watch
            if watch is not None and not patient:
                watch.check(what, missing, world)
            if not patient and time.monotonic() >= end:
                raise _late(world, what, missing)


def _late(world: World, what: str, missing: Sequence[int]) -> PeerError:
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
