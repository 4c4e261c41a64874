"""A digest of the samples that were read: the same wherever, and whenever, the same samples are read.

A few samples are looked at, and a few values of each, so it costs nothing that could be noticed. What differs between
processes although the samples are the same has no part in it: addresses, hashes, the order of a set or of the keys of
a dict, folders before the name of a file, the last digits of a number, the bits of a NaN.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np
import torch

_EVERY = 64  # samples of which one is looked at, behind the first ones
_VALUES = 8  # of a tensor, an array, or a sequence
_CHARACTERS = 32  # at both ends of a text
_TENSOR: Any = torch.Tensor
_OF_NUMPY = frozenset({
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
    torch.float64, torch.complex64, torch.complex128,
})  # fmt: skip
_DEPTH = 6  # of values in values
_TINY = 1e-6  # numbers that may be nothing but rounding


def next_looked_at(number: int) -> int:
    """The first sample from this number on that is looked at: 0, 1, 3, 7, 15, 31, 63, then each 64th.

    These are numbers of samples in the epoch, so they are the same for any batch size, and on any number of ranks.
    """
    count = number + 1
    return (1 << (count - 1).bit_length() if count <= _EVERY else -(-count // _EVERY) * _EVERY) - 1


def is_compared(number: int) -> bool:
    """Whether ranks compare their digests after this sample: 0, 1, 3, 7, ..., a number of times that stays small."""
    return number & (number + 1) == 0


class ReadDigest:
    """Of the samples of an epoch, as far as they were read.

    Attributes:
        last: The last sample that was looked at, -1 before the first one, and the digest after it.
        next: The next one.
    """

    def __init__(self) -> None:
        self.last = (-1, "")
        self.next = 0

    def see(self, first: int, samples: Sequence[Any]) -> list[tuple[int, str]]:
        """Look at samples that were read, from number `first` on: each that was looked at, and the digest after it."""
        found: list[tuple[int, str]] = []
        self.next = max(self.next, next_looked_at(first))
        while self.next < first + len(samples):
            text = f"{self.last[1]}|{self.next}|{'|'.join(_facts(samples[self.next - first], 0))}"
            self.last = (self.next, hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest())
            found.append(self.last)
            self.next = next_looked_at(self.next + 1)
        return found


def _facts(value: Any, depth: int) -> list[str]:
    """What tells a sample from others; single numbers with a fraction only where there is nothing else."""
    exact: list[str] = []
    inexact: list[str] = []
    for kind, text in _parts(value, depth):
        (inexact if kind == "float" else exact).append(text)
    return exact if any(text.startswith(("#", "=")) for text in exact) else exact + inexact


def _parts(value: Any, depth: int) -> Iterator[tuple[str, str]]:
    """Kind and text of each part of a value. A text begins with "#" or "=" if it holds values."""
    if isinstance(value, (bool, int, np.integer, np.bool_)):
        yield "exact", f"={int(value)}"
    elif isinstance(value, (float, np.floating)):
        yield "float", _rounded(float(value))
    elif isinstance(value, (complex, np.complexfloating)):
        yield "float", _number(complex(value))
    elif isinstance(value, str):
        yield "exact", f"={_ends(value)}"
    elif isinstance(value, (bytes, bytearray)):
        yield "exact", f"={len(value)}:{bytes(value[:_CHARACTERS]).hex()}:{bytes(value[-_CHARACTERS:]).hex()}"
    elif isinstance(value, torch.Tensor):
        yield "exact", _of_tensor(value)
    elif isinstance(value, np.ndarray):
        yield "exact", _of_array(value)
    else:
        yield from _inside(value, depth)


def _inside(value: Any, depth: int) -> Iterator[tuple[str, str]]:
    """The parts of something that holds others; of anything else its class."""
    yield "exact", type(value).__name__
    if depth == _DEPTH:
        return
    if isinstance(value, Mapping):
        named = sorted(((str(key), key) for key in value if isinstance(key, (str, int))), key=lambda pair: pair[0])
        for name, key in named:
            yield "exact", name
            yield from _parts(value[key], depth + 1)
    elif isinstance(value, AbstractSet):
        yield "exact", f"={len(value)}"
        if len(value) <= _VALUES:
            yield "exact", ",".join(sorted("".join(_facts(each, depth + 1)) for each in value))
    elif isinstance(value, (list, tuple, range)):
        yield "exact", str(len(value))
        for place in _spread(len(value)):
            yield from _parts(value[place], depth + 1)
    elif dataclasses.is_dataclass(value):
        for each in dataclasses.fields(value):
            yield from _parts(getattr(value, each.name, None), depth + 1)


def _of_tensor(value: torch.Tensor) -> str:
    text = f"{value.dtype}{list(value.shape)}"
    if value.device.type != "cpu" or value.layout is not torch.strided or value.is_quantized or not value.numel():
        return text
    bare: Any = value.detach()
    if type(bare).__torch_dispatch__ is not _TENSOR.__torch_dispatch__:  # one that is only pretended has no values
        return text
    bare = bare.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    array = bare.numpy() if bare.dtype in _OF_NUMPY else bare.float().numpy()
    return f"#{text}{_some(array)}"


def _of_array(value: np.ndarray[Any, Any]) -> str:
    text = f"{value.dtype.kind}{value.dtype.itemsize if value.dtype.kind != 'U' else ''}{list(value.shape)}"
    return text if value.dtype.kind not in "biufcSU" or value.size == 0 else f"#{text}{_some(value)}"


def _some(array: np.ndarray[Any, Any]) -> str:
    """A few of its values, without a copy of all."""
    return " ".join([_number(array.item(place)) for place in _spread(array.size)])


def _spread(count: int) -> list[int]:
    """Some places from the beginning to the end."""
    if count <= _VALUES:
        return list(range(count))
    return [place * (count - 1) // (_VALUES - 1) for place in range(_VALUES)]


def _number(value: Any) -> str:
    if isinstance(value, float):
        return _rounded(value)
    if isinstance(value, complex):
        return _rounded(value.real) + _rounded(value.imag)
    return _ends(value) if isinstance(value, str) else repr(value)


def _rounded(value: float) -> str:
    """Two digits: processors differ in the last ones."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return "0" if abs(value) < _TINY else f"{value:.1e}"


def _ends(text: str) -> str:
    """Of a path the last name only: the folder of the data may be another on each host."""
    last = text[-4 * _CHARACTERS :].rstrip("/\\").replace("\\", "/").rpartition("/")[2]
    begin = "" if "/" in text or "\\" in text else text[:_CHARACTERS]
    return f"{begin}~{last[-_CHARACTERS:]}"
