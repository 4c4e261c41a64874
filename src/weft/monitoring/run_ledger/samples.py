"""A digest of the samples of a step: a sum over samples, the same however they are divided and in any order.

Where weft knows the number of each sample it is a sum over numbers; else over the bytes of the rows of batches.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from weft.data.split.map_samples import BatchInfo, as_index
from weft.data.split.position import Cursor
from weft.monitoring.run_ledger.exact_sums import Words, number_of, spread, weights
from weft.tensors.blocks import whole
from weft.tensors.checksums import can_be_read
from weft.tensors.nested import leaves, rows_of

_MOST = 2**16  # batches that are remembered between two records
_MIX = 0x1E3779B97F4A7C15
_SHIFT = 29


class SampleSums:
    """The samples of this rank since they were taken last.

    Attributes:
        are_known: Whether the samples of any batch are known.
    """

    def __init__(self, loaders: Mapping[str, Any]) -> None:
        self._seen: dict[int, deque[BatchInfo]] = {}
        self._cursors: list[Cursor] = []
        for name, loader in loaders.items():
            cursor = getattr(loader, "weft_cursor", None)
            if isinstance(cursor, Cursor):
                cursor.given = self._seen[number_of(name)] = deque(maxlen=_MOST)
                self._cursors.append(cursor)
        self.are_known = bool(self._cursors)
        self._sums: list[torch.Tensor] = []
        self._count = 0

    def see(self, batch: Any) -> None:
        """Look at the rows of a batch."""
        self.are_known = True
        count = rows_of(batch) or 0
        self._count += count
        total: Any = 0
        for path, leaf in leaves(batch):
            tensor = torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "biuf" else leaf
            if isinstance(tensor, torch.Tensor) and tensor.dim() and len(tensor) == count and can_be_read(tensor):
                total = total + _rows(tensor.detach(), number_of("/".join(path)))
        if isinstance(total, torch.Tensor):
            total = (total ^ (total >> _SHIFT)) * _MIX  # so that what belongs to one row stays together
            self._sums.append((total ^ (total >> _SHIFT)).sum())

    def take(self, device: torch.device) -> tuple[torch.Tensor, int]:
        """The sum, int64, and how many samples there were; then begin anew."""
        numbers = 0
        for salt, seen in self._seen.items():
            for given in seen:
                valid = () if given.empty else given.ids[: given.valid]
                self._count += len(valid)
                numbers += int(spread([_number(one) for one in valid], salt + given.epoch).sum()) if valid else 0
            seen.clear()
        found = torch.tensor(_signed(numbers), dtype=torch.int64).to(device)
        for one in self._sums:
            found = found + one.to(device)
        count, self._count = self._count, 0
        self._sums.clear()
        return found, count

    def close(self) -> None:
        """Let the loaders remember nothing more."""
        for cursor in self._cursors:
            cursor.given = None


def _rows(tensor: torch.Tensor, salt: int) -> torch.Tensor:
    """A number for each row, int64."""
    shape = (len(tensor), math.prod(tensor.shape[1:]))
    words = Words(shape, tensor.dtype, whole(shape)).of(tensor.resolve_conj().reshape(shape))
    return (words * torch.from_numpy(weights(range(words.shape[1]), salt)).to(words.device)).sum(1)


def _number(index: Any) -> int:
    one = as_index(index)
    return one % 2**64 if isinstance(one, int) else number_of(repr(one))


def _signed(number: int) -> int:
    number %= 2**64
    return number - 2**64 * (number >= 2**63)
