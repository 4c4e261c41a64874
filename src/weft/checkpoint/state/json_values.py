"""Nested values as JSON, and back: what a checkpoint keeps besides tensors."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import is_lazy

from weft.checkpoint.format.manifest import DTYPES
from weft.errors import type_error
from weft.tensors.blocks import Held, hold
from weft.tensors.dtensor import local
from weft.tensors.quantized import is_wrapped

_MOST_NESTED = 200  # three times as deep in JSON, which Python reads a thousand deep
_MOST_BITS = 10_000  # of a whole number; Python reads 4300 digits
_DICTS: Mapping[Any, type[dict[Any, Any]]] = MappingProxyType(
    {"counter": Counter, "ordered": OrderedDict}
)  # kept as what they are


def encode(path: str, value: Any, tensors: dict[str, Held], *, depth: int = 0) -> Any:
    """A nested value as JSON; its tensors go into `tensors`, under the path they stand at.

    Raises:
        TypeError: A leaf is something else, or a tensor of a kind that is not supported; the text names its path.
    """
    if isinstance(value, torch.Tensor):
        check_tensor(path, value)
        place = path
        while place in tensors:  # {"a/b": x, "a": {"b": y}}
            place += "'"
        tensors[place] = hold(place, value)
        return {"$": "tensor", "name": place}
    if isinstance(value, np.generic):
        value = value.item()
    _check_writable(path, value, depth)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [encode(f"{path}/{index}", item, tensors, depth=depth + 1) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$": "tuple", "items": items}
    if isinstance(value, Mapping):
        if type(value) is dict and all(isinstance(key, str) and key != "$" for key in value):
            return {key: encode(f"{path}/{key}", item, tensors, depth=depth + 1) for key, item in value.items()}
        if all(isinstance(key, (str, int, float, bool)) for key in value):
            items = [[key, encode(f"{path}/{key}", item, tensors, depth=depth + 1)] for key, item in value.items()]
            kind = next((name for name, made in _DICTS.items() if isinstance(value, made)), "dict")
            return {"$": kind, "items": items}
    raise _refusal(path, f"{type(value).__name__} {value!r:.60}", value)


def _check_writable(path: str, value: Any, depth: int) -> None:
    """Raise if JSON could not hold a value, or not give it back.

    Raises:
        TypeError: It is too deep, too long, or no text.
    """
    if depth > _MOST_NESTED:
        raise _refusal(f"{path:.60}...", f"values in each other, more than {_MOST_NESTED} deep")
    for one in (value, *value) if isinstance(value, Mapping) else (value,):
        if isinstance(one, int) and one.bit_length() > _MOST_BITS:
            raise _refusal(path, f"a whole number of {one.bit_length()} bits")
        if isinstance(one, str) and not one.isascii():
            try:
                one.encode()
            except UnicodeEncodeError as error:  # half of a surrogate pair has no bytes
                readable = path.encode(errors="replace").decode()
                raise _refusal(readable, f"{one!a:.60}, no text of Unicode") from error


def _refusal(path: str, found: str, value: object = None) -> TypeError:
    instead = "leave it out of state_dict(), or turn it into these"
    if hasattr(value, "load_state_dict"):
        instead = f'weft.checkpointable({{..., "{path.replace("/", "_")}": it}}, ctx)  # a name of its own'
    if isinstance(value, np.ndarray):
        instead = "torch.from_numpy(array)  # and array[...] = tensor.numpy() when it is loaded"
    return type_error(
        f"save: {path} cannot be saved",
        found=found,
        expected="tensors, numbers, strings, None, and lists, tuples and dicts of them",
        fix=instead,
    )


def check_tensor(path: str, tensor: torch.Tensor) -> None:
    """Raise if a tensor cannot be written into a file.

    Raises:
        TypeError: Its dtype or layout has no place in the format; the text names its path.
    """
    if is_wrapped(local(tensor)):
        raise type_error(
            f"save: {path} cannot be saved",
            found=f"{type(local(tensor)).__name__} of torchao, whose numbers are in several tensors",
            expected="plain tensors; those of bitsandbytes are saved with their scales",
            fix='weft.quantized(model, ctx, "nf4")  # of the plain model; or "int8", engine="bitsandbytes"',
        )
    name = str(tensor.dtype).removeprefix("torch.")
    if name in DTYPES and tensor.layout is torch.strided and not is_lazy(tensor):
        return
    raise type_error(
        f"save: {path} cannot be saved",
        found="a parameter without a shape"
        if is_lazy(tensor)
        else f"a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}",
        expected=f"a dense tensor with values, of {', '.join(DTYPES)}",
        fix="model(example_batch)  # a lazy module gets its parameters by the first call"
        if is_lazy(tensor)
        else "leave it out of state_dict(), or convert it there",
    )


def check_values(path: str, tensor: torch.Tensor) -> None:
    """Raise if a tensor has no values, on any rank.

    Raises:
        TypeError: It is on meta; the text names its path.
    """
    if tensor.is_meta:
        raise type_error(
            f"save: {path} cannot be saved",
            found=f"a tensor of {tensor.dtype}, {tensor.layout}, on {tensor.device}",
            expected=f"a dense tensor with values, of {', '.join(DTYPES)}",
            fix="weft.load_weights(model, path, ctx)  # gives it values",
        )


def decode(value: Any, tensors: Callable[[str], torch.Tensor], *, depth: int = 0) -> Any:
    """The nested value that `encode` made JSON of.

    Raises:
        ValueError: `encode` has not made it.
        LookupError: Likewise.
        TypeError: Likewise.
    """
    if depth > _MOST_NESTED + 5:  # those of a module are below its name and kind
        raise ValueError(f"values in each other, more than {_MOST_NESTED} deep")

    def inner(item: Any) -> Any:
        return decode(item, tensors, depth=depth + 1)

    if isinstance(value, list):
        return list(map(inner, value))
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: inner(item) for key, item in value.items()}
    if kind == "tensor":
        return tensors(value["name"])
    if kind == "tuple":
        return tuple(map(inner, value["items"]))
    if kind == "dict" or kind in _DICTS:
        return _DICTS.get(kind, dict)({key: inner(item) for key, item in value["items"]})
    raise ValueError(f"a value marked {kind!r}")
