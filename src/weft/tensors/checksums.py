"""Numbers that tell whether tensors hold the same bits, on any device."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn

from weft import torch_internals
from weft.tensors.blocks import memory_of

_COLUMNS = 1024
_SMALL = 2**12  # bytes
_PART = 2**22  # elements that are widened at a time
_MIX = 0x1E3779B97F4A7C15  # an odd number with bits all over it


def can_be_read(tensor: torch.Tensor) -> bool:
    """Whether it has memory of its own here: not in a rehearsal, under `torch.func`, nor as a part of something."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    wrapped: bool = torch_internals.is_functorch_tensor(tensor)
    return plain and not wrapped and not tensor.is_meta and not tensor.is_quantized and tensor.numel() > 0


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Numbers that are equal if the bytes of tensors are, and next to never otherwise; one for each tensor.

    They are made on the device of a tensor, in the time of one look at it, and waited for once.
    """
    return begin_checksums(tensors)()


def begin_checksums(tensors: Iterable[torch.Tensor]) -> Callable[[], list[int]]:
    """Begin to make `checksums`; the result returns them, and waits for the device if it is not as far yet."""
    weights: dict[torch.device, torch.Tensor] = {}
    found = [_checksum(tensor, weights) for tensor in tensors]
    elsewhere = [number for number in found if isinstance(number, torch.Tensor)]
    if not elsewhere:
        return lambda: cast("list[int]", found)
    wait = begin_reading(torch.stack([one.to(elsewhere[0].device) for one in elsewhere]))

    def read() -> list[int]:
        told = iter(wait())
        return [next(told) if isinstance(number, torch.Tensor) else number for number in found]

    return read


def begin_reading(numbers: torch.Tensor) -> Callable[[], list[Any]]:
    """Begin to copy numbers to the host; the result returns them, and waits for the device if it is not as far yet."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or numbers.device.type != accelerator.type:
        return numbers.tolist
    there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(numbers, non_blocking=True)
    event = torch.Event(device=numbers.device)
    event.record()

    def read() -> list[Any]:
        event.synchronize()
        found: list[Any] = there.tolist()
        return found

    return read


@torch.no_grad()
def _checksum(tensor: torch.Tensor, weights: dict[torch.device, torch.Tensor]) -> int | torch.Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if type(flat) is not torch.Tensor:
        flat = flat.clone()  # what functional collectives return is waited for
    if type(flat) is torch.Tensor and flat.device.type == "cpu" and flat.nbytes <= _SMALL:  # a hash is one call
        return int.from_bytes(hashlib.blake2b(memory_of(flat), digest_size=7).digest(), "little")
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    data = flat.view(torch.uint8)
    whole = data[: data.numel() // 8 * 8]
    # In halves where a number fills eight bytes: the sum of many of those with only high bits has none of them left.
    words = whole.view(torch.int32 if flat.dtype == torch.float64 else torch.int64)
    total = torch.zeros(_COLUMNS, dtype=torch.int64, device=flat.device)
    for part in words.split(_PART):
        rows = part.numel() // _COLUMNS
        total += part[: rows * _COLUMNS].view(rows, _COLUMNS).sum(0, dtype=torch.int64)
        rest = part[rows * _COLUMNS :]
        total[: rest.numel()] += rest
    total[: data.numel() % 8] += data[whole.numel() :]
    if flat.device not in weights:  # an odd number for each column
        weights[flat.device] = (torch.arange(_COLUMNS, device=flat.device) * 2 + 1) * _MIX
    return (total * weights[flat.device]).sum()
