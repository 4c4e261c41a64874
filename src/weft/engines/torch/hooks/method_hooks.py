"""Do something before and after the calls of a module, and take it back without a trace.

Forward is reached through torch's own hooks; other methods, if they are named, through an
instance attribute, as `torch.distributed.fsdp.register_fsdp_forward_method` does. A copy or a
pickle of the module is plain: hooks and methods of this file stay behind.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from weft import torch_internals


class Removable:
    """Everything that was attached to a module, removed in one call."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def add(self, undo: Callable[[], None]) -> None:
        """Note how to take one thing off again."""
        self._undo.append(undo)

    def remove(self) -> None:
        """Take everything off again, latest first. Idempotent."""
        while self._undo:
            self._undo.pop()()


class Attached:
    """What was attached to a module, and is taken off by `undo`."""

    def __init__(self) -> None:
        self._removable = Removable()

    def undo(self) -> None:
        """Take everything off the module again."""
        self._removable.remove()


def attach(
    module: nn.Module,
    removable: Removable,
    *,
    before: Callable[[nn.Module, Any, Any], Any] | None = None,
    after: Callable[..., Any] | None = None,
    around: Callable[[Callable[..., Any], Any, Any], Any] | None = None,
    methods: Sequence[str] = (),
    first: bool = False,
    after_first: bool = False,
    always: bool = False,
    after_kwargs: bool = False,
) -> None:
    """Call functions around the calls of a module; all of them are inert in a copy or a pickle of it.

    Args:
        module: Gets two hooks, and an instance attribute per method.
        removable: Learns how to take them off.
        before: Called before forward, (module, args, kwargs); may return others.
        after: Called after forward, (module, args, output); may return another output.
        around: Called in place of a method, (call, args, kwargs); returns what the method is to return.
        methods: Names of methods.
        first: Call `before` before all hooks that are there.
        after_first: Call `after` before all hooks that are there.
        always: Call `after` with None when forward has raised.
        after_kwargs: Call `after` with (module, args, kwargs, output).
    """
    if before is not None:
        removable.add(module.register_forward_pre_hook(_Hook(before), prepend=first, with_kwargs=True).remove)
    if after is not None:
        options = {"prepend": after_first, "always_call": always, "with_kwargs": after_kwargs}
        removable.add(module.register_forward_hook(_Hook(after), **options).remove)
    for name in methods:
        assert around is not None
        earlier = module.__dict__.get(name)
        setattr(module, name, _Method(module, name, getattr(module, name), around))
        removable.add(_restore(weakref.ref(module), name, earlier))


def call_routes(module: nn.Module, name: str) -> list[Callable[..., Any]]:
    """List what calls of `module.<name>` are routed through, outermost first."""
    found, call = [], module.__dict__.get(name)
    while isinstance(call, _Method):
        found.append(call._around)
        call = call._call
    return found


def with_names(call: Callable[..., Any], names: Mapping[str, object]) -> Callable[..., Any]:
    """A copy of a function or method, and of its decorators, in which global names stand for something else.

    What was attached around it stays so. A decorator has to have `__wrapped__`, as those of `functools.wraps`.
    """
    if isinstance(call, _Method):
        return call.with_names(names)
    if isinstance(call, types.MethodType):
        return types.MethodType(with_names(call.__func__, names), call.__self__)
    function: Any = call
    inner, cells = getattr(function, "__wrapped__", None), function.__closure__
    if inner is not None:
        renamed = types.CellType(with_names(inner, names))
        cells = tuple(renamed if cell.cell_contents is inner else cell for cell in cells or ())
    defaults = function.__defaults__
    copied = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, defaults, cells
    )
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def route_calls(module: nn.Module, removable: Removable, route: Callable[[Callable[..., Any], Any, Any], Any]) -> None:
    """Call `route(call, args, kwargs)` in place of a module, outside its hooks; a copy of it is plain.

    Takes the place in which `Module.compile` puts its function.
    """
    earlier = torch_internals.COMPILED_CALL.of(module)
    torch_internals.COMPILED_CALL.set(module, Routed(weakref.ref(module), earlier, route))
    removable.add(_restore(weakref.ref(module), torch_internals.COMPILED_CALL.name, earlier))


class Routed:
    """What stands in the place of the call of a module."""

    def __init__(
        self, module: weakref.ref[nn.Module], earlier: Callable[..., Any] | None, route: Callable[..., Any]
    ) -> None:
        self._module = module
        self._earlier = earlier
        self._route = route

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what it was routed to."""
        module: Any = self._module()
        return self._route(self._earlier or torch_internals.CALL.of(module), args, kwargs)


class CompiledCall:
    """A compiled function around the forward of a module."""

    def __init__(self, compiled: Callable[..., Any]) -> None:
        self._compiled = compiled

    def __call__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run what was compiled, in place of `call`."""
        return self._compiled(*args, **kwargs)


def already_compiled(module: nn.Module) -> list[str]:
    """Name the parts of `module` that are compiled, by us or by torch."""
    return [name or "the module itself" for name, part in module.named_modules() if _is_compiled(part)]


def _is_compiled(part: nn.Module) -> bool:
    return (
        any(isinstance(around, CompiledCall) for around in call_routes(part, "forward"))
        or not isinstance(torch_internals.COMPILED_CALL.of(part), (Routed, type(None)))
        or torch_internals.compiled_module.holds(part)
    )


class _Hook:
    """A hook that is inert in a copy of the module: what it serves belongs to the original."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_inert,)


def _inert(*args: object) -> None:
    """The hook of a copied module: does nothing."""


class _Method:
    """A method of one module, with something done around it."""

    def __init__(self, module: nn.Module, name: str, call: Callable[..., Any], around: Callable[..., Any]) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._call = call
        self._around = around

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._call, args, kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """That of the method: `generate` of transformers looks for arguments of forward, such as masks."""
        return inspect.signature(self._call)

    def with_names(self, names: Mapping[str, object]) -> _Method:
        """See the function of this name."""
        module = self._module()
        assert module is not None
        return _Method(module, self._name, with_names(self._call, names), self._around)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo.get(id(self._module()))
        return _plain_method(copied, self._name)

    def __reduce__(self) -> str | tuple[Any, ...]:
        return _plain_method, (self._module(), self._name)


def _plain_method(module: Any, name: str) -> Any:
    return types.MethodType(getattr(type(module), name), module)


def _restore(module: weakref.ref[nn.Module], name: str, earlier: Any) -> Callable[[], None]:
    def undo() -> None:
        target = module()
        if target is not None and earlier is None:
            delattr(target, name)
        elif target is not None:
            setattr(target, name, earlier)

    return undo
