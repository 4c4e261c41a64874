"""Notice `parameter.data = ...` of a DTensor, which changes nothing that is computed.

A DTensor is a tensor without memory that has this rank's part as an attribute. Assigning `.data` exchanges the memory
that it does not have, and leaves the part; `Module.to` and the like exchange both.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from weft import torch_internals
from weft.errors import ContractError, listed


class AssignedData:
    """The memory and the parts of parameters as they were when they were last looked at."""

    def __init__(self, what: str, class_name: str) -> None:
        self._what = what
        self._class_name = class_name
        # A weak reference to the part: a strategy that comes later may have replaced it.
        self._known: dict[str, tuple[Any, weakref.ref[torch.Tensor]]] = {}

    def look(self, named: Iterable[tuple[str, Any]]) -> None:
        """Raise if `.data` of one of these parameters was assigned since; others are looked at for the first time.

        Raises:
            ContractError: It was.
        """
        changed = []
        address = torch_internals.STORAGE_ADDRESS.of
        with torch_internals.without_subclasses():  # which makes it twice as fast
            for name, parameter in named:
                now, local = parameter.untyped_storage(), torch_internals.DTENSOR_PART.of(parameter)
                storage, part = self._known.get(name) or (None, None)
                if storage is not None and part is not None and part() is local:
                    if address(now) != address(storage):
                        changed.append(name)
                elif isinstance(parameter, nn.Parameter):  # no other one that functional_call has put there
                    self._known[name] = now, weakref.ref(local)
        if changed:
            raise ContractError(
                f"{self._what}: .data of sharded parameters of {self._class_name} was assigned, which changes nothing",
                found=f"{listed(changed)}: p.data = ..., or torch.nn.utils.vector_to_parameters",
                expected="values that are written into the parameters, of which each rank has a part",
                fix="with torch.no_grad(): p.copy_(p * 0.5); whole tensors: "
                "with weft.full_params(model, ctx, write=True), torch.no_grad(): p.copy_(...)",
            )
