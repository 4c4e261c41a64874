"""Parameters, which have no values in a simulation, and lazy ones, whose shape is not known yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from weft import torch_internals
from weft.private_names import replaced
from weft.rehearsal.simulation.devices import with_device_alike


@contextlib.contextmanager
def parameters_without_values(fake: Any) -> Iterator[None]:
    """Let parameters have no values in a mode of fake tensors: strategies replace their memory.

    They have none from the start: whoever keeps one that was just made, such as an optimizer, has that of the module.
    """
    known: Any = WeakTensorKeyDictionary()
    make: Any = nn.Parameter.__new__

    def has_values(parameter: Any) -> bool:
        is_here = torch_internals.active_fake_mode() is fake  # not in what is imported meanwhile
        return is_here and type(parameter) is nn.Parameter and parameter.device.type != "meta"

    def made(cls: type[nn.Parameter], data: Any = None, requires_grad: bool = True) -> Any:
        new = make(cls, data, requires_grad)
        return fake.from_tensor(new) if has_values(new) else new

    def register(module: nn.Module, name: str, parameter: Any) -> Any:
        """One that was made elsewhere is another one here."""
        if not has_values(parameter):
            return None
        if parameter not in known:
            known[parameter] = fake.from_tensor(parameter)
        return known[parameter]

    with (
        register_module_parameter_registration_hook(register),
        replaced(nn.Parameter, __new__=made),
        _of_fake_tensors(nn.UninitializedParameter),
        _of_fake_tensors(nn.UninitializedBuffer),
    ):
        yield


def _of_fake_tensors(lazy: Any) -> AbstractContextManager[None]:
    """Let what stands for a tensor without a shape be made as ever, and become a fake one, of another class."""
    make = lazy.__new__

    def made(cls: Any, *args: Any, **kwargs: Any) -> Any:
        with torch_internals.without_modes():
            return make(cls, *args, **with_device_alike(kwargs))

    return replaced(lazy, __new__=made, materialize=_materialize)


def _materialize(lazy: Any, shape: Any, device: Any = None, dtype: torch.dtype | None = None) -> None:
    """Be the tensor of this shape from now on."""
    made: Any = torch.empty(shape, device=device or lazy.data.device, dtype=dtype or lazy.data.dtype)
    made = nn.Parameter(made, lazy.requires_grad) if isinstance(lazy, nn.Parameter) else made
    vars(made).update(vars(lazy))
    torch.utils.swap_tensors(lazy, made)
