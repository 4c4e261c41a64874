"""Values as JSON, and back, without pickle: what checkpoints keep, and what `broadcast` and `gather_objects` send.

[Note: values as JSON] None, booleans, numbers, text and lists are themselves, and so are dicts whose keys are text.
Anything else is an object with a mark: `{"$": "tensor", "name": name}`, and `{"$": kind, "items": ...}` of tuples and
other dicts. Messages add what `broadcast` lists.

[Note: no foreign code] A received text can make values of the types listed here, and instances of dataclasses, enums
and named tuples whose class the receiving program has imported itself. Nothing is imported, and no constructor of
such a class runs: fields are set, members are looked up.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime as dt
import enum
import json
import pathlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from typing_extensions import override

from weft.collectives.primitives import as_bytes, num_bytes
from weft.errors import type_error
from weft.tensors.nested import Path

MOST_NESTED = 200  # in a checkpoint; three times as deep in JSON, which Python reads a thousand deep
_MOST_NESTED_SENT = 100
_EXPECTED = (
    "tensors, numpy arrays, numbers, strings, bytes, None, dates, paths, enums, and dicts, lists, tuples, sets and "
    "dataclasses of them"
)
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))
_DICTS: Mapping[Any, Any] = MappingProxyType(
    {"dict": dict, "ordered": collections.OrderedDict, "counter": collections.Counter}
)
_SEQUENCES = MappingProxyType({"set": set, "frozenset": frozenset, "Size": torch.Size})

# By type: the values it has in JSON, and back.
_PLAIN: Mapping[type[Any], tuple[Callable[[Any], Any], Callable[[Any], Any]]] = MappingProxyType(
    {
        bytes: (lambda x: base64.b64encode(x).decode(), base64.b64decode),
        bytearray: (lambda x: base64.b64encode(x).decode(), lambda text: bytearray(base64.b64decode(text))),
        complex: (lambda x: [x.real, x.imag], lambda parts: complex(*parts)),
        dt.date: (dt.date.isoformat, dt.date.fromisoformat),
        dt.datetime: (
            lambda x: [x.isoformat(), x.fold],
            lambda pair: dt.datetime.fromisoformat(pair[0]).replace(fold=pair[1]),
        ),
        dt.time: (lambda x: [x.isoformat(), x.fold], lambda pair: dt.time.fromisoformat(pair[0]).replace(fold=pair[1])),
        dt.timedelta: (lambda x: [x.days, x.seconds, x.microseconds], lambda parts: dt.timedelta(*parts)),
        torch.device: (str, torch.device),
        torch.dtype: (str, lambda text: _dtype(text)),
        **{one: (str, one) for one in _PATHS},
    }
)
_PLAIN_NAMED = MappingProxyType({one.__name__: back for one, (_, back) in _PLAIN.items()})

Kinds: TypeAlias = Callable[[str, Any, Callable[[Any], Any]], Any]


class Encoder:
    """Nested values as JSON; see [Note: values as JSON]. Who uses it says what may be in them."""

    def plain(self, item: Any, path: Path) -> Any:
        """What stands for a value, of any type, at a path.

        Raises:
            TypeError: It may not be there.
        """
        raise NotImplementedError

    def name(self, tensor: torch.Tensor, path: Path) -> object:
        """The name under which a tensor is kept beside the JSON.

        Raises:
            TypeError: It may not be there.
        """
        raise NotImplementedError

    def other(self, item: Any, path: Path) -> Any:
        """The JSON of what is no tensor, list, tuple or dict.

        Raises:
            TypeError: It may not be there.
        """
        raise NotImplementedError

    def encode(self, value: Any, path: Path) -> Any:
        """The JSON of a nested value that stands at a path.

        Raises:
            TypeError: Something in it may not be there.
        """
        item = self.plain(value, path)
        kind = type(item)
        if isinstance(item, torch.Tensor):
            return {"$": "tensor", "name": self.name(item, path)}
        if kind is list or kind is tuple:
            items = [self.encode(x, (*path, str(i))) for i, x in enumerate(item)]
            return items if kind is list else _marked("tuple", items)
        if kind is dict and all(type(key) is str and key != "$" for key in item):
            return {key: self.encode(x, (*path, key)) for key, x in item.items()}
        mark = next((name for name, made in _DICTS.items() if kind is made), None)
        if mark is not None:
            return _marked(mark, [[self.encode(k, path), self.encode(x, (*path, str(k)))] for k, x in item.items()])
        return self.other(item, path)


def decode(value: Any, tensors: Callable[[Any], torch.Tensor], more: Kinds | None = None, *, depth: int = 0) -> Any:
    """The nested value that an `Encoder` made JSON of, wherever the JSON comes from.

    Args:
        value: JSON.
        tensors: Gives a tensor by its name.
        more: Gives what has a mark of another kind, of the kind, the items, and what decodes a value in them.
        depth: Of the value in others.

    Raises:
        ValueError: No `Encoder` has made it.
        LookupError: Likewise.
        TypeError: Likewise.
    """
    if depth > MOST_NESTED + 5:  # those of a module are below its name and kind
        raise ValueError(f"values in each other, more than {MOST_NESTED} deep")

    def inner(item: Any) -> Any:
        return decode(item, tensors, more, depth=depth + 1)

    if isinstance(value, list):
        return list(map(inner, value))
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: inner(item) for key, item in value.items()}
    if kind == "tuple":
        return tuple(map(inner, value["items"]))
    if kind in _DICTS:
        return _DICTS[kind]({inner(key): inner(item) for key, item in value["items"]})
    if kind == "tensor":
        return tensors(value["name"])
    if more is None:
        raise ValueError(f"a value marked {kind!r}")
    return more(kind, value["items"], inner)


# -- messages ----------------------------------------------------------------------------------------


class Packed(NamedTuple):
    """A value as bytes.

    Attributes:
        body: Its text and then its tensors; uint8 [n].
        text: JSON.
    """

    body: torch.Tensor
    text: bytes

    @property
    def text_size(self) -> int:
        """How many bytes are text."""
        return len(self.text)


def pack(what: str, value: object, device: torch.device, *, grad: bool = False) -> Packed:
    """A value as bytes on a device; `unpack` is the way back.

    Args:
        what: The function that asks, for the texts of errors.
        value: Anything that can be sent.
        device: Where to.
        grad: Whether tensors that require grad are sent detached without a word.

    Raises:
        TypeError: Something in it cannot be sent; whatever else may go wrong is raised as this too.
    """
    encoder = _Sent(what, grad=grad)
    try:
        found = encoder.encode(value, ())
        text = json.dumps([found, encoder.heads]).encode()
        return Packed(torch.cat([one.to(device) for one in (bytes_tensor(text), *encoder.parts)]), text)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        found = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise encoder._error(found, "send its parts") from error


class _Sent(Encoder):
    def __init__(self, what: str, *, grad: bool) -> None:
        self.what, self.grad = what, grad
        self.heads: list[tuple[str, list[int]]] = []  # dtypes and shapes
        self.parts: list[torch.Tensor] = []
        self.path: Path = ()

    @override
    def plain(self, item: Any, path: Path) -> Any:
        self.path = path
        if len(path) > _MOST_NESTED_SENT:
            raise self._error("a value in more than 100 others", "leave out references of a value to itself")
        return item

    @override
    def other(self, item: Any, path: Path) -> Any:
        kind = type(item)
        if kind in (type(None), bool, float, str):
            return item
        if kind is int:  # decimals have a limit of digits
            return item if item.bit_length() < 64 else _marked("int", hex(item))
        if isinstance(item, (np.ndarray, np.generic)):
            return self._array(item)
        if isinstance(item, enum.Enum):
            return _marked("enum", [*self._class(kind), item.value if isinstance(item, enum.Flag) else item.name])
        if kind in _PLAIN:
            self._check_zone(item)
            return _marked(kind.__name__, _PLAIN[kind][0](item))
        if kind is _SEQUENCES.get(kind.__name__):
            return _marked(kind.__name__, [self.encode(x, (*path, str(i))) for i, x in enumerate(item)])
        return self._instance(item, kind, path)

    def _instance(self, item: Any, kind: Any, path: Path) -> Any:
        if dataclasses.is_dataclass(item):
            names = [field.name for field in dataclasses.fields(item) if hasattr(item, field.name)]
            found = {name: self.encode(getattr(item, name), (*path, name)) for name in names}
            return _marked("fields", [*self._class(kind), found])
        if isinstance(item, tuple) and hasattr(kind, "_fields"):
            values = [self.encode(x, (*path, n)) for n, x in zip(kind._fields, item, strict=True)]
            return _marked("named", [*self._class(kind), values])
        if isinstance(item, (int, float, str)):
            return item  # of a subclass: its plain value
        raise self._error(kind.__name__, "send its fields as a dict")

    @override
    def name(self, tensor: torch.Tensor, path: Path) -> int:
        if tensor.requires_grad and torch.is_grad_enabled() and not self.grad:
            raise self._error(
                f"a tensor {tuple(tensor.shape)} that requires grad; the others would get a constant",
                "value.detach()  # or weft.gather(value, ctx, grad=True), through which gradients flow",
            )
        kinds = (hasattr(tensor, "full_tensor"), tensor.is_nested, tensor.is_quantized, tensor.layout != torch.strided)
        if any(kinds):
            ways = ("value.full_tensor()", "value.unbind()", "value.dequantize()", "value.to_dense()")
            raise self._error(f"{type(tensor).__name__} with layout {tensor.layout}", ways[kinds.index(True)])
        return self._part(tensor.detach().resolve_conj().resolve_neg())

    def _part(self, values: torch.Tensor) -> int:
        self.parts.append(as_bytes(values))
        self.heads.append((str(values.dtype), list(values.shape)))
        return len(self.parts) - 1

    def _array(self, item: Any) -> Any:
        scalar = isinstance(item, np.generic)
        if not (scalar or type(item) is np.ndarray) or item.dtype.kind not in "biufcmMSU":
            raise self._error(f"{type(item).__name__} of dtype {item.dtype}", "an array of numbers, strings or times")
        place = self._part(bytes_tensor(item.tobytes()))
        return _marked("scalar" if scalar else "array", [item.dtype.str, list(item.shape), place])

    def _check_zone(self, item: Any) -> None:
        zone = getattr(item, "tzinfo", None)
        if zone is not None and type(zone) is not dt.timezone:  # no fixed offset: a rule that no text holds
            raise self._error(f"a time zone {zone!r}", "value.replace(tzinfo=None), str(value.tzinfo)")

    def _class(self, kind: type[Any]) -> list[str]:
        if _found(kind.__module__, kind.__qualname__) is not kind:
            raise self._error(
                f"{kind.__qualname__}, which is not found by its name in {kind.__module__}",
                "define the class at the top of a module",
            )
        return [kind.__module__, kind.__qualname__]

    def _error(self, found: str, fix: str) -> TypeError:
        where = ".".join(self.path[:8]) or "the value"
        return type_error(f"{self.what}: {where} cannot be sent", found=found, expected=_EXPECTED, fix=fix)


def _marked(kind: str, items: Any) -> dict[str, Any]:
    return {"$": kind, "items": items}


def unpack(body: torch.Tensor, text: int | bytes, device: torch.device) -> Any:
    """The value whose text and bytes are in `body`; tensors on `device`.

    Args:
        body: Of `Packed`.
        text: Its size; or the text, where `body` has no values, see rehearsal/.
        device: For tensors.

    Raises:
        TypeError: It holds an instance of a class that this process has not imported.
    """
    at, text = (text, bytes(body[:text].cpu().numpy())) if isinstance(text, int) else (len(text), text)
    value, heads = json.loads(text)
    parts = []
    for name, shape in heads:
        dtype = _dtype(name)
        size = num_bytes(shape, dtype)
        data = body[at : at + size]  # whose memory is not aligned
        parts.append(data.clone().view(dtype).view(shape) if size else data.new_empty(shape, dtype=dtype))
        at += size

    def more(kind: str, items: Any, inner: Callable[[Any], Any]) -> Any:
        if kind in _SEQUENCES:
            return _SEQUENCES[kind](map(inner, items))
        if kind in _PLAIN_NAMED:
            return _PLAIN_NAMED[kind](items)
        if kind == "int":
            return int(items, 16)
        if kind in ("array", "scalar"):
            dtype, shape, place = items
            array = np.empty(shape, dtype)  # of an empty text, numpy makes one letter
            if array.nbytes:
                array = np.frombuffer(bytearray(parts[place].cpu().numpy()), array.dtype).reshape(shape)
            return array[()] if kind == "scalar" else array
        return _instance(kind, inner, *items)

    return decode(value, lambda place: parts[place].to(device), more)


def _instance(kind: str, inner: Callable[[Any], Any], module: str, name: str, content: Any) -> Any:
    cls: Any = _found(module, name)
    wanted = {"enum": lambda: issubclass(cls, enum.Enum), "fields": lambda: dataclasses.is_dataclass(cls)}
    if cls is None or not wanted.get(kind, lambda: issubclass(cls, tuple))():
        raise type_error(
            f"a value of class {name} was received, but this class is unknown on this rank",
            found=f"no class {name} in {module}, as far as it is imported",
            expected="classes that every rank has imported; none is imported for a message",
            fix=f"import {module}  # on all ranks",
        )
    if kind == "enum":
        return cls(content) if issubclass(cls, enum.Flag) else cls[content]
    if kind == "named":
        return tuple.__new__(cls, map(inner, content))
    new = object.__new__(cls)
    for field, value in content.items():
        object.__setattr__(new, field, inner(value))  # of frozen ones too, and without __post_init__
    return new


def _found(module: str, name: str) -> type[Any] | None:
    """A class by its name in a module that is imported already; nothing is run to find it."""
    place: Any = sys.modules.get(module)
    for part in name.split("."):
        place = vars(place).get(part) if hasattr(place, "__dict__") else None
    return place if isinstance(place, type) else None


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


def bytes_tensor(text: bytes) -> torch.Tensor:
    """Bytes as a tensor uint8 [n]."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
