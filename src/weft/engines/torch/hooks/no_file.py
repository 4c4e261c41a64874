"""Let a part of a tensor raise where it is pickled: another rank's part would be missing in the file."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from weft.errors import ContractError
from weft.tensors.dtensor import is_sharded

__all__ = ["refuse_file"]


def refuse_file(what: str, whose: str, name: str, tensor: object) -> None:
    """Let `torch.save` and pickle of a tensor raise if this rank holds a part of it.

    Args:
        what: Name of the strategy.
        whose: State it belongs to.
        name: Of the tensor.
        tensor: Anything else is passed over.
    """
    if isinstance(tensor, torch.Tensor) and is_sharded(tensor):
        vars(tensor)["weft_part"] = _NoFile(what, whose, name, tensor.shape)


class _NoFile:
    """Goes with a shard in a state_dict, and comes up when it is pickled."""

    def __init__(self, what: str, whose: str, name: str, shape: torch.Size) -> None:
        self._what = what
        self._whose = whose
        self._name = name
        self._shape = tuple(shape)

    def __deepcopy__(self, memo: dict[int, Any]) -> _NoFile:
        return self

    def __reduce__(self) -> NoReturn:
        raise ContractError(
            f"{self._what}: the state_dict of {self._whose} cannot be pickled",
            found=f"torch.save or pickle of {self._name} {list(self._shape)}, of which this rank holds only a shard",
            expected="all ranks save their parts, or the weights are made whole",
            fix="weft.save(state, directory, step, ctx); weft.export(path, folder)  # safetensors; or on all ranks:\n"
            "            with weft.full_params(model, ctx): ...",
        )
