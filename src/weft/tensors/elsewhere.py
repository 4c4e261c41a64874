"""Tensors on meta that stand for what another rank has, as the parameters of the other stages of a pipeline.

Unlike tensors on meta that wait for values, they stay there; strategies and device moves leave them out.
"""

from __future__ import annotations

import torch

__all__ = ["empty_elsewhere", "forget_elsewhere", "is_elsewhere"]

_MARK = "_weft_elsewhere"


def empty_elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """What stands for a tensor: its shape and dtype, and no memory; a parameter for a parameter."""
    values = tensor.detach()
    if values.is_meta and type(values) is torch.Tensor:  # `empty_like` of these is Python, and imports sympy: 30 MB
        made = torch.empty_strided(values.size(), values.stride(), dtype=values.dtype, device="meta")
    else:
        made = torch.empty_like(values, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    setattr(made, _MARK, True)
    return made


def is_elsewhere(tensor: torch.Tensor) -> bool:
    """Whether another rank has a tensor."""
    return tensor.is_meta and getattr(tensor, _MARK, False)


def forget_elsewhere(tensor: torch.Tensor) -> None:
    """Let a tensor be an ordinary one on meta."""
    vars(tensor).pop(_MARK, None)
