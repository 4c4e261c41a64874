"""Parameters that autocast has cast, which backward casts again instead of keeping the casts.

A linear layer keeps the weight that it has multiplied by for its backward: under autocast a copy in 16 bits. A unit
that is gathered for a moment would leave such a copy of all its weights behind. The cast of a gathered parameter has
the same bits whenever it is made, so the parameter is kept for it, which backward gathers in any case.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from weft import torch_internals

_SMALL = 4096  # elements: casting so few again takes more time than keeping 8 KiB is worth


def has_large_parameters(module: nn.Module) -> bool:
    """Whether a cast of any parameter is made again; otherwise the hooks on all saved tensors would do nothing."""
    return any(p.numel() >= _SMALL for p in module.parameters())


def recast_in_backward() -> torch.autograd.graph.saved_tensors_hooks:
    """A context in which autograd keeps parameters for the casts of them, and for views of these casts."""
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


class _Cast:
    """How to make a cast, or a view of one, again."""

    __slots__ = ("dtype", "parameter", "version", "view")

    def __init__(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        self.parameter = parameter
        self.version = torch_internals.VERSION.of(parameter)
        self.dtype = tensor.dtype
        self.view = tensor.size(), tensor.stride(), tensor.storage_offset()

    def again(self) -> torch.Tensor:
        cast = self.parameter.detach().to(self.dtype)
        if isinstance(cast, DTensor):  # has no `as_strided`
            return cast if self.view[0] == cast.size() and self.view[1] == cast.stride() else cast.t()
        return cast.as_strided(*self.view)


def _pack(tensor: torch.Tensor) -> Any:
    base = torch_internals.BASE.of(tensor)
    base = tensor if base is None else base
    if base.numel() < _SMALL:
        return tensor
    if isinstance(tensor, DTensor) and not _is_whole_or_transposed(tensor, base):
        return tensor
    made_by: Any = base.grad_fn
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return tensor
    # Of a leaf, this is the node that accumulates its gradient.
    parameter = getattr(made_by.next_functions[0][0], "variable", None)
    if not isinstance(parameter, nn.Parameter) or parameter.device != tensor.device or base.dtype is not tensor.dtype:
        return tensor
    return _Cast(parameter, tensor)


def _unpack(kept: Any) -> torch.Tensor:
    if not isinstance(kept, _Cast):
        return kept  # type: ignore[no-any-return]
    parameter = kept.parameter
    if torch_internals.VERSION.of(parameter) != kept.version:
        raise RuntimeError(
            f"a parameter of shape {tuple(parameter.shape)} was changed in place after forward has cast it, "
            f"and backward needs it as it was: version {torch_internals.VERSION.of(parameter)}, expected {kept.version}"
        )
    return kept.again()


def _is_whole_or_transposed(view: torch.Tensor, base: torch.Tensor) -> bool:
    if view.storage_offset() != base.storage_offset():
        return False
    ways = [(base.size(), base.stride())]
    if base.dim() == 2:
        ways.append((base.size()[::-1], base.stride()[::-1]))
    return (view.size(), view.stride()) in ways
