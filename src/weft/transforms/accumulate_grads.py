"""`accumulate_grads`: the loader yields windows of micro-batches, one optimizer step per window.

A window is a value: it has a length, can be asked for the number of tokens in it over all ranks,
and knows which of its micro-batches is the last. Nothing outside of it changes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar, overload

import torch
from torch import nn
from torch.utils.data import DataLoader

from weft.collectives import reduce
from weft.context import DistContext
from weft.contract import GradSync, offered, transform
from weft.errors import ContractError, message
from weft.loaders import Extension, extended_copy

__all__ = ["Window", "Windows", "accumulate_grads"]

B = TypeVar("B")
M = TypeVar("M", bound=nn.Module)
Steps = int | Callable[[int], int]
Count = int | float | torch.Tensor
Remainder = Literal["step", "drop", "carry"]


class Window(Generic[B]):
    """The micro-batches of one optimizer step: sized, and iterable once.

    While it is iterated, gradients are reduced over ranks in the backward of the last micro-batch
    only (`reduce="last"`), or in each one.
    """

    def __init__(self, source: Iterator[B], length: int, cutting: _Cutting[B]) -> None:
        self._source = source
        self._length = length
        self._cutting = cutting
        self._read: list[B] = []  # read ahead for `denominator`
        self._given = 0

    def __len__(self) -> int:
        """Number of micro-batches, also of a short last window."""
        return self._length

    def __iter__(self) -> Iterator[B]:
        syncs, every = self._cutting.syncs, self._cutting.reduce == "every"
        try:
            while self._given < self._length:
                batch = self._next()
                for sync in syncs:
                    sync.set(every or self._given == self._length)
                yield batch
        finally:
            for sync in syncs:
                sync.set(True)

    def denominator(self, count: Count | Callable[[B], Count]) -> float:
        """Add a count up over the window and all ranks, for exact means over ragged data.

        A loss that is a *sum* over samples or tokens, divided by this, has the gradient of the
        mean over all of them, however they are split into ranks and micro-batches; the factor by
        which averaging over ranks would be off is in it. Report the loss itself as
        `weft.reduce(loss_sum, ctx, "mean")` of these quotients.

        Changes: with a function, the micro-batches of the window are read now. Collectives: one
        all-reduce of one number over the data axes.

        Args:
            count: This rank's count in the whole window, or a function of one micro-batch.

        Returns:
            The count over all ranks, divided by the number of ranks gradients are averaged over;
            1 if it is zero, so that a window without tokens gives zero gradients.

        Raises:
            ValueError: A count that is negative or not finite.
            PeerError: A peer failed.
        """
        if callable(count):
            self._read_all()
            counts = [torch.as_tensor(count(batch)).sum() for batch in self._read]
            mine = torch.stack([c.double() for c in counts]).sum() if counts else torch.zeros((), dtype=torch.double)
        else:
            mine = torch.as_tensor(count).double().sum()
        ctx = self._cutting.ctx
        line = ctx.on(ctx.data_axes)
        # Counts are exact in float64 up to 2**53; some devices have none, so add on the CPU there.
        device = ctx.device if ctx.device.type != "mps" else torch.device("cpu")
        total = float(reduce(mine.to(device), line, "sum"))
        if not 0 <= total < float("inf"):
            raise ValueError(
                message(
                    f"denominator: the count over all ranks is {total}",
                    found=f"{float(mine)} on rank {ctx.rank}",
                    expected="a finite number >= 0",
                    fix="window.denominator(lambda batch: batch[1].numel())",
                )
            )
        return total / self._cutting.mean_over if total > 0 else 1.0

    def _next(self) -> B:
        if self._given < len(self._read):
            batch = self._read[self._given]
        else:
            batch = self._take()
        self._given += 1
        return batch

    def _read_all(self) -> None:
        if self._given:
            raise ContractError(
                message(
                    "denominator: a function was given after the window was begun",
                    found=f"{self._given} of {self._length} micro-batches used already",
                    expected="denominator(function) before the inner loop",
                    fix="tokens = window.denominator(count)\nfor batch in window: ...",
                )
            )
        while len(self._read) < self._length:
            self._read.append(self._take())

    def _take(self) -> B:
        try:
            return next(self._source)
        except StopIteration:
            raise ContractError(
                message(
                    "accumulate_grads: the loader ended in the middle of a window",
                    found="fewer batches than len(loader)",
                    expected="a loader that yields as many batches as its length says, or has no length",
                    fix="def __len__(self): return ...  # the true number of batches",
                )
            ) from None

    def _skip_rest(self) -> None:
        """Read past what the user left over, so that the next window begins where it should."""
        for _ in range(self._length - max(self._given, len(self._read))):
            self._take()
        self._given = self._length


@dataclass
class _Cutting(Generic[B]):
    """How a stream of micro-batches is cut into windows, and how far that has come."""

    steps: Steps
    remainder: Remainder
    reduce: Literal["last", "every"]
    syncs: list[GradSync]
    mean_over: int
    ctx: DistContext
    windows: int = 0
    carried: list[Any] = field(default_factory=list)

    def size_of(self, window: int) -> int:
        """Micro-batches in a full window."""
        size = self.steps(window) if callable(self.steps) else self.steps
        _check_steps(size, f"steps({window})" if callable(self.steps) else "steps")
        return size

    def count(self, batches: int) -> int:
        """Windows that so many batches will make, from here on."""
        left, number = batches + len(self.carried), 0
        while left >= (size := self.size_of(self.windows + number)):
            left, number = left - size, number + 1
        return number + (1 if left and self.remainder == "step" else 0)

    def cut(self, batches: Iterable[B], length: int | None) -> Iterator[Window[B]]:
        """Yield the windows of one pass over `batches`."""
        carried, self.carried = self.carried, []
        left = None if length is None else length + len(carried)
        source = itertools.chain(carried, batches)
        while True:
            size = self.size_of(self.windows)
            if left is None:  # no length: look ahead to know whether this window is a full one
                ahead = list(itertools.islice(source, size))
                have, stream = len(ahead), iter(ahead)
            else:
                have, stream = min(size, left), source
                left -= have
            if have == size or (have and self.remainder == "step"):
                window = Window(stream, have, self)
                self.windows += 1
                yield window
                window._skip_rest()
            if have < size:
                if have and self.remainder != "step":
                    self.carried = [*stream] if self.remainder == "carry" else _discard(stream)
                break
        for _ in source:  # let the loader notice that its epoch is over
            pass


def _discard(batches: Iterator[Any]) -> list[Any]:
    for _ in batches:
        pass
    return []


class Windows(Generic[B]):
    """Windows over any iterable of batches; what `accumulate_grads` returns for a non-DataLoader."""

    def __init__(self, batches: Iterable[B], cutting: _Cutting[B]) -> None:
        self.batches = batches
        self.weft_cutting = cutting

    def __iter__(self) -> Iterator[Window[B]]:
        return self.weft_cutting.cut(self.batches, _length(self.batches))

    def __len__(self) -> int:
        return self.weft_cutting.count(len(self.batches))  # type: ignore[arg-type]


class _WindowLoader(Extension[Any]):
    """Mixed in before the class of a loader, so that it yields windows."""

    weft_cutting: _Cutting[Any]

    def __iter__(self) -> Iterator[Window[Any]]:  # type: ignore[override]
        return self.weft_cutting.cut(super().__iter__(), super().__len__())

    def __len__(self) -> int:
        return self.weft_cutting.count(super().__len__())


@overload
def accumulate_grads(
    modules: M,
    loader: Iterable[B],
    ctx: DistContext,
    *,
    steps: Steps,
    remainder: Remainder = "step",
    reduce: Literal["last", "every"] = "last",
) -> tuple[M, Windows[B], DistContext]: ...
@overload
def accumulate_grads(
    modules: Sequence[M],
    loader: Iterable[B],
    ctx: DistContext,
    *,
    steps: Steps,
    remainder: Remainder = "step",
    reduce: Literal["last", "every"] = "last",
) -> tuple[Sequence[M], Windows[B], DistContext]: ...
@transform(after={"replicate", "fully_shard", "zero_partition", "shard_data"}, collective=True)
def accumulate_grads(
    modules: Any,
    loader: Any,
    ctx: DistContext,
    *,
    steps: Steps,
    remainder: Remainder = "step",
    reduce: Literal["last", "every"] = "last",
) -> tuple[Any, Any, DistContext]:
    """Let the loader yield windows of micro-batches: one optimizer step per window.

    A window knows its true length, also the short one at the end of an epoch, so `/ len(window)`
    and `window.denominator(...)` are right without guessing, and gradients travel only in the last
    backward of a window. `break`, exceptions and other loaders inside a window change nothing.

        for window in loader:
            tokens = window.denominator(lambda batch: batch[1].numel())
            for x, y in window:
                loss = cross_entropy(model(x), y, reduction="sum") / tokens
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    Changes: nothing; a copy of the loader comes back. The modules are only marked.
    Collectives: none here (a meeting through the store) and none while iterating.

    Args:
        modules: The module, or several, whose gradients are accumulated over a window.
        loader: A `DataLoader` (after `shard_data`), or any iterable of batches, with or without
            length; without one, windows are read ahead.
        ctx: Where we run.
        steps: Micro-batches per window; or a function of the number of windows so far.
        remainder: Of an epoch that does not fill the last window. "step": a short window; "drop":
            leave it out; "carry": it begins the first window of the next epoch.
        reduce: "last": gradients travel once per window; "every": in each backward (less memory
            for sharded gradients).

    Returns:
        `modules` itself; the loader of windows, with `len` in windows; `ctx` with this transform
        in `applied`.

    Raises:
        AlreadyApplied: A module or the loader is accumulated already.
        OrderError: A strategy or `shard_data` is applied afterwards.
        TypeError: The modules or the loader are something else.
        ValueError: An option is out of range, or the modules average over different ranks.
        ContextError: The ranks disagree.

    Example:
        >>> import weft
        >>> model, ctx = weft.replicate(nn.Linear(1, 1), weft.local())
        >>> model, windows, ctx = weft.accumulate_grads(model, [1, 2, 3], ctx, steps=2)
        >>> [list(window) for window in windows]
        [[1, 2], [3]]
    """
    if not callable(steps):
        _check_steps(steps, "steps")
    for name, value, allowed in (
        ("remainder", remainder, ("step", "drop", "carry")),
        ("reduce", reduce, ("last", "every")),
    ):
        if value not in allowed:
            raise ValueError(
                message(
                    f"accumulate_grads: {name} = {value!r} is unknown",
                    found=repr(value),
                    expected=" or ".join(map(repr, allowed)),
                    fix=f"weft.accumulate_grads(model, loader, ctx, steps=4, {name}={allowed[0]!r})",
                )
            )
    several = [modules] if isinstance(modules, nn.Module) else list(modules)
    if not all(isinstance(module, nn.Module) for module in several) or not isinstance(loader, Iterable):
        raise TypeError(
            message(
                "accumulate_grads: takes modules and a loader",
                found=f"{', '.join(type(m).__name__ for m in several)}; {type(loader).__name__}",
                expected="one module or several, and an iterable of batches",
                fix="model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=4)",
            )
        )
    syncs = [sync for module in several for sync in offered(module, GradSync)]
    means = {sync.mean_over for sync in syncs} or {1}
    if len(means) > 1:
        raise ValueError(
            message(
                "accumulate_grads: the modules average their gradients over different numbers of ranks",
                found=f"{sorted(means)} ranks",
                expected="modules with one denominator in one window",
                fix="one accumulate_grads per module, each with a loader of its own",
            )
        )
    ctx.agree(
        "accumulate_grads",
        {"steps": steps if isinstance(steps, int) else "schedule", "remainder": remainder, "reduce": reduce},
    )
    cutting: _Cutting[Any] = _Cutting(steps, remainder, reduce, syncs, means.pop(), ctx)
    return modules, _windowed(loader, cutting), ctx


def _windowed(loader: Any, cutting: _Cutting[Any]) -> Any:
    if not isinstance(loader, DataLoader):
        return Windows(loader, cutting)
    return extended_copy(loader, _WindowLoader, weft_cutting=cutting)


def _check_steps(steps: object, what: str) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(
            message(
                f"accumulate_grads: {what} = {steps!r} cannot be used",
                found=repr(steps),
                expected="a whole number >= 1",
                fix="weft.accumulate_grads(model, loader, ctx, steps=4)",
            )
        )


def _length(batches: object) -> int | None:
    try:
        return len(batches)  # type: ignore[arg-type]
    except TypeError:
        return None
