"""Sizes in bytes: of a module and of each of its parts (`module_sizes`), and as a text says them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import MappingProxyType

import torch
from torch import nn

from weft.checks import check_module, check_not_lazy

UNITS = MappingProxyType({"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
         "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40})  # fmt: skip


def parse_size(text: str) -> int | None:
    """The bytes of a text such as "5GB"; None if it is no size.

    Example:
        >>> parse_size("100B"), parse_size("1.5KB"), parse_size("2 MiB"), parse_size("5")
        (100, 1500, 2097152, None)
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{0,9})?|\.\d{1,9}) ?([KMGT]i?B|B)", text)
    return int(float(found[1]) * UNITS[found[2]]) if found else None


def module_sizes(module: nn.Module) -> dict[str, int]:
    """Count the bytes of parameters and buffers of a module and of each part.

    What has several names, as tied weights have, counts once in each part that holds it. Tensors on meta count as if
    they had values; buffers count whether they are saved or not.

    Changes: nothing. Collectives: none.

    Args:
        module: On any device, or on meta.

    Returns:
        Bytes by the name of the part, in the order of `named_modules()`; "" is the whole.

    Raises:
        TypeError: Not a module.
        ValueError: A parameter has no shape yet.

    Example:
        >>> import torch
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(nn.Linear(1000, 500), nn.BatchNorm1d(500))
        >>> module_sizes(model)
        {'': 2010008, '0': 2002000, '1': 8008}
    """
    check_module("module_sizes", module, fix="weft.weights.module_sizes(model)")
    check_not_lazy("module_sizes", module)
    return {name: bytes_of((*part.parameters(), *part.buffers())) for name, part in module.named_modules()}


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of tensors, each counted once."""
    return sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
