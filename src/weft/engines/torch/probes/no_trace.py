"""Call a module once more, and leave nothing behind: what its calls change is put back."""

from __future__ import annotations

import contextlib
import copy
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from weft.tensors.dtensor import groups_of, is_fsdp_unit, kept_prefetches, local
from weft.tensors.sequence_order import with_note_of

__all__ = [
    "as_made",
    "attributes_of",
    "copied",
    "hooks_of_user",
    "hooks_off",
    "is_measured",
    "measured",
    "no_trace",
    "quiet_hooks",
    "random_kept",
    "zeros_filled",
]

T = TypeVar("T")
_measured: ContextVar[bool] = ContextVar("measured", default=False)
_SMALL = 0.02
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


@contextlib.contextmanager
def measured() -> Iterator[None]:
    """Around what a probe runs."""
    token = _measured.set(True)
    try:
        yield
    finally:
        _measured.reset(token)


def is_measured() -> bool:
    """Whether a probe runs. Its backward passes compute no block again, which has other parameters by then."""
    return _measured.get()


@contextlib.contextmanager
def no_trace(module: nn.Module) -> Iterator[None]:
    """Put back random states, and what modules hold as plain attributes, also in lists, dicts and sets.

    Parameters and buffers are those of the call; see `torch.func.functional_call`. Inside, tensors that are plain
    attributes are copies.
    """
    attributes = [(part, dict(vars(part))) for part in module.modules()]
    gathered = [group for part in module.modules() if is_fsdp_unit(part) for group in groups_of(part)]
    filled = {id(v): (v, copy.copy(v)) for _, held in attributes for v in held.values() if _can_fill(v)}
    for part, held in attributes:
        vars(part).update({name: value.clone() for name, value in held.items() if isinstance(value, torch.Tensor)})
    try:
        with random_kept(), kept_prefetches(gathered):
            yield
    finally:
        for part, held in attributes:
            vars(part).clear()
            vars(part).update(held)
        for value, before in filled.values():
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(before)


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Put back random states."""
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device: Any = None if present is None else torch.get_device_module(present)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    of_device = None if device is None else device.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        if device is not None:
            device.set_rng_state(of_device)


_Attributes = list[tuple[nn.Module, dict[str, Any]]]


def attributes_of(module: nn.Module) -> _Attributes:
    """What modules hold as plain attributes, but for functions and modules."""
    torch_own = vars(nn.Module()).keys()
    return [
        (part, {n: _copy(v) for n, v in vars(part).items() if n not in torch_own and not callable(v)})
        for part in module.modules()
    ]


@contextlib.contextmanager
def as_made(module: nn.Module, attributes: _Attributes) -> Iterator[None]:
    """A context in which modules hold what they held earlier; see `attributes_of`."""
    with no_trace(module):
        for part, held in attributes:
            vars(part).update({name: _copy(value) for name, value in held.items()})
        yield


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.copy(value) if _can_fill(value) else value


def _can_fill(value: object) -> bool:
    return type(value) in (list, dict, set, deque)


@contextlib.contextmanager
def zeros_filled(module: nn.Module) -> Iterator[None]:
    """Let parameters that are zero, as many are in the beginning, be small numbers: they would hide what they multiply.

    They are equal on ranks that have the same parameter; versions of parameters stay as they are.
    """
    held = [local(p.detach()).data for p in module.parameters() if p.is_floating_point() and not p.is_meta]
    plain = [one for one in held if type(one) is torch.Tensor and one.numel()]
    largest = torch.stack([one.abs().amax().double().cpu() for one in plain]).tolist() if plain else []
    zeros = [(n, one, one.clone()) for n, (one, size) in enumerate(zip(plain, largest, strict=True)) if size == 0]
    try:
        for number, one, _ in zeros:
            drawn = torch.Generator().manual_seed(number)
            one.copy_(torch.randn(one.shape, generator=drawn).mul_(_SMALL))
        yield
    finally:
        for _, one, before in zeros:
            one.copy_(before)


@contextlib.contextmanager
def hooks_off(module: nn.Module, which: Callable[[nn.Module, Any], bool]) -> Iterator[None]:
    """Leave hooks and methods out for which `which(part, hook)` is true; the others stay in their order."""
    saved: list[tuple[dict[str, Any], str, Any]] = []
    for part in module.modules():
        own = vars(part)
        for kind in _HOOKS:
            hooks = own[kind]
            if any(which(part, hook) for hook in hooks.values()):
                saved.append((own, kind, hooks))
                own[kind] = type(hooks)((key, hook) for key, hook in hooks.items() if not which(part, hook))
    try:
        yield
    finally:
        for own, kind, hooks in reversed(saved):
            own[kind] = hooks


@contextlib.contextmanager
def quiet_hooks(module: nn.Module) -> Iterator[set[int]]:
    """The hooks in a module, by id, that return nothing while this context lasts: another call can do without them.

    Yields:
        A set that is filled when it ends.
    """
    quiet: set[int] = set()
    watched = []
    for part in module.modules():
        for hooks in (vars(part)[kind] for kind in _HOOKS):
            for key, hook in hooks.items():
                if not _of_package(hook):
                    hooks[key] = _Watched(hook)
                    watched.append((hooks, key, hooks[key]))
    try:
        yield quiet
    finally:
        for hooks, key, one in watched:
            if hooks.get(key) is one:
                hooks[key] = one.hook
        loud = {id(one.hook) for _, _, one in watched if one.has_returned}  # perhaps on one of several parts
        quiet |= {id(one.hook) for _, _, one in watched} - loud


def hooks_of_user(module: nn.Module) -> list[Any]:
    """The hooks in a module that are neither torch's nor weft's."""
    parts = [vars(part)[kind] for part in module.modules() for kind in _HOOKS]
    return [hook for hooks in parts for hook in hooks.values() if not _of_package(hook)]


class _Watched:
    """A hook of the user, in place of it."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.has_returned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.hook(*args, **kwargs)
        self.has_returned = self.has_returned or result is not None
        return result


def _of_package(hook: Any) -> bool:
    """Whether a hook is one of torch's or weft's."""
    home = str(getattr(hook, "__module__", None) or type(hook).__module__)
    return home.partition(".")[0] in ("torch", "weft")


class _SharedValues(TorchFunctionMode):
    """Deep copies share the values of tensors, without their graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0].detach().clone() if func is torch.Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def copied(value: T) -> T:
    """Arguments for one more call: tensors without their graph, and copies of what calls fill, such as caches."""

    def one(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return with_note_of(leaf, leaf.detach().clone()).requires_grad_(leaf.requires_grad)
        if isinstance(leaf, (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, nn.Module)):
            return leaf
        with _SharedValues():
            return copy.deepcopy(leaf)

    return cast("T", tree_map(one, value))
