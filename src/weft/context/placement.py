"""Bring batches, modules and optimizers to the context's device."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn

from weft.context import DistContext
from weft.engines import Spmd
from weft.engines.results import Undoable
from weft.errors import listed, value_error
from weft.tensors.quantized import keep_order
from weft.tensors.remote_parameter import is_elsewhere

T = TypeVar("T")


def to_device(value: T, ctx: DistContext, *, skip_keys: Collection[str] = ()) -> T:
    """Put a nested value, a module or an optimizer's state on the device of the context.

    Changes: modules and optimizers in place, so an optimizer's parameters stay the module's; a
    batch is rebuilt, with its container types kept and other leaves (strings, numbers) untouched.
    Collectives: none.

    Args:
        value: A nested value as in `weft.tensors.nested`, an `nn.Module` or an `Optimizer`.
        ctx: Where to.
        skip_keys: Mapping keys whose values stay where they are.

    Returns:
        `value` itself if nothing had to move.

    Raises:
        ValueError: A module lies on several devices, on another accelerator, or on meta.

    Example:
        >>> import weft
        >>> to_device({"x": torch.ones(1), "name": "a"}, weft.local())
        {'x': tensor([1.]), 'name': 'a'}
    """
    if isinstance(value, nn.Module):
        place_module("to_device", value, ctx)
        return value
    if isinstance(value, torch.optim.Optimizer):
        _place_optimizer(value, ctx)
        return value
    moved: T = ctx.engine.move(value, ctx.device, skip=frozenset(skip_keys))
    return moved


def place_module(what: str, module: nn.Module, ctx: DistContext) -> None:
    """Move a module from the CPU to `ctx.device`, in a form that can be trained; raise if it lies anywhere else.

    Raises:
        ValueError: The text names the tensors and the devices.
    """
    check_place(what, module, ctx)
    if any(not _same(tensor.device, ctx.device) for _, tensor in _named_tensors(module)):
        ctx.engine.place(module, ctx.device)
    keep_order(module)


def check_place(what: str, module: nn.Module, ctx: DistContext) -> None:
    """Raise if `place_module` would; changes nothing.

    Raises:
        ValueError: The text names the tensors and the devices.
    """
    named = _named_tensors(module)
    devices = {tensor.device for _, tensor in named}
    if not all(_same(device, ctx.device) for device in devices) and devices != {torch.device("cpu")}:
        strange = [f"{name} on {tensor.device}" for name, tensor in named if not _same(tensor.device, ctx.device)]
        meta = torch.device("meta") in devices
        raise value_error(
            f"{what}: {type(module).__name__} is not on {ctx.device}",
            found=listed(strange),
            expected=f"all parameters and buffers on {ctx.device}, or all on the CPU",
            fix="build the module on a real device" if meta else f'module.to("{ctx.device}")',
        )
    double = [name for name, tensor in named if tensor.dtype in (torch.float64, torch.complex128)]
    if double and ctx.device.type == "mps":
        raise value_error(
            f"{what}: mps has no float64",
            found=listed(double),
            expected="float32, float16 or bfloat16 parameters and buffers on mps",
            fix="module.float()",
        )


def _named_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    named = [*module.named_parameters(), *module.named_buffers()]
    return [(name, tensor) for name, tensor in named if not is_elsewhere(tensor)]


def _same(device: torch.device, wanted: torch.device) -> bool:
    return device.type == wanted.type and (wanted.index is None or device.index in (None, wanted.index))


def _place_optimizer(optimizer: torch.optim.Optimizer, ctx: DistContext) -> None:
    strange = [
        f"group {index}: a parameter of shape {tuple(p.shape)} on {p.device}"
        for index, entry in enumerate(optimizer.param_groups)
        for p in entry["params"]
        if not _same(p.device, ctx.device)
    ]
    if strange:
        raise value_error(
            f"to_device: the optimizer's parameters are not on {ctx.device}",
            found=listed(strange),
            expected="the parameters of a module that was brought to the device",
            fix="module = weft.to_device(module, ctx)  # before the optimizer",
        )
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            # A 0-d step counter may stay on the CPU: torch keeps it there on purpose.
            if isinstance(value, torch.Tensor) and value.dim() > 0 and not _same(value.device, ctx.device):
                state[key] = value.to(parameter.device)


# -- devices whose memory cannot be written in place, see `weft.engines.Spmd` ------------------------------


def value_device(ctx: DistContext) -> torch.device:
    """Where values are made that are then brought to the device of a context: there, or on the CPU."""
    return torch.device("cpu") if isinstance(ctx.engine, Spmd) else ctx.device


def readable(tensors: dict[str, torch.Tensor], ctx: DistContext) -> dict[str, torch.Tensor]:
    """Tensors whose bytes can be copied, one by one, to the memory of the CPU."""
    return ctx.engine.fetch(tensors) if isinstance(ctx.engine, Spmd) else tensors


def values_replaced(objects: Iterable[object], ctx: DistContext) -> None:
    """Let the engine know that values of modules and optimizers were put in place."""
    if isinstance(ctx.engine, Spmd):
        ctx.engine.values_replaced(objects)


def apply_layout(module: nn.Module, ctx: DistContext, axes: Sequence[str], cut: str) -> Undoable | None:
    """Divide a module among the devices of this one rank, "no", "state" or "all" of it; None if it has one device."""
    return ctx.engine.apply_layout(module, axes, cut) if isinstance(ctx.engine, Spmd) else None


def check_ranks_send(what: str, ctx: DistContext, expected: str, *, fix: str) -> None:
    """Raise where what a transform does needs ranks that send tensors to each other, one operation after the other.

    Raises:
        ValueError: One process drives several devices, and compiles a step as a whole.
    """
    if isinstance(ctx.engine, Spmd):
        raise value_error(
            f"{what}: not supported on {ctx.engine.name}",
            found=f"engine {ctx.engine.name!r}, of which one process drives several devices",
            expected=expected,
            fix=fix,
        )
