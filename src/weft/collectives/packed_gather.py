"""Columns of all ranks: the messages of `gather_metrics`.

[Note: one message] What `gather_metrics` sends first is a message of a fixed size: sizes, and of the sample ids and
values those that fit. Small metrics are one collective this way, and so are those of some hundred kilobytes from the
second time on: the size follows what the ranks brought the last time, which all of them know. Of ranks that bring
tensors of the same shapes, each large one is then gathered from where it lies to where it stays; if they differ, all
goes into a second message.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from weft.collectives.encoding import bytes_tensor, decode, encode
from weft.collectives.primitives import all_gather_rows, as_bytes, num_bytes, row_gather, tensor_of
from weft.context import DistContext, World
from weft.peers.agreement import compare_values

__all__ = ["exchange_columns"]

_FIRST_BYTES = 2**13  # of all ranks together
_ONE_MESSAGE = 2**20  # bytes per rank
_HEAD = 80  # bytes: ten words
_ALIGNED = 16  # bytes: where a tensor begins, so that its memory is seen as its dtype
_KEPT = 8  # messages of one shape that are ready to be filled again
Kinds: TypeAlias = tuple[tuple[torch.dtype, torch.Size] | None, ...]  # of the columns; None: one that is a list


def exchange_columns(
    structure: str, columns: list[Any], ids: torch.Tensor, ctx: DistContext
) -> list[tuple[list[Any], torch.Tensor]]:
    """Columns and ids of every rank, or of all together, in memory of their own; see [Note: one message].

    Raises:
        TypeError: On all ranks, if an entry cannot be sent.
        ContextError: The ranks bring different structures.
        PeerError: A peer failed or died.
    """
    world = ctx.require_collective("gather_metrics")
    capacity = world.message_bytes or _usual_capacity(ctx.world_size)
    kinds: Kinds = tuple([(one.dtype, one.shape) if isinstance(one, torch.Tensor) else None for one in columns])
    failed: TypeError | None = None
    if None in kinds:
        lists = {str(index): one for index, one in enumerate(columns) if kinds[index] is None}
        text, parts = b"", list[torch.Tensor]()
        try:
            text, parts = encode("gather_metrics", [_described(kinds), lists], grad=True)
        except TypeError as error:
            failed = error
        layout = _Layout(structure, kinds, len(ids), text, parts, flags=1 if failed is None else 3)
        message = _Message(layout, capacity, ctx)
        tensors = [ids, *(one for one in columns if isinstance(one, torch.Tensor))]
    else:
        message = _message_of_tensors(structure, kinds, len(ids), capacity, ctx)
        tensors = [ids, *columns]
    heads = message.exchange(tensors)
    if heads is None:
        world.message_bytes = message.next_capacity
        return [message.joined(tensors)]
    return _of_different(message, tensors, heads, failed, ctx)


def _of_different(
    message: _Message, tensors: list[torch.Tensor], heads: list[bytes], failed: TypeError | None, ctx: DistContext
) -> list[tuple[list[Any], torch.Tensor]]:
    """What ranks brought that did not bring tensors of the same shapes: columns and ids of each."""
    world, layout = message.world, message.layout
    words = [struct.unpack_from("9q", each) for each in heads]
    longest = max(each[5] for each in words)
    world.message_bytes = _next_capacity(longest, ctx.world_size)
    _check_heads(words, failed, f"{layout.structure}: {_described(layout.kinds)}", world)
    bodies = message.rows[:, _HEAD:]
    if longest > bodies.shape[1]:
        bodies = torch.empty(ctx.world_size, longest, dtype=torch.uint8, device=ctx.device)
        for start, piece in zip(layout.starts, layout.pieces(tensors), strict=True):
            bodies[ctx.rank, start : start + len(piece)] = piece
        all_gather_rows(bodies, world)
    return [_unpacked(body, each) for body, each in zip(bodies, words, strict=True)]


def _usual_capacity(size: int) -> int:
    return max(_FIRST_BYTES // size, 1024) - _HEAD


def _next_capacity(longest: int, size: int) -> int | None:
    """Capacity for what the ranks bring, for the next time; the same on all ranks. None: the usual."""
    return longest if _usual_capacity(size) < longest <= _ONE_MESSAGE else None


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


class _Layout:
    """Where the pieces of one rank lie: sizes of all tensors, ids, tensors, and the text with what belongs to it.

    Attributes:
        words: Hashes of the structure, and of the kinds too; rows, dimensions, bytes of the text and of all pieces;
            flags; bytes of tensors in lists; a hash of all sizes.
        starts: Of each piece.
        sizes: Of each piece, in bytes.
        others: The pieces that are no tensors of the caller, by number.
        num_tensors: Ids, and columns that are tensors: pieces 1 to this.
        total: Bytes of all.
    """

    def __init__(
        self, structure: str, kinds: Kinds, count: int, text: bytes, parts: list[torch.Tensor], *, flags: int
    ) -> None:
        self.structure, self.kinds = structure, kinds
        tensors = [kind for kind in kinds if kind is not None]
        dims = [number for _, shape in tensors for number in shape]
        self.num_tensors = len(tensors) + 1
        behind = [bytes_tensor(text), *parts]
        self.others = dict(enumerate(behind, start=1 + self.num_tensors))
        self.others[0] = torch.tensor(dims, dtype=torch.int64).view(torch.uint8)
        self.sizes = [8 * len(dims), 8 * count, *(num_bytes(list(shape), dtype) for dtype, shape in tensors)]
        ends = list(itertools.accumulate(map(_padded, self.sizes), initial=0))
        rest = [part.numel() for part in behind]
        self.starts = [*ends[:-1], *itertools.accumulate(rest[:-1], initial=ends[-1])]
        self.sizes += rest
        self.total = ends[-1] + sum(rest)
        outer, inner = (zlib.crc32(one.encode()) for one in (structure, f"{structure} {_described(kinds)}"))
        same = hashlib.blake2b(f"{dims} {count}".encode(), digest_size=8).digest()
        hashed = struct.unpack("q", same)
        self.words = (outer, inner, count, len(dims), len(text), self.total, flags, sum(rest[1:]), *hashed)

    def pieces(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All pieces as bytes; `tensors` are the ids and the columns that are tensors."""
        found = {number: as_bytes(one) for number, one in enumerate(tensors, start=1)}
        return [(found | self.others)[piece] for piece in range(len(self.sizes))]


