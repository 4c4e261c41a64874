"""`pack_collate`: samples of different lengths one after the other in one row, without padding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from weft.checks import check_count
from weft.errors import listed, value_error


def pack_collate(
    *, multiple_of: int = 1, fill: float | Mapping[str, float] = 0, first: Mapping[str, float] | None = None
) -> Callable[[Sequence[Any]], Any]:
    """Make a `collate_fn` that puts the samples of a batch one after the other into one row.

    Nothing is padded, so what a batch costs is its number of tokens; see `balance` of `weft.shard_data`. Position ids
    begin at 0 in each sample. Segment ids are equal where two tokens are of one sample: attention must not look across,
    `segment_ids[:, :, None] == segment_ids[:, None, :]`. For means over tokens use `window.denominator`.

    Changes: nothing. Collectives: none.

    Args:
        multiple_of: The row is filled up to a multiple of it, with a segment of its own.
        fill: What it is filled up with; or one value per key of a sample that is a dict, such as `{"labels": -100}`.
        first: Values that replace the first element of each sample, by key: `{"labels": -100}` for models that shift
            labels, so that no sample predicts the next one.

    Returns:
        A function for `DataLoader(..., collate_fn=)`; it can be pickled. Of samples that are dicts it makes a dict:
        tensors [length, ...] become [1, total, ...], "position_ids" and "segment_ids" [1, total] (int64) are added,
        everything else goes to torch's `default_collate`. Of tuples it makes a tuple with both at its end, and so
        it does of tensors.

    Raises:
        ValueError: `multiple_of` is no whole number >= 1; when it is called, samples have no tensor with a length,
            or one has tensors of different lengths.

    Example:
        >>> row, positions, segments = pack_collate()([torch.tensor([7, 8, 9]), torch.tensor([5, 6])])
        >>> row, positions, segments
        (tensor([[7, 8, 9, 5, 6]]), tensor([[0, 1, 2, 0, 1]]), tensor([[0, 0, 0, 1, 1]]))
    """
    check_count("pack_collate", "multiple_of", multiple_of, fix="weft.data.pack_collate(multiple_of=64)")
    return functools.partial(_pack, multiple_of=multiple_of, fill=fill, first=first or {})


def _pack(
    samples: Sequence[Any], *, multiple_of: int, fill: float | Mapping[str, float], first: Mapping[str, float]
) -> Any:
    sample = samples[0]
    if isinstance(sample, Mapping):
        columns = {key: [one[key] for one in samples] for key in sample}
    else:
        parts = [one if isinstance(one, (tuple, list)) else (one,) for one in samples]
        columns = {str(place): list(column) for place, column in enumerate(zip(*parts, strict=True))}
    lengths = _lengths(columns)
    rest = -sum(lengths) % multiple_of
    packed: dict[str, Any] = {}
    for key, column in columns.items():
        if _has_length(column[0]):
            value = fill.get(key, 0) if isinstance(fill, Mapping) else fill
            packed[key] = _row(column, rest, value, first.get(key))
        else:
            packed[key] = default_collate(column)
    pieces = [*lengths, rest] if rest else lengths
    packed["position_ids"] = torch.cat([torch.arange(length) for length in pieces])[None]
    packed["segment_ids"] = torch.arange(len(pieces)).repeat_interleave(torch.tensor(pieces))[None]
    return packed if isinstance(sample, Mapping) else tuple(packed.values())


def _has_length(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _lengths(columns: Mapping[str, Sequence[Any]]) -> list[int]:
    """The length of each sample, which all its tensors have."""
    found = {key: [len(one) for one in column] for key, column in columns.items() if _has_length(column[0])}
    if not found or len({tuple(lengths) for lengths in found.values()}) > 1:
        raise value_error(
            "pack_collate: a sample has no length"
            if not found
            else "pack_collate: samples have tensors of two lengths",
            found=listed(f"{key}: {listed(map(str, lengths))}" for key, lengths in found.items())
            or listed(f"{key}: {type(column[0]).__name__}" for key, column in columns.items()),
            expected="tensors [length, ...], of one length in each sample",
            fix="loader = DataLoader(..., collate_fn=weft.data.pad_collate())  # or one tensor per sample, its tokens",
        )
    return next(iter(found.values()))


def _row(column: Sequence[torch.Tensor], rest: int, fill: float, first: float | None) -> torch.Tensor:
    pieces = list(column)
    if rest:
        pieces.append(pieces[0].new_full((rest, *pieces[0].shape[1:]), fill))
    row = torch.cat(pieces)
    if first is not None:
        starts = torch.tensor([0, *map(len, pieces)])[: len(column)].cumsum(0)
        row[starts[[len(piece) > 0 for piece in column]]] = first
    return row[None]
