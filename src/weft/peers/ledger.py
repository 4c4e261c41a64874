"""`Ledger`: what the ranks of one strategy note for each other in the store.

[Note: the ledger] Keys, below the prefix of the world:
    ledger/<n>/facts/<k>   rank 0's facts of comparison k, until all others have read them
    ledger/<n>/facts/<k>/read   how many have
    ledger/<n>/count/<key> a number that all ranks add to
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from collections.abc import Mapping
from itertools import chain
from typing import Any

from weft.peers.agreement import agree, compare, exchange
from weft.peers.liveness import check_failed, report_failure
from weft.peers.world import World

_MAX_NOTED = 64  # of a rank that is so far ahead the oldest are let go


class Ledger:
    """One strategy on one module, as it is on the other ranks of a world. Everything goes through the store.

    All ranks make their ledgers in the same order, so that a number names the same one on each.

    Attributes:
        copies: That of the ranks which hold the same as this one, if those of this ledger hold parts.
    """

    def __init__(self, world: World, name: str, copies: World | None = None) -> None:
        self._world = world
        self._name = name
        self._prefix = f"ledger/{world.next_number('ledger')}"
        self._compared = 0
        self._counts: Counter[str] = Counter()  # where there is no store
        self._noted: deque[tuple[int, str, str, dict[str, object]]] = deque(maxlen=_MAX_NOTED)
        world.root.ledgers.add(self)
        self.copies = Ledger(copies, name) if copies is not None and copies.size > 1 else None

    @property
    def pretended(self) -> bool:
        """Whether the other ranks are not there, and bring what this one brings: equal values then say nothing."""
        return self._world.pretended

    def meet(self, what: str, mine: Any, *, kind: str | None = None) -> list[Any]:
        """Wait for all ranks and return the JSON value of each, in rank order; see `exchange`.

        Raises:
            ContextError: They came for different things; where `what` may differ, of different kinds.
            PeerError: A rank failed, died, or waits elsewhere.
        """
        return exchange(self._world, f"{self._name}: {what}", mine, kind=kind)

    def agree(self, what: str, facts: Mapping[str, object], *, fix: str | None = None) -> None:
        """Wait for all ranks and compare facts; `fix` is what the error suggests.

        Raises:
            ContextError: They differ; the text names both values.
            PeerError: A rank failed, died, or waits elsewhere.
        """
        agree(self._world, f"{self._name}: {what}", facts, **({} if fix is None else {"fix": fix}))

    def differing(self, what: str, numbers: Mapping[str, int | None]) -> list[str]:
        """The names of numbers, such as checksums, that differ between the ranks; a meeting, and one more to find them.

        Raises:
            ContextError: The ranks came for different things.
            PeerError: A rank failed, died, or waits elsewhere.
        """
        if len(set(self.meet(what, hashlib.sha256(repr(numbers).encode()).hexdigest()))) == 1:
            return []
        everyone = self.meet(f"{what}, which differ", numbers)
        return [name for name in dict.fromkeys(chain(*everyone)) if len({one.get(name) for one in everyone}) > 1]

    def report(self, error: BaseException) -> None:
        """Tell the others of an error of this rank that torch does not know of. Does not wait; see `report_failure`.

        A rank that waits for this one in a collective raises `PeerError` with its text within seconds.
        """
        report_failure(self._world, error)

    def count(self, key: str, add: int) -> int:
        """Add to a number that the ranks share, and return it. Does not wait."""
        if self._world.store is None:  # the others are pretended, and add as much
            self._counts[key] += add * self._world.size
            return self._counts[key]
        return self._world.store.add(f"{self._prefix}/count/{key}", add)

    def next_reduction(self) -> int:
        """Count the reductions of gradients that all strategies over these ranks have made in this process.

        Raises:
            PeerError: The last one was aborted.
        """
        check_failed(self._world)
        self._world.reductions += 1
        return self._world.reductions

    def compare(self, what: str, facts: Mapping[str, object], *, fix: str) -> None:
        """Note facts for the others, and compare those noted before with rank 0's, as far as it has come.

        Does not wait. Every rank calls it equally often. A difference is found one call later, or when the context is
        closed. Between two steps the ranks meet in a collective, so rank 0 is hardly ever behind.

        Raises:
            ContextError: They differ; the text names both values.
        """
        self.finish()
        self._compared += 1
        if self._world.store is None:
            return
        if self._world.rank == 0:
            self._world.store.write(self._key(self._compared), facts)
        else:
            self._noted.append((self._compared, what, fix, dict(facts)))

    def finish(self, limit_s: float = 0.0) -> None:
        """Compare what was noted and not compared yet.

        Args:
            limit_s: How long rank 0 is waited for, which may be a step behind.

        Raises:
            ContextError: It differs from what rank 0 noted.
        """
        store, ranks = self._world.store, self._world.ranks
        while self._noted and store is not None:
            number, what, fix, mine = self._noted[0]
            key = self._key(number)
            text = store.wait_for(key, 0) or (store.wait_for(key, limit_s) if limit_s else None)
            if text is None:
                return
            self._noted.popleft()
            theirs = store.parsed(key, text)
            if store.add(f"{key}/read", 1) == self._world.size - 1:  # the last one to read it
                store.delete(key)
                store.delete(f"{key}/read")
            if theirs != json.loads(json.dumps(mine)):
                compare(f"{self._name}: {what}", {ranks[0]: theirs, ranks[self._world.rank]: mine}, fix=fix)

    def _key(self, number: int) -> str:
        return f"{self._prefix}/facts/{number}"