class _Message:
    """The first message of all ranks: memory for it, and what of it is a tensor of which rank.

    Attributes:
        rows: Of bytes [ranks, _HEAD + capacity].
        next_capacity: For the next message, if all ranks bring what this one brings.
    """

    def __init__(self, layout: _Layout, capacity: int, ctx: DistContext) -> None:
        self.layout, self.world = layout, ctx.require_collective("gather_metrics")
        size, rank = ctx.world_size, ctx.rank
        self.next_capacity = _next_capacity(layout.total, size)
        self.rows = torch.empty(size, _padded(_HEAD + capacity), dtype=torch.uint8, device=ctx.device)
        self._gather = row_gather(self.rows, self.world)
        heads = self.rows[:, :_HEAD]
        self._heads = heads.numpy() if ctx.device.type == "cpu" else heads
        head = struct.pack("10q", *layout.words, 0)
        # Only tensors, of the same kinds and sizes everywhere.
        self._alike = head * size if None not in layout.kinds else b""
        self.rows[rank, :_HEAD] = bytes_tensor(head)
        self._mine: list[tuple[int, torch.Tensor]] = []  # number of a tensor, and where it goes
        self._theirs: dict[int, tuple[torch.Tensor, ...]] = {}  # by number of a tensor, where it is of each rank
        dtypes = [torch.int64, *(kind[0] for kind in layout.kinds if kind is not None)]
        shapes = [(layout.words[2],), *(tuple(kind[1]) for kind in layout.kinds if kind is not None)]
        start = 0
        for piece, nbytes in enumerate(layout.sizes):
            # All pieces where they lie if all fit; else those that fit, the first ones first.
            at = _HEAD + (layout.starts[piece] if layout.total <= capacity else start)
            if layout.total > capacity and start + _padded(nbytes) > capacity:
                continue
            start += _padded(nbytes)
            number = piece - 1
            if 0 <= number < layout.num_tensors:
                parts = [self.rows[each, at : at + nbytes].view(dtypes[number]) for each in range(size)]
                self._theirs[number] = tuple(part.view(shapes[number]) for part in parts)
                self._mine.append((number, self._theirs[number][rank]))
            else:
                self.rows[rank, at : at + nbytes] = layout.others[piece]

    def exchange(self, tensors: Sequence[torch.Tensor]) -> list[bytes] | None:
        """Fill it and send it; gives the heads of all ranks, or None if all brought what this one brought."""
        for number, place in self._mine:
            place.copy_(tensors[number])
        self._gather()
        heads: bytes = (self._heads if isinstance(self._heads, np.ndarray) else self._heads.cpu().numpy()).tobytes()
        return None if heads == self._alike else [heads[at : at + _HEAD] for at in range(0, len(heads), _HEAD)]

    def joined(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], torch.Tensor]:
        """Columns and ids of all ranks together, which bring the same kinds and sizes."""
        found = []
        for number, tensor in enumerate(tensors):
            places = self._theirs.get(number)
            if places is not None:
                found.append(torch.cat(places))
                continue
            rows = self.rows.new_empty(len(self.rows), self.layout.sizes[number + 1])
            rows[self.world.rank] = as_bytes(tensor)
            all_gather_rows(rows, self.world)
            found.append(rows.view(-1).view(tensor.dtype).view(-1, *tensor.shape[1:]))
        return found[1:], found[0]


