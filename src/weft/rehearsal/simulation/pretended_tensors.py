"""Which tensors of a simulation have values, and what is read of those that have none.

[Note: values] Tensors that are made without others (`torch.empty`, `randn`, the weights of layers) have shapes and no
memory. Small ones of integers and booleans have values: indices, sizes, plans, tokens; so do single numbers. What is
computed from values alone has values, everything else has none; a tensor that had values has none once others wrote
into it. All numbers are finite: `isnan`, `isinf` and `isfinite` return values. What is read of a tensor without values
is the answer of `assume`, or one of `Numbers`. Where weft itself reads one, all is in order.

[Note: sizes] What a mask selects has a size that its values decide. Where the mask has values, such as that of padding
in a batch, it is known; otherwise `assume` says how many there are.

[Note: choices] A router chooses experts by values, and sizes of tensors and messages follow from its choices. So they
may be declared, at the line of the `topk`, `max` or `argmax`: "balanced", every expert as often, or the number of the
expert that all rows choose first.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import sys
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from weft import torch_internals
from weft.errors import ContextError
from weft.private_names import replaced
from weft.rehearsal.simulation.devices import autocast_alike, placed_alike, with_device_alike
from weft.rehearsal.simulation.lines import code_position
from weft.rehearsal.simulation.numbers import Numbers
from weft.rehearsal.simulation.parameters import parameters_without_values

_MOST = 2**22  # elements of a tensor that has values
_IN_ORDER = "what weft checks is in order: gradients are finite"
_FORMAT = torch.Tensor.__format__
_READING = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, _FORMAT)
_FINITE: Mapping[Any, bool] = MappingProxyType(
    {
        getattr(owner, f"is{what}"): what == "finite"
        for owner in (torch, torch.Tensor)
        for what in ("nan", "inf", "finite")
    }
)
_SIZED = frozenset(
    ("empty", "zeros", "ones", "full", "randint", "new_empty", "new_zeros", "new_ones", "new_full", "empty_strided")
)
_COUNTED = ("randperm", "arange")
_CHOOSING = ("topk", "argmax", "argmin", "max", "min", "sort", "argsort")
_SPACED = ("linspace", "logspace")
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


Assumed = Mapping[str, float | Literal["balanced"]]


class Simulation:
    """Computes shapes, and values where there are any; see [Note: values].

    Attributes:
        assumed: What was taken for granted.
        numbers: What is read otherwise.
    """

    def __init__(self, assume: Assumed, numbers: Numbers) -> None:
        self.assumed: dict[str, None] = {}
        self._assume = assume
        self.numbers = numbers
        self._choosing: str | None = None  # the last line that chose without values
        self._overwritten: dict[int, weakref.ref[Any]] = {}  # storages that had values, by address

    def __call__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Do one operation."""
        kwargs = with_device_alike(kwargs)
        tensors = [
            leaf for leaf in torch_internals.tree.found.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
        ]
        if not any(map(torch_internals.fake_tensor.holds, tensors)) and (
            func.is_view or (all(map(self.knows, tensors)) and self._has_values(func, args, kwargs, tensors))
        ):
            with torch_internals.without_fakes():
                return func(*args, **kwargs)
        try:
            is_grouped = func is torch_internals.grouped_mm.found.default
            out = _grouped(*args, **kwargs) if is_grouped else func(*args, **kwargs)
        except torch_internals.unknown_value.found:
            kind = str(torch_internals.schema.of(func).returns[0].type)
            if kind not in ("bool", "number"):
                raise  # of an operator of the program that says so itself
            return self.read(tensors[0], bool if kind == "bool" else None)
        except torch_internals.unknown_size.found:
            return self._sized(func, args)
        schema = torch_internals.schema.of(func)
        name = schema.name.partition("::")[2]
        out = self._written(func, args, kwargs, out) if schema.is_mutable else out
        return self._chosen(func, out, args, kwargs) if name in _CHOOSING else out

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor has values that can be read."""
        return not torch_internals.fake_tensor.holds(tensor) and _address_of(tensor) not in self._overwritten

    def _has_values(
        self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]
    ) -> bool:
        name = torch_internals.schema.of(func).name.partition("::")[2]
        device, dtype = kwargs.get("device"), kwargs.get("dtype")
        if device is not None and torch.device(device).type == "meta":
            return True
        if tensors and any(each.device.type == "meta" for each in tensors):
            return device is None  # without one, meta stays meta
        if name in _COUNTED:
            numbers = [each for each in args if isinstance(each, (int, float))]
            dtype = dtype or (torch.int64 if all(isinstance(each, int) for each in numbers) else torch.float32)
            return dtype in _INTEGERS and max(map(abs, numbers), default=0) <= _MOST
        if name in _SPACED:
            return not tensors and args[2] <= _MOST
        if name in _SIZED:
            if dtype is None:
                default = torch.int64 if name == "randint" else torch.get_default_dtype()
                dtype = tensors[0].dtype if tensors else default
            shape = next((each for each in args if isinstance(each, (list, tuple))), ())
            return not shape or (dtype in _INTEGERS and math.prod(shape) <= _MOST)
        if not tensors:
            return False
        return math.prod(map(max, *_padded(tensors))) <= _MOST if len(tensors) > 1 else True

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> Any:
        """What an operation returns that wrote what is not known into tensors: those that had values have none now."""
        pairs = _given(func, args, kwargs)
        targets = [
            value for argument, value in pairs if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for tensor in torch_internals.tree.found.tree_leaves(targets):
            if isinstance(tensor, torch.Tensor) and self.knows(tensor):
                key = _address_of(tensor)
                self._overwritten[key] = weakref.ref(tensor.untyped_storage(), partial(self._forget, key))
        if isinstance(out, torch.Tensor):
            return targets[0]
        return type(out)(targets) if isinstance(out, tuple) and len(out) == len(targets) else out

    def _forget(self, key: int, _: object) -> None:
        self._overwritten.pop(key, None)

    def _sized(self, func: Any, args: tuple[Any, ...]) -> Any:
        """What an operation returns whose size depends on values; see [Note: sizes]."""
        name = torch_internals.schema.of(func).name.partition("::")[2]
        if name == "nonzero":
            return self._selected(func, args[0])
        if name == "masked_select":
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
            return args[0].new_empty(len(self._selected(func, args[1])) * math.prod(shape) // args[1].numel())
        if name == "index":
            masks = [each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1]]
            pairs = zip(args[1], masks, strict=True)
            places = [self._selected(func, each).unbind(1) if is_mask else (each,) for each, is_mask in pairs]
            return func(args[0], list(itertools.chain.from_iterable(places)))
        if name == "bincount" and len(args) == 3:  # numbers below `minlength`, as in counts of classes
            counted, weights, length = args
            return (counted if weights is None else weights).new_empty(length)
        makes, at = {
            torch_internals.CTC_LOSS.name: (_aligned, 3),
            torch_internals.PACK_SEQUENCE.name: (_packed, 1),
        }.get(name, (None, 0))
        if makes is not None and isinstance(args[at], torch.Tensor) and self.knows(args[at]):
            return makes(args[0], args[at])
        raise _unknown_size(func, torch_internals.tree.found.tree_leaves(args)[0], self._choosing, can_be_assumed=False)

    def _selected(self, func: Any, mask: torch.Tensor) -> torch.Tensor:
        """The places [n, dims] where a mask is true."""
        if self.knows(mask):
            with torch_internals.without_fakes():
                return mask.nonzero()
        line = code_position().line
        count = self._assume.get(line)
        if not isinstance(count, (int, float)):
            raise _unknown_size(func, mask, self._choosing)
        self.assumed[f"{line}: of {mask.numel()} elements, {int(count)} are selected"] = None
        return mask.new_empty((int(count), mask.dim()), dtype=torch.int64)

    def _chosen(self, func: Any, out: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What an operation returns whose indices are declared; see [Note: choices]."""
        given = {argument.name: value for argument, value in _given(func, args, kwargs)}
        arguments = torch_internals.schema.of(func).arguments
        dim = given.get("dim", next((each.default_value for each in arguments if each.name == "dim"), None))
        *others, index = (out,) if isinstance(out, torch.Tensor) else out
        if dim is None or not torch_internals.fake_tensor.holds(index) or index.numel() > _MOST:
            return out
        line, ways = code_position().line, given["self"].shape[dim]
        declared = next((self._assume[key] for key in (line, "choices") if key in self._assume), None)
        if declared is None:
            self._choosing = line
            return out
        self.assumed[f"{line}: choices among {ways} are {declared}"] = None
        with torch_internals.without_fakes():
            numbers = torch.arange(index.numel())
            if index.dim() < given["self"].dim():
                rows = numbers if declared == "balanced" else numbers * 0 + int(declared)
                values = (rows % ways).view(index.shape)
            else:
                shape = list(index.movedim(dim, -1).shape)
                rows = numbers if declared == "balanced" else numbers % shape[-1] + int(declared)
                values = (rows % ways).view(shape).movedim(-1, dim).contiguous()
        return (*others, values) if others else values

    def assume_finite(self) -> None:
        """The program asks whether numbers are finite, and is told so."""
        line, _, in_order = code_position()
        self.assumed[_IN_ORDER if in_order or not line else f"{line}: numbers are finite"] = None

    def read(self, tensor: torch.Tensor, kind: type[float] | None = None) -> Any:
        """A number that the program wants to know."""
        line, _, in_order = code_position()
        kind = kind or (bool if tensor.dtype == torch.bool else float if tensor.is_floating_point() else int)
        if in_order or not line:
            self.assumed[_IN_ORDER] = None
            return kind(0)
        for key in (line, "values"):
            if key in self._assume:
                self.assumed[f"{line}: a number that is read is {self._assume[key]}"] = None
                return kind(self._assume[key])
        return self.numbers.read(line, kind)


