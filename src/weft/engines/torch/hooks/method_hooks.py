"""Do something before and after the calls of a module, and take it back without a trace.

Forward is reached through torch's own hooks; other methods, if they are named, through an
instance attribute, as `torch.distributed.fsdp.register_fsdp_forward_method` does. A copy or a
pickle of the module is plain: hooks and methods of this file stay behind.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

__all__ = ["Hook", "Removable", "around_methods", "arounds"]


class Hook:
    """A hook that is inert in a copy of the module: what it serves belongs to the original."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _inert

    def __copy__(self) -> Callable[..., None]:
        return _inert

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _give_inert, ()


def _inert(*args: object) -> None:
    """The hook of a copied module: does nothing."""


def _give_inert() -> Callable[..., None]:
    return _inert


class Removable:
    """Everything that was hung on a module, removed in one call."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def add(self, undo: Callable[[], None]) -> None:
        """Note how to take one thing off again."""
        self._undo.append(undo)

    def remove(self) -> None:
        """Take everything off again, latest first. Idempotent."""
        while self._undo:
            self._undo.pop()()


class _Method:
    """A method of one module, with something done around it."""

    def __init__(self, module: nn.Module, name: str, call: Callable[..., Any], around: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._call = call
        self._around = around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._call, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module()))
        return _plain_method(copied, self._name)

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _plain_method, (self._module(), self._name)


def _plain_method(module: Any, name: str) -> Any:
    return types.MethodType(getattr(type(module), name), module)


def around_methods(module: nn.Module, methods: Sequence[str], around: Callable[..., Any], removable: Removable) -> None:
    """Route calls of `module.<method>` through `around(call, args, kwargs)`.

    Args:
        module: Gets an instance attribute per method.
        methods: Names of its methods.
        around: Must return what `call(*args, **kwargs)` returns, changed or not.
        removable: Learns how to take the attributes off.
    """
    for name in methods:
        before = module.__dict__.get(name)
        setattr(module, name, _Method(module, name, getattr(module, name), around))
        removable.add(_restore(weakref.ref(module), name, before))


def arounds(module: nn.Module, name: str) -> list[Callable[..., Any]]:
    """List what calls of `module.<name>` are routed through, outermost first."""
    found, call = [], module.__dict__.get(name)
    while isinstance(call, _Method):
        found.append(call._around)
        call = call._call
    return found


def _restore(module: weakref.ref[nn.Module], name: str, before: Any) -> Callable[[], None]:
    def undo() -> None:
        target = module()
        if target is not None and before is None:
            delattr(target, name)
        elif target is not None:
            setattr(target, name, before)

    return undo