def _message_of_tensors(structure: str, kinds: Kinds, count: int, capacity: int, ctx: DistContext) -> _Message:
    """The message where all columns are tensors: made once for batches of one shape."""
    messages = ctx.world.messages
    key = structure, kinds, count, capacity
    message: _Message | None = messages.get(key)
    if message is None:
        # The ranks may differ: a column of rows of one shape here, of several there. So each sends its kinds.
        layout = _Layout(structure, kinds, count, json.dumps(_described(kinds)).encode(), [], flags=0)
        message = messages[key] = _Message(layout, capacity, ctx)
        if len(messages) > _KEPT:
            del messages[next(iter(messages))]
    return message


def _described(kinds: Kinds) -> list[list[str | int] | None]:
    return [None if kind is None else [str(kind[0]), len(kind[1])] for kind in kinds]


def _check_heads(heads: list[tuple[int, ...]], failed: TypeError | None, described: str, world: World) -> None:
    """Raise on all ranks if a value cannot be sent, or if the values do not fit together."""
    if failed is not None:
        raise failed
    bad = [rank for rank, head in enumerate(heads) if head[6] >= 2]
    if bad:
        raise TypeError(f"gather_metrics: rank {bad[0]} brought an entry that cannot be sent; see its error")
    what = 0 if any(head[6] for head in heads) else 1  # dtypes and dimensions count where all columns are tensors
    if any(head[what] != heads[0][what] for head in heads):
        compare_values(world, "gather_metrics", described)


def _unpacked(body: torch.Tensor, words: tuple[int, ...]) -> tuple[list[Any], Any]:
    """Columns and ids of one rank, from its bytes."""
    _, _, count, num_dims, text_size, total, flags, sent, _ = words
    dims: list[int] = tensor_of(body[: 8 * num_dims], [num_dims], torch.int64).tolist()
    place = _padded(8 * num_dims)
    ids = tensor_of(body[place : place + 8 * count], [count], torch.int64)
    place += _padded(8 * count)
    text = body[total - sent - text_size : total]
    objects: dict[str, Any] = {}
    if flags:
        kinds, objects = decode(text, text_size, body.device)
    else:
        kinds = json.loads(bytes(text.cpu().numpy()))
    found: list[Any] = []
    for index, kind in enumerate(kinds):
        if kind is None:
            found.append(objects[str(index)])
            continue
        dtype = getattr(torch, kind[0].removeprefix("torch."))
        shape, dims = dims[: kind[1]], dims[kind[1] :]
        stop = place + num_bytes(shape, dtype)
        found.append(tensor_of(body[place:stop], shape, dtype))
        place = _padded(stop)
    return found, ids
