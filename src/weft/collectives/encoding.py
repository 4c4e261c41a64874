"""Values as JSON and bytes, and back, without pickle: what `broadcast`, `scatter` and `gather_objects` send.

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
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.collectives.primitives import as_bytes, num_bytes, tensor_of
from weft.errors import message, type_error
from weft.tensors.nested import Path

_DEEPEST = 100
_EXPECTED = (
    "tensors, numpy arrays, numbers, strings, bytes, None, dates, paths, enums, and dicts, lists, tuples, sets and "
    "dataclasses of them"
)
_PATHS = (pathlib.PurePosixPath, pathlib.PureWindowsPath, type(pathlib.Path()))
_MAPPINGS = MappingProxyType({"dict": dict, "OrderedDict": collections.OrderedDict, "Counter": collections.Counter})
_SEQUENCES = MappingProxyType({"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "Size": torch.Size})

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
        dt.time: (
            lambda x: [x.isoformat(), x.fold],
            lambda pair: dt.time.fromisoformat(pair[0]).replace(fold=pair[1]),
        ),
        dt.timedelta: (lambda x: [x.days, x.seconds, x.microseconds], lambda parts: dt.timedelta(*parts)),
        torch.device: (str, torch.device),
        torch.dtype: (str, lambda text: _dtype(text)),
        **{one: (str, one) for one in _PATHS},
    }
)
_PLAIN_NAMED = MappingProxyType({one.__name__: back for one, (_, back) in _PLAIN.items()})


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
    """A value as bytes on a device; `decode` is the way back.

    Args:
        what: The function that asks, for the texts of errors.
        value: Anything that can be sent.
        device: Where to.
        grad: Whether tensors that require grad are sent detached without a word.

    Raises:
        TypeError: Something in it cannot be sent; whatever else may go wrong is raised as this too.
    """
    encoder = _Encoder(what, grad=grad)
    try:
        text = json.dumps(encoder.encode(value, ())).encode()
        return Packed(torch.cat([one.to(device) for one in (bytes_tensor(text), *encoder.parts)]), text)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        found = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise TypeError(_refusal(what, encoder.path, found, "send its parts")) from error


class _Encoder:
    def __init__(self, what: str, *, grad: bool) -> None:
        self.what, self.grad = what, grad
        self.parts: list[torch.Tensor] = []
        self.path: Path = ()

    def encode(self, item: Any, path: Path) -> Any:
        self.path = path
        kind = type(item)
        if len(path) > _DEEPEST:
            raise self._error("a value in more than 100 others", "leave out references of a value to itself")
        if kind in (type(None), bool, float, str):
            return item
        if kind is int:
            return item if item.bit_length() < 64 else {"int": hex(item)}  # decimals have a limit of digits
        if isinstance(item, torch.Tensor):
            return self._tensor(item)
        if isinstance(item, (np.ndarray, np.generic)):
            return self._array(item)
        if isinstance(item, enum.Enum):
            return {"enum": [*self._class(kind), item.value if isinstance(item, enum.Flag) else item.name]}
        if kind in _PLAIN:
            self._check_zone(item)
            return {kind.__name__: _PLAIN[kind][0](item)}
        if kind is _SEQUENCES.get(kind.__name__):
            return {kind.__name__: [self.encode(x, (*path, str(i))) for i, x in enumerate(item)]}
        if kind is _MAPPINGS.get(kind.__name__):
            return {kind.__name__: [[self.encode(k, path), self.encode(x, (*path, str(k)))] for k, x in item.items()]}
        return self._instance(item, kind, path)

    def _instance(self, item: Any, kind: Any, path: Path) -> Any:
        if dataclasses.is_dataclass(item):
            names = [field.name for field in dataclasses.fields(item) if hasattr(item, field.name)]
            return {"fields": [*self._class(kind), [[n, self.encode(getattr(item, n), (*path, n))] for n in names]]}
        if isinstance(item, tuple) and hasattr(kind, "_fields"):
            values = [self.encode(x, (*path, n)) for n, x in zip(kind._fields, item, strict=True)]
            return {"named": [*self._class(kind), values]}
        if isinstance(item, (int, float, str)):
            return item  # of a subclass: its plain value
        raise self._error(kind.__name__, "send its fields as a dict")

    def _tensor(self, item: torch.Tensor) -> Any:
        if item.requires_grad and torch.is_grad_enabled() and not self.grad:
            raise self._error(
                f"a tensor {tuple(item.shape)} that requires grad; the others would get a constant",
                "value.detach()  # or weft.gather(value, ctx, grad=True), through which gradients flow",
            )
        kinds = (hasattr(item, "full_tensor"), item.is_nested, item.is_quantized, item.layout != torch.strided)
        if any(kinds):
            ways = ("value.full_tensor()", "value.unbind()", "value.dequantize()", "value.to_dense()")
            raise self._error(f"{type(item).__name__} with layout {item.layout}", ways[kinds.index(True)])
        self.parts.append(as_bytes(item.detach().resolve_conj().resolve_neg()))
        return {"tensor": [str(item.dtype), list(item.shape)]}

    def _array(self, item: Any) -> Any:
        scalar = isinstance(item, np.generic)
        if not (scalar or type(item) is np.ndarray) or item.dtype.kind not in "biufcmMSU":
            raise self._error(f"{type(item).__name__} of dtype {item.dtype}", "an array of numbers, strings or times")
        self.parts.append(bytes_tensor(item.tobytes()))
        return {"scalar" if scalar else "array": [item.dtype.str, list(item.shape)]}

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
        return TypeError(_refusal(self.what, self.path, found, fix))


def _refusal(what: str, path: Path, found: str, fix: str) -> str:
    where = ".".join(path[:8]) or "the value"
    return message(f"{what}: {where} cannot be sent", found=found, expected=_EXPECTED, fix=fix)


def decode(body: torch.Tensor, text: int | bytes, device: torch.device) -> Any:
    """The value whose text and bytes are in `body`; tensors on `device`.

    Args:
        body: Of `Packed`.
        text: Its size; or the text, where `body` has no values, see rehearsal/.
        device: For tensors.

    Raises:
        TypeError: It holds an instance of a class that this process has not imported.
    """
    size, text = (text, bytes(body[:text].cpu().numpy())) if isinstance(text, int) else (len(text), text)
    return _Decoder(body, size, device).decode(json.loads(text))


class _Decoder:
    def __init__(self, body: torch.Tensor, place: int, device: torch.device) -> None:
        self.body, self.place, self.device = body, place, device

    def decode(self, item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        ((kind, content),) = item.items()
        if kind in _SEQUENCES:
            return _SEQUENCES[kind]([self.decode(x) for x in content])
        if kind in _MAPPINGS:
            return _MAPPINGS[kind]({self.decode(k): self.decode(x) for k, x in content})
        if kind in _PLAIN_NAMED:
            return _PLAIN_NAMED[kind](content)
        if kind == "int":
            return int(content, 16)
        if kind == "tensor":
            return self._tensor(*content)
        if kind in ("array", "scalar"):
            array = self._array(*content)
            return array[()] if kind == "scalar" else array
        return self._instance(kind, *content)

    def _take(self, size: int) -> torch.Tensor:
        self.place += size
        return self.body[self.place - size : self.place]

    def _tensor(self, name: str, shape: list[int]) -> torch.Tensor:
        dtype = _dtype(name)
        return tensor_of(self._take(num_bytes(shape, dtype)), shape, dtype).to(self.device)

    def _array(self, name: str, shape: list[int]) -> Any:
        array = np.empty(shape, np.dtype(name))
        data = self._take(array.nbytes)
        return np.frombuffer(data.cpu().numpy().tobytes(), array.dtype).reshape(shape).copy() if len(data) else array

    def _instance(self, kind: str, module: str, name: str, content: Any) -> Any:
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
            return tuple.__new__(cls, [self.decode(x) for x in content])
        new = object.__new__(cls)
        for field, value in content:
            object.__setattr__(new, field, self.decode(value))  # of frozen ones too, and without __post_init__
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
