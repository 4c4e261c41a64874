"""Parameters that are put in place before the call of a part, and taken out after it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from weft import torch_internals
from weft.engines.torch.device.prefetch import move
from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.engines.torch.streaming.slots import Fill, Slots, Wanted
from weft.errors import ContractError
from weft.tensors.nested import tensors


class StreamedTensor(NamedTuple):
    """A parameter of a part that is streamed.

    Attributes:
        owners: The modules that have it, and its name there.
        stand_in: What they have between calls: on meta, of its shape and dtype.
        source: Where its values are.
    """

    owners: tuple[tuple[nn.Module, str], ...]
    stand_in: nn.Parameter
    source: Any


class StreamedPart(NamedTuple):
    """A part whose parameters have memory only while it is called.

    Attributes:
        name: In the module.
        module: Itself.
        tensors: Its parameters, each once.
    """

    name: str
    module: nn.Module
    tensors: tuple[StreamedTensor, ...]


class StreamOptions(NamedTuple):
    """What is streamed where, and what else is done to a module whose parts lie in several places.

    Attributes:
        parts: What is streamed, in the order in which it is probably called.
        device: Where these parts compute.
        room: Bytes there.
        ahead: Whether the next part is read while one computes.
        devices: Parts, and the devices to which what they are given is brought; for several devices.
        refusing: Modules whose tensors may not be moved or replaced.
        refuse: Called in place of their methods for that, and of those that copy what is streamed; raises.
    """

    parts: tuple[StreamedPart, ...]
    device: torch.device
    room: int
    ahead: bool
    devices: tuple[tuple[nn.Module, torch.device], ...]
    refusing: tuple[nn.Module, ...]
    refuse: Callable[..., NoReturn]


class Streamed:
    """Hooks that stream parts, and bring what parts are given to their devices."""

    def __init__(self, options: StreamOptions, fill: Fill) -> None:
        """Attach the hooks.

        Args:
            options: Which.
            fill: Fills tensors from the sources of `StreamedTensor`.
        """
        parts = self._parts = options.parts
        wanted = [[Wanted(t.source, tuple(t.stand_in.shape), t.stand_in.dtype) for t in part.tensors] for part in parts]
        self._slots = Slots(wanted, options.device, options.room, fill, ahead=options.ahead) if parts else None
        self._turn = threading.Lock()  # held while a part has values: calls from several threads take turns
        self._thread: int | None = None
        self._removable = Removable()
        for module, device in options.devices:
            attach(module, self._removable, before=partial(_bring, device), first=True)
        for index, part in enumerate(parts):
            attach(part.module, self._removable, before=partial(self._enter, index), first=True)
            attach(part.module, self._removable, after=partial(self._leave, index), always=True)
            attach(part.module, self._removable, around=options.refuse, methods=("__reduce_ex__",))
        refused = (torch_internals.APPLY.name, "load_state_dict")
        for module in options.refusing:
            attach(module, self._removable, around=options.refuse, methods=refused)

    def undo(self) -> None:
        """Take the hooks off, and let go of the memory."""
        self._removable.remove()
        if self._slots is not None:
            self._slots.close()

    def _enter(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        part, slots = self._parts[index], self._slots
        assert slots is not None
        if self._thread == threading.get_ident() and slots.in_use is not None:
            raise ContractError(
                f"place: {part.name} is called while {self._parts[slots.in_use].name} computes",
                found="two streamed parts, one called inside the other",
                expected="parts that are called one after the other",
                fix=f'weft.weights.plan_placement(model, budgets, keep="{part.name}")',
            )
        if torch.is_grad_enabled() and _has_gradients(part, (args, kwargs)):
            raise ContractError(
                f"place: {part.name} is streamed, and its call would be part of a backward pass",
                found="gradients are enabled, and a parameter or an input requires them",
                expected="calls without gradients: parameters are freed before a backward pass could use them",
                fix="with torch.no_grad(): ...  # to train: weft.zero_partition(..., engine='deepspeed', offload=...)",
            )
        if torch.compiler.is_exporting():
            raise ContractError(
                f"place: {part.name} is streamed, and cannot be exported",
                found="torch.export of a placed module",
                expected="a module that has its values",
                fix="model, ctx = weft.undo(model, ctx)  # and weft.load_weights(model, path, ctx), if it was on meta",
            )
        self._turn.acquire()
        # torch chooses by `requires_grad` how it multiplies, also without gradients; no tensor made in inference mode
        # has it.
        with torch.inference_mode(mode=False), torch.no_grad():
            try:
                entered = slots.enter(index)
            except BaseException:
                self._turn.release()
                raise
            self._thread = threading.get_ident()
            for tensor, values in zip(part.tensors, entered, strict=True):
                parameter = nn.Parameter(values, tensor.stand_in.requires_grad)
                for owner, name in tensor.owners:
                    setattr(owner, name, parameter)

    def _leave(self, index: int, *_: Any) -> None:
        if self._slots is None or self._slots.in_use != index or self._thread != threading.get_ident():
            return  # its call failed before it began
        for tensor in self._parts[index].tensors:
            for owner, name in tensor.owners:
                setattr(owner, name, tensor.stand_in)
        self._thread = None
        try:
            self._slots.leave()
        finally:
            self._turn.release()


def _has_gradients(part: StreamedPart, inputs: Any) -> bool:
    given = (*(tensor.stand_in for tensor in part.tensors), *tensors(inputs))
    return any(tensor.requires_grad for tensor in given)


def _bring(device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return move(args, device, non_blocking=True), move(kwargs, device, non_blocking=True)
