"""`accumulate_grads`: the loader yields windows of micro-batches, one optimizer step per window.

A window is a value: it has a length, can be asked for the number of tokens in it over all ranks,
and knows which of its micro-batches is the last. Nothing outside of it changes.

[Note: position in windows] A position lies between two windows. Gradients of a window in progress are in no
checkpoint, and neither is what its forward passes changed (random states, statistics), so `save` refuses
such a moment, and `state_dict` gives the beginning of the window. What is carried over into the next epoch
stays unread in a sharded loader: it is a part of the position, read when its turn comes, by a run that
goes on as by one that was never interrupted. Other loaders cannot read it again, so it is kept in memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NoReturn, TypeVar, cast, overload

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from weft.collectives import reduce
from weft.context import DistContext
from weft.contract import GradSync, Stateful, offered, transform
from weft.errors import ContractError, message
from weft.loaders import Extension, Seekable, extended_copy

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

    def __init__(self, source: Iterator[B], length: int, cutting: _Cutting[B], *, ahead: int = 0) -> None:
        self._source = source
        self._length = length
        self._cutting = cutting
        self._number = cutting.handed_out
        self._read: list[B] = []  # read ahead for `denominator`
        self._given = 0
        self._ahead = ahead  # micro-batches that were taken from the loader before the window was made
        self._running = False

    def __len__(self) -> int:
        """Number of micro-batches, also of a short last window."""
        return self._length

    def __iter__(self) -> Iterator[B]:
        """Yield the micro-batches; after a `break`, those that are left.

        Raises:
            ContractError: There are none left: the window was used, or the loader went on.
        """
        if self._given == self._length:
            raise ContractError(
                message(
                    "accumulate_grads: a window was iterated a second time",
                    found=f"all {self._length} micro-batches were used, or skipped when the loader went on",
                    expected="each window iterated once, before the next one is taken from the loader",
                    fix="for window in loader:\n    batches = list(window)  # to go through them several times",
                )
            )
        return self._micro_batches()

    def _micro_batches(self) -> Iterator[B]:
        cutting = self._cutting
        self._running = True
        try:
            while self._given < self._length:
                batch = self._next()
                last = self._given == self._length
                cutting.synchronize(self._number, enabled=last or cutting.reduce == "every")
                yield batch
        finally:
            self._running = False
            cutting.synchronize(self._number, enabled=True)

    @property
    def used_up(self) -> bool:
        """Whether the inner loop over all micro-batches has ended."""
        return self._given == self._length and not self._running

    @property
    def taken(self) -> int:
        """Micro-batches that were taken from the loader so far."""
        return max(self._given, len(self._read), self._ahead)

    @property
    def begun(self) -> int:
        """Micro-batches that were used, or read by `denominator`."""
        return max(self._given, len(self._read))

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
        ctx = self._cutting.ctx
        # Counts are exact in float64 up to 2**53; some devices have none, so add on the CPU there.
        device = ctx.device if ctx.device.type != "mps" else torch.device("cpu")
        counts = [count] if not callable(count) else [count(batch) for batch in self._read_all()]
        mine = torch.stack([torch.as_tensor(c).detach().to(device).double().sum() for c in counts])
        # A bad count on one rank has to be seen by all: not-a-number survives the sum.
        part = torch.where((mine >= 0).all(), mine.sum(), torch.nan)
        total = float(reduce(part, ctx.on(ctx.data_axes), "sum"))
        if not 0 <= total < float("inf"):
            raise ValueError(
                message(
                    "denominator: a count is negative or not finite",
                    found=f"{mine.tolist()} on rank {ctx.rank}, {total} over all ranks",
                    expected="finite numbers >= 0 on all ranks",
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
        self._cutting.current = self
        return batch

    def _read_all(self) -> list[B]:
        missing = self._length - len(self._read)
        if missing and self._given:
            raise ContractError(
                message(
                    "denominator: a function was given after the window was begun",
                    found=f"{self._given} of {self._length} micro-batches used already",
                    expected="denominator(function) before the inner loop",
                    fix="tokens = window.denominator(count)\nfor batch in window: ...",
                )
            )
        self._read += [self._take() for _ in range(missing)]
        return self._read

    def _take(self) -> B:
        try:
            return next(self._source)
        except StopIteration:
            _raise_untrue_length("fewer", "ended in the middle of a window")

    def _finish(self) -> None:
        """Read past what the user left over, so that the next window begins where it should."""
        for _ in range(self._length - self.begun):
            self._take()
        self._given = self._length


@dataclass
class _Cutting(Generic[B]):
    """How a stream of micro-batches is cut into windows, and how far that has come.

    Attributes:
        steps: As given by the user; the same for the next four.
        windows: Number of windows so far, over all epochs and runs.
        handed_out: The same, of this process.
        current: The window that was handed out last, in the running or last pass.
        carried: Micro-batches left over by the last epoch, for the first window of the next.
        began: `windows` and the number of carried micro-batches when the running epoch began.
    """

    steps: Steps
    remainder: Remainder
    reduce: Literal["last", "every"]
    syncs: list[GradSync]
    mean_over: int
    ctx: DistContext
    windows: int = 0
    handed_out: int = 0
    current: Window[B] | None = None
    carried: list[B] = field(default_factory=list)
    began: tuple[int, int] | None = None

    def size_of(self, window: int) -> int:
        """Micro-batches in a full window."""
        size = self.steps(window) if callable(self.steps) else self.steps
        _check_steps(size, f"steps({window})" if callable(self.steps) else "steps")
        return size

    def count(self, batches: int) -> int:
        """Windows of an epoch of so many batches: the running one, or else the next."""
        first, carried = self.began or (self.windows, len(self.carried))
        number, left = self.fit(first, batches + carried)
        return number + (1 if left and self.remainder == "step" else 0)

    def fit(self, first: int, batches: int) -> tuple[int, int]:
        """Full windows in so many batches, from window number `first` on, and the batches left over."""
        if not callable(self.steps):
            return divmod(batches, self.steps)
        number, left = 0, batches
        while left >= (size := self.size_of(first + number)):
            left, number = left - size, number + 1
        return number, left

    def go_to(self, windows: int) -> None:
        """Let the next pass begin with this window, and with nothing carried over."""
        self.windows, self.carried, self.current, self.began = windows, [], None, None

    def state_between_windows(self, batches: Callable[[], Any]) -> dict[str, Any]:
        """A state made of that of the loader, which knows nothing of windows.

        Raises:
            ContractError: A window has begun, or micro-batches are carried over: they cannot be read again.
        """  # noqa: DOC501  (also an error made by a function)
        if self.current is not None and not self.current.used_up:
            raise _unfinished(self.current)
        if self.carried:
            raise ContractError(
                message(
                    "accumulate_grads: micro-batches that are carried over cannot be saved",
                    found=f"{len(self.carried)} of the last epoch, in memory, of a loader that cannot read them again",
                    expected='a loader of weft.shard_data, or remainder="step"',
                    fix="loader, ctx = weft.shard_data(loader, ctx)  # before accumulate_grads",
                )
            )
        return {"loader": batches(), "windows": self.windows}

    def synchronize(self, window: int, *, enabled: bool) -> None:
        """Let backward passes communicate or not, unless a later window has taken over.

        What a user keeps of an earlier window may be collected at any time, on one rank only.
        """
        if window == self.handed_out:
            for sync in self.syncs:
                sync.set(enabled)

    def cut(self, batches: Iterator[B], length: int | None) -> Iterator[Window[B]]:
        """Yield the windows of one pass over `batches`."""
        carried, self.carried, self.current = self.carried, [], None
        self.began = began = (self.windows, len(carried))
        left = None if length is None else length + len(carried)
        source = itertools.chain(carried, batches)
        windows, number = self.windows, self.handed_out
        try:
            while True:
                size = self.size_of(windows)
                if left is None:  # no length: look ahead to know whether this window is a full one
                    ahead = list(itertools.islice(source, size))
                    have, stream = len(ahead), iter(ahead)
                else:
                    have, stream = min(size, left), source
                    left -= have
                if have == size or (have and self.remainder == "step"):
                    self.windows = windows = windows + 1
                    self.handed_out = number = self.handed_out + 1
                    self.current = window = Window(stream, have, self, ahead=have if left is None else 0)
                    yield window
                    window._finish()
                    self.synchronize(number, enabled=True)
                elif have:
                    rest = Window(stream, have, self)._read_all()
                    self.carried = rest if self.remainder == "carry" else []
                if have < size:
                    break
            for _ in source:  # asked once more, the loader notices that its epoch is over
                _raise_untrue_length("more", "went on after its last window")
        finally:
            self.synchronize(number, enabled=True)
            if self.began is began:
                self.began = None


def _raise_untrue_length(how_many: str, what: str) -> NoReturn:
    raise ContractError(
        message(
            f"accumulate_grads: the loader {what}",
            found=f"{how_many} batches than len(loader)",
            expected="a loader that yields as many batches as its length says, or has no length",
            fix="def __len__(self): return ...  # the true number of batches",
        )
    )


class Windows(Generic[B]):
    """Windows over any iterable of batches; what `accumulate_grads` returns for a non-DataLoader."""

    def __init__(self, batches: Iterable[B], cutting: _Cutting[B]) -> None:
        self.batches = batches
        self.weft_cutting = cutting

    def __iter__(self) -> Iterator[Window[B]]:
        batches = iter(self.batches)
        return self.weft_cutting.cut(batches, _length(self.batches))

    def __len__(self) -> int:
        return self.weft_cutting.count(len(self.batches))  # type: ignore[arg-type]


class _WindowLoader(Extension[Any]):
    """Mixed in before the class of a loader, so that it yields windows."""

    weft_cutting: _Cutting[Any]

    def __iter__(self) -> Iterator[Window[Any]]:  # type: ignore[override]
        batches = iter(super().__iter__())  # before `len`: a new epoch may have another length
        length = _length(self, super().__len__)
        return self.weft_cutting.cut(batches, self._to_read(length))

    def _to_read(self, length: int | None) -> int | None:
        return length

    def __len__(self) -> int:
        return self.weft_cutting.count(super().__len__())


class _SeekableWindowLoader(_WindowLoader):
    """Over a loader that can leave batches unread; see [Note: position in windows]."""

    def _to_read(self, length: int | None) -> int | None:
        cutting, loader = self.weft_cutting, _seekable(super())
        if length is None or cutting.remainder != "carry":
            return length
        rest = cutting.fit(cutting.windows, length)[1]
        loader.weft_hold_back(rest)
        return length - rest

    def state_dict(self) -> dict[str, Any]:
        """The position between two windows, free of the number of ranks; in a window: where it begins."""
        cutting, loader = self.weft_cutting, _seekable(super())
        window = cutting.current
        if window is None or window.used_up:
            # What is carried over from a loader without length lies in memory, and is read again.
            return loader.weft_position(len(cutting.carried)) | {"windows": cutting.windows}
        return loader.weft_position(window.taken) | {"windows": cutting.windows - 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position, also one saved with other `steps` or before there were windows."""
        windows, base = _windows_in(state), cast("Any", super())
        base.load_state_dict(state)
        self.weft_cutting.go_to(windows)

    def check_savable(self) -> None:
        """Raise in the middle of a window."""
        window = self.weft_cutting.current
        if window is not None and not window.used_up and window.begun:
            raise _unfinished(window)


