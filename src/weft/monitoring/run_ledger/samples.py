"""A digest of the samples of a step: a sum over samples, the same however they are divided and in any order.

Where weft knows the number of each sample it is a sum over numbers, beside one over what the rows of batches contain;
else over the bytes of the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from weft.data.split.map_samples import BatchInfo, as_index
from weft.data.split.position import Cursor
from weft.monitoring.run_ledger.exact_sums import Words, signed, weights
from weft.rng import mix
from weft.tensors.blocks import whole
from weft.tensors.checksums import can_be_read
from weft.tensors.nested import leaves, rows_of

_MOST = 2**14  # bytes of a row that are looked at where samples have numbers: 2,048 tokens, a part of an image
_MIX, _SHIFT = 0x1E3779B97F4A7C15, 29


class SampleSums:
    """The samples of this rank since they were taken last."""

    def __init__(self, objects: Mapping[str, Any], device: torch.device) -> None:
        self._cursors = [c for each in objects.values() if isinstance(c := getattr(each, "weft_cursor", None), Cursor)]
        for place, cursor in enumerate(self._cursors):
            cursor.noted = partial(self._note, place)
        self.are_known = bool(self._cursors)
        self._device, self._factors = device, dict[tuple[Any, ...], torch.Tensor]()
        self._begin()

    def _begin(self) -> None:
        self._sum, self._content = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._numbers = self._shapes = self._count = 0

    def see(self, batch: Any) -> None:
        """Look at the rows of a batch."""
        self.are_known, count = True, rows_of(batch) or 0
        self._count += count
        self._sum = self._sum + self._look(batch, count)[0]

    def _note(self, place: int, batch: Any, given: BatchInfo) -> None:
        """A loader gives a batch."""
        ids = () if given.empty else [_number(as_index(one)) for one in given.ids[: given.valid]]
        self._count += len(ids)
        self._numbers += int(weights(ids, mix(place, given.epoch)).sum())
        if ids and rows_of(batch) == len(given.ids):  # else its rows are no samples
            content, shapes = self._look(batch, len(given.ids), len(ids), most=_MOST)
            self._content = self._content + content
            self._shapes += shapes

    def _look(self, batch: Any, count: int, valid: int | None = None, most: int = 2**62) -> tuple[torch.Tensor, int]:
        """Sums over the first `valid` of the rows of a batch: over their bytes, int64 [], and over their shapes."""
        total, shapes = torch.zeros(count, dtype=torch.int64, device=self._device), 0
        for path, each in leaves(batch):
            is_numbers = isinstance(each, np.ndarray) and each.dtype.kind in "biuf" and each.dtype.isnative
            leaf: Any = torch.from_numpy(np.ascontiguousarray(each)) if is_numbers else each
            is_read = isinstance(leaf, torch.Tensor) and can_be_read(leaf) and not leaf.is_complex()
            if is_read and leaf.dim() and len(leaf) == count:
                rows = leaf.detach().reshape(count, math.prod(leaf.shape[1:]))
                shapes += mix(*path, *leaf.shape[1:], str(leaf.dtype))
                rows = rows[:, :: -(-rows.shape[1] * rows.element_size() // most)]
                read = Words(tuple(rows.shape), rows.dtype, whole(rows.shape))
                key = (path, len(read.columns), rows.device)
                if key not in self._factors:
                    self._factors[key] = torch.from_numpy(weights(read.columns, mix(*path))).to(rows.device)
                total += (read.of(rows) * self._factors[key]).sum(1).to(total.device)
        total = (total ^ (total >> _SHIFT)) * _MIX  # so that what belongs to one row stays together
        valid = count if valid is None else valid
        return (total ^ (total >> _SHIFT))[:valid].sum(), shapes * valid

    def take(self) -> tuple[torch.Tensor, int]:
        """Sums, int64 [3]: the samples, what they contain, their shapes. And how many there were; then begin anew."""
        numbers, shapes = (torch.tensor(signed(one), device=self._device) for one in (self._numbers, self._shapes))
        found = torch.stack([self._sum + numbers, self._content, shapes]), self._count
        self._begin()
        return found

    def close(self) -> None:
        """Let the loaders tell nothing more."""
        for cursor in self._cursors:
            cursor.noted = None


def _number(index: Any) -> int:
    return index % 2**64 if isinstance(index, int) else mix(index)
