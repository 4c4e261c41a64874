"""Numbers in another dtype: which conversions keep what they mean."""

from __future__ import annotations

import math

import torch

from weft.errors import value_error

__all__ = ["converted", "is_faithful", "of_one_kind"]


def of_one_kind(one: torch.dtype, other: torch.dtype) -> bool:
    """Whether both are real numbers, or complex, or booleans, or integers.

    Example:
        >>> of_one_kind(torch.float32, torch.bfloat16), of_one_kind(torch.float32, torch.int64)
        (True, False)
    """
    here, there = ((d.is_floating_point, d.is_complex, d is torch.bool) for d in (one, other))
    return here == there


def is_faithful(values: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether numbers are still numbers in another dtype, and whole ones the same."""
    if not result.is_floating_point():
        return torch.equal(result.to(values.dtype), values)
    if torch.finfo(result.dtype).max >= torch.finfo(values.dtype).max:
        return True
    wide = torch.promote_types(values.dtype, torch.float32)
    # The sum is a number if all are; the other way round it may just be too large.
    return math.isfinite(result.to(wide).sum().item()) or not bool(
        (values.to(wide).isfinite() & ~result.to(wide).isfinite()).any()
    )


def converted(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values in another dtype.

    Raises:
        ValueError: They do not fit into it.
    """
    if values.dtype == dtype:
        return values
    result = values.to(dtype)
    if not is_faithful(values, result):
        raise value_error(
            f"{name} does not fit into {dtype}",
            found=f"{values.dtype} up to {values.abs().max().item():.3g}",
            expected="values that are numbers there too",
            fix="dtype=torch.bfloat16, which has the range of float32",
        )
    return result
