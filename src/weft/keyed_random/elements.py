"""Random numbers for the elements of a tensor: a function of the place in the whole, on any rank that has a part of it.

Source: Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958, over Philox.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from weft.keyed_random.philox import Words, drawn
from weft.tensors.blocks import Block


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

    def fill(words: Words, numbers: torch.Tensor) -> None:
        a, b, c, d = words
        radius = (-2 * _uniform(a, b, wide).log()).sqrt()
        angle = 2 * math.pi * _uniform(c, d, wide)
        torch.mul(radius, angle.cos(), out=numbers[..., 0])
        torch.mul(radius, angle.sin(), out=numbers[..., 1])

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

    def fill(words: Words, numbers: torch.Tensor) -> None:
        for place, word in enumerate(words):
            numbers[..., place] = word

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
    last = range(offsets[-1], offsets[-1] + sizes[-1])
    return drawn((lines & 0xFFFFFFFF, lines >> 32), last, key, per_counter, fill, dtype).reshape(block.shape)


def _uniform(high: torch.Tensor, low: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Two words of 32 bits as a number in (0, 1), of which 53 bits count."""
    bits = ((high >> 5) << 26) | (low >> 6)
    return (bits.to(dtype) + 0.5) * 2.0**-53
