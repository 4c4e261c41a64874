"""Operations on DTensors that torch refuses in its own words, or whose writes get lost, are refused clearly.

Some of torch's operations have no version for tensors that are cut over ranks. And a slice of such a tensor is often a
gathered copy: what is written into it changes nothing, without an error. Both are seen where torch dispatches them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from weft import torch_internals
from weft.errors import ContractError
from weft.tensors.dtensor import axes_of, is_sharded

_FIX = (
    "whole = tensor.full_tensor()  # on all ranks; to change it, under no_grad: whole[0] = 0; tensor.copy_(whole); "
    "parameters also: with weft.full_params(model, ctx, write=True), torch.no_grad(): ..."
)
Copies = weakref.WeakValueDictionary[int, Any]  # memory of gathered slices


def watched(call: Callable[..., Any], copies_now: Callable[[], Copies | None]) -> Callable[..., Any]:
    """A step of torch's dispatch of an operation on DTensors, which raises errors of weft's.

    Since torch 2.10, C++ keeps what it has called once and goes on to call it: without copies, nothing is checked. For
    the same reason, some operations of a program that has used DTensors before its first strategy are not checked.
    """

    @functools.wraps(call)
    def run(op: Any, args: Any, *more: Any) -> Any:
        copies = copies_now()
        if copies is None:
            return call(op, args, *more)
        kwargs = more[0] if more and isinstance(more[0], dict) else {}
        if copies:
            check_written(op, args, kwargs, copies)
        _check_terms(op, args)
        if _changes_number(op, args):
            return op(*(one.full_tensor() if is_sharded(one) else one for one in args), **kwargs)
        try:
            found = call(op, args, *more)
        except (RuntimeError, AssertionError, IndexError) as error:
            if _is_of_dtensors(error) and not _fails_anyway(op, args, kwargs):
                raise _refused(str(op), _first((args, kwargs)), str(error)) from error
            raise
        if op.is_view:
            _note(args[0], found, copies)
        elif kwargs and hasattr(found, "output_spec"):
            _check_outputs(op, args, kwargs, found.output_spec)
        return found

    return run


def _changes_number(op: Any, args: Any) -> bool:
    """Whether a plain tensor without dimensions is changed by a DTensor, as a gradient by the norm of all.

    torch takes it for a DTensor, and then finds that it has nothing to return.
    """
    first = args[0] if args else None
    is_number = isinstance(first, torch.Tensor) and not first.ndim and not is_sharded(first)
    return is_number and bool(torch_internals.schema.of(op).is_mutable)


def _check_terms(op: Any, args: Any) -> None:
    """Raise if a loss is added to a number in a DTensor: its backward pass would meet both kinds of gradients."""
    numbers = [one for one in args if isinstance(one, torch.Tensor) and not one.ndim]
    cut = [one for one in numbers if is_sharded(one)]
    if cut and any(one.grad_fn is not None for one in numbers if not is_sharded(one)):
        raise ContractError(
            f"{op}: a loss and a number in a DTensor are terms of one loss",
            found=f"{_described(cut[0])}, as of a sum over a parameter that is cut, beside a plain tensor",
            expected="numbers of one kind, each the same on all ranks",
            fix="loss + 0.1 * penalty.full_tensor()  # of each term over parameters; or weight_decay= of an optimizer",
        )


def _refused(what: str, tensor: torch.Tensor, why: str) -> ContractError:
    """The error for an operation that torch cannot do on the parts of a tensor."""
    return ContractError(
        f"{what}: torch cannot do this with a tensor that is cut over ranks",
        found=f"{_described(tensor)}; {why.splitlines()[0]}",
        expected="a whole tensor, or an operation that each rank can do with its part",
        fix=_FIX,
    )


def no_memory(name: str) -> Callable[..., Any]:
    """A method of DTensor that would ask for its memory, which it does not have: the parts have."""

    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if name == "__format__" and args == ("",):
            return str(self)
        tensor: Any = self
        if all(placement.is_replicate() for placement in tensor.placements):  # a number of all ranks, such as a norm
            return getattr(tensor.to_local(), name)(*args, **kwargs)
        raise ContractError(
            f"{name}: each rank has the memory of its part only",
            found=_described(self),
            expected="operations of torch, or a whole tensor",
            fix=_FIX,
        )

    return method


def copied(original: Callable[..., Any]) -> Callable[..., Any]:
    """`copy.deepcopy` of a DTensor; torch takes one whose part begins within a larger memory for a plain tensor."""

    @functools.wraps(original)
    def method(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        if self.requires_grad or not self.storage_offset():
            return original(self, memo)
        return memo.setdefault(id(self), self.detach().clone())

    return method


def check_written(op: Any, args: Any, kwargs: dict[str, Any], copies: Copies) -> None:
    """Raise if an operation writes into a slice that is a copy.

    Raises:
        ContractError: It does.
    """
    if not torch_internals.schema.of(op).is_mutable:
        return
    for tensor in _written(op, args, kwargs):
        if is_sharded(tensor) and torch_internals.STORAGE_ADDRESS.of(_memory(tensor)) in copies:
            raise ContractError(
                f"{op}: a slice of a tensor that is cut over ranks is written, which changes a copy",
                found=f"{_described(tensor)}, gathered from the ranks that have it",
                expected="writes into the tensor itself, of which each rank takes its part",
                fix=_FIX,
            )


def _written(op: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[Any]:
    for at, argument in enumerate(torch_internals.schema.of(op).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            yield from value if isinstance(value, list | tuple) else (value,)


def _note(base: Any, found: Any, copies: Copies) -> None:
    """Remember what should be a view of `base`, if it does not share its memory."""
    for part in found if isinstance(found, list | tuple) else (found,):
        if isinstance(part, torch.Tensor) and is_sharded(base):
            memory = _memory(part)
            address = torch_internals.STORAGE_ADDRESS.of(memory)
            is_apart = address != torch_internals.STORAGE_ADDRESS.of(_memory(base))
            if is_apart and memory.device.type != "meta":  # nor what a compiler traces
                copies[address] = memory


def _memory(tensor: Any) -> Any:
    return torch_internals.DTENSOR_PART.get(tensor, tensor).untyped_storage()


def _check_outputs(op: Any, args: Any, kwargs: dict[str, Any], specs: Any) -> None:
    """Raise if `out=` would be cut in another way afterwards, or get a whole tensor as its part: it is a parameter."""
    arguments = torch_internals.schema.of(op).arguments
    outs = [kwargs[argument.name] for argument in arguments if argument.is_out and argument.name in kwargs]
    for out, spec in zip(outs, specs if isinstance(specs, list | tuple) else (specs,), strict=False):
        if not is_sharded(out) or all(placement.is_replicate() for placement in out.placements):
            continue
        if _first(args) is None or (spec is not None and spec.placements != out.placements):
            raise _refused(str(op), out, "out= gets all of the result on each rank")


def _is_of_dtensors(error: Exception) -> bool:
    words = (
        "Sharding propagation failed",
        "sharding strategy",
        "with DTensor",
        "dtensor args",
    )
    if "the same mesh" in str(error):  # as norms of shards over several: the end of the context says what to write
        return False
    return isinstance(error, IndexError) or any(word in str(error) for word in words)


def _fails_anyway(op: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation does not work with whole tensors of these shapes either: torch's error says why."""

    def on_meta(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    tree_map = torch_internals.tree.found.tree_map
    try:
        op(*tree_map(on_meta, args), **tree_map(on_meta, kwargs))
    except NotImplementedError:
        return False
    except (RuntimeError, IndexError, ValueError):
        return True
    return False


def _first(values: Any) -> Any:
    return next((value for value in torch_internals.tree.found.tree_leaves(values) if is_sharded(value)), None)


def _described(tensor: Any) -> str:
    return f"a DTensor {list(tensor.shape)} that is {', '.join(map(str, tensor.placements))} over {axes_of(tensor)}"
