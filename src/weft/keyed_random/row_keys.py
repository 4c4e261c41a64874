"""Which samples the rows of a batch are, noted on its tensors.

A model sees values, not samples. What draws random numbers for each sample finds them on the tensors that the model is
called with; the note is lost where a new tensor is made of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from weft.tensors.nested import tensors
from weft.tensors.sequence_order import with_note_of

_NOTE = "_weft_rows"


class RowKeys:
    """The samples of a batch.

    Attributes:
        epoch: Whose order the batch is a part of.
        ids: A number per row, 0 <= id < 2**63.
        draws: How often something was drawn for these rows, by what.
    """

    def __init__(self, epoch: int, ids: Sequence[int]) -> None:
        self.epoch = epoch
        self.ids = tuple(ids)
        self.draws: Counter[str] = Counter()
        self._on: dict[torch.device, torch.Tensor] = {}
        self._parts: dict[tuple[int, ...], RowKeys] = {}

    def part(self, rows: slice | Sequence[int]) -> RowKeys:
        """Those of some rows; the same object for the same rows."""
        chosen = range(len(self.ids))[rows] if isinstance(rows, slice) else rows
        key = tuple(chosen)
        if key not in self._parts:
            self._parts[key] = RowKeys(self.epoch, [self.ids[row] for row in key])
        return self._parts[key]

    def on(self, device: torch.device) -> torch.Tensor:
        """The ids as a tensor, int64 [rows]; the device does not wait for it."""
        if device not in self._on:
            self._on[device] = torch.tensor(self.ids, dtype=torch.int64).to(device, non_blocking=True)
        return self._on[device]


def note_rows(batch: object, rows: RowKeys) -> None:
    """Note on every tensor of a batch which samples its rows are."""
    for tensor in tensors(batch):
        setattr(tensor, _NOTE, rows)


def noted_rows(value: object) -> RowKeys | None:
    """What was noted on the tensors of a nested value: on the first one that has as many rows."""
    for tensor in tensors(value):
        rows = getattr(tensor, _NOTE, None)
        if isinstance(rows, RowKeys) and len(rows.ids) in tensor.shape[:2]:
            return rows
    return None


def rows_cut(tensor: torch.Tensor, rows: slice | list[int]) -> torch.Tensor:
    """Some rows of a tensor, with what weft has noted on it."""
    cut = with_note_of(tensor, tensor[rows])
    noted = getattr(tensor, _NOTE, None)
    if isinstance(noted, RowKeys) and len(noted.ids) == len(tensor):
        setattr(cut, _NOTE, noted.part(rows))
    return cut
