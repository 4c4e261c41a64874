"""What a call of a module may change besides parameters and buffers, found from what its functions can reach.

Python cannot undo what a program does. But where a forward can leave something is known: in attributes of modules and
of objects that they hold, in variables that its functions close over or name, and in what those contain. Functions of
installed libraries are not looked at: they are many, and keep little in variables.
"""

from __future__ import annotations

import dis
import enum
import functools
import random
import sys
import sysconfig
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

_FILLED = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
# Packages whose classes and functions hold nothing of a program; `test` may be one.
_OTHERS = frozenset({"torch", "weft", "numpy", "builtins", *sys.stdlib_module_names}) - {"test"}
_MOST = 1000  # elements of one container that are looked at
_LIMIT = 20_000  # objects
_OF_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL")
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)  # noqa: S311  (a type)
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))
_TORCH_OWN = frozenset(vars(nn.Module()))
_ABSENT = object()


class CallState:
    """Everything that calls of modules may change, as it is when `note` looks; `put_back` makes it so again.

    Until then, tensors and arrays in it are copies, which calls may change in place. Iterators are not put back.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []
        self._copies: dict[int, Any] = {}
        self._seen: dict[int, Any] = {}  # which also keeps them alive, and so their ids
        self._left: deque[Any] = deque()

    def note(self, called: Iterable[Any]) -> None:
        """Note what calls of modules and functions may change; parts of a module are modules of their own."""
        self._left.extend(called)
        while self._left and len(self._seen) < _LIMIT:
            self._look(self._left.popleft())

    def put_back(self) -> None:
        """Put everything back."""
        for undo in reversed(self._undo):
            undo()

    def _look(self, value: Any) -> None:
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        kind = type(value)
        if kind in _FILLED:
            self._container(value)
        elif isinstance(value, nn.Module):
            self._module(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self._left += [value.__self__, value.__func__]
        elif isinstance(value, functools.partial):
            self._left += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, tuple):
            self._left += value[:_MOST]
        elif isinstance(value, _GENERATORS):
            self._generator(value)
        elif isinstance(value, type):
            self._class(value)
        elif not _is_of_others(kind.__module__) and hasattr(value, "__dict__") and not isinstance(value, enum.Enum):
            self._variables(vars(value))
            self._left.append(kind)

    def _module(self, module: nn.Module) -> None:
        held = dict(vars(module))

        def undo() -> None:
            vars(module).clear()
            vars(module).update(held)

        self._undo.append(undo)
        for name in held.keys() & _TORCH_OWN:
            if type(held[name]) in _FILLED:
                self._undo.append(_filler(held[name]))  # parameters and buffers are those of the call
        for name, value in held.items():
            if name not in _TORCH_OWN:
                vars(module)[name] = self._stand_in(value)
        self._left.append(type(module))

    def _class(self, kind: type) -> None:
        for one in kind.__mro__:
            if not _is_of_program(one.__module__):
                continue
            for name, value in list(vars(one).items()):
                inner = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(inner, types.FunctionType):
                    self._left.append(inner)
                elif not name.startswith("__") and not hasattr(type(value), "__get__"):
                    self._undo.append(functools.partial(_set_on_class, one, name, value))
                    self._left.append(value)

    def _function(self, function: types.FunctionType) -> None:
        if not _is_of_program(function.__module__ or "builtins"):
            return
        for cell in function.__closure__ or ():
            try:
                before = cell.cell_contents
            except ValueError:  # empty
                continue
            cell.cell_contents = self._stand_in(before)
            self._undo.append(functools.partial(setattr, cell, "cell_contents", before))
        self._variables(function.__globals__, _names(function.__code__))
        self._variables(vars(function))
        self._left += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]

    def _variables(self, variables: dict[str, Any], names: Iterable[str] | None = None) -> None:
        """Variables in a dict, or those of some names, which may come to be."""
        for name in list(variables) if names is None else names:
            before = variables.get(name, _ABSENT)
            if before is _ABSENT:
                self._undo.append(functools.partial(variables.pop, name, None))
                continue
            after = self._stand_in(before)
            if after is not before:
                variables[name] = after
            self._undo.append(functools.partial(_set_if_changed, variables, name, before))
        if names is None:
            known = set(variables)
            self._undo.append(lambda: [variables.pop(name) for name in variables.keys() - known])

    def _container(self, value: Any) -> None:
        self._undo.append(_filler(value))
        if isinstance(value, dict):
            for key, one in list(value.items())[:_MOST]:
                after = self._stand_in(one)
                if after is not one:
                    value[key] = after
        elif not isinstance(value, set):
            for place, one in enumerate(list(value)[:_MOST]):
                after = self._stand_in(one)
                if after is not one:
                    value[place] = after

    def _stand_in(self, value: Any) -> Any:
        """What is in the place of a value meanwhile: itself, or a copy of a tensor or an array."""
        if isinstance(value, nn.Parameter) or not isinstance(value, (torch.Tensor, np.ndarray)):
            self._left.append(value)
            return value
        if id(value) not in self._copies:
            self._seen[id(value)] = value
            self._copies[id(value)] = value.clone() if isinstance(value, torch.Tensor) else value.copy()
        return self._copies[id(value)]

    def _generator(self, value: Any) -> None:
        if isinstance(value, np.random.Generator):
            value = value.bit_generator
            self._undo.append(functools.partial(setattr, value, "state", value.state))
        elif isinstance(value, _GENERATORS[-1]):
            self._undo.append(functools.partial(value.setstate, value.getstate()))
        else:
            self._undo.append(functools.partial(value.set_state, value.get_state()))


def _is_of_others(module: str) -> bool:
    return module.partition(".")[0] in _OTHERS


@functools.lru_cache(maxsize=1000)
def _is_of_program(module: str) -> bool:
    """Whether functions in a module are the program's: those of libraries that are installed are many."""
    file = str(getattr(sys.modules.get(module), "__file__", None) or "")
    return not _is_of_others(module) and not file.startswith(_INSTALLED)


@functools.lru_cache(maxsize=1000)
def _names(code: types.CodeType) -> frozenset[str]:
    """The names of global variables that a function, or one inside of it, may use."""
    found = {str(one.argval) for one in dis.get_instructions(code) if one.opname in _OF_GLOBALS}
    return frozenset(found.union(*(_names(inner) for inner in code.co_consts if isinstance(inner, types.CodeType))))


def _filler(value: Any) -> Callable[[], None]:
    """What gives a container the elements that it has now."""
    before = value.copy()

    def fill() -> None:
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(before)

    return fill


def _set_if_changed(variables: dict[str, Any], name: str, before: Any) -> None:
    if variables.get(name, _ABSENT) is not before:
        variables[name] = before


def _set_on_class(kind: type, name: str, before: Any) -> None:
    if vars(kind).get(name) is not before:
        setattr(kind, name, before)
