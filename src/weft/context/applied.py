"""`Applied`: the record of one transform in `ctx.applied`."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Applied"]


@dataclass(frozen=True, kw_only=True)
class Applied:
    """One transform that was applied: its name, its options, and to what.

    The objects themselves are only referred to weakly: a context never keeps a model alive.
    Records compare by name, options and class names, so that two contexts built the same way
    over models of the same class are equal. A pickled record forgets its objects.

    Attributes:
        name: Name of the transform function.
        options: Its keyword arguments as `(name, text)`, defaults included.
        targets: Class names of the objects it was applied to.
    """

    name: str
    options: tuple[tuple[str, str], ...] = ()
    targets: tuple[str, ...] = ()
    refs: tuple[weakref.ref[Any], ...] = field(default=(), compare=False, repr=False)

    def concerns(self, obj: object) -> bool:
        """Say whether this record is about `obj`."""
        return obj is not None and any(ref() is obj for ref in self.refs)

    def __getstate__(self) -> dict[str, object]:
        return {"name": self.name, "options": self.options, "targets": self.targets, "refs": ()}

    def __str__(self) -> str:
        options = ", ".join(f"{name}={text}" for name, text in self.options)
        return (
            f"{self.name}({', '.join(self.targets)}; {options})"
            if options
            else f"{self.name}({', '.join(self.targets)})"
        )
