"""What a parameter is between the calls of its part: on meta, and computing with it is an error.

torch multiplies by a matrix on meta without an error, and returns memory that was never written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from weft import torch_internals
from weft.errors import ContractError
from weft.tensors.nested import tensors
from weft.tensors.remote_parameter import empty_elsewhere

_NAME = "_weft_name"


class _StreamedPlaceholder(nn.Parameter):
    """A parameter without values; its shape, dtype and the like may be asked for."""

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer questions, and raise for the rest."""
        given = list(tensors((args, kwargs)))
        name = next(vars(one)[_NAME] for one in given if isinstance(one, cls))
        if all(isinstance(one, cls) for one in given):
            with torch_internals.without_subclasses():
                result = func(*args, **(kwargs or {}))
            if func is torch.Tensor.detach:  # for `state_dict`
                return _named(result, name)
            if func is torch.Tensor.requires_grad_ or not list(tensors(result)):
                return result
        asked: Any = getattr(func, "__self__", func) if func.__name__ == "__get__" else func
        raise ContractError(
            f"place: {name} is read while the part that streams it is not called",
            found=f"{asked.__name__} by the module around it, or a call of something inside the part",
            expected="parts that are called: their parameters have values only during the call",
            fix=f'weft.weights.plan_placement(..., keep="{name.rpartition(".")[0]}"); or weft.undo(model, ctx)  '
            "# and weft.load_weights, if it was on meta",
        )


def stand_in(parameter: torch.Tensor, name: str) -> nn.Parameter:
    """A parameter that stands for one which is streamed.

    Args:
        parameter: That one.
        name: In the module, for the error.
    """
    return _named(empty_elsewhere(parameter), name)


def _named(tensor: Any, name: str) -> nn.Parameter:
    tensor.__class__ = _StreamedPlaceholder
    vars(tensor)[_NAME] = name
    made: nn.Parameter = tensor
    return made
