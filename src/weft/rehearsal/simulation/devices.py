"""Devices by any name are one: where there is no memory, devices are alike.

A script asks for "cuda" by name, on a machine that has none, or whose torch was built without it: autograd ends the
process there when it meets a tensor of such a device. So what is asked for is on the CPU, whatever its name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from weft import torch_internals
from weft.private_names import replaced

_HERE = torch.device("cpu")
_MOVES = (torch.Tensor.cuda, torch.Tensor.xpu)


def with_device_alike(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments of an operation, with the CPU for any other device; tensors on meta stay there."""
    device = kwargs.get("device")
    if device is None or (not isinstance(device, int) and torch.device(device).type in ("cpu", "meta")):
        return kwargs
    return {**kwargs, "device": _HERE}


def placed_alike(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]:
    """A function and its arguments that leave tensors on the CPU where they would move them elsewhere."""
    if func in _MOVES:
        return torch.Tensor.to, (args[0], _HERE), {}
    first = {torch.Tensor.to: 1, torch_internals.parse_to.found: 0}.get(func)
    if first is not None and len(args) > first and isinstance(args[first], (str, int, torch.device)):
        args = (*args[:first], with_device_alike({"device": args[first]})["device"], *args[first + 1 :])
    return func, args, with_device_alike(kwargs)


@contextlib.contextmanager
def autocast_alike() -> Iterator[None]:
    """Let autocast and gradient scalers for any device be those for the CPU."""
    with (
        replaced(torch.autocast, __init__=_on_cpu(torch.autocast.__init__, "device_type")),
        replaced(torch.amp.GradScaler, __init__=_on_cpu(torch.amp.GradScaler.__init__, "device")),
    ):
        yield


def _on_cpu(before: Callable[..., None], name: str) -> Callable[..., None]:
    """Make an object for the CPU, the first argument or `name`, whatever it was meant for."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop(name, None)
        before(self, "cpu", *args[1:], **kwargs)

    return init
