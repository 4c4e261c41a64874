"""A digest of the samples of a step: a sum over samples, the same however they are divided and in any order.

Where weft knows the number of each sample it is a sum over numbers; else over the bytes of the rows of batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch

from weft.data.split.map_samples import as_index
from weft.data.split.position import Cursor
from weft.monitoring.run_ledger.exact_sums import Words, signed, weights
from weft.rng import mix
from weft.tensors.blocks import whole
from weft.tensors.checksums import can_be_read
from weft.tensors.nested import leaves, rows_of

_MOST = 2**16  # batches that are remembered between two records
_MIX, _SHIFT = 0x1E3779B97F4A7C15, 29


class SampleSums:
    """The samples of this rank since they were taken last."""

    def __init__(self, objects: Mapping[str, Any], device: torch.device) -> None:
        self._cursors = [c for each in objects.values() if isinstance(c := getattr(each, "weft_cursor", None), Cursor)]
        for cursor in self._cursors:
            cursor.given = deque(maxlen=_MOST)
        self.are_known = bool(self._cursors)
        self._sum, self._count = torch.zeros((), dtype=torch.int64, device=device), 0

    def see(self, batch: Any) -> None:
        """Look at the rows of a batch."""
        self.are_known, count = True, rows_of(batch) or 0
        self._count += count
        total = torch.zeros(count, dtype=torch.int64, device=self._sum.device)
        for path, leaf in leaves(batch):
            is_read = isinstance(leaf, torch.Tensor) and can_be_read(leaf) and not leaf.is_complex()
            if is_read and leaf.dim() and len(leaf) == count:
                rows = leaf.detach().reshape(count, math.prod(leaf.shape[1:]))
                read = Words(tuple(rows.shape), rows.dtype, whole(rows.shape))
                factors = torch.from_numpy(weights(read.columns, mix(*path))).to(rows.device)
                total += (read.of(rows) * factors).sum(1).to(total.device)
        total = (total ^ (total >> _SHIFT)) * _MIX  # so that what belongs to one row stays together
        self._sum = self._sum + (total ^ (total >> _SHIFT)).sum()

    def take(self) -> tuple[torch.Tensor, int]:
        """The sum, int64, and how many samples there were; then begin anew."""
        numbers = 0
        for place, cursor in enumerate(self._cursors):
            for given in cursor.given or ():
                ids = () if given.empty else [_number(as_index(one)) for one in given.ids[: given.valid]]
                self._count += len(ids)
                numbers += int(weights(ids, mix(place, given.epoch)).sum())
            cursor.given = deque(maxlen=_MOST)
        found = self._sum + signed(numbers), self._count
        self._sum, self._count = torch.zeros_like(self._sum), 0
        return found

    def close(self) -> None:
        """Let the loaders remember nothing more."""
        for cursor in self._cursors:
            cursor.given = None


def _number(index: Any) -> int:
    return index % 2**64 if isinstance(index, int) else mix(index)
