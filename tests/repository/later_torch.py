"""A torch of later, made of the installed one: one private name is called something else in all of its code."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
import warnings
from typing import Any

import torch

NEW = "_renamed_in_a_later_torch"


def rename(name: str) -> None:
    """Give a name another spelling everywhere in torch: code, classes, modules and objects. For the whole process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of objects that warn when they are looked at
        _rename(name)


def _rename(name: str) -> None:
    for module in [m for key, m in list(sys.modules.items()) if key.split(".")[0] == "torch" and m is not None]:
        _move(vars(module), name)
    for one in gc.get_objects():
        if type(one) is types.FunctionType and str(one.__module__).split(".")[0] == "torch":
            if one.__name__ == name:
                one.__name__ = name + NEW
            one.__code__ = _renamed(one.__code__, name)
        elif issubclass(type(one), type) and str(one.__module__).split(".")[0] == "torch":
            _move_in_class(one, name)
        elif str(type(one).__module__).split(".")[0] == "torch" and isinstance(
            vars(type(one)).get("__dict__"), types.GetSetDescriptorType
        ):
            _move(one.__dict__, name)
    base: Any = torch._C.TensorBase
    if name in vars(base):  # of C, and not to be changed: hidden in the class that derives from it
        setattr(torch.Tensor, name + NEW, vars(base)[name])
        setattr(torch.Tensor, name, property(_gone(name)))


def _gone(name: str) -> Any:
    def get(self: object) -> Any:
        raise AttributeError(f"{type(self).__name__} has no {name}")

    return get


def _move(place: dict[str, Any], name: str) -> None:
    if name in place:
        place[name + NEW] = place.pop(name)


def _move_in_class(cls: type, name: str) -> None:
    if name in vars(cls):
        value = vars(cls)[name]
        with contextlib.suppress(TypeError, AttributeError):  # of C
            delattr(cls, name)
            setattr(cls, name + NEW, value)
    for key in ("__annotations__", "__dataclass_fields__"):
        if isinstance(vars(cls).get(key), dict):
            _move(vars(cls)[key], name)


def _renamed(code: types.CodeType, name: str) -> types.CodeType:
    consts = tuple(
        _renamed(one, name) if isinstance(one, types.CodeType) else name + NEW if one == name else one
        for one in code.co_consts
    )
    names = tuple(name + NEW if one == name else one for one in code.co_names)
    same = names == code.co_names and all(a is b for a, b in zip(consts, code.co_consts, strict=True))
    return code if same else code.replace(co_names=names, co_consts=consts)
