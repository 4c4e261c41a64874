"""Names of other libraries that are not public: looked up when they are first needed, and one error when one is gone.

A library's names stand in one file: `weft.torch_internals`, `weft.engines.deepspeed.internals`,
`weft.engines.xla.internals`. A `Private` is in a module or a class, an `Attribute` on the objects of a class. What is
exchanged for a while, there or elsewhere, is `replaced`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from weft.errors import ContextError
from weft.version import numbers_of


class SupportedLibrary(NamedTuple):
    """Where names come from.

    Attributes:
        name: As pip knows it.
        version: The one that is installed.
        tested: The versions that weft is tested with.
    """

    name: str
    version: Callable[[], str]
    tested: tuple[str, ...]

    def error(self, does: str, found: str, note: str = "") -> ContextError:
        """What to raise where the installed version is not what weft relies on.

        Args:
            does: What it does, or lacks.
            found: What was seen of that.
            note: On the versions that are expected.
        """
        return ContextError(
            f"{self.name} {self.version()} {does}",
            found=found,
            expected=f"a version that weft is tested with: {self.name} {', '.join(self.tested)}{note}",
            fix=f"pip install '{self.name}=={self.tested[-1]}'",
        )


@dataclass(eq=False, repr=False)
class _Name:
    """A name.

    Attributes:
        library: Whose it is.
        where: The module, or "module:Class".
        spelling: In it.
        use: What of weft needs it.
        since: The first version with it, where weft supports an older one.
        until: The first version without it.
        instead: What takes its place then.
    """

    library: SupportedLibrary
    where: str
    spelling: str
    use: str
    since: str = ""
    until: str = ""
    instead: str = ""

    def __repr__(self) -> str:
        return f"{self.where.replace(':', '.')}.{self.spelling}"

    @property
    def is_due(self) -> bool:
        """Whether the installed version is one that has it, as `since` and `until` say."""
        here, since, until = map(numbers_of, (self.library.version(), self.since, self.until))
        return since <= here and (not until or here < until)

    def _home(self) -> Any:
        module, _, cls = self.where.partition(":")
        found: Any = importlib.import_module(module)
        for part in filter(None, cls.split(".")):
            found = getattr(found, part)
        return found

    def _raise(self, error: Exception | None = None) -> NoReturn:
        there = [f"since {self.since}"] * bool(self.since) + [f"before {self.until}"] * bool(self.until)
        raise self.library.error(
            f"lacks a name that {self.use} needs",
            f"no {self!r}" + (f", which {self.instead} has replaced" if self.instead else ""),
            f" (it has the name {' and '.join(there)})" if there else "",
        ) from error


class Private(_Name):
    """A function, class or constant. Calling it calls that."""

    @functools.cached_property
    def found(self) -> Any:
        """The object itself.

        Raises:
            ContextError: The installed version does not have it.
        """
        try:
            return getattr(self._home(), self.spelling)
        except (ImportError, AttributeError) as error:
            self._raise(error)

    @property
    def exists(self) -> bool:
        """Whether the installed version has it: for names that came or went between versions that are supported."""
        try:
            return hasattr(self._home(), self.spelling)
        except (ImportError, AttributeError):
            return False

    @property
    def home(self) -> tuple[Any, str]:
        """The module or class, and the name in it: for what is replaced there for a while.

        Raises:
            ContextError: The installed version does not have it.
        """
        if not self.exists:
            self._raise()
        return self._home(), self.spelling

    @property
    def base(self) -> Any:
        """The class, to be derived from. Where it is gone, one whose objects cannot be made: the error comes then."""
        try:
            return self.found
        except ContextError as error:
            gone = error

        def refuse(self: object, *args: object, **kwargs: object) -> NoReturn:
            raise gone

        return type(self.spelling, (), {"__init__": refuse})

    def holds(self, value: object) -> bool:
        """Whether a value is of this class. Imports nothing: without its module there are no objects.

        Raises:
            ContextError: The installed version does not have it.
        """
        return self.where.partition(":")[0] in sys.modules and isinstance(value, self.found)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it."""
        return self.found(*args, **kwargs)


class Attribute(_Name):
    """An attribute of objects: one that the class has, or that a method of the class, or a function, sets."""

    @functools.cached_property
    def exists(self) -> bool:
        """Whether objects of the installed version have it: for names that came or went between supported versions."""
        try:
            return _has(self._home(), self.spelling)
        except (ImportError, AttributeError):
            return False

    @property
    def name(self) -> str:
        """The name, for `vars(owner)` and the like. Imports nothing: without its module there are no objects.

        Raises:
            ContextError: The installed version does not have it.
        """
        self.check()
        return self.spelling

    def check(self) -> None:
        """Raise if it is gone: for a method that a class of weft has in place of this one.

        Imports nothing: without its module there are no objects.

        Raises:
            ContextError: The installed version does not have it.
        """
        if self.where.partition(":")[0] in sys.modules and not self.exists:
            self._raise()

    def of(self, owner: Any) -> Any:
        """The value.

        Raises:
            ContextError: The installed version does not have it.
        """
        value = getattr(owner, self.spelling, self)
        if value is self:
            del owner  # the traceback must not keep it alive; see `Buckets.release` in reducing/buckets.py
            self._raise()
        return value

    def get(self, owner: Any, default: Any = None) -> Any:
        """The value; the default where an object has none although others of this version have.

        Raises:
            ContextError: No object of the installed version has it.
        """
        try:
            return getattr(owner, self.spelling)
        except AttributeError:
            if not self.exists or isinstance(getattr(type(owner), self.spelling, None), property):
                self._raise()  # of a property, an error is no object without it
            return default

    def set(self, owner: Any, value: Any) -> None:
        """Give an object that has it another value.

        Raises:
            ContextError: The installed version does not have it.
        """
        if not hasattr(owner, self.spelling):
            self._raise()
        setattr(owner, self.spelling, value)


def _has(home: Any, name: str) -> bool:
    if hasattr(home, name) or isinstance(home, types.ModuleType):
        return hasattr(home, name)
    classes = home.__mro__ if isinstance(home, type) else ()
    values = [value for cls in classes for value in vars(cls).values()] or [home]
    annotated = any(name in vars(cls).get("__annotations__", ()) for cls in classes)
    return annotated or any(name in code.co_names or name in code.co_consts for v in values for code in _codes(v))


def _codes(value: Any) -> list[types.CodeType]:
    function = getattr(value, "__func__", getattr(value, "fget", value))
    code = getattr(getattr(function, "__wrapped__", function), "__code__", None)
    return [] if code is None else [code, *(one for one in code.co_consts if isinstance(one, types.CodeType))]


@contextlib.contextmanager
def replaced(owner: Any, **functions: Any) -> Iterator[None]:
    """Let attributes of a module, class or object be others inside, also those that are inherited or not there."""
    before = {name: vars(owner)[name] for name in functions if name in vars(owner)}
    for name, function in functions.items():
        setattr(owner, name, function)
    try:
        yield
    finally:
        for name in functions:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
