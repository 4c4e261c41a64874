"""What ranks send each other, and a model of how long it takes.

[Note: the time is a model] Counts and bytes of messages are facts: the program asked for them. Their time is not. It is
the usual alpha-beta model: a message costs the latency of a tree, `alpha * ceil(log2(ranks))`, and `sent / beta` for
the bytes that each rank sends with the ring algorithm. A group that spans nodes runs at the links between them. Nothing
overlaps in it, nothing waits, and no switch is shared: use it to compare meshes, not to predict a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Links:
    """The links of a cluster: what the time model is computed with; see [Note: the time is a model].

    Attributes:
        intra: Within a node: seconds of latency, bytes per second and direction of each rank.
        inter: Between nodes, likewise.
        per_node: Ranks of a node.

    The defaults are those of a node of 8 accelerators with NVLink, and one port of 400 Gbit/s for each.
    """

    intra: tuple[float, float] = (2e-6, 400e9)
    inter: tuple[float, float] = (1e-5, 50e9)
    per_node: int = 8

    def seconds(self, message: Message) -> float:
        """The modelled time of all these messages, one after the other.

        Example:
            >>> Links().seconds(Message("all_gather", "shard", ranks=8, count=1, bytes=8 * 10**9, sent=7 * 10**9))
            0.017506
        """
        alpha_s, bytes_per_s = self.intra if message.nodes == 1 else self.inter
        rounds = 2 if message.kind == "all_reduce" else 1
        latency_s = rounds * alpha_s * math.ceil(math.log2(max(message.ranks, 1)))
        return message.count * latency_s + message.sent / bytes_per_s


@dataclass(frozen=True)
class Message:
    """All messages of one kind along one axis.

    Attributes:
        kind: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send", ...
        axis: The mesh axis whose ranks take part; axes that are one group are joined, "replica+shard"; "all" of them.
        ranks: How many take part in each.
        count: How many messages.
        bytes: Their sum, of the whole: the gathered tensor, the gradient before it is scattered.
        sent: What this rank sends of it, with the algorithms of `sent_bytes`.
        nodes: How many nodes the group spans.
    """

    kind: str
    axis: str
    ranks: int
    count: int
    bytes: int
    sent: int
    nodes: int = 1


def sent_bytes(kind: str, num_bytes: int, ranks: int) -> int:
    """Bytes that each rank sends for a message of `num_bytes` in whole, with ring algorithms.

    An all-reduce is a reduce-scatter and an all-gather; in a broadcast and a reduce, ranks relay what they receive.

    Example:
        >>> sent_bytes("all_gather", 800, 8), sent_bytes("all_reduce", 800, 8), sent_bytes("broadcast", 800, 8)
        (700, 1400, 800)
    """
    if ranks <= 1 or kind in ("recv", "barrier"):
        return 0
    if kind in ("broadcast", "reduce", "send"):
        return num_bytes
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * num_bytes * (ranks - 1) // ranks
