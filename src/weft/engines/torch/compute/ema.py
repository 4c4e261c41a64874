"""Averages of a module's weights, kept by each rank for what it holds: whole tensors or its shards.

Everything happens on local tensors with one kernel per dtype, as in `torch.optim.swa_utils`;
nothing is communicated. Averages of 16-bit weights are kept in float32: (1 - decay) of a difference
is mostly below the last bit of a 16-bit number, and would be lost.

[Note: where FSDP computes] FSDP2 computes with gathered copies and may keep those of the root after
a forward pass. They are dropped before weights are read or written, or the copies would stay as
they were.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from weft import torch_internals
from weft.engines.torch.parts.left_gathered import drop_gathered
from weft.errors import ContractError, listed, value_error
from weft.precision import LOW
from weft.tensors.blocks import cut_as, sharded_as
from weft.tensors.dtensor import is_sharded

Named = dict[str, torch.Tensor]
Buffers = Literal["live", "copy", "average"]


class WeightAverages:
    """One average per trained parameter, and per floating-point buffer if asked; or copies of all buffers."""

    def __init__(self, module: nn.Module, *, buffers: Buffers) -> None:
        self._module = weakref.ref(module)
        self._class_name = type(module).__name__
        self._buffers: Buffers = buffers
        self._values: Named = {}
        self._values = {name: _kept(_local(tensor)) for name, tensor in self.live().items()}

    def live(self) -> Named:
        """The tensors that are averaged, by name, as the module has them now."""
        module = self._module()
        if module is None:
            raise ContractError(
                f"averages: the {self._class_name} is gone",
                found="averages of a module that was deleted",
                expected="a module that exists as long as its averages are used",
                fix="keep the model in a variable",
            )
        drop_gathered(module)
        found: Named = {name: p for name, p in module.named_parameters() if p.requires_grad or name in self._values}
        if self._buffers != "live":
            copies = self._buffers == "copy"
            found |= {n: b for n, b in module.named_buffers() if copies or b.is_floating_point() or b.is_complex()}
        if self._values:
            _check_same(self._class_name, self._values, found)
        return found

    def update(self, weight: float) -> None:
        """Move the averages towards the module by `weight`; 1 makes them equal."""
        live = self.live()
        copied = {n for n, one in live.items() if self._buffers == "copy" and not isinstance(one, nn.Parameter)}
        with torch.no_grad():
            self._write({name: self._values[name] for name in copied}, live)
            for kept, now in _by_kind({n: one for n, one in self._values.items() if n not in copied}, live):
                if weight == 1:
                    torch_internals.foreach_copy(kept, now)
                else:
                    same = [n if n.dtype == k.dtype else n.to(k.dtype) for k, n in zip(kept, now, strict=True)]
                    torch_internals.foreach_lerp(kept, same, weight)

    def put_in(self) -> Named:
        """Write the averages into the module; returns what to give `put_back`."""
        live = self.live()
        before = {name: _local(tensor).clone() for name, tensor in live.items()}
        self._write(live, self._values)
        return before

    def put_back(self, before: Named) -> None:
        """Write what `put_in` returned into the module."""
        self._write(self.live(), before)

    def copy_to(self, other: nn.Module) -> None:
        """Write the averages into another module with the same names, shapes and shards."""
        drop_gathered(other)
        targets: Named = {**dict(other.named_parameters()), **dict(other.named_buffers())}
        live = self.live()
        differences = {name: _differs(own, targets.get(name)) for name, own in live.items()}
        wrong = [f"{name}: {why}" for name, why in differences.items() if why]
        if wrong:
            raise value_error(
                f"copy_to: this {type(other).__name__} has different weights than the {self._class_name}",
                found=listed(wrong),
                expected="the same names, shapes and shards",
                fix="averages.copy_to(model)  # or: with averages.swapped(): model.state_dict()",
            )
        self._write({name: targets[name] for name in live}, self._values)

    def _write(self, targets: Named, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for goals, sources in _by_kind({name: _local(t) for name, t in targets.items()}, values):
                torch_internals.foreach_copy(goals, sources)
        torch.clear_autocast_cache()  # an autocast around all this keeps casts of the old values

    # -- as a state ------------------------------------------------------------------------------

    def tensors(self) -> Named:
        """The averages by name; DTensors like those of the module where it has such."""
        return {name: sharded_as(self._values[name], tensor) for name, tensor in self.live().items()}

    def load(self, given: Mapping[str, Any]) -> None:
        """Take averages over; all or none."""
        live = self.live()
        missing, strange = [n for n in live if n not in given], [n for n in given if n not in live]
        wrong = [f"{name} is missing" for name in missing] + [f"{name} is unknown" for name in strange]
        wrong += [f"{n}: {_refused(t, given[n])}" for n, t in live.items() if n in given and _refused(t, given[n])]
        if wrong:
            raise value_error(
                f"load_state_dict: these are not averages of this {self._class_name}",
                found=listed(wrong),
                expected="the names and shapes of the module's trained parameters, either full or sharded as they are",
                fix="averages.load_state_dict(saved)  # from averages.state_dict() of the same model",
            )
        parts = {name: _part_like(given[name], tensor) for name, tensor in live.items()}
        with torch.no_grad():
            for name, part in parts.items():
                self._values[name].copy_(part)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, in the same memory, without a graph."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():  # a detach is ten times the work on a DTensor
        return tensor.to_local()


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to(torch.float32 if tensor.dtype in LOW else tensor.dtype, copy=True)


def _by_kind(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Local tensors of both, sorted by device and the dtypes of both: one kernel each."""
    kinds: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for name, one in first.items():
        two = _local(second[name])
        ones, twos = kinds.setdefault((one.device, one.dtype, two.dtype), ([], []))
        ones.append(one)
        twos.append(two)
    return list(kinds.values())


