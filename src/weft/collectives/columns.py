"""Columns of all ranks: the messages of `gather_metrics`.

[Note: one message] What `gather_metrics` sends first is a message of a fixed size: sizes, and of the sample ids and
values those that fit. Small metrics are one collective this way, and so are those of some hundred kilobytes from the
second time on: the size follows what the ranks brought the last time, which all of them know. Of ranks that bring
tensors of the same shapes, each large one is then gathered from where it lies to where it stays; if they differ, all
goes into a second message.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from weft.collectives.entry import all_gather_rows, num_bytes
from weft.collectives.objects import _bytes_tensor, _decode, _encode
from weft.context import DistContext, World
from weft.context.world import compare, exchange

__all__ = ["exchange_columns"]

_FIRST_BYTES = 2**13  # of all ranks together
_ONE_MESSAGE = 2**20  # bytes per rank
_HEAD = 72  # bytes: nine words
Kinds: TypeAlias = tuple[tuple[torch.dtype, torch.Size] | None, ...]  # of the columns; None: one that is a list


class _Head(NamedTuple):
    """What a rank tells of its columns before it sends them.

    Attributes:
        words: Hashes of the structure, and of the kinds too; rows, dimensions, bytes of the text and of all pieces;
            flags; bytes of tensors in lists; a hash of all sizes.
        raw: The words, as bytes.
        values: The words, as a tensor of bytes.
        dims: The sizes of all tensors, as a tensor of bytes.
        text: The kinds, and the lists if there are any, as a tensor of bytes.
        chosen: Which pieces go into the first message if there is no room for all.
    """

    words: tuple[int, ...]
    raw: bytes
    values: torch.Tensor
    dims: torch.Tensor
    text: torch.Tensor
    chosen: tuple[int, ...]


def exchange_columns(
    structure: str, columns: list[Any], ids: torch.Tensor, ctx: DistContext
) -> list[tuple[list[Any], torch.Tensor]]:
    """Columns and ids of every rank, or of all together; see [Note: one message].

    Raises:
        TypeError: On all ranks, if an entry cannot be sent.
        ContextError: The ranks bring different structures.
        PeerError: A peer failed or died.
    """
    world = ctx.require_collective("gather_metrics")
    size, device = ctx.world_size, ctx.device
    usual = max(_FIRST_BYTES // size, 1024) - _HEAD
    room = world.room or usual
    kinds: Kinds = tuple([(one.dtype, one.shape) if isinstance(one, torch.Tensor) else None for one in columns])
    parts: list[torch.Tensor] = []
    failed: TypeError | None = None
    if None in kinds:
        text, lists = b"", {str(index): one for index, one in enumerate(columns) if kinds[index] is None}
        try:
            text, parts = _encode("gather_metrics", [_described(kinds), lists])
        except TypeError as error:
            failed = error
        sent = sum(part.numel() for part in parts)
        head = _head(structure, kinds, len(ids), room, text, 1 if failed is None else 3, sent)
    else:
        head = _head_of_tensors(structure, kinds, len(ids), room, world)
    tensors = [ids, *(one for one in columns if isinstance(one, torch.Tensor))]
    pieces = [head.dims, *(one.contiguous().view(-1).view(torch.uint8) for one in tensors), head.text, *parts]
    chosen = range(len(pieces)) if head.words[5] <= room else head.chosen
    first = [head.values, *(pieces[index] for index in chosen)]
    if device.type != "cpu":
        first = [piece.to(device) for piece in first]
    rows = torch.empty(size, _HEAD + room, dtype=torch.uint8, device=device)
    torch.cat(first, out=rows[ctx.rank, : sum(map(len, first))])
    all_gather_rows(rows, world)
    heads = [each.tobytes() for each in rows[:, :_HEAD].cpu().numpy()]
    longest = max(struct.unpack_from("q", each, 40)[0] for each in heads)
    world.room = longest if usual < longest <= _ONE_MESSAGE else None  # the same on all ranks, for the next time
    if None not in kinds and heads.count(head.raw) == size:
        return [_all_alike(rows[:, _HEAD:], tensors, pieces, chosen, world)]
    words = [struct.unpack("9q", each) for each in heads]
    _check_heads(words, failed, f"{structure}: {_described(kinds)}", world)
    bodies = rows[:, _HEAD:]
    if longest > room:
        bodies = torch.empty(size, longest, dtype=torch.uint8, device=device)
        torch.cat([piece.to(device) for piece in pieces], out=bodies[ctx.rank, : head.words[5]])
        all_gather_rows(bodies, world)
    return [_unpacked(body, each) for body, each in zip(bodies, words, strict=True)]


def _head(structure: str, kinds: Kinds, count: int, room: int, text: bytes, flags: int, sent: int) -> _Head:
    tensors = [kind for kind in kinds if kind is not None]
    dims = [number for _, shape in tensors for number in shape]
    sizes = [8 * len(dims), 8 * count, *(num_bytes(list(shape), dtype) for dtype, shape in tensors), len(text)]
    total = sum(sizes) + sent
    outer, inner = (zlib.crc32(one.encode()) for one in (structure, f"{structure} {_described(kinds)}"))
    same = hashlib.blake2b(f"{dims} {count}".encode(), digest_size=8).digest()
    words = (outer, inner, count, len(dims), len(text), total, flags, sent, *struct.unpack("q", same))
    chosen = []
    for index, size in enumerate(sizes):
        if size <= room:
            chosen.append(index)
            room -= size
    raw = struct.pack("9q", *words)
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    sent_dims = torch.tensor(dims, dtype=torch.int64).view(torch.uint8)
    return _Head(words, raw, values, sent_dims, _bytes_tensor(text), tuple(chosen))


def _head_of_tensors(structure: str, kinds: Kinds, count: int, room: int, world: World) -> _Head:
    """The head where all columns are tensors: made once for batches of one shape."""
    key = (kinds, count, room)
    known: tuple[object, Any] = world.heads.get(structure, (None, None))
    if known[0] != key:
        # The ranks may differ: a column of rows of one shape here, of several there. So each tells its kinds.
        known = key, _head(structure, kinds, count, room, json.dumps(_described(kinds)).encode(), 0, 0)
        world.heads[structure] = known
    head: _Head = known[1]
    return head


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
        compare("gather_metrics", [{"value": text} for text in exchange(world, "gather_metrics", described)])


def _all_alike(
    bodies: torch.Tensor, tensors: list[torch.Tensor], pieces: list[torch.Tensor], chosen: Sequence[int], world: World
) -> tuple[list[Any], torch.Tensor]:
    """Columns and ids of all ranks together, which bring the same shapes; `tensors` are ids and columns."""
    size, start = len(bodies), 0
    found: dict[int, torch.Tensor] = {}
    for index in chosen:
        stop = start + pieces[index].numel()
        if 0 < index <= len(tensors):  # a slice starts anywhere; a dtype's view wants its own alignment
            found[index] = bodies[:, start:stop].reshape(-1) if size > 1 else bodies[0, start:stop].clone()
        start = stop
    joined = []
    for index, tensor in enumerate(tensors, start=1):
        if index not in found:
            rows = bodies.new_empty(size, pieces[index].numel())
            rows[world.rank] = pieces[index]
            all_gather_rows(rows, world)
            found[index] = rows.view(-1)
        joined.append(found[index].view(tensor.dtype).view(size * len(tensor), *tensor.shape[1:]))
    return joined[1:], joined[0]


def _unpacked(body: torch.Tensor, words: tuple[int, ...]) -> tuple[list[Any], Any]:
    """Columns and ids of one rank, from its bytes."""
    _, _, count, num_dims, text_size, total, flags, sent, _ = words
    dims: list[int] = body[: 8 * num_dims].clone().view(torch.int64).tolist()
    place = 8 * num_dims
    ids = body[place : place + 8 * count].clone().view(torch.int64)
    place += 8 * count
    text = body[total - sent - text_size : total]
    objects: dict[str, Any] = {}
    if flags:
        kinds, objects = _decode(text, text_size, body.device)
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
        # Slices start anywhere; a dtype's view wants its own alignment.
        piece = body[place:stop].clone().view(dtype).view(shape) if stop > place else None
        found.append(body.new_empty(shape, dtype=dtype) if piece is None else piece)
        place = stop
    return found, ids
