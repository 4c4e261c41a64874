"""Linear layers that multiply matrices of 8-bit numbers.

[Note: scales of rows] A row of a matrix is rounded with a scale of its own, a power of two. In the output and in the
gradient of the input, rows belong to one token or one feature: what is rounded does not depend on the other samples of
a batch, nor on how a batch is divided among ranks. The gradient of the weight is a sum over tokens, in which such
rows would lie across the batch. Its factors are not rounded, and it is added up in float32.

Where `tensor_parallel` has divided rows among ranks, the largest number of a row is that of all of them, so the scales
are those of one process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable

from weft import torch_internals
from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.engines.torch.probes.no_trace import is_measured
from weft.tensors.blocks import as_dtensor
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
        if is_measured():  # a probe compares without rounding, whose steps are larger than some mistakes
            return call(*args, **kwargs)
        return _linear(alive(), *args, **kwargs)

    attach(layer, removable, around=around, methods=("forward",))


class _Ranks(NamedTuple):
    """The ranks among which the inputs of a layer are divided, or its outputs; None: they are whole."""

    inputs: dist.ProcessGroup | None = None
    outputs: dist.ProcessGroup | None = None

    @property
    def adds_bias(self) -> bool:
        """Whether this rank does: where inputs are divided, the outputs of all ranks are added up."""
        return self.inputs is None or self.inputs.rank() == 0


def _linear(layer: Any, input: Any) -> Any:
    if is_sharded(layer.weight):
        return _divided_linear(layer, input)
    return _product(input, layer.weight, layer.bias, _Ranks())


def _divided_linear(layer: Any, input: Any) -> Any:
    """The same for a layer of `tensor_parallel`, whose input and output are DTensors."""
    from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: PLC0415  (half a second)

    weight, bias = layer.weight, layer.bias
    mesh, (placement,) = weight.device_mesh, weight.placements
    by_outputs, by_inputs = placement.is_shard(0), placement.is_shard(1)
    last = Shard(input.dim() - 1)
    takes = last if by_inputs else Replicate()
    gives = Partial() if by_inputs else last if by_outputs else Replicate()
    as_one = input if is_sharded(input) else as_dtensor(input, mesh, [takes])
    rows = as_one.redistribute(placements=[takes]).to_local(grad_placements=[Partial() if by_outputs else takes])
    group = mesh.get_group()
    ranks = _Ranks(group if by_inputs else None, group if by_outputs else None)
    output = _product(rows, weight.to_local(), None if bias is None else bias.to_local(), ranks)
    return as_dtensor(output, mesh, [gives])


def _product(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ranks: _Ranks) -> torch.Tensor:
    kind = input.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
    rows = input.reshape(-1, input.shape[-1])
    output: torch.Tensor = _Product.apply(rows, weight, bias, dtype, ranks)  # type: ignore[no-untyped-call]
    return output.view(*input.shape[:-1], -1)


class _Product(torch.autograd.Function):
    """rows [tokens, in] times weight [out, in], plus bias [out].

    Collectives: where rows of factors are divided among ranks, one all-reduce of their largest numbers.
    """

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: Any, dtype: torch.dtype, ranks: _Ranks
    ) -> torch.Tensor:
        ctx.dtypes = rows.dtype, None if bias is None else bias.dtype
        ctx.ranks = ranks
        ctx.save_for_backward(rows.to(dtype), weight)
        with torch.autocast(rows.device.type, enabled=False):
            output = _multiplied(rows, weight, dtype, ranks.inputs)
            return output if bias is None or not ranks.adds_bias else output + bias.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, weight = ctx.saved_tensors
        row_dtype, bias_dtype = ctx.dtypes
        of_rows = of_weight = of_bias = None
        with torch.autocast(gradient.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                of_rows = _multiplied(gradient, weight.t(), gradient.dtype, ctx.ranks.outputs).to(row_dtype)
            if ctx.needs_input_grad[1]:
                of_weight = _summed(gradient.t(), rows).to(weight.dtype)
            if ctx.needs_input_grad[2]:
                of_bias = gradient.sum(0, dtype=torch.float32).to(bias_dtype)
        return of_rows, of_weight, of_bias, None, None


def _rounded(matrix: torch.Tensor, largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix [rows, columns] in 8 bits, and what its rows are to be multiplied by, [rows, 1].

    Args:
        matrix: In float32.
        largest: The largest number of each row [rows, 1].
    """
    scale = _LARGEST / largest.clamp(min=_SMALLEST)
    scale = scale.view(torch.int32).bitwise_and(_EXPONENT).view(torch.float32)  # the power of two below it
    return (matrix * scale).to(torch.float8_e4m3fn).contiguous(), scale.reciprocal()


def _multiplied(
    left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """[rows, shared] times the transposed of [columns, shared], both rounded.

    Args:
        left: A matrix.
        right: Another one.
        dtype: Of the product.
        group: The ranks among which `shared` is divided.
    """
    wide = left.detach().float(), right.detach().float()
    largest = [matrix.abs().amax(1, keepdim=True) for matrix in wide]
    if group is not None:
        message = torch.cat(largest)
        dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
        largest = list(message.split([len(left), len(right)]))
    (a, a_scale), (b, b_scale) = map(_rounded, wide, largest)
    fits = not any(side % _MULTIPLE for side in b.shape)  # the part of a rank may be too narrow
    if _has_kernels(a.device) and len(a) and fits:
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
