"""Where weights go: the tensors of a module under all their names, and memory for those on meta."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from weft import torch_internals
from weft.checkpoint.format.tensor_blocks import check_memory
from weft.checkpoint.state.collect import is_extra, plain_name
from weft.checks import check_module, check_not_lazy
from weft.context import DistContext
from weft.context.placement import value_device, values_replaced
from weft.errors import CheckpointError, listed, type_error
from weft.sharding.meta import draw_values, draws, own_tensors, tensor_slots
from weft.tensors.dtensor import is_fsdp_unit, is_sharded
from weft.tensors.quantized import quantization_state
from weft.tensors.remote_parameter import is_elsewhere


class Target(NamedTuple):
    """A parameter or buffer, and its names in `state_dict`: several if it is tied.

    Attributes:
        names: In the module.
        tensor: Itself; or what stands for a parameter whose values lie elsewhere.
        parameter: The id of the tensor in the module.
    """

    names: tuple[str, ...]
    tensor: torch.Tensor
    parameter: int


def targets(module: nn.Module, elsewhere: Mapping[int, torch.Tensor], *, what: str = "load_weights") -> list[Target]:
    """What weights can be loaded into, in the order of `state_dict`.

    Args:
        module: Whose.
        elsewhere: Of `kept_shards`.
        what: The function that asks, for errors.

    Raises:
        TypeError: Not a module, or `state_dict` has something that is no parameter or buffer.
        ValueError: A parameter has no shape yet.
    """
    check_module(what, module, fix='weft.load_weights(model, "model.safetensors", ctx)')
    state = module.state_dict(keep_vars=True)  # first: FSDP2 puts its shards in place for it
    held = {id(tensor) for kind in (module.parameters(), module.buffers()) for tensor in kind}
    scales = quantization_state(module)
    assign = ", assign=True" if any(p.is_meta for p in module.parameters()) else ""
    found: dict[int, tuple[list[str], Any]] = {id(value): ([plain_name(name)], value) for name, value in scales.items()}
    for name, value in state.items():
        if id(value) in held:
            found.setdefault(id(value), ([], value))[0].append(plain_name(name))
        elif name not in scales and not is_extra(name):
            raise type_error(
                f"{what}: {name} cannot be loaded",
                found=f"{type(value).__name__} in state_dict(), no parameter or buffer of the module",
                expected="parameters and buffers",
                fix=f"model.load_state_dict(weft.weights.read(path){assign})",
            )
    check_not_lazy(what, module)
    for names, value in found.values():
        check_memory(what, names[0], value)
    return [Target(tuple(names), elsewhere.get(one, value), one) for one, (names, value) in found.items()]


def waits_for_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on meta, and not because another rank has it."""
    return tensor.is_meta and not is_elsewhere(tensor)


class TargetMemory:
    """Memory for the tensors of a module on meta, and what draws those that no file has; all can be undone.

    Attributes:
        drawn: The tensors on meta that are not given.

    Raises:
        CheckpointError: Something would have no value; the text names it.
    """

    def __init__(
        self, module: nn.Module, ctx: DistContext, given: Collection[int], dtypes: Mapping[int, torch.dtype]
    ) -> None:
        self._module = module
        self._ctx = ctx
        self._dtypes = dtypes
        self._real: dict[int, torch.Tensor] = {}
        self._before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        unknown = [
            (name, part, own, tensor)
            for name, part in module.named_modules()
            for own, tensor in own_tensors(part)
            if waits_for_values(tensor) and id(tensor) not in given
        ]
        self.drawn = list({id(tensor): tensor for *_, tensor in unknown}.values())
        self._drawing = {name: part for name, part, *_ in unknown}
        lost = [f"{name}.{own}".lstrip(".") for name, part, own, _ in unknown if not _can_draw(part)]
        if lost:
            raise CheckpointError(
                "load_weights: tensors on meta would have no value",
                found=listed(lost),
                expected="each in the file; or, as for buffers that are not saved, in a part whose "
                "reset_parameters() makes it, with nothing in it that is sharded or has values already",
                fix="with weft.weights.on_meta(): model = ...  # its buffers are real; or add reset_parameters()",
            )

    def take(self) -> None:
        """Put real tensors in the place of those on meta, and draw what no file has."""
        for part in self._module.modules():
            for kind, name, tensor in tensor_slots(part):
                if waits_for_values(tensor):
                    self._before.append((kind, name, tensor))
                    kind[name] = self._made(tensor)
        for name, part in self._drawing.items():
            draw_values(part, name, self._ctx)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The real tensor that stands in the place of one on meta; any other by itself."""
        return self._real.get(id(tensor), tensor)

    def undo(self) -> None:
        """Put the tensors on meta back."""
        for kind, name, tensor in self._before:
            kind[name] = tensor

    def settle(self) -> None:
        """Bring what had values beside tensors on meta, such as buffers, to their device; tell FSDP2 of shards."""
        device = self._ctx.device
        if value_device(self._ctx) != device:
            if self._real:
                self._ctx.engine.place(self._module, device)
            values_replaced([self._module], self._ctx)
            return
        for tensor in (*self._module.parameters(), *self._module.buffers()) if self._real else ():
            if not is_sharded(tensor) and tensor.device.type == "cpu" != device.type:
                tensor.data = tensor.data.to(device)
        if self._real and any(map(is_fsdp_unit, self._module.modules())):
            torch_internals.APPLY.of(self._module)(lambda tensor: tensor)

    def _made(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._real:
            dtype = self._dtypes.get(id(tensor), tensor.dtype)
            values = torch.empty_like(tensor, dtype=dtype, device=value_device(self._ctx))
            self._real[id(tensor)] = in_place_of(tensor, values)
        return self._real[id(tensor)]


def _can_draw(part: nn.Module) -> bool:
    """Whether `reset_parameters` of a part is there, and changes nothing that has a value or is cut."""
    return draws(part) and all(tensor.is_meta and not is_sharded(tensor) for _, tensor in own_tensors(part))


def in_place_of(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Values as what stands for a tensor: a parameter for a parameter, with its attributes."""
    made = nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values
    vars(made).update(vars(tensor))
    return made
