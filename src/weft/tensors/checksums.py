"""Numbers that tell whether tensors hold the same bits, on any device."""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

import torch
from torch import nn

from weft import torch_internals

_INTEGERS = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


def can_be_read(tensor: torch.Tensor) -> bool:
    """Whether it has memory of its own here: not in a rehearsal, under `torch.func`, nor as a part of something."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    wrapped: bool = torch_internals.is_functorch_tensor(tensor)
    return plain and not wrapped and not tensor.is_meta and not tensor.is_quantized and tensor.numel() > 0


def sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the elements, read as integers, modulo 2**64: it does not depend on the order of the additions."""
    real = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    return real.contiguous().view(_INTEGERS[real.dtype.itemsize]).sum(dtype=torch.int64)


def sums_of_bits(tensors: Iterable[torch.Tensor]) -> list[int]:
    """`sum_of_bits` of each; waits for a device once, if they lie on one."""
    sums = [sum_of_bits(each) for each in tensors]
    numbers: list[int] = torch.stack([one.to(sums[0].device) for one in sums]).tolist() if sums else []
    return numbers
