"""Gradients of cut layers beside those of whole ones: lines over `model.parameters()` compute as with one process."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from typing_extensions import override

from weft import torch_internals
from weft.errors import ContractError
from weft.tensors.nested import map_tensors, tensors
from weft.tensors.remote_parameter import RemoteTensor


class CutLayerGradient(DTensor):
    """A DTensor whose numbers go with plain tensors, and with DTensors over other ranks.

    As `torch.nn.utils.clip_grad_norm_` needs it, which takes the norm of each tensor, that of the norms, and scales all
    tensors by it. With tensors of this class it leaves out functions of lists, which take tensors of one kind only.
    """

    __slots__ = ()

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute as torch; numbers that come with tensors of another kind are made whole first.

        Collectives: one all-reduce for a number of which each rank has a part.

        Raises:
            ContractError: Tensors of several kinds are more than numbers.
        """
        if any(issubclass(kind, RemoteTensor) for kind in types):
            return NotImplemented  # what comes of it is elsewhere, too
        with torch_internals.without_subclasses():
            given = list(tensors((args, kwargs or {})))
            kinds = {getattr(t, "device_mesh", None): t for t in given if isinstance(t, DTensor) or t.numel() > 1}
            name = getattr(func, "__name__", "")
            if len(kinds) > 1 and not name.startswith("__"):
                kept = args[:1] if name.endswith("_") else ()  # what is changed by it
                others, kwargs = map_tensors(lambda t: _number(func, t, kinds), (args[len(kept) :], kwargs or {}))
                args = (*kept, *others)
            return map_tensors(_marked, func(*args, **(kwargs or {})))

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy is an ordinary one."""
        with torch_internals.without_subclasses():
            made: torch.Tensor = memo.setdefault(id(self), self.detach().clone())
        return made


def _number(func: Any, tensor: torch.Tensor, kinds: dict[Any, torch.Tensor]) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.numel() == 1:
        return tensor.full_tensor()
    raise ContractError(
        f"{getattr(func, '__name__', func)}: gradients of cut layers and of whole ones in one call",
        found=" and ".join(map(_described, kinds.values())),
        expected="one kind in a call, or functions of weft for both",
        fix="norm = weft.clip_grads(model, ctx, max_norm=1.0); or, on all ranks: tensor.full_tensor()",
    )


def _described(tensor: torch.Tensor) -> str:
    mesh = getattr(tensor, "device_mesh", None)
    return f"a tensor {list(tensor.shape)} " + ("that is plain" if mesh is None else f"over {mesh.mesh_dim_names}")


def _marked(found: Any) -> Any:
    if type(found) is DTensor:
        found.__class__ = CutLayerGradient
    return found
