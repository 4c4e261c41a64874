"""Hashes of files: XXH3 where the package xxhash is, else SHA-256; which one it was is stated beside it.

A hash finds damage: flipped bits, torn writes, files of another checkpoint. XXH3 with 128 bits does so at
the speed of memory, where SHA-256 is slower than a good disk. Neither says who wrote a file: whoever can
change a file can change the manifest as well.
"""

from __future__ import annotations

import hashlib
from types import MappingProxyType
from typing import Any, Protocol

from weft.checks import import_extra
from weft.errors import MissingExtra

# What each is called, and its number of hexadecimal digits.
HASHES = MappingProxyType({"xxh3_128": ("XXH3-128", 32), "sha256": ("SHA-256", 64)})


class Hash(Protocol):
    """As those of hashlib."""

    def update(self, data: Any, /) -> None:
        """Hash more bytes; lets other threads run."""

    def hexdigest(self) -> str:
        """The hash, as hexadecimal digits."""
        ...


def best_hash() -> str:
    """The hash that new files get."""
    try:
        new_hash("xxh3_128")
    except MissingExtra:
        return "sha256"
    return "xxh3_128"


def new_hash(kind: str) -> Hash:
    """Begin a hash of one of `HASHES`.

    Raises:
        MissingExtra: It is one of the package xxhash, which is not installed.
    """
    if kind == "sha256":
        return hashlib.sha256()
    problem = "the checkpoint was written with hashes of xxhash, which is not installed"
    hashing: Hash = import_extra("xxhash", problem, expected="the package xxhash", extra="checkpoint").xxh3_128()
    return hashing
