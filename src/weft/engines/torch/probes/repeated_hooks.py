"""Which forward hooks run again when a module is called once more: not those of the user that return nothing."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from weft import torch_internals
from weft.private_names import replaced

HOOKS = (torch_internals.FORWARD_PRE_HOOKS, torch_internals.FORWARD_HOOKS)


@contextlib.contextmanager
def hooks_off(module: nn.Module, which: Callable[[nn.Module, Any], bool]) -> Iterator[None]:
    """Leave hooks and methods out for which `which(part, hook)` is true; the others stay in their order."""
    with contextlib.ExitStack() as stack:
        for part in module.modules():
            for kind in HOOKS:
                hooks = kind.of(part)
                others = type(hooks)((key, hook) for key, hook in hooks.items() if not which(part, hook))
                if len(others) < len(hooks):
                    stack.enter_context(replaced(part, **{kind.name: others}))
        yield


@contextlib.contextmanager
def quiet_hooks(module: nn.Module) -> Iterator[set[int]]:
    """The hooks in a module, by id, that return nothing while this context lasts: another call can do without them.

    Yields:
        A set that is filled when it ends.
    """
    quiet: set[int] = set()
    watched = []
    for part in module.modules():
        for hooks in (kind.of(part) for kind in HOOKS):
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
        # Those of experts on other ranks were not called: they are like others from the same lines of code.
        alike = {_code_of(one.hook) for _, _, one in watched if one.has_returned}
        quiet |= {id(one.hook) for _, _, one in watched if one.was_called or _code_of(one.hook) not in alike} - loud


def hooks_of_user(module: nn.Module) -> list[Any]:
    """The hooks in a module that are neither torch's nor weft's."""
    parts = [kind.of(part) for part in module.modules() for kind in HOOKS]
    return [hook for hooks in parts for hook in hooks.values() if not _of_package(hook)]


def unwatched(hook: Any) -> Any:
    """A hook itself, also while `quiet_hooks` watches it."""
    return unwatched(hook.hook) if isinstance(hook, _Watched) else hook


class _Watched:
    """A hook of the user, in place of it."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook
        self.was_called = self.has_returned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.was_called = True
        result = self.hook(*args, **kwargs)
        self.has_returned = self.has_returned or result is not None
        return result


def _code_of(hook: Any) -> Any:
    function = inspect.unwrap(getattr(hook, "func", hook))
    return getattr(function, "__code__", type(function))


def _of_package(hook: Any) -> bool:
    """Whether a hook is one of torch's or weft's; those that another probe watches are the user's."""
    if isinstance(hook, _Watched):
        return False
    home = str(getattr(hook, "__module__", None) or type(hook).__module__)
    return home.partition(".")[0] in ("torch", "weft")
