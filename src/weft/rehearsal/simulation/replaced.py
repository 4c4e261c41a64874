"""Functions of torch and Python, replaced for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(owner: Any, **functions: Any) -> Iterator[None]:
    """Let attributes of a module or class be others inside, also those that a class inherits or does not have."""
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
