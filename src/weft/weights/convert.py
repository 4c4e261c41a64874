"""Values on their way from files, a few megabytes at a time, in another dtype if that is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.checkpoint.format.dtypes import is_faithful
from weft.checkpoint.format.safetensors_read import TensorFiles, in_order, inside
from weft.checkpoint.format.tensor_blocks import Block
from weft.errors import value_error
from weft.weights.sources import Stored

__all__ = ["blocks", "fill", "floating_dtype"]

_CHUNK_BYTES = 4 * 2**20
_SHORT = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def floating_dtype(what: str, dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype by itself or by name.

    Raises:
        ValueError: It is unknown, or not for real numbers.

    Example:
        >>> floating_dtype("f", "bf16"), floating_dtype("f", "torch.float16"), floating_dtype("f", None)
        (torch.bfloat16, torch.float16, None)
    """
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    found = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise value_error(
            f"{what}: dtype = {dtype!r} cannot be used",
            found=repr(dtype),
            expected="a floating-point dtype: only tensors of these are converted",
            fix=f"weft.{what}(..., dtype=torch.bfloat16)",
        )
    return found


def blocks(
    files: TensorFiles, name: str, stored: Stored, within: Block, dtype: torch.dtype
) -> Iterator[tuple[Block, torch.Tensor]]:
    """Read a block of a tensor in parts, in the order of its memory.

    Yields:
        Where the part lies in the block, and its values, which hold until the next is read.

    Raises:
        CheckpointError: A file cannot be read.
        ValueError: Values do not fit into `dtype`.
    """
    there = getattr(torch, stored.entry.dtype)
    scratch = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
    for part in in_order(within.shape, _CHUNK_BYTES // there.itemsize):
        values = scratch[: part.size * there.itemsize].view(there).view(part.shape)
        offsets = tuple(a + b for a, b in zip(part.offsets, within.offsets, strict=True))
        files.read(stored.key, stored.entry, Block(offsets, part.shape), values)
        yield part, _converted(name, values, dtype)


def fill(files: TensorFiles, name: str, stored: Stored, within: Block, out: torch.Tensor) -> None:
    """Read a block of a tensor into another, of any floating-point dtype, device and layout.

    Raises:
        CheckpointError: A file cannot be read.
        ValueError: Values do not fit into its dtype.
    """
    same = out.dtype == getattr(torch, stored.entry.dtype)
    if same and out.device.type == "cpu" and out.is_contiguous():
        files.read(stored.key, stored.entry, within, out)
        return
    with torch.no_grad():
        for part, values in blocks(files, name, stored, within, out.dtype):
            out[inside(part, (0,) * len(part.shape))].copy_(values)


def _converted(name: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
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
