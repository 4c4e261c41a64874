"""Sums of the bits of tensors, with a weight for each place: exact, and the same however a tensor is cut into blocks.

[Note: exact sums] A tensor is a matrix: its last dimensions, up to some 16,000 elements, are the columns. Each row is
read as words of 64 bits, which holds two elements of float32; words outside of a block are zero. The sum of a row is
multiplied by a number for that row, the sum of a column of words by one for that column, and all are added up modulo
2**64. Weights are odd numbers with bits all over them, hashed from the name of the tensor and the place in the whole
tensor. So any single bit that differs changes the sum, as do two elements that change places in a column or a row, and
the sums over blocks add up to the sum over the whole. No number is rounded, so the order does not count.
What differs in an even number of the highest bits of words may cancel out.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from weft.tensors.blocks import Block

_MOST_COLUMNS = 2**14
_WORD = 8  # bytes
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def number_of(text: str | bytes) -> int:
    """A number below 2**64 that stands for a text."""
    data = text.encode() if isinstance(text, str) else text
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def spread(numbers: Any, salt: int = 0) -> np.ndarray[Any, Any]:
    """Numbers with bits all over them, uint64, one for each.

    Source: the finalizer of SplitMix64, Steele et al., "Fast splittable pseudorandom number generators", 2014.
    """
    mixed = np.asarray(numbers, dtype=np.uint64) * np.uint64(_STEP) + np.uint64(salt % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_FIRST)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SECOND)
    found: np.ndarray[Any, Any] = mixed ^ (mixed >> np.uint64(31))
    return found


def weights(places: Any, salt: int) -> np.ndarray[Any, Any]:
    """An odd number for each place, int64."""
    found: np.ndarray[Any, Any] = (spread(places, salt) | np.uint64(1)).view(np.int64)
    return found


class Words:
    """How a block of a tensor is read as rows of words; see [Note: exact sums].

    Attributes:
        rows: Numbers of its rows in the whole.
        columns: Numbers of its words in a row of the whole.
        is_vector: Each element is a row; the words of several such blocks, one after the other, are those of each.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, block: Block) -> None:
        shape, offsets, sizes = (tuple(shape) or (1,)), (block.offsets or (0,)), (block.shape or (1,))
        if dtype.is_complex:
            shape, offsets, sizes = (*shape, 2), (*offsets, 0), (*sizes, 2)
        lead = next(d for d in range(1, len(shape) + 1) if math.prod(shape[d:]) <= _MOST_COLUMNS or d >= len(shape) - 1)
        per_word = _WORD // (dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize)
        self._inner, inner_sizes, self._starts = shape[lead:], sizes[lead:], offsets[lead:]
        self._sizes, self._complex = inner_sizes, dtype.is_complex
        self.is_vector = not self._inner
        whole = math.prod(self._inner)
        step = math.prod(self._inner[1:])
        start, length = (offsets[lead] * step, sizes[lead] * step) if self._inner else (0, 1)
        # Otherwise the row is laid out whole, with zeros.
        self._fits = inner_sizes[1:] == self._inner[1:] and start % per_word == 0 and length % per_word == 0
        self._padded = -(-whole // per_word) * per_word
        self._whole = whole
        self.columns = np.arange(length // per_word) + start // per_word
        if not self._fits:
            self.columns = np.arange(self._padded // per_word)
        rows = np.zeros((1,) * lead, dtype=np.int64)
        for dim in range(lead):
            place = np.arange(offsets[dim], offsets[dim] + sizes[dim]) * math.prod(shape[dim + 1 : lead])
            rows = rows + place.reshape([-1 if d == dim else 1 for d in range(lead)])
        self.rows = rows.reshape(-1)

    def of(self, block: torch.Tensor) -> torch.Tensor:
        """The words of a block, int64 [rows, words of a row]; in the memory of the block where that is possible."""
        values = torch.view_as_real(block) if self._complex else block
        flat = values.reshape(len(self.rows), -1)
        if not self._fits:
            laid_out = flat.new_zeros(len(self.rows), self._padded)
            if self._inner:
                inside = tuple(slice(at, at + size) for at, size in zip(self._starts, self._sizes, strict=True))
                target = laid_out[:, : self._whole].unflatten(1, self._inner)[(slice(None), *inside)]
                target.copy_(values.reshape(len(self.rows), *self._sizes))
            else:
                laid_out[:, :1] = flat
            flat = laid_out
        if not flat.is_contiguous() or flat.storage_offset() * flat.element_size() % _WORD:
            flat = flat.clone(memory_format=torch.contiguous_format)
        return flat.view(torch.int64)
