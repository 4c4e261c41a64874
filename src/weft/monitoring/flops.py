"""Floating-point operations: how many a function makes, and how many a device can make."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import MappingProxyType

import torch
from torch.utils.flop_counter import FlopCounterMode

from weft.errors import value_error

# Per second and dense (without sparsity), as the makers' data sheets say: for matrix products in bfloat16 or float16,
# and in float32 without TF32. The first name that the device's name contains as words counts.
_PEAKS = MappingProxyType({
    "GB200": (2.5e15, 80e12), "B200": (2.25e15, 80e12), "GH200": (989e12, 67e12), "H200": (989e12, 67e12),
    "H100 NVL": (835e12, 60e12), "H100 PCIe": (756e12, 51e12), "H100": (989e12, 67e12), "A100": (312e12, 19.5e12),
    "A40": (149.7e12, 37.4e12), "A30": (165e12, 10.3e12), "A10": (125e12, 31.2e12), "L40S": (362e12, 91.6e12),
    "L40": (181e12, 90.5e12), "L4": (121e12, 30.3e12), "V100": (125e12, 15.7e12), "T4": (65e12, 8.1e12),
    "MI325X": (1307e12, 163.4e12), "MI300X": (1307e12, 163.4e12), "MI250X": (383e12, 47.9e12),
})  # fmt: skip


def count_flops(fn: Callable[[], object]) -> int:
    """Floating-point operations of a call: matrix products, convolutions and attention, backward included.

    A multiplication and an addition count as two. What is computed again in backward counts again. The function
    runs once, for real, on this rank.

    Source: `torch.utils.flop_counter.FlopCounterMode`.

    Example:
        >>> model = torch.nn.Linear(4, 8, bias=False)
        >>> count_flops(lambda: model(torch.ones(2, 4)).sum().backward())  # 2*2*4*8, and again for the weight
        256
    """
    with FlopCounterMode(display=False) as counter:
        fn()
    return int(counter.get_total_flops())


def peak_flops(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float | None:
    """What a device can do per second at best, as its maker says; None if it is not known, as for any CPU.

    Raises:
        ValueError: Another dtype than bfloat16, float16 and float32.

    Example:
        >>> peak_flops(torch.device("cpu")) is None
        True
    """
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise value_error(
            f"peak_flops: dtype = {dtype} is not in the table",
            found=str(dtype),
            expected="torch.bfloat16, torch.float16 or torch.float32",
            fix="weft.monitoring.throughput(ctx, peak_flops=989e12)",
        )
    return _peak_of(torch.cuda.get_device_name(device), dtype) if device.type == "cuda" else None


def _peak_of(name: str, dtype: torch.dtype) -> float | None:
    peaks = next((peaks for key, peaks in _PEAKS.items() if re.search(rf"\b{key}\b", name)), None)
    return None if peaks is None else peaks[dtype == torch.float32]
