"""Sums of the bits of tensors, with a weight for each place: exact, and the same however a tensor is cut into blocks.

[Note: exact sums] A tensor is a matrix: its last dimension is the columns, of one with more than three all but the
first; a vector is one row. Each row is read as words of 64 bits, which holds two elements of float32; what lies outside
of a block is zero. The sum of a row of words is multiplied by a number for that row, the sum of a column by one for
that column, and all are added up modulo 2**64. The numbers are odd, hashed from the name of the tensor and the place in
the whole tensor. So any bit that differs changes the sum, as do two elements that change places in a row or a column,
and the sums over blocks add up to the sum over the whole. Nothing is rounded, so the order does not count. If several
words differ in nothing but their highest bits, that may cancel out.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from weft.data.order.mixed_order import hashed
from weft.tensors.blocks import Block

_WORD = 8  # bytes


def signed(word: int) -> int:
    """A number modulo 2**64, as an int64."""
    return (word + 2**63) % 2**64 - 2**63


def weights(places: Any, salt: int) -> np.ndarray[Any, Any]:
    """An odd number with bits all over it for each place >= 0, int64."""
    return (hashed(np.uint64(salt % 2**64), np.asarray(places, dtype=np.uint64)) | np.uint64(1)).view(np.int64)


class Words:
    """How a block of a tensor is read as rows of words; see [Note: exact sums].

    Attributes:
        rows: Numbers of its rows in the whole.
        columns: Numbers of its words in a row of the whole.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, block: Block) -> None:
        more = (1,) * (2 - len(shape))
        shape, sizes, offsets = more + shape, more + block.shape, (0,) * len(more) + block.offsets
        lead = 1 if len(shape) > 3 else len(shape) - 1
        per_word, step = _WORD // dtype.itemsize, math.prod(shape[lead + 1 :])
        start, length = offsets[lead] * step, sizes[lead] * step
        self._fits = sizes[lead + 1 :] == shape[lead + 1 :] and start % per_word == length % per_word == 0
        if not self._fits:  # then its rows are laid out whole, with zeros
            start, length = 0, -(-math.prod(shape[lead:]) // per_word) * per_word
        self._length, self._inner, self._inside = length, shape[lead:], Block(offsets[lead:], sizes[lead:])
        self.columns = np.arange(start // per_word, (start + length) // per_word)
        above = Block(offsets[:lead], sizes[:lead])
        self.rows = np.arange(math.prod(shape[:lead])).reshape(shape[:lead])[above.slices].ravel()

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """The words of a block, int64 [rows, words of a row]; in the memory of the block where that is possible."""
        flat = block.reshape(len(self.rows), *self._inside.shape)
        if not self._fits:
            whole = block.new_zeros(len(self.rows), self._length)
            inner = whole[:, : math.prod(self._inner)].unflatten(1, self._inner)
            inner[(slice(None), *self._inside.slices)] = flat
            flat = whole
        flat = flat.flatten(1).contiguous()
        if flat.storage_offset() * flat.element_size() % _WORD:
            flat = flat.clone()
        return flat.view(torch.int64)