def _check_same(class_name: str, values: Named, live: Named) -> None:
    """Raise if the module no longer has the tensors whose averages are kept."""
    wrong = [f"{name} is gone" for name in values if name not in live]
    wrong += [f"{name} is new" for name in live if name not in values]
    wrong += [
        f"{name} had {tuple(value.shape)} on this rank, has {tuple(_local(live[name]).shape)}"
        for name, value in values.items()
        if name in live and _local(live[name]).shape != value.shape
    ]
    if wrong:
        raise ContractError(
            f"averages: other parameters of {class_name} are trained now, or they have other shapes",
            found=listed(wrong),
            expected="requires_grad_, parametrizations and sharding before average_weights",
            fix="model, ctx = weft.average_weights(model, ctx)  "
            "# as the last transform of the model; or weft.undo before it",
        )


def _differs(own: torch.Tensor, other: torch.Tensor | None) -> str:
    """What keeps the value of `own` from being written to `other`; "" if nothing does."""
    if other is None:
        return "missing"
    if own.shape != other.shape:
        return f"{tuple(other.shape)} instead of {tuple(own.shape)}"
    if _layout(own) != _layout(other):
        return f"{_layout(other)} instead of {_layout(own)}"
    return ""


def _layout(tensor: Any) -> str:
    return f"{tensor.placements} on {tensor.device_mesh}" if is_sharded(tensor) else "whole"


def _refused(own: torch.Tensor, given: object) -> str:
    if not isinstance(given, torch.Tensor):
        return f"a {type(given).__name__}"
    if is_sharded(own) and not is_sharded(given) and own.shape == given.shape:
        return ""
    return _differs(own, given)


def _part_like(given: torch.Tensor, tensor: Any) -> torch.Tensor:
    """This rank's part of `given`, which is whole or cut like `tensor`."""
    if not is_sharded(tensor) or is_sharded(given):
        return _local(given)
    return _local(cut_as(given, tensor))  # every rank has the whole tensor: each takes its part, none sends
