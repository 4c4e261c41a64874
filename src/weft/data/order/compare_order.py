"""Ranks that read in different orders find out: through the store, without waiting for each other."""

from __future__ import annotations

import json

from weft.errors import ContextError
from weft.peers.world import World


def compare_order(world: World, key: str, digest: str, what: str, fix: str, *, old: str | None = None) -> None:
    """Compare what this rank reads with what the first rank to come here reads; does not wait.

    The first one writes its digest down, and who comes later compares. So of two ranks that differ, the later one
    raises, and the other learns that a peer failed. One request to the store, and another one for all but the first.

    Changes: a key of the store. Collectives: none.

    Args:
        world: The ranks that have to agree; nothing happens if it has no store.
        key: Where they compare: the same text on all ranks, of one loader, one of its iterations, one place in it.
        digest: Of what was read, or is going to be read, up to there.
        what: What is compared: the first line of the error.
        fix: The line that repairs it.
        old: A key that is not needed any more, such as that of two iterations ago; the first rank removes it.

    Raises:
        ContextError: Another rank has another digest; the text names both ranks, numbered as in the whole job.
        PeerError: The store is gone.
    """
    store = world.store
    if store is None:
        return
    rank = world.ranks[world.rank]
    if store.claim(f"order/{key}", json.dumps({"rank": rank, "digest": digest})):
        if old is not None:
            store.delete(f"order/{old}")
        return
    text = store.wait_for(f"order/{key}", 0)
    if text is None:  # this rank is two iterations behind, and the key was removed
        return
    first = store.parsed(f"order/{key}", text, "rank", "digest")
    if first["digest"] != digest:
        raise ContextError(
            what,
            found=f"rank {first['rank']}: {first['digest']}, rank {rank}: {digest}",
            expected="the same samples in the same order on every rank",
            fix=fix,
        )
