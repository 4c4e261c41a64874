"""Random numbers by counting: a function of a counter and a key, on any device, without a state.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x32-10).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

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
    limit = round(keep * 2**32)

    def fill(words: Words, kept: torch.Tensor) -> None:
        for place, word in enumerate(words):
            torch.lt(word, limit, out=kept[..., place])

    return drawn(lines, last, key, 4, fill, torch.bool)


def drawn(
    lines: tuple[torch.Tensor, torch.Tensor],
    last: range,
    key: int,
    per_counter: int,
    fill: Callable[[Words, torch.Tensor], None],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Numbers for the elements of lines along the last dimension, of which so many neighbors share a counter.

    Args:
        lines: Two words for each.
        last: Where the elements lie in the last dimension.
        key: Separates draws, 0 <= key < 2**64.
        per_counter: How many neighbors.
        fill: Makes them of the four words of their counter, in place: [..., `per_counter`].
        dtype: Of the numbers.

    Returns:
        Numbers [*shape of the lines, length of `last`].
    """
    (low, high), device = lines, lines[0].device
    first, end = last.start // per_counter, -(-last.stop // per_counter)
    counters, zero = torch.arange(first, end, device=device), torch.zeros((), dtype=torch.int64, device=device)
    made = torch.empty(low.numel(), len(counters), per_counter, dtype=dtype, device=device)
    at_once = _CACHED if device.type == "cpu" else _AT_ONCE
    for some, into in zip(counters.split(at_once), made.split(at_once, 1), strict=True):
        step = max(at_once // max(len(some), 1), 1)
        parts = (one.reshape(-1, 1).split(step) for one in (low, high))
        for one, two, numbers in zip(*parts, into.split(step), strict=True):
            fill(philox([some, one, two, zero], key), numbers)
    begin = last.start - per_counter * first
    return made.flatten(1)[:, begin : begin + len(last)].reshape(*low.shape, len(last))
