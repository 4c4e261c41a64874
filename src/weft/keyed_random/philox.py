"""Random numbers by counting: a function of a counter and a key, on any device, without a state.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x32-10).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from weft.tensors.blocks import Block

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_CACHED, _AT_ONCE = 2**15, 2**22  # counters that fit into the cache of a CPU; that bound the memory of a device

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Sequence[torch.Tensor], key: int) -> Words:
    """Four random words of 32 bits for each counter of four such words, kept in int64.

    Args:
        counter: int64, of shapes that can be broadcast to each other.
        key: 0 <= key < 2**64.
    """
    a, b, c, d = counter
    low, high = key & _WORD, key >> 32
    for _ in range(_ROUNDS):
        # The product of two words may pass 2**63: it wraps around, and its 64 bits are those of the true product.
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, c = ((second >> 32) ^ b ^ low) & _WORD, ((first >> 32) ^ d ^ high) & _WORD
        b, d = second & _WORD, first & _WORD
        low, high = (low + _WEYL[0]) & _WORD, (high + _WEYL[1]) & _WORD
    return a, b, c, d


def line_keys(ids: torch.Tensor, places: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two words for each line of a tensor along its last dimension, a function of its row and its place alone.

    Args:
        ids: Of the rows, int64 [rows] >= 0.
        places: Where the lines lie in each further dimension but the last: int64.

    Returns:
        Two words, int64 [rows, *lengths of `places`].
    """
    low, high = ids & _WORD, ids >> 32
    for number, place in enumerate(places, 1):
        low, high = philox([place, low[..., None], high[..., None], torch.full_like(place, number)], 0)[:2]
    return low, high


def keep_mask(lines: tuple[torch.Tensor, torch.Tensor], last: range, key: int, keep: float) -> torch.Tensor:
    """Which elements are kept, each with probability `keep`, as a function of its own place and of nothing else.

    What is computed of a part of the places, or of the rows, is that part of the whole mask.

    Args:
        lines: Of the tensor; see `line_keys`.
        last: Where the elements lie in the last dimension.
        key: Separates masks, 0 <= key < 2**64.
        keep: The probability.

    Returns:
        bool [*shape of the lines, length of `last`].
    """
    (low, high), device = lines, lines[0].device
    first, end = last.start // 4, -(-last.stop // 4)
    blocks, zero = torch.arange(first, end, device=device), torch.zeros((), dtype=torch.int64, device=device)
    number, count = low.numel(), len(blocks)
    kept = torch.empty(number, count, 4, dtype=torch.bool, device=device)
    step = max((_CACHED if device.type == "cpu" else _AT_ONCE) // max(count, 1), 1)
    limit = round(keep * 2**32)
    for start in range(0, number, step):
        some = slice(start, start + step)
        counter = [blocks, low.reshape(-1, 1)[some], high.reshape(-1, 1)[some], zero]
        for word, bits in enumerate(philox(counter, key)):
            torch.lt(bits, limit, out=kept[some, :, word])
    return kept.reshape(*low.shape, count * 4)[..., last.start - 4 * first :][..., : len(last)]


def normal_block(block: Block, shape: Sequence[int], key: int, device: torch.device) -> torch.Tensor:
    """Standard normal numbers for a block of a tensor: that block of what is drawn for the whole.

    Source: Box and Muller, "A Note on the Generation of Random Normal Deviates", 1958.

    Args:
        block: Which one.
        shape: Of the whole tensor.
        key: Separates draws, 0 <= key < 2**64.
        device: Where the numbers are drawn.

    Returns:
        float64, of the shape of the block; float32 on mps, which has no wider numbers.
    """
    wide = torch.float32 if device.type == "mps" else torch.float64
    offsets, sizes, whole = block.offsets or (0,), block.shape or (1,), tuple(shape) or (1,)
    lines = torch.zeros((), dtype=torch.int64, device=device)
    for offset, size, length in zip(offsets[:-1], sizes[:-1], whole[:-1], strict=True):
        lines = lines[..., None] * length + torch.arange(offset, offset + size, device=device)
    lines = lines.reshape(-1, 1)
    # Two neighbors of the last dimension share a counter.
    first, end = offsets[-1] // 2, -(-(offsets[-1] + sizes[-1]) // 2)
    pairs = torch.arange(first, end, device=device)
    drawn = torch.empty(len(lines), len(pairs), 2, dtype=wide, device=device)
    at_once = _CACHED if device.type == "cpu" else _AT_ONCE
    for some, into in zip(pairs.split(at_once), drawn.split(at_once, 1), strict=True):
        step = max(at_once // max(len(some), 1), 1)
        for these, numbers in zip(lines.split(step), into.split(step), strict=True):
            a, b, c, d = philox([some, these & _WORD, these >> 32, torch.zeros_like(these)], key)
            radius = (-2 * _uniform(a, b, wide).log()).sqrt()
            angle = 2 * math.pi * _uniform(c, d, wide)
            torch.mul(radius, angle.cos(), out=numbers[..., 0])
            torch.mul(radius, angle.sin(), out=numbers[..., 1])
    begin = offsets[-1] - 2 * first
    return drawn.flatten(1)[:, begin : begin + sizes[-1]].reshape(block.shape)


def _uniform(high: torch.Tensor, low: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Two words of 32 bits as a number in (0, 1), of which 53 bits count."""
    bits = ((high >> 5) << 26) | (low >> 6)
    return (bits.to(dtype) + 0.5) * 2.0**-53
