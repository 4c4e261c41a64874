"""`Peers`: what an engine asks of the other ranks outside of collectives. `Replicas`: those of an elastic job."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, Protocol

import torch


class Peers(Protocol):
    """One strategy on one module, as it is on the other ranks. Everything goes through the store."""

    @property
    def pretended(self) -> bool:
        """Whether the others are not there, and bring what this one brings: equal values then say nothing."""
        ...

    def meet(self, what: str, mine: Any, *, kind: str | None = None) -> list[Any]:
        """Wait for all ranks and return the JSON value of each, in rank order.

        Raises:
            ContextError: They came for different things; where `what` may differ, of different kinds.
            PeerError: A rank failed, died, or waits elsewhere.
        """
        ...

    def agree(self, what: str, facts: Mapping[str, object], *, fix: str | None = None) -> None:
        """Wait for all ranks and compare facts; `fix` is what the error suggests.

        Raises:
            ContextError: They differ; the text names both values.
            PeerError: A rank failed, died, or waits elsewhere.
        """

    def report(self, error: BaseException) -> None:
        """Tell the others of an error of this rank that torch does not know of. Does not wait.

        A rank that waits for this one in a collective raises `PeerError` with its text within seconds.
        """

    def count(self, key: str, add: int) -> int:
        """Add to a number that the ranks share, and return it. Does not wait."""
        ...

    def next_reduction(self) -> int:
        """Count the reductions of gradients that all strategies over these ranks have made in this process."""
        ...

    def compare(self, what: str, facts: Mapping[str, object], *, fix: str) -> None:
        """Note facts for the others, and compare those noted at the previous call. Does not wait.

        Every rank calls it equally often. A difference is found one call later, or when the context is closed.

        Raises:
            ContextError: They differ; the text names both values.
        """


def differing(peers: Peers, what: str, numbers: Mapping[str, int | None]) -> list[str]:
    """The names of numbers, such as checksums, that differ between the ranks; a meeting, and one more to find them.

    Raises:
        ContextError: The ranks came for different things.
        PeerError: A rank failed, died, or waits elsewhere.
    """
    if len(set(peers.meet(what, hashlib.sha256(repr(numbers).encode()).hexdigest()))) == 1:
        return []
    everyone = peers.meet(f"{what}, which differ", numbers)
    return [name for name in dict.fromkeys(chain(*everyone)) if len({one.get(name) for one in everyone}) > 1]


class Replicas(Protocol):
    """The replicas of an elastic job that make steps together, as a rank of one of them sees them.

    Attributes:
        size: How many there are.
        index: Of this one.
    """

    size: int
    index: int

    def add_up(self, tensors: Iterable[torch.Tensor], *, room: bool = False) -> bool:
        """Add tensors on the CPU up over the replicas, in place; False if one was lost. All ranks come here.

        `room`: The last element of the first one is free, for what replicas tell each other.
        """
        ...
