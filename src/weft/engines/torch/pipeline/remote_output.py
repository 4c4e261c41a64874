"""A tensor that is computed on another rank: it has a shape, a dtype and a device, and no values.

It stands for what other stages of a pipeline compute when the forward of the whole module runs on one of them. What
is computed from it is elsewhere, too. A layer of this rank that is given one would compute with nothing, which is
an error; so is a read of its values.
"""

from __future__ import annotations

from typing import Any

import torch

from weft import torch_internals
from weft.errors import ContractError
from weft.tensors.nested import tensors

# Results that depend on nothing but a shape, a dtype and a device: they are real.
_MADE = frozenset(
    ("new_empty", "new_zeros", "new_ones", "new_full", "empty_like", "zeros_like", "ones_like", "full_like")
)


class RemoteOutput(torch.Tensor):
    """Such a tensor.

    Attributes:
        any_shape: Whether its shape is a guess: operations that it does not fit give another one like it.
    """

    any_shape: bool

    @staticmethod
    def like(tensor: torch.Tensor, device: torch.device | None = None, *, any_shape: bool = False) -> RemoteOutput:
        """One of the same shape, dtype and device."""
        made: RemoteOutput = torch_internals.make_subclass(
            RemoteOutput, tensor.shape, strides=tensor.stride(), dtype=tensor.dtype, device=device or tensor.device
        )
        made.any_shape = any_shape
        return made

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"RemoteOutput({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        tree = torch_internals.tree.found
        given = [one for one in tree.tree_leaves((args, kwargs)) if isinstance(one, cls)]
        device, any_shape = given[0].device, any(one.any_shape for one in given)

        def on_meta(value: Any) -> Any:
            return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value

        def real(value: Any) -> Any:
            return (
                torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
                if isinstance(value, cls)
                else value
            )

        if torch_internals.schema.of(func).name.partition("::")[2] in _MADE:
            return func(*tree.tree_map(real, args), **tree.tree_map(real, kwargs or {}))
        try:
            found = func(*tree.tree_map(on_meta, args), **tree.tree_map(on_meta, kwargs or {}))
        except (NotImplementedError, RuntimeError) as error:
            if any_shape:
                return cls.like(given[0], device, any_shape=True)
            raise ContractError(
                f"pipeline: {func} needs values that another stage computes",
                found=f"a tensor of shape {tuple(given[0].shape)} without values",
                expected="between the layers of a module only what does not depend on values of other stages",
                fix="the operation in the forward of a layer, which one rank computes",
            ) from error
        if torch_internals.schema.of(func).is_mutable:
            return args[0]

        def elsewhere(value: Any) -> Any:
            return cls.like(value, device, any_shape=any_shape) if isinstance(value, torch.Tensor) else value

        return tree.tree_map(elsewhere, found)


def has_remote(value: Any) -> bool:
    """Whether a nested value holds such a tensor."""
    return any(isinstance(one, RemoteOutput) for one in tensors(value))
