"""Call a module once more, and leave nothing behind: what its calls change is put back."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from weft import torch_internals
from weft.engines.torch.probes.call_state import CallState
from weft.engines.torch.probes.repeated_hooks import hooks_of_user, unwatched
from weft.private_names import replaced
from weft.tensors.dtensor import groups_of, is_fsdp_unit, kept_prefetches, local
from weft.tensors.rng_state import RngState
from weft.tensors.sequence_order import with_note_of

T = TypeVar("T")
_measured: ContextVar[str] = ContextVar("measured", default="")
_SMALL = 0.02


@contextlib.contextmanager
def measured(*, recompute: bool = False) -> Iterator[None]:
    """Around what a probe runs.

    Args:
        recompute: Whether its backward passes may compute blocks again: they have the same parameters then.
    """
    token = _measured.set("recompute" if recompute else "keep")
    try:
        yield
    finally:
        _measured.reset(token)


def is_measured() -> bool:
    """Whether a probe runs."""
    return bool(_measured.get())


def keeps_activations() -> bool:
    """Whether a probe runs whose backward passes compute no block again, which has other parameters by then."""
    return _measured.get() == "keep"


@contextlib.contextmanager
def switched_off(parts: Iterable[Any]) -> Iterator[None]:
    """Let what divides a module among ranks, by an attribute `off`, do nothing: calls are those of one process."""
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(replaced(part, off=True))
        yield


@contextlib.contextmanager
def no_trace(module: nn.Module) -> Iterator[None]:
    """Put back random states, and what calls of a module and of hooks in it may have changed; see `CallState`.

    Parameters and buffers are those of the call; see `torch.func.functional_call`.
    """
    parts = list(module.modules())
    gathered = [group for part in parts if is_fsdp_unit(part) for group in groups_of(part)]
    state = CallState()
    try:
        state.note((*parts, *map(unwatched, hooks_of_user(module))))
        with random_kept(), kept_prefetches(gathered):
            yield
    finally:
        state.put_back()


@contextlib.contextmanager
def random_kept() -> Iterator[None]:
    """Put back random states."""
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device: Any = None if present is None else torch.get_device_module(present)
    states, of_device = RngState.capture(), None if device is None else device.get_rng_state()
    try:
        yield
    finally:
        states.apply()
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
    filled = torch.stack([one.any().to(plain[0].device) for one in plain]).tolist() if plain else []
    zeros = [
        (n, one, one.clone()) for n, (one, has_values) in enumerate(zip(plain, filled, strict=True)) if not has_values
    ]
    try:
        for number, one, _ in zeros:
            drawn = torch.Generator().manual_seed(number)
            one.copy_(torch.randn(one.shape, generator=drawn).mul_(_SMALL))
        yield
    finally:
        for _, one, before in zeros:
            one.copy_(before)


class _SharedValues(TorchFunctionMode):
    """Deep copies share the values of tensors, without their graph."""

    @override
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

    return cast("T", torch_internals.tree.found.tree_map(one, value))
