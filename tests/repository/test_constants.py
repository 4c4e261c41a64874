"""No module keeps state: what stands in a module of the package cannot be changed."""

import collections
import importlib
import itertools
import pkgutil
import weakref
from collections.abc import MutableMapping, MutableSequence, MutableSet

import weft

MUTABLE = (MutableMapping, MutableSequence, MutableSet, collections.deque, weakref.WeakSet, itertools.count)
# What has no other home, with the reason.
ALLOWED = {
    "weft.context.start._made_in": "which process has made a group: groups of torch have no attributes; weak",
}


def _names():
    found = pkgutil.walk_packages(weft.__path__, "weft.", onerror=lambda name: None)
    return ["weft", *(module.name for module in found if not module.name.endswith("__main__"))]


def test_no_module_has_a_global_that_can_be_changed():
    found = []
    for name in _names():
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            if error.name is None or error.name.partition(".")[0] == "weft":
                raise
            continue  # of an extra that is not installed
        own = {key: value for key, value in vars(module).items() if not key.startswith("__")}
        found += [f"{name}.{key}" for key, value in own.items() if isinstance(value, MUTABLE)]
    assert not set(found) - set(ALLOWED)
