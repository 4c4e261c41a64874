"""Random numbers for the elements of a tensor: a function of the place in the whole, on any rank that has a part of it.

Source: Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958, over Philox.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from weft.keyed_random.philox import Words, philox
from weft.tensors.blocks import Block

_CACHED, _AT_ONCE = 2**14, 2**21  # counters that fit into the cache of a CPU; that bound the memory of a device


def normal_block(block: Block, shape: Sequence[int], key: int, device: torch.device) -> torch.Tensor:
    """Standard normal numbers for a block of a tensor: that block of what is drawn for the whole.

    Args:
        block: Which one.
        shape: Of the whole tensor.
        key: Separates draws, 0 <= key < 2**64.
        device: Where the numbers are drawn.

    Returns:
        float64, of the shape of the block; float32 on mps, which has no wider numbers.
    """
    wide = torch.float32 if device.type == "mps" else torch.float64

    def fill(words: Words, drawn: torch.Tensor) -> None:
        a, b, c, d = words
        radius = (-2 * _uniform(a, b, wide).log()).sqrt()
        angle = 2 * math.pi * _uniform(c, d, wide)
        torch.mul(radius, angle.cos(), out=drawn[..., 0])
        torch.mul(radius, angle.sin(), out=drawn[..., 1])

    return _drawn(block, shape, key, 2, fill, wide, device)


def words_block(block: Block, shape: Sequence[int], key: int, device: torch.device) -> torch.Tensor:
    """Random words of 32 bits for a block of a tensor: that block of what is drawn for the whole.

    Args:
        block: Which one.
        shape: Of the whole tensor.
        key: Separates draws, 0 <= key < 2**64.
        device: Where the words are drawn.

    Returns:
        int64, >= 0, of the shape of the block.
    """

    def fill(words: Words, drawn: torch.Tensor) -> None:
        for place, word in enumerate(words):
            drawn[..., place] = word

    return _drawn(block, shape, key, 4, fill, torch.int64, device)


def _drawn(
    block: Block,
    shape: Sequence[int],
    key: int,
    per_counter: int,
    fill: Callable[[Words, torch.Tensor], None],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Numbers for a block, of which so many neighbors of the last dimension share a counter."""
    offsets, sizes, whole = block.offsets or (0,), block.shape or (1,), tuple(shape) or (1,)
    lines = torch.zeros((), dtype=torch.int64, device=device)
    for offset, size, length in zip(offsets[:-1], sizes[:-1], whole[:-1], strict=True):
        lines = lines[..., None] * length + torch.arange(offset, offset + size, device=device)
    lines = lines.reshape(-1, 1)
    first, end = offsets[-1] // per_counter, -(-(offsets[-1] + sizes[-1]) // per_counter)
    counters = torch.arange(first, end, device=device)
    drawn = torch.empty(len(lines), len(counters), per_counter, dtype=dtype, device=device)
    at_once = _CACHED if device.type == "cpu" else _AT_ONCE
    for some, into in zip(counters.split(at_once), drawn.split(at_once, 1), strict=True):
        step = max(at_once // max(len(some), 1), 1)
        for these, numbers in zip(lines.split(step), into.split(step), strict=True):
            fill(philox([some, these & 0xFFFFFFFF, these >> 32, torch.zeros_like(these)], key), numbers)
    begin = offsets[-1] - per_counter * first
    return drawn.flatten(1)[:, begin : begin + sizes[-1]].reshape(block.shape)


def _uniform(high: torch.Tensor, low: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Two words of 32 bits as a number in (0, 1), of which 53 bits count."""
    bits = ((high >> 5) << 26) | (low >> 6)
    return (bits.to(dtype) + 0.5) * 2.0**-53