def _grouped(a: torch.Tensor, b: torch.Tensor, offs: Any = None, *_: Any, **given: Any) -> torch.Tensor:
    """What `torch.nn.functional.grouped_mm` returns: torch knows the shape for the dtypes of its GPU kernel alone."""
    batch = [len(offs) if a.dim() == 2 else len(a)] if a.dim() == b.dim() else []
    return a.new_empty([*batch, a.shape[-2], b.shape[-1]], dtype=given.get("out_dtype") or a.dtype)


def _packed(padded: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What packing a padded sequence returns: the steps of all sequences, and how many sequences have each step."""
    with torch_internals.without_fakes():
        batch_sizes = (lengths.unsqueeze(1) > torch.arange(int(lengths.max()))).sum(0)
        count = int(lengths.sum())
    return padded.new_empty(count, *padded.shape[2:]), batch_sizes


def _aligned(log_probs: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What aten's CTC loss returns: losses, and the probabilities of alignments, with blanks around each label."""
    with torch_internals.without_fakes():
        longest = int(lengths.max())
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, 2 * longest + 1)


class _Reads(TorchFunctionMode):
    """Functions that read memory, past all operations."""

    def __init__(self, fake: Any, simulation: Simulation) -> None:
        super().__init__()
        self._fake = fake
        self._simulation = simulation

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._simulation.numbers.operation()  # where torch's own code does not run: some of it cannot pass on an error
        if func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], (list, tuple)):
            tree, is_fake = torch_internals.tree.found, torch_internals.fake_tensor.holds
            leaves, spec = tree.tree_flatten(args[0])
            if any(map(is_fake, leaves)):
                known = [_like(leaf) if is_fake(leaf) else leaf for leaf in leaves]
                shaped = torch.tensor(tree.tree_unflatten(known, spec), *args[1:], **(kwargs or {}))
                return self._fake.from_tensor(shaped)
        if func in _READING and not self._simulation.knows(args[0]) and (func is not _FORMAT or args[0].dim() == 0):
            return func(self.filled(args[0]), *args[1:], **(kwargs or {}))
        func, args, kwargs = placed_alike(func, args, kwargs or {})
        out = func(*args, **kwargs)
        return self._mask(out, value=_FINITE[func]) if func in _FINITE else out

    def _mask(self, found: torch.Tensor, *, value: bool) -> torch.Tensor:
        """What is found of numbers that are finite: of a DTensor that is one number, a plain tensor."""
        is_plain = type(found) is torch.Tensor or torch_internals.fake_tensor.holds(found)
        if self._simulation.knows(found) if is_plain else found.dim():
            return found
        self._simulation.assume_finite()
        with torch_internals.without_modes():
            mask = torch.full((), value).expand(found.shape)
            return mask.clone() if found.numel() <= _MOST else mask

    def filled(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in which all numbers are the one that is read: there is one per rank in what some programs read."""
        number = self._simulation.read(tensor)
        with torch_internals.without_modes():
            return torch.full(tensor.shape, number, dtype=tensor.dtype)


def _like(tensor: torch.Tensor) -> float | int | bool:
    """Some number of its kind."""
    return False if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0


def _padded(tensors: list[torch.Tensor]) -> Iterator[tuple[int, ...]]:
    """Shapes of one length."""
    dims = max(each.dim() for each in tensors)
    return ((1,) * (dims - each.dim()) + tuple(each.shape) or (1,) for each in tensors)


def _given(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The arguments of an operation, as its schema has them, and their values."""
    arguments = torch_internals.schema.of(func).arguments
    for argument, value in zip(arguments, args, strict=False):
        yield argument, value
    for argument in arguments[len(args) :]:
        if argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _described(tensor: torch.Tensor) -> str:
    return f"a tensor {list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"


def _unknown_size(func: Any, tensor: torch.Tensor, chosen: str | None, *, can_be_assumed: bool = True) -> ContextError:
    line, number = code_position().line, tensor.numel()
    key, value, option = (line or "values", number, number) if chosen is None else (chosen, '"balanced"', "balanced")
    answer = f'weft.rehearse(..., assume={{"{key}": {value}}}), or --assume {key}={option}'
    if chosen is not None and line:
        answer += f"; of what no router has chosen, how many are selected: --assume {line}={number}"
    if not can_be_assumed:
        answer = "sizes from small tensors of integers, which have values: of a loader, or torch.tensor(lengths)"
    return ContextError(
        "rehearse: tensors have shapes but no values, and the program makes one whose size depends on values",
        found=f"the size of what {func} returns depends on the values of {_described(tensor)}"
        + (f", at {line}" if line else ""),
        expected="sizes that do not depend on values",
        fix=answer,
    )


@contextlib.contextmanager
def without_memory(assume: Assumed, numbers: Numbers) -> Iterator[Simulation]:
    """Let tensors have no memory inside."""
    fake = torch_internals.fake_mode(allow_non_fake_inputs=True)
    simulation = Simulation(assume, numbers)
    reads = _Reads(fake, simulation)
    converter: Any = fake.fake_tensor_converter.meta_converter
    swap: Any = torch.utils.swap_tensors

    def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
        """As `Module.to` does it for fake tensors; they must not be referenced weakly."""
        converter.tensor_memo.clear()
        swap(one, other)

    methods = {"data_ptr": _address, "__deepcopy__": _copied, "__reduce_ex__": _pickled}
    methods["tolist"] = lambda each: reads.filled(each).tolist()
    with (
        parameters_without_values(fake),
        replaced(torch_internals.fake_tensor.found, **methods),
        replaced(torch_internals.fake_mode.found, cache={}),
        replaced(torch.utils, swap_tensors=swap_tensors),
        autocast_alike(),
        fake,
        reads,
    ):
        yield simulation


def _address(tensor: torch.Tensor) -> int:
    """What `data_ptr` is good for: to see whether two tensors lie at the same place. Nothing can be read there."""
    if "-packages/safetensors/" in sys._getframe(1).f_code.co_filename:  # it would write what is there
        raise _unwritten(tensor)
    return int(_address_of(tensor) + tensor.storage_offset() * tensor.element_size())


def _address_of(tensor: torch.Tensor) -> int:
    return int(torch_internals.STORAGE_ADDRESS.of(tensor.untyped_storage()))


def _pickled(tensor: torch.Tensor, _: int) -> Any:
    raise _unwritten(tensor)


def _unwritten(tensor: torch.Tensor) -> ContextError:
    return ContextError(
        "rehearse: tensors have shapes but no values, and the program writes one to a file",
        found=f"{_described(tensor)}, at {code_position().line}",
        expected="checkpoints of weft, whose bytes are counted, or none within the steps that are rehearsed",
        fix="weft.save(state, folder, step, ctx)",
    )


def _copied(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """As `copy.deepcopy` does for tensors without an address: it would copy the memory of others."""
    if id(tensor) not in memo:
        new = tensor.detach().clone()
        made = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        made.requires_grad_(tensor.requires_grad)
        if tensor.is_leaf and tensor.grad is not None:
            made.grad = copy.deepcopy(tensor.grad, memo)
        memo[id(tensor)] = made
    copied: torch.Tensor = memo[id(tensor)]
    return copied
