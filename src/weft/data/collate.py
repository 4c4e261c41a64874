"""Batches of samples of different lengths: a collate function that pads, a batch sampler that groups by length."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler, default_collate

from weft.checks import check_count
from weft.errors import listed, value_error

_POOL = 50  # batches sorted by length at a time: enough for little padding, few enough to be shuffled well


def pad_collate(
    *, multiple_of: int = 1, fill: float | Mapping[str, float] = 0, dim: int = 0, mask: str | None = None
) -> Callable[[Sequence[Any]], Any]:
    """Make a `collate_fn` that pads tensors to the longest sample of the batch, and to a multiple.

    Tensors that differ along `dim` alone are padded and stacked; everything else goes to torch's
    `default_collate`. The padding is the least possible: the batch is as long as its longest sample,
    rounded up.

    Changes: nothing. Collectives: none.

    Args:
        multiple_of: The length of a batch is rounded up to it: 8 or 64 for tensor cores.
        fill: The value to pad with; or one per key of a sample that is a dict, such as
            `{"labels": -100}`, and 0 for the others.
        dim: The dimension of a sample in which lengths differ.
        mask: Key under which a batch of dicts gets a bool tensor [batch, length]: True where the first
            padded value is no padding.

    Returns:
        A function for `DataLoader(..., collate_fn=)`; it can be pickled.

    Raises:
        ValueError: `multiple_of` is not a whole number >= 1.

    Example:
        >>> collate = pad_collate(multiple_of=4)
        >>> collate([torch.ones(2), torch.ones(3)])
        tensor([[1., 1., 0., 0.],
                [1., 1., 1., 0.]])
    """
    check_count("pad_collate", "multiple_of", multiple_of, fix="weft.data.pad_collate(multiple_of=8)")
    return functools.partial(_collate, multiple_of=multiple_of, fill=fill, dim=dim, mask=mask)


def _collate(
    samples: Sequence[Any], *, multiple_of: int, fill: float | Mapping[str, float], dim: int, mask: str | None
) -> Any:
    first, again = samples[0], functools.partial(_collate, multiple_of=multiple_of, dim=dim, mask=None)
    if isinstance(first, Mapping):
        fills = fill if isinstance(fill, Mapping) else dict.fromkeys(first, fill)
        parts = {key: again([sample[key] for sample in samples], fill=fills.get(key, 0)) for key in first}
        if mask is not None:
            parts[mask] = _mask(samples, parts, dim)
        return parts
    value = 0.0 if isinstance(fill, Mapping) else fill
    if isinstance(first, tuple):
        columns = [again(column, fill=value) for column in zip(*samples, strict=True)]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in dataclasses.fields(first)]
        return dataclasses.replace(first, **{n: again([getattr(s, n) for s in samples], fill=value) for n in names})
    if isinstance(first, torch.Tensor) and first.dim() > dim:
        return _padded(list(samples), multiple_of, value, dim)
    return default_collate(list(samples))


def _padded(rows: list[torch.Tensor], multiple_of: int, fill: float, dim: int) -> torch.Tensor:
    longest = max(row.shape[dim] for row in rows)
    goal = -(-longest // multiple_of) * multiple_of
    if all(row.shape[dim] == goal for row in rows):
        return torch.stack(rows)
    shape = list(rows[0].shape)
    shape[dim] = goal
    whole = rows[0].new_full([len(rows), *shape], fill)
    for place, row in zip(whole, rows, strict=True):
        place.narrow(dim, 0, row.shape[dim]).copy_(row)
    return whole


def _mask(samples: Sequence[Any], parts: Mapping[str, Any], dim: int) -> torch.Tensor:
    key = next(name for name, value in samples[0].items() if isinstance(value, torch.Tensor) and value.dim() > dim)
    lengths = torch.tensor([sample[key].shape[dim] for sample in samples])
    return torch.arange(parts[key].shape[dim + 1]) < lengths[:, None]


def length_batches(
    lengths: Sequence[int], *, batch_size: int, shuffle: bool = True, drop_last: bool = False, pool: int = _POOL
) -> Sampler[list[int]]:
    """Make a batch sampler that puts samples of like length together, and each sample into one batch per epoch.

    Samples are shuffled, sorted by length within pools of `pool` batches, cut into batches, and the
    batches are shuffled. The order comes from torch's random state alone, so after `shard_data` it is a
    function of (seed, epoch), alike at every number of ranks.

    Changes: nothing. Collectives: none.

    Args:
        lengths: Of all samples.
        batch_size: Samples per batch.
        shuffle: False: samples keep their order between pools, longest first within each.
        drop_last: Leave a batch with fewer samples out.
        pool: Batches that are sorted together; more of them mean less padding and less mixing.

    Returns:
        A sampler for `DataLoader(..., batch_sampler=)`, with a length.

    Raises:
        ValueError: `batch_size` or `pool` is not a whole number >= 1.

    Example:
        >>> sampler = length_batches([5, 1, 5, 1], batch_size=2)
        >>> sorted(sorted(batch) for batch in sampler)
        [[0, 2], [1, 3]]
    """
    for name, number in (("batch_size", batch_size), ("pool", pool)):
        check_count("length_batches", name, number, fix="weft.data.length_batches(lengths, batch_size=32)")
    return _LengthBatches(torch.as_tensor(lengths), batch_size, pool, shuffle=shuffle, drop_last=drop_last)


@dataclasses.dataclass(eq=False)
class _LengthBatches(Sampler[list[int]]):
    """See `length_batches`."""

    lengths: torch.Tensor
    batch_size: int
    pool: int
    shuffle: bool
    drop_last: bool

    def __len__(self) -> int:
        count = len(self.lengths)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        count = len(self.lengths)
        order = torch.randperm(count) if self.shuffle else torch.arange(count)
        batches: list[list[int]] = []
        for group in order.split(self.pool * self.batch_size) if count else ():
            by_length = group[self.lengths[group].argsort(descending=True, stable=True)]
            batches += [batch.tolist() for batch in by_length.split(self.batch_size)]
        if self.drop_last:
            batches = [batch for batch in batches if len(batch) == self.batch_size]
        numbers = torch.randperm(len(batches)).tolist() if self.shuffle else range(len(batches))
        for number in numbers:
            yield batches[number]


def padding_share(lengths: Sequence[int], batches: Iterable[Sequence[int]], *, multiple_of: int = 1) -> float:
    """Measure which share of what is computed is padding, when each batch is padded to its longest sample.

    Changes: nothing. Collectives: none.

    Args:
        lengths: Of all samples.
        batches: Indices of the samples of each batch: a batch sampler, or a list.
        multiple_of: As for `pad_collate`.

    Returns:
        From 0 (none) to 1.

    Raises:
        ValueError: A batch holds an index that is no sample.

    Example:
        >>> padding_share([1, 2], [[0, 1]])
        0.25
    """
    real = whole = 0
    for batch in batches:
        strange = [index for index in batch if not 0 <= index < len(lengths)]
        if strange:
            raise value_error(
                "padding_share: a batch contains an index that is out of range",
                found=listed(strange),
                expected=f"0 to {len(lengths) - 1}",
                fix="weft.data.padding_share(lengths, weft.data.length_batches(lengths, batch_size=32))",
            )
        sizes = [int(lengths[index]) for index in batch]
        longest = -(-max(sizes, default=0) // multiple_of) * multiple_of
        real, whole = real + sum(sizes), whole + longest * len(sizes)
    return 1 - real / whole if whole else 0.0
