"""What replicas and other launchers have to say to the launcher that decides; see [Note: replica keys]."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weft.peers.replica_groups import LAUNCHED, MEMORY, STORE

__all__ = ["Messages"]

_MISSING_S = 1.0  # a message that was counted is written in a moment, unless its process has died in between


class Messages:
    """The side of the launcher that decides."""

    def __init__(self, store: dist.Store, replica_ranks: int, memory: Path) -> None:
        """Let others find out what is served here.

        Args:
            store: Served by this process.
            replica_ranks: Ranks of each replica.
            memory: A folder for copies of the state, of the replicas on this node.
        """
        self._store = dist.PrefixStore(STORE, store)
        self._store.set(f"{MEMORY}/0", str(memory))
        self._store.add("asks", 0)
        self._store.set(LAUNCHED, str(replica_ranks))
        self._seen = 0
        self._missing_since: float | None = None

    def arrived(self, now: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """What has come since the last time, with its number."""
        while self._seen < self._store.add("asks", 0):
            key = f"ask/{self._seen + 1}"
            if not self._store.check([key]):
                self._missing_since = self._missing_since or now
                if now - self._missing_since < _MISSING_S:
                    return
            self._missing_since = None
            self._seen += 1
            if self._store.check([key]):
                found = json.loads(self._store.get(key))
                self._store.delete_key(key)
                yield self._seen, found

    def answer(self, number: int, found: dict[str, Any]) -> None:
        """Answer a question of a replica."""
        self._store.set(f"answer/{number}", json.dumps(found))

    def tell(self, what: str, quorum: int) -> None:
        """Tell the members of a quorum that they are "called" together after their step, or that it is "broken"."""
        if not self._store.check([f"{what}/{quorum}"]):
            self._store.set(f"{what}/{quorum}", "1")

    def order(self, launcher: str, number: int, what: dict[str, Any]) -> None:
        """Tell another launcher to do something."""
        self._store.set(f"order/{launcher}/{number}", json.dumps(what))
