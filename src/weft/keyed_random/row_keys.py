"""Which samples the rows of a batch are, noted on its tensors.

A model sees values, not samples. What draws random numbers for each sample finds them on the tensors that the model is
called with; the note is lost where a new tensor is made of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from weft.tensors.nested import tensors

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

    def on(self, device: torch.device) -> torch.Tensor:
        """The ids as a tensor, int64 [rows]; the device does not wait for it."""
        if device not in self._on:
            ids = torch.tensor(self.ids, dtype=torch.int64)
            ids = ids.pin_memory() if device.type == "cuda" else ids
            self._on[device] = ids.to(device, non_blocking=True)
        return self._on[device]


def note_rows(batch: object, rows: RowKeys) -> None:
    """Note on every tensor of a batch which samples its rows are."""
    for tensor in tensors(batch):
        setattr(tensor, _NOTE, rows)


def noted_rows(value: object) -> RowKeys | None:
    """What was noted on the first tensor in a nested value on which something was."""
    found = (getattr(tensor, _NOTE, None) for tensor in tensors(value))
    return next((rows for rows in found if isinstance(rows, RowKeys)), None)
