"""Columns of all ranks: the messages of `gather_metrics`.

[Note: one message] What `gather_metrics` sends first is a message of a fixed size: a description, and of the sample ids
and values those that fit. Where all ranks bring tensors of the same shapes, small metrics are one collective this way,
and so are those of some hundred kilobytes from the second time on: the size follows what the ranks brought the last
time, which all of them know. Each larger tensor is then gathered straight into the result. Where the ranks bring other
shapes, or lists, all values are sent as `gather_objects` sends them.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from weft.collectives.encoding import bytes_tensor
from weft.collectives.objects import gather_packed
from weft.collectives.primitives import aligned, all_gather_rows, as_bytes, num_bytes, row_gather
from weft.context import DistContext
from weft.peers.agreement import compare_values

_FIRST_BYTES = 2**13  # of all ranks together
_ONE_MESSAGE = 2**20  # bytes per rank
_HEAD = 32  # bytes: four words
_KEPT = 8  # messages of one shape that are ready to be filled again
Kinds: TypeAlias = tuple[tuple[torch.dtype, torch.Size] | None, ...]  # of the columns; None: one that is a list


def exchange_columns(
    structure: str, columns: list[Any], ids: torch.Tensor, ctx: DistContext
) -> list[tuple[list[Any], torch.Tensor]]:
    """Columns and ids of every rank, or of all together, in memory of their own; see [Note: one message].

    Raises:
        TypeError: On all ranks, if an entry cannot be sent.
        ContextError: The ranks pass different structures.
        PeerError: A peer failed or died.
    """
    kinds: Kinds = tuple([(one.dtype, one.shape) if isinstance(one, torch.Tensor) else None for one in columns])
    message = _message(structure, kinds, len(ids), ctx)
    if message.exchange([ids, *columns]):
        ctx.world.message_bytes = message.next_capacity
        return [message.joined([ids, *columns])]
    message.check_heads()
    found = gather_packed("gather_metrics", [columns, ids], ctx, grad=True, each="an entry")
    return [(theirs, their_ids) for theirs, their_ids in found]


def _message(structure: str, kinds: Kinds, count: int, ctx: DistContext) -> _PackedMessage:
    """The first message; made once for batches of one shape."""
    messages, capacity = ctx.world.messages, ctx.world.message_bytes or _usual_capacity(ctx.world_size)
    key = structure, kinds, count, capacity
    message: _PackedMessage | None = messages.get(key)
    if message is None:
        message = messages[key] = _PackedMessage(structure, kinds, count, capacity, ctx)
        if len(messages) > _KEPT:
            del messages[next(iter(messages))]
    return message


def _usual_capacity(size: int) -> int:
    return max(_FIRST_BYTES // size, 1024) - _HEAD


class _PackedMessage:
    """The first message of all ranks: memory for it, and what of it is a tensor of which rank.

    Attributes:
        rows: Of bytes [ranks, _HEAD + capacity]; each row begins with hashes of the structure, and of the kinds too,
            whether there are lists, and a hash of all sizes.
        next_capacity: For the next message, if all ranks bring what this one brings; None: the usual.
    """

    def __init__(self, structure: str, kinds: Kinds, count: int, capacity: int, ctx: DistContext) -> None:
        self.world = ctx.require_collective("gather_metrics")
        tensors = [kind for kind in kinds if kind is not None]
        dims = [number for _, shape in tensors for number in shape]
        described = [None if kind is None else [str(kind[0]), len(kind[1])] for kind in kinds]
        self._described = f"{structure}: {described}"
        self._has_lists = None in kinds
        outer, inner = (zlib.crc32(one.encode()) for one in (structure, self._described))
        sizes = hashlib.blake2b(f"{dims} {count}".encode(), digest_size=8).digest()
        self._head = struct.pack("3q", outer, inner, int(self._has_lists)) + sizes
        self.rows = torch.empty(ctx.world_size, aligned(_HEAD + capacity), dtype=torch.uint8, device=ctx.device)
        self.rows[ctx.rank, :_HEAD] = bytes_tensor(self._head)
        self._gather = row_gather(self.rows, self.world)
        heads = self.rows[:, :_HEAD]
        self._heads: Callable[[], bytes] = (
            heads.numpy().tobytes if ctx.device.type == "cpu" else lambda: heads.cpu().numpy().tobytes()
        )
        # By number of a tensor, where it is of each rank: of those that fit, the first ones first.
        self._places: dict[int, tuple[torch.Tensor, ...]] = {}
        start = total = _HEAD
        for number, (dtype, shape) in enumerate([] if self._has_lists else [(torch.int64, (count,)), *tensors]):
            nbytes = num_bytes(shape, dtype)
            total += aligned(nbytes)
            if start + aligned(nbytes) <= _HEAD + capacity:
                parts = [row[start : start + nbytes].view(dtype).view(shape) for row in self.rows]
                self._places[number] = tuple(parts)
                start += aligned(nbytes)
        longest = total - _HEAD
        self.next_capacity = longest if _usual_capacity(ctx.world_size) < longest <= _ONE_MESSAGE else None

    def exchange(self, tensors: Sequence[Any]) -> bool:
        """Fill it and send it; whether all ranks bring tensors of the same shapes."""
        for number, places in self._places.items():
            places[self.world.rank].copy_(tensors[number])
        self._gather()
        return not self._has_lists and self._heads() == self._head * self.world.size

    def check_heads(self) -> None:
        """Raise on all ranks if the values do not fit together.

        Raises:
            ContextError: They do not.
        """
        words = list(struct.iter_unpack("4q", self._heads()))
        what = 0 if any(each[2] for each in words) else 1  # dtypes and dimensions count where all columns are tensors
        if any(each[what] != words[0][what] for each in words):
            compare_values(self.world, "gather_metrics", self._described)

    def joined(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], torch.Tensor]:
        """Columns and ids of all ranks together, which bring the same kinds and sizes."""
        found = []
        for number, tensor in enumerate(tensors):
            if number in self._places:
                found.append(torch.cat(self._places[number]))
                continue
            mine = as_bytes(tensor)
            rows = self.rows.new_empty(len(self.rows), len(mine))
            rows[self.world.rank] = mine
            all_gather_rows(rows, self.world)
            found.append(rows.view(-1).view(tensor.dtype).view(-1, *tensor.shape[1:]))
        return found[1:], found[0]