class _StatefulWindowLoader(_WindowLoader):
    """Over a loader with a state of its own kind, which is asked between two windows only."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader below, and the number of windows."""
        base = cast("Any", super())
        return self.weft_cutting.state_between_windows(base.state_dict)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from it."""
        windows, base = _windows_in(state), cast("Any", super())
        base.load_state_dict(state["loader"])
        self.weft_cutting.go_to(windows)


class _StatefulWindows(Windows[B]):
    """The same over an iterable that is no `DataLoader`."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the iterable below, and the number of windows."""
        return self.weft_cutting.state_between_windows(cast("Stateful", self.batches).state_dict)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from it."""
        windows = _windows_in(state)
        cast("Stateful", self.batches).load_state_dict(state["loader"])
        self.weft_cutting.go_to(windows)


def _seekable(loader: object) -> Seekable:
    return cast("Seekable", loader)


def _windows_in(state: Mapping[str, Any]) -> int:
    windows = state.get("windows", 0)
    if isinstance(windows, bool) or not isinstance(windows, int) or windows < 0:
        raise ValueError(
            message(
                "load_state_dict: this is not a position in windows",
                found=f"windows = {windows!r}",
                expected="a whole number >= 0",
                fix="loader.load_state_dict(saved_loader.state_dict())",
            )
        )
    return windows


def _unfinished(window: Window[Any]) -> ContractError:
    return ContractError(
        message(
            "accumulate_grads: a window in progress cannot be saved, for its gradients cannot",
            found=f"{window.begun} of {len(window)} micro-batches were read, and the inner loop has not ended",
            expected="a save between two windows, after optimizer.step()",
            fix="leave `for batch in window` first; after a break: for _ in window: pass  # leaves the rest out",
        )
    )


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
@overload
def accumulate_grads(
    modules: Mapping[str, M],
    loader: Iterable[B],
    ctx: DistContext,
    *,
    steps: Steps,
    remainder: Remainder = "step",
    reduce: Literal["last", "every"] = "last",
) -> tuple[Mapping[str, M], Windows[B], DistContext]: ...
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
        modules: The module, or a list, tuple or dict of several, whose gradients are accumulated
            over a window. Parts of them may be replicated instead of the whole.
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
    several = _flattened(modules)
    if not several or not all(isinstance(m, nn.Module) for m in several) or not isinstance(loader, Iterable):
        raise TypeError(
            message(
                "accumulate_grads: takes modules and a loader",
                found=f"{', '.join(type(m).__name__ for m in several) or 'no module'}; {type(loader).__name__}",
                expected="one module, or a list, tuple or dict of them, and an iterable of batches",
                fix="model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=4)",
            )
        )
    syncs = _grad_syncs(several)
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
    cutting: _Cutting[Any] = _Cutting(steps, remainder, reduce, syncs, means.pop(), ctx)
    windows = _windowed(loader, cutting)
    ctx.agree("accumulate_grads", _facts(windows, cutting))
    return modules, windows, ctx


def _flattened(modules: Any) -> list[Any]:
    """The modules in a module, list, tuple or dict."""
    if isinstance(modules, nn.Module) or not isinstance(modules, (Mapping, Sequence)):
        return [modules]
    return list(modules.values() if isinstance(modules, Mapping) else modules)


def _grad_syncs(modules: Sequence[nn.Module]) -> list[GradSync]:
    """What reduces the gradients of these modules or of parts of them, each once."""
    found = [sync for module in modules for part in module.modules() for sync in offered(part, GradSync)]
    return list({id(sync): sync for sync in found}.values())


def _facts(windows: Any, cutting: _Cutting[Any]) -> dict[str, object]:
    """What the ranks have to agree on, or they would wait for each other for ever."""
    facts: dict[str, object] = {
        "steps": f"schedule, at first {cutting.size_of(0)}" if callable(cutting.steps) else cutting.steps,
        "remainder": cutting.remainder,
        "reduce": cutting.reduce,
    }
    if cutting.syncs:
        facts["windows per epoch"] = _length(windows)
    return facts


def _windowed(loader: Any, cutting: _Cutting[Any]) -> Any:
    if not isinstance(loader, DataLoader):
        kind = _StatefulWindows if _is(loader, Stateful) else Windows
        return kind(loader, cutting)
    addition = _StatefulWindowLoader if _is(loader, Stateful) else _WindowLoader
    return extended_copy(loader, _SeekableWindowLoader if _is(loader, Seekable) else addition, weft_cutting=cutting)


def _is(loader: object, protocol: Any) -> bool:
    return isinstance(loader, protocol)


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


def _length(batches: object, measure: Callable[[], int] | None = None) -> int | None:
    """How many batches, or windows, there will be; None if that is not known for sure."""
    if isinstance(batches, DataLoader) and isinstance(batches.dataset, IterableDataset):
        return None  # with several workers its length is a guess
    try:
        return measure() if measure is not None else len(batches)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None
