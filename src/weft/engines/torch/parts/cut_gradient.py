"""Gradients of cut layers beside those of whole ones: lines over `model.parameters()` compute as with one process."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from weft.errors import ContractError
from weft.tensors.nested import map_tensors, tensors

__all__ = ["CutLayerGradient"]


class CutLayerGradient(DTensor):
    """A DTensor whose numbers scale plain tensors, as `torch.nn.utils.clip_grad_norm_` does with its norm.

    torch takes functions of it one by one, and those of lists (`torch._foreach_norm`), which take no plain tensors
    beside DTensors, not at all.
    """

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as torch; where plain tensors come with it, numbers are made whole first.

        Collectives: one all-reduce for a number of which each rank has a part.

        Raises:
            ContractError: Plain tensors come with DTensors that are more than a number.
        """
        with torch._C.DisableTorchFunctionSubclass():
            given = list(tensors((args, kwargs or {})))
            plain = [t for t in given if not isinstance(t, DTensor) and t.numel() > 1]
            if plain and not getattr(func, "__name__", "").startswith("__"):
                args, kwargs = map_tensors(lambda t: _number(func, t, plain[0]), (args, kwargs or {}))
            return map_tensors(_marked, func(*args, **(kwargs or {})))

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy is an ordinary one."""
        with torch._C.DisableTorchFunctionSubclass():
            made: torch.Tensor = memo.setdefault(id(self), self.detach().clone())
        return made


def _number(func: Any, tensor: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.numel() == 1:
        return tensor.full_tensor()
    raise ContractError(
        f"{getattr(func, '__name__', func)}: gradients of cut layers and of whole ones in one call",
        found=f"a plain tensor {list(plain.shape)} beside a DTensor {list(tensor.shape)}",
        expected="one kind in a call, or functions of weft for both",
        fix="norm = weft.clip_grads(model, ctx, max_norm=1.0); or, on all ranks: tensor.full_tensor()",
    )


def _marked(found: Any) -> Any:
    if type(found) is DTensor:
        found.__class__ = CutLayerGradient
    return found
