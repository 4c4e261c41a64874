"""The transforms of the package, as its folder has them, and what each says of itself: tests need no other list."""

import importlib
import inspect
import pkgutil

import weft.transforms


def rules_of(transform):
    """What `@transform` was given."""
    return inspect.getclosurevars(transform).nonlocals["rules"]


def objects_of(transform):
    """What it takes and returns, in its order: "module", also for several ones, "loader" or "optimizer"."""
    return [name.removesuffix("s") for name in inspect.getclosurevars(transform).nonlocals["given"]]


def _found():
    for module in pkgutil.iter_modules(weft.transforms.__path__):
        function = getattr(importlib.import_module(f"weft.transforms.{module.name}"), module.name)
        if hasattr(function, "__wrapped__"):  # others are plain functions, such as `clip_grads`
            yield module.name, function


TRANSFORMS = dict(_found())
