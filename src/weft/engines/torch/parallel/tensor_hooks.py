"""What moves around the calls of parts: an argument that is gathered once, a sequence that is cut and joined.

And what moves around layers that torch's styles do not know.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from typing_extensions import override

from weft import torch_internals
from weft.errors import value_error
from weft.private_names import Attribute
from weft.tensors.blocks import as_dtensor

_HOOKS = MappingProxyType(
    {
        torch_internals.FORWARD_PRE_HOOKS: torch_internals.FORWARD_PRE_HOOKS_WITH_KWARGS,
        torch_internals.FORWARD_HOOKS: torch_internals.FORWARD_HOOKS_WITH_KWARGS,
    }
)
_Known = list[tuple[nn.Module, Attribute, set[int]]]


def gather_argument(mesh: DeviceMesh, arrives: Placement) -> Callable[..., Any]:
    """A hook that makes the first tensor among the arguments a DTensor, whole on every rank.

    All layers that take it then have one message in forward, and one in backward, instead of one each.
    """
    return _of_argument(lambda x: moved(x, mesh, arrives, Replicate()))


def cut_sequence(mesh: DeviceMesh, name: str) -> Callable[..., Any]:
    """A hook that lets this rank continue with its part of the sequence."""

    def cut(x: torch.Tensor) -> Any:
        if x.dim() < 3 or x.shape[1] % mesh.size():
            raise value_error(
                f"tensor_parallel: a sequence that cannot be cut came to {name}",
                found=f"shape {tuple(x.shape)}, {mesh.size()} ranks",
                expected="(batch, length, features), and a length that is divisible by the ranks",
                fix="pad the batch, or weft.tensor_parallel(..., sequence=False)",
            )
        return moved(x, mesh, Replicate(), Shard(1)).to_local()

    return _of_argument(cut)


def whole_sequence(mesh: DeviceMesh) -> Callable[..., Any]:
    """A hook before a part that needs the whole sequence; `own_part` is the one after it."""
    return _of_argument(lambda x: moved(x, mesh, Shard(1), Replicate()).to_local())


def own_part(mesh: DeviceMesh) -> Callable[..., Any]:
    """A hook that leaves this rank's part of a sequence."""
    return _of_output(lambda x: moved(x, mesh, Replicate(), Shard(1)).to_local())


def join_sequence(mesh: DeviceMesh) -> Callable[..., Any]:
    """A hook that gives every rank the whole sequence again."""
    return _of_output(lambda x: moved(x, mesh, Shard(1), Replicate()).to_local())


def _of_argument(change: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    """A hook that exchanges the first floating-point tensor among the arguments."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for place, value in enumerate(args):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return (*args[:place], change(value), *args[place + 1 :]), kwargs
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                return args, {**kwargs, name: change(value)}
        return args, kwargs

    return before


def _of_output(change: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    return after


class TransposedStyle(ParallelStyle):
    """As `ColwiseParallel` or `RowwiseParallel`, for a layer whose weight is [inputs, outputs].

    Args:
        column: Whether the outputs are divided, or the inputs.
        arrives: How the argument lies, if it is no DTensor.
        leaves: How the outputs lie that are returned.
    """

    def __init__(self, *, column: bool, arrives: Placement, leaves: Placement) -> None:
        super().__init__()
        self._column = column
        self._arrives = arrives
        self._leaves = leaves

    @override
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        bias = Shard(0) if self._column else Replicate()
        takes = Replicate() if self._column else Shard(-1)

        def cut(name: str, part: nn.Module, mesh: DeviceMesh) -> None:
            for own, p in list(part.named_parameters(recurse=False)):
                placement = bias if p.dim() == 1 else Shard(1 if self._column else 0)
                part.register_parameter(own, nn.Parameter(distribute_tensor(p, mesh, [placement], src_data_rank=None)))

        def before(part: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
            return (moved(inputs[0], mesh, self._arrives, takes), *inputs[1:])

        def after(part: nn.Module, output: Any, mesh: DeviceMesh) -> Any:
            return moved(output, mesh, self._leaves, self._leaves).to_local()

        return distribute_module(module, device_mesh, cut, before, after)


def moved(x: Any, mesh: DeviceMesh, arrives: Placement, wanted: Placement) -> Any:
    """A tensor as a DTensor that lies as is wanted; `arrives` says how a plain one lies."""
    if not isinstance(x, DTensor):
        x = as_dtensor(x, mesh, [arrives])
    return x if x.placements == (wanted,) else x.redistribute(placements=[wanted])


def hooks_of(part: nn.Module) -> _Known:
    """The keys of the hooks that a part and those in it have; for `remove_added_hooks`."""
    return [(one, hooks, set(hooks.of(one))) for one in part.modules() for hooks in _HOOKS]


def added_hooks(before: _Known) -> set[int]:
    """The hooks, by id, that were added since."""
    return {id(hook) for part, hooks, known in before for key, hook in hooks.of(part).items() if key not in known}


def run_first(before: _Known) -> None:
    """Let hooks after forward that were added since run first: those of the user see what one process returns."""
    for part, hooks, known in before:
        if hooks is torch_internals.FORWARD_HOOKS:
            for key in reversed([key for key in hooks.of(part) if key not in known]):
                hooks.of(part).move_to_end(key, last=False)


def remove_added_hooks(before: _Known) -> None:
    """Remove the hooks that torch has added since: it has no function for that."""
    for part, hooks, known in before:
        for key in [key for key in hooks.of(part) if key not in known]:
            for each in (hooks, _HOOKS[hooks], torch_internals.FORWARD_HOOKS_ALWAYS):
                each.of(part).pop(key, None)
        part.__dict__.pop(torch_internals.DISTRIBUTED.name, None)
