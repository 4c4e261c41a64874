"""Linear layers that multiply matrices of 8-bit numbers.

[Note: scales of rows] A row of a matrix is rounded with a scale of its own, a power of two. In the output and in the
gradient of the input, rows belong to one token or one feature: what is rounded does not depend on the other samples of
a batch, nor on how a batch is divided among ranks. The gradient of the weight is a sum over tokens, in which such
rows would lie across the batch. Its factors are not rounded, and it is added up in float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from weft import torch_internals
from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.errors import ContractError
from weft.tensors.dtensor import is_sharded

_MULTIPLE = 16  # of both sides of a weight: what the kernels take
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST = 2.0**-100  # a row of zeros has a scale, too
_EXPONENT = 0x7F800000  # the bits of it in a float32


def is_convertible(part: nn.Module) -> bool:
    """Whether a part is a linear layer of a size that kernels for 8 bits take."""
    if not isinstance(part, nn.Linear) or type(part).forward is not nn.Linear.forward:
        return False
    return part.in_features % _MULTIPLE == 0 and part.out_features % _MULTIPLE == 0


def multiply_in_fp8(layer: nn.Module, removable: Removable) -> None:
    """Let a linear layer multiply matrices of 8-bit numbers, forward and back."""
    alive = weakref.ref(layer)

    def around(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        del call
        return _linear(alive(), *args, **kwargs)

    attach(layer, removable, around=around, methods=("forward",))


def _linear(layer: Any, input: torch.Tensor) -> torch.Tensor:
    if is_sharded(layer.weight) or is_sharded(input):
        raise ContractError(
            "with_precision: fp8 needs the whole weight of a layer",
            found=f"a weight of shape {tuple(layer.weight.shape)} that tensor_parallel has sharded",
            expected="fully_shard, zero_partition or replicate with fp8",
            fix='model, ctx = weft.with_precision(model, ctx, "bf16")  # in place of "fp8", before tensor_parallel',
        )
    kind = input.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
    rows = input.reshape(-1, input.shape[-1])
    output: torch.Tensor = _Product.apply(rows, layer.weight, layer.bias, dtype)  # type: ignore[no-untyped-call]
    return output.view(*input.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """rows [tokens, in] times weight [out, in], plus bias [out]."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: Any, dtype: torch.dtype) -> torch.Tensor:
        ctx.dtypes = rows.dtype, None if bias is None else bias.dtype
        ctx.save_for_backward(rows.to(dtype), weight)
        with torch.autocast(rows.device.type, enabled=False):
            output = _multiplied(_rounded(rows), _rounded(weight), dtype)
            return output if bias is None else output + bias.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, weight = ctx.saved_tensors
        row_dtype, bias_dtype = ctx.dtypes
        of_rows = of_weight = of_bias = None
        with torch.autocast(gradient.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_rows = _multiplied(_rounded(gradient), _rounded(weight.t()), gradient.dtype).to(row_dtype)
            if ctx.needs_input_grad[1]:
                of_weight = _summed(gradient.t(), rows).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                of_bias = gradient.sum(0, dtype=torch.float32).to(bias_dtype)
        return of_rows, of_weight, of_bias, None


def _rounded(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [rows, columns] in 8 bits, and what its rows are to be multiplied by, [rows, 1]."""
    wide = matrix.detach().float()
    scale = _LARGEST / wide.abs().amax(1, keepdim=True).clamp(min=_SMALLEST)
    scale = scale.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)  # the power of two below it
    return (wide * scale).to(torch.float8_e4m3fn).contiguous(), scale.reciprocal()


def _multiplied(
    left: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """[rows, shared] times the transposed of [columns, shared]."""
    (a, a_scale), (b, b_scale) = left, right
    if _has_kernels(a.device) and len(a):
        scales = {"scale_a": a_scale, "scale_b": b_scale.t()}
        product: torch.Tensor = torch_internals.scaled_product(a, b.t(), **scales, out_dtype=torch.bfloat16)
        return product.to(dtype)
    return (a.float() @ b.float().t() * a_scale * b_scale.t()).to(dtype)


def _summed(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A product in float32, of factors in what dtype they have."""
    if left.device.type == "cuda" and left.dtype is torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _has_kernels(device: torch.device) -> bool:
    """Whether the device multiplies matrices of 8-bit numbers with scales of rows."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
