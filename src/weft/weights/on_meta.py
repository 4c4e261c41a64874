"""`on_meta`: build a module without memory for its parameters.

[Note: memory that is given back] A parameter has memory between its creation and the moment when its module gets it.
Memory from `malloc` leaves a hole that the next parameter, aligned, does not fit into: 800 MB of parameters grew the
data segment by 800 MB, which counts under `ulimit -d`. So large uninitialized tensors get pages of their own.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from weft.weights.targets import in_place_of

_LARGE = 2**20  # bytes of a tensor that gets pages of its own


@contextlib.contextmanager
def on_meta(*, buffers: bool = False) -> Iterator[None]:
    """Put the parameters of modules that are built inside the body on meta; buffers are real.

    For models that are larger than the memory: build them here, then `weft.place`, or a strategy with
    `weft.load_weights`. Each parameter goes to meta when its module gets it, so that at most one has memory at a time.
    Under `torch.device("meta")` buffers have no values either, and what no file holds, as the frequencies of rotary
    embeddings, would be lost.

    Source: the hooks are torch's `register_module_parameter_registration_hook` and
    `register_module_buffer_registration_hook`.

    Changes: parameters that modules get in this thread while the body runs; tied ones stay tied, classes and
    `requires_grad` stay. Collectives: none.

    Args:
        buffers: Put buffers on meta as well.

    Yields:
        Nothing. It also decorates a function that builds a module.

    Raises:
        RuntimeError: Code in the body needs the value of a parameter, which it has not.

    Example:
        >>> with on_meta():
        ...     model = nn.Sequential(nn.Linear(20_000, 20_000), nn.BatchNorm1d(20_000))
        >>> model[0].weight.is_meta, model[1].running_var.is_meta
        (True, False)
    """
    thread = threading.get_ident()
    made: dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor]] = {}

    def moved(module: nn.Module, name: str, tensor: torch.Tensor | None) -> Any:
        if threading.get_ident() != thread or tensor is None or tensor.is_meta:
            return None
        if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
            return None
        known = made.get(id(tensor))
        if known is None or known[0]() is not tensor:  # the memory of an earlier one may have been used again
            known = made[id(tensor)] = weakref.ref(tensor), _without_memory(tensor)
        return known[1]

    with contextlib.ExitStack() as hooks:
        hooks.callback(register_module_parameter_registration_hook(moved).remove)
        if buffers:
            hooks.callback(register_module_buffer_registration_hook(moved).remove)
        hooks.enter_context(_OwnPages())
        yield


class _OwnPages(TorchFunctionMode):
    """Large tensors of `torch.empty` on the CPU have pages of their own; see [Note: memory that is given back]."""

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        kwargs = kwargs or {}
        if func is not torch.empty or not kwargs.keys() <= {"size", "dtype", "device", "requires_grad"}:
            return func(*args, **kwargs)
        device = torch.get_default_device() if kwargs.get("device") is None else torch.device(kwargs["device"])
        planned = func(*args, **(kwargs | {"device": "meta"}))
        if type(planned) is not torch.Tensor or device.type != "cpu" or planned.nbytes < _LARGE:
            return func(*args, **kwargs)  # also for fake tensors, which have no memory
        values = torch.frombuffer(mmap.mmap(-1, planned.nbytes), dtype=planned.dtype).view(planned.shape)
        return values.requires_grad_(planned.requires_grad)


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    made: Any = in_place_of(tensor, torch.empty_like(tensor.detach(), device="meta"))
    made.__class__ = type(tensor)
    return cast("torch.Tensor", made)
