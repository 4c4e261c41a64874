"""Collectives by kind and axis, of real groups and of pretended ones."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from weft import torch_internals
from weft.peers.pretended import PretendedGroup
from weft.rehearsal.messages import Message, sent_bytes
from weft.tensors.nested import tensors

# Operations of torch that are messages: what they are, and which argument is what all ranks have together.
_REAL = MappingProxyType(
    {
        "allreduce_": ("all_reduce", 0),
        "allreduce_coalesced_": ("all_reduce", 0),
        "broadcast_": ("broadcast", 0),
        "reduce_": ("reduce", 0),
        "allgather_": ("all_gather", 0),
        "allgather_into_tensor_coalesced_": ("all_gather", 0),
        "reduce_scatter_": ("reduce_scatter", 1),
        "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
        "alltoall_": ("all_to_all", 1),
        "alltoall_base_": ("all_to_all", 1),
        "gather_": ("gather", 1),
        "scatter_": ("scatter", 0),
        "send": ("send", 0),
        "recv_": ("recv", 0),
        "barrier": ("barrier", 0),
    }
)
_FUNCTIONAL = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")  # how names of these begin


@functools.cache
def _real() -> dict[str, tuple[str, int]]:
    """`_REAL`, and those that torch does not name in public."""
    gather, reduce_scatter = torch_internals.GATHER.name, torch_internals.REDUCE_SCATTER.name
    return {**_REAL, gather: ("all_gather", 0), reduce_scatter: ("reduce_scatter", 1)}


@functools.cache
def functional_spaces() -> tuple[str, ...]:
    """Where the functional operations are."""
    return tuple(each.found.default.namespace for each in torch_internals.FUNCTIONAL_MESSAGES)


class Traffic:
    """All messages.

    Attributes:
        noted: In order: kind, ranks, bytes of the whole.
    """

    def __init__(self) -> None:
        self.noted: list[tuple[str, tuple[int, ...], int]] = []

    def note(self, kind: str, group: Any, size: int) -> None:
        """One message."""
        ranks = group.ranks if isinstance(group, PretendedGroup) else tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1:
            self.noted.append((kind, ranks, size))

    def see(self, func: Any, args: Sequence[Any]) -> None:
        """An operation that may be a message. Pretended groups note theirs, but for those that never reach them."""
        name = torch_internals.schema.of(func).name.partition("::")[2]
        if func.namespace == "c10d":
            kind, place = _real().get(name, ("", 0))
            groups = [each for each in args if isinstance(each, torch.ScriptObject)]
            for each in groups if kind else ():
                with contextlib.suppress(RuntimeError, ValueError):  # an operation that is reduced by, not a group
                    self.note(kind, dist.ProcessGroup.unbox(each), _bytes(args[place]))
                    break
        elif func.namespace in functional_spaces() and name.startswith(_FUNCTIONAL):
            kind = next(each for each in _FUNCTIONAL if name.startswith(each))
            group = next(each for each in reversed(args) if isinstance(each, str))
            whole = _bytes(args[0])
            resolved = torch_internals.find_group(group)
            if kind == "all_gather":
                whole *= resolved.size()
            self.note(kind, resolved, whole)


def summed(found: list[tuple[str, tuple[int, ...], int]], axes: dict[str, int], per_node: int) -> tuple[Message, ...]:
    """Messages by kind and axis."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    sizes: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for kind, ranks, size in found:
        counts[kind, ranks] += 1
        sizes[kind, ranks] += size
    return tuple(
        Message(
            kind=kind,
            axis=_axis(ranks, axes),
            ranks=len(ranks),
            count=count,
            bytes=sizes[kind, ranks],
            sent=sent_bytes(kind, sizes[kind, ranks], len(ranks)),
            nodes=len({rank // per_node for rank in ranks}),
        )
        for (kind, ranks), count in counts.items()
    )


def _axis(ranks: tuple[int, ...], axes: dict[str, int]) -> str:
    """The axes along which ranks differ; "some" if they are no line of the mesh."""
    wide = [name for name, size in axes.items() if size > 1]
    moving: list[str] = []
    stride = 1
    for name in reversed(wide):
        if len({rank // stride % axes[name] for rank in ranks}) > 1:
            moving.insert(0, name)
        stride *= axes[name]
    if math.prod(axes[name] for name in moving) != len(ranks):
        return "some"
    return "all" if len(moving) == len(wide) > 1 else "+".join(moving)


def _bytes(value: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors(value))
