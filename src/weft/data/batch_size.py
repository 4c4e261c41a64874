"""How much each rank does at a time: `batch_math`, `find_batch_size`, `split_between`."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import nn

from weft.context import DistContext
from weft.data.split.split_plan import SplitPlan
from weft.errors import PeerError, WeftError, listed, type_error, value_error
from weft.peers.agreement import exchange
from weft.peers.liveness import exception_text
from weft.rng import restored
from weft.tensors.nested import cuts_itself, leaves, map_leaves, map_tensors

T = TypeVar("T")
_FIX = "weft.data.batch_math(ctx, per_rank=8, accumulate=4)"
_FIND = "weft.data.find_batch_size(trial, ctx, start=128, smallest=1)"


@dataclass(frozen=True, kw_only=True)
class BatchMath:
    """The sizes of batches; what `batch_math` returns.

    Attributes:
        per_rank: Samples per rank and micro-batch: the `batch_size` of the loader.
        ranks: Ranks that see different batches.
        accumulate: Micro-batches per optimizer step.
        global_batch: Samples per optimizer step, of all ranks.
        steps_per_epoch: Optimizer steps per epoch, a short last one included; None without `samples`.
        tokens_per_step: Tokens per optimizer step; None without `tokens_per_sample`.
    """

    per_rank: int
    ranks: int
    accumulate: int
    global_batch: int
    steps_per_epoch: int | None = None
    tokens_per_step: int | None = None


def batch_math(
    ctx: DistContext,
    *,
    per_rank: int | None = None,
    global_batch: int | None = None,
    accumulate: int | None = None,
    samples: int | None = None,
    tokens_per_sample: int | None = None,
    drop_last: bool = False,
) -> BatchMath:
    """Work out batch sizes: global batch = per rank x ranks x accumulate. Any two give the third.

    Changes: nothing. Collectives: none.

    Args:
        ctx: The current context; the ranks are those that see different batches.
        per_rank: Samples per rank and micro-batch.
        global_batch: Samples per optimizer step, of all ranks.
        accumulate: Micro-batches per optimizer step; 1 if only one of the other two is given.
        samples: Of an epoch.
        tokens_per_sample: For tokens per step.
        drop_last: Whether the incomplete step at the end of an epoch is left out.

    Returns:
        All of them.

    Raises:
        ValueError: They contradict each other, do not divide, or too few are given; with the arithmetic.

    Example:
        >>> import weft
        >>> weft.data.batch_math(weft.testing.fake(0, 4), global_batch=256, per_rank=16).accumulate
        4
    """
    given = {"per_rank": per_rank, "global_batch": global_batch, "accumulate": accumulate, "samples": samples}
    given |= {"tokens_per_sample": tokens_per_sample}
    wrong = [
        f"{name}={number!r}"
        for name, number in given.items()
        if number is not None and (type(number) is not int or number < (0 if name == "samples" else 1))
    ]
    if wrong:
        raise _contradiction("these are no sizes", listed(wrong), "whole numbers >= 1")
    ranks = ctx.data_size
    if per_rank is None:
        if global_batch is None:
            raise _contradiction("too little is known", f"accumulate={accumulate}", "per_rank, global_batch, or both")
        accumulate = accumulate or 1
        divisor = f"{ranks} ranks x {accumulate}"
        per_rank = _quotient(global_batch, ranks * accumulate, divisor, "a whole number per rank")
    elif global_batch is None:
        accumulate = accumulate or 1
        global_batch = per_rank * ranks * accumulate
    elif accumulate is None:
        divisor = f"{per_rank} x {ranks} ranks"
        accumulate = _quotient(global_batch, per_rank * ranks, divisor, "a whole number of micro-batches")
    elif per_rank * ranks * accumulate != global_batch:
        product = f"{per_rank} x {ranks} ranks x {accumulate} = {per_rank * ranks * accumulate}, not {global_batch}"
        rule = "global_batch = per_rank x ranks x accumulate"
        raise _contradiction("the sizes contradict each other", product, rule)
    steps = None
    if samples is not None:
        steps = samples // global_batch if drop_last else -(-samples // global_batch)
    return BatchMath(
        per_rank=per_rank,
        ranks=ranks,
        accumulate=accumulate,
        global_batch=global_batch,
        steps_per_epoch=steps,
        tokens_per_step=None if tokens_per_sample is None else tokens_per_sample * global_batch,
    )


def _quotient(whole: int, divisor: int, text: str, expected: str) -> int:
    if whole % divisor:
        found = f"{whole} / ({text}) = {whole / divisor:g}"
        raise _contradiction("the global batch does not divide", found, expected)
    return whole // divisor


def _contradiction(problem: str, found: str, expected: str) -> ValueError:
    return value_error(f"batch_math: {problem}", found=found, expected=expected, fix=_FIX)


# -- the largest batch that fits ---------------------------------------------------------------------


def find_batch_size(
    trial: Callable[[int], object],
    ctx: DistContext,
    *,
    start: int = 128,
    smallest: int = 1,
    shrink: Callable[[int], int] | None = None,
    objects: Sequence[Any] = (),
) -> int:
    """Find the largest batch size with which a trial step does not run out of memory, on any rank.

    After each trial the ranks come together: if one ran out of memory all try the next size. The
    trial itself must not communicate, or the others would wait for the rank that failed: give it the
    module before `replicate`, or one step without reduction.

    Changes: `objects` are as before when it returns, and before each trial; so is torch's random state.
    Collectives: none; a meeting through the store per trial.

    Args:
        trial: Called with a batch size; does what a training step does.
        ctx: The current context.
        start: The first size.
        smallest: The last one.
        shrink: The next size after one that failed; default: nine tenths, rounded down.
        objects: What the trial changes: modules, optimizers, and others with `state_dict`. Their states
            are kept in CPU memory.

    Returns:
        The size, the same on all ranks.

    Raises:
        ValueError: No size fits; a size is out of range; `shrink` does not shrink.
        PeerError: Another rank failed otherwise than by memory. On that rank the error itself.

    Example:
        >>> import weft
        >>> def trial(batch_size):
        ...     if batch_size > 100:
        ...         raise MemoryError
        >>> weft.data.find_batch_size(trial, weft.local())
        92
    """
    if not 1 <= smallest <= start:
        raise _no_size(f"start={start}, smallest={smallest}", "1 <= smallest <= start", _FIND)
    kept = [_kept(obj) for obj in objects]
    size, tried = start, list[int]()
    while size >= smallest:
        tried.append(size)
        outcome, failure = _attempt(trial, size, ctx)
        for obj, state in zip(objects, kept, strict=True):
            _put_back(obj, state)
        if outcome == "memory":  # not before: gradients and state of optimizers go with the old values
            _free_cached_memory()
        world = ctx.require_collective("find_batch_size")
        outcomes = exchange(world, "find_batch_size", outcome)
        if failure is not None:
            raise failure
        failed = next(((rank, text) for rank, text in enumerate(outcomes) if text not in ("fits", "memory")), None)
        if failed is not None:
            raise PeerError(f"find_batch_size: rank {failed[0]} failed: {failed[1]}", rank=failed[0], text=failed[1])
        if all(text == "fits" for text in outcomes):
            return size
        after = size * 9 // 10 if shrink is None else shrink(size)
        if not after < size:
            raise _no_size(f"shrink({size}) = {after}", "a smaller size than before", _FIND)
        size = after
    fix = _FIND if smallest > 1 else "model, ctx = weft.recompute(model, ctx, blocks=[Block])  # before the trial"
    raise _no_size(f"out of memory with {listed(tried)}", f"memory for a batch of {smallest}", fix)


def _no_size(found: str, expected: str, fix: str) -> ValueError:
    return value_error("find_batch_size: there is no batch size", found=found, expected=expected, fix=fix)


def _attempt(trial: Callable[[int], object], size: int, ctx: DistContext) -> tuple[str, Exception | None]:
    """How a trial ended; nothing of it is kept, above all not the frames of an error."""
    try:
        with restored(ctx.device, ctx.engine):
            trial(size)
    except Exception as error:  # noqa: BLE001  (raised once the ranks have come together)
        return ("memory", None) if _is_out_of_memory(error) else (exception_text(error), error)
    return "fits", None


def _free_cached_memory() -> None:
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    signs = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_NOT_SUPPORTED.")
    return isinstance(error, RuntimeError) and not isinstance(error, WeftError) and any(s in str(error) for s in signs)


def _kept(obj: Any) -> Any:
    """A copy of the state of an object, in CPU memory."""
    state = copy.deepcopy(map_tensors(lambda tensor: tensor.detach().cpu(), obj.state_dict()))
    if isinstance(obj, nn.Module):
        return state, [p.grad is None for p in obj.parameters()], {m: m.training for m in obj.modules()}
    return state


def _put_back(obj: Any, state: Any) -> None:
    if not isinstance(obj, nn.Module):
        obj.load_state_dict(copy.deepcopy(state))
        return
    values, had_none, modes = state
    obj.load_state_dict(values)
    for parameter, none in zip(obj.parameters(), had_none, strict=True):
        if none:
            parameter.grad = None
    for module, training in modes.items():
        module.training = training


# -- plain inputs ------------------------------------------------------------------------------------


def split_between(value: T, ctx: DistContext, *, pad: bool = False) -> T:
    """Give each rank its part of a list, tensor, dict or dataset: for inference over plain inputs.

    The parts follow each other in rank order; the first ranks get one more where it does not divide.

    Changes: nothing; `value` is left alone. Collectives: none.

    Args:
        value: The same on all ranks: a list, tuple, string, tensor, array, TensorDict or `Dataset` of the
            `datasets` library. Mappings, named tuples, dataclasses and tuples of tensors or arrays, such as
            `(x, y)`, are cut value by value; these have one length. Anything else with `__len__` and
            `__getitem__` comes back as a list.
        ctx: The current context; ranks that see the same batches get the same part.
        pad: Repeat the last entry, so that all parts are as long as the first.

    Returns:
        This rank's part, of the same type.

    Raises:
        TypeError: It has no length.
        ValueError: The values of a mapping, or the tensors of a tuple, differ in length.

    Example:
        >>> import weft
        >>> [weft.data.split_between(list(range(5)), weft.testing.fake(rank, 2)) for rank in range(2)]
        [[0, 1, 2], [3, 4]]
    """
    if _has_columns(value):
        _length(value)
        return map_leaves(
            lambda _, item: split_between(item, ctx, pad=pad) if _has_entries(item) else item,
            value,
            whole=lambda item: item is not value,
        )
    source: Any = value
    total = _length(value)
    first, count = SplitPlan(ctx.data_rank, ctx.data_size, 1, drop_last=False, uneven="balance").share(total)
    missing = -(-total // ctx.data_size) - count if pad else 0
    rows = [*range(first, first + count), *[total - 1] * missing]
    if callable(getattr(source, "select", None)) and hasattr(source, "column_names"):  # a Dataset of `datasets`
        return cast("T", source.select(rows if missing else range(first, first + count)))
    if isinstance(source, (list, tuple, str, bytes)):
        cut: Any = source[first : first + count]
        return cast("T", cut + source[-1:] * missing)
    if isinstance(source, (torch.Tensor, np.ndarray)) or cuts_itself(source):
        return cast("T", source[rows] if missing else source[first : first + count])
    return cast("T", [source[i] for i in rows])


def _has_columns(value: object) -> bool:
    """Whether a value is cut item by item."""
    named = isinstance(value, tuple) and (hasattr(value, "_fields") or _is_tensors(value))
    fields = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return (isinstance(value, Mapping) or named or fields) and not cuts_itself(value)


def _is_tensors(value: tuple[Any, ...]) -> bool:
    """Whether a tuple is of columns, such as (x, y); one of numbers is a sequence of them."""
    return all(isinstance(item, (torch.Tensor, np.ndarray)) for item in value) and any(item.ndim for item in value)


def _has_entries(value: object) -> bool:
    """Whether a value can be cut at all; the numbers in a mapping cannot, and stay."""
    sized = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return (sized and getattr(value, "ndim", 1) > 0) or _has_columns(value)


def _length(value: Any) -> int:
    """The number of entries to share out; raises if there is none."""
    if _has_columns(value):
        columns = leaves(value, whole=lambda item: not _has_columns(item))
        lengths = {".".join(path): len(item) for path, item in columns if _has_entries(item)}
        if len(set(lengths.values())) > 1:
            raise value_error(
                f"split_between: the values of the {type(value).__name__} differ in length",
                found=listed(f"{key}: {length}" for key, length in lengths.items()),
                expected="values of one length",
                fix="weft.data.split_between(list(value), ctx)  # a list is cut entry by entry"
                if type(value) is tuple
                else "weft.data.split_between({'text': texts, 'id': ids}, ctx)",
            )
        return next(iter(lengths.values()), 0)
    if not _has_entries(value):
        raise type_error(
            f"split_between: {type(value).__name__} cannot be cut",
            found=type(value).__name__,
            expected="a list, tuple, tensor, dict of these, or a dataset with a length",
            fix=f"weft.data.split_between({'sorted' if isinstance(value, (set, frozenset)) else 'list'}(value), ctx)",
        )
    return len(value)
