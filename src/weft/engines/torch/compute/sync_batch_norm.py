"""Batch normalisation over the batch of all ranks, on every device.

torch's own `SyncBatchNorm` refuses CPU tensors; its kernels are used where they exist. Same
formula: Ioffe and Szegedy, "Batch Normalization", 2015, with sums taken over the ranks.
Shapes: x [N, C, ...]; statistics [C].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft import torch_internals
from weft.engines.torch.hooks.method_hooks import Removable
from weft.engines.torch.probes.compare import largest_over
from weft.errors import value_error, warn
from weft.tensors.checksums import can_be_read

_LOOKS = 16  # calls of batch norms in which shapes are compared


class _NormGroup:
    """The group of a module and of its copies, as in torch; one that was pickled has none and normalises alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self._looks = group, _LOOKS
        # Looked up here: a compiler cannot trace that.
        self.native: Any = None if group is None else torch_internals.sync_batch_norm.found

    def compare_lengths(self, x: torch.Tensor) -> None:
        """Warn, once, if the ranks have padded their rows to different lengths. Collectives: one all-reduce, at first.

        Args:
            x: What a batch norm is called with in training.
        """
        if not self._looks or not (can_be_read(x) or x.numel() == 0):
            return
        self._looks -= 1
        length = math.prod(x.shape[2:]) if len(x) else -math.inf
        most, least = largest_over(self.group, [length, -length if len(x) else -math.inf], x.device)
        if most != -least and math.isfinite(most):
            self._looks = 0
            warn(
                "sync_batch_norm: the ranks have padded their rows to different lengths",
                found=f"from {-least:.0f} to {most:.0f} positions per row, which all count in the statistics",
                expected="one length, as in one process, which pads to the longest row of all ranks",
                fix="x = weft.collectives.pad_across(x, ctx, dim=1)  # before the model; or a collate_fn that pads to "
                "a fixed length",
            )

    def release(self) -> None:
        self.group = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _NormGroup:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _NormGroup, (None,)


class _OverRanks(torch_internals.batch_norm.base):  # type: ignore[name-defined, misc]
    """Mixed in before one of torch's batch norms."""

    weft_ranks: _NormGroup

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        group = self.weft_ranks.group
        if not self.training or group is None:
            alone: torch.Tensor = super().forward(input)
            return alone
        torch_internals.CHECK_SHAPE.of(self)(input)
        if not torch.compiler.is_compiling():
            self.weft_ranks.compare_lengths(input)
        factor = self.momentum
        running_mean = running_var = None
        if self.track_running_stats:
            assert self.num_batches_tracked is not None
            running_mean, running_var = self.running_mean, self.running_var
            self.num_batches_tracked.add_(1)
            if factor is None:  # a cumulative mean instead of an exponential one
                factor = 1.0 / float(self.num_batches_tracked)
        arguments = (input, self.weight, self.bias, running_mean, running_var, self.eps, factor or 0.0, group)
        if input.is_cpu:
            output: torch.Tensor = _BatchNormOverRanks.apply(*arguments)  # type: ignore[no-untyped-call]
        else:
            output = self.weft_ranks.native.apply(*arguments, dist.get_world_size(group))
        return output


class SyncBatchNorm1d(_OverRanks, nn.BatchNorm1d):
    """`BatchNorm1d` over all ranks."""


class SyncBatchNorm2d(_OverRanks, nn.BatchNorm2d):
    """`BatchNorm2d` over all ranks."""


class SyncBatchNorm3d(_OverRanks, nn.BatchNorm3d):
    """`BatchNorm3d` over all ranks."""


_TWINS: Mapping[type[nn.Module], type[_OverRanks]] = MappingProxyType(
    {
        nn.BatchNorm1d: SyncBatchNorm1d,
        nn.BatchNorm2d: SyncBatchNorm2d,
        nn.BatchNorm3d: SyncBatchNorm3d,
    }
)
_PLAIN: Mapping[type[nn.Module], type[nn.Module]] = MappingProxyType({twin: plain for plain, twin in _TWINS.items()})


class Synchronized:
    """The batch norms of a module, which compute their statistics over the ranks of a group; and the way back."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        self._removable = Removable()
        self._ranks = _NormGroup(group)
        for child in module.modules():
            kind = _PLAIN.get(type(child), type(child))
            if kind in _TWINS:
                self._removable.add(partial(_put_back, child, type(child), vars(child).get("weft_ranks")))
                vars(child)["weft_ranks"] = self._ranks
                child.__class__ = _TWINS[kind]

    def undo(self) -> None:
        """Give every batch norm its class back."""
        self._removable.remove()

    def release(self) -> None:
        """Let the process group go; batch norms normalise alone from now on."""
        self._ranks.release()


def _put_back(child: nn.Module, kind: type[nn.Module], ranks: _NormGroup | None) -> None:
    child.__class__ = kind
    if ranks is None:
        del vars(child)["weft_ranks"]
    else:
        vars(child)["weft_ranks"] = ranks


class _BatchNormOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        eps: float,
        factor: float,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        # The mean first, then the squares around it: as accurate as one process, for one more message.
        first = torch.cat([x.sum(dims), x.new_tensor([x.numel() / x.shape[1]])])
        dist.all_reduce(first, group=group)
        count = first[-1]
        if count <= 1:
            raise value_error(
                "sync_batch_norm: a single value has no variance",
                found=f"{int(count)} value per channel over all ranks, {tuple(x.shape)} on this one",
                expected="more than 1 value per channel when training",
                fix="a larger batch, or model.eval()",
            )
        mean = first[:-1] / count
        centred = x - mean.view(shape)
        squares = (centred * centred).sum(dims)
        dist.all_reduce(squares, group=group)
        var = squares / count
        scale = torch.rsqrt(var + eps)
        normal = centred * scale.view(shape)
        if running_mean is not None and running_var is not None:
            running_mean.mul_(1 - factor).add_(mean, alpha=factor)
            running_var.mul_(1 - factor).add_(var * (count / (count - 1)), alpha=factor)
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.dims, ctx.shape, ctx.group = dims, shape, group
        output = normal if weight is None else normal * weight.view(shape)
        return output if bias is None else output + bias.view(shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        normal, weight, scale, count = ctx.saved_tensors
        by_weight = (gradient * normal).sum(ctx.dims)
        by_bias = gradient.sum(ctx.dims)
        sums = torch.stack([by_weight, by_bias])
        dist.all_reduce(sums, group=ctx.group)
        means = sums / count
        inner = gradient - means[1].view(ctx.shape) - normal * means[0].view(ctx.shape)
        factor = scale if weight is None else scale * weight
        return (
            inner * factor.view(ctx.shape),
            None if weight is None else by_weight,
            by_bias if ctx.needs_input_grad[2] else None,
            *[None] * 5,
        )
