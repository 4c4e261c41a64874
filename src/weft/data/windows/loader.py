"""Loaders that yield windows, over loaders of any kind; see [Note: position in windows] in window.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset
from typing_extensions import override

from weft.checks import check_count
from weft.contract import Stateful
from weft.data.loader_copy import Extension, Size, extended_copy, length_of
from weft.data.split.sharded_loader import ShardedLoader
from weft.data.windows.splitter import WindowSplitter, unfinished_window_error
from weft.data.windows.window import Window
from weft.errors import ContractError
from weft.tensors.nested import rows_of

B = TypeVar("B")


def windowed(loader: Any, splitter: WindowSplitter[Any]) -> Any:
    """A loader that yields windows, and has a position if the one below has."""
    stateful = isinstance(loader, Stateful)
    if not isinstance(loader, DataLoader):
        return (_StatefulWindows if stateful else Windows)(loader, splitter)
    if isinstance(loader, ShardedLoader):
        loader.weft_cursor.has_windows = True
        loader.weft_cursor.has_schedule = callable(splitter.steps)
        return extended_copy(loader, _ShardedWindowLoader, weft_splitter=splitter)
    return extended_copy(loader, _StatefulWindowLoader if stateful else _WindowLoader, weft_splitter=splitter)


class Windows(Generic[B]):
    """Windows over any iterable of batches; what `accumulate_grads` returns for a non-DataLoader."""

    def __init__(self, batches: Iterable[B], splitter: WindowSplitter[B]) -> None:
        self.batches = batches
        self.weft_splitter = splitter

    def __iter__(self) -> Iterator[Window[B]]:
        batches = iter(self.batches)
        return self.weft_splitter.split(batches, known_length(self.batches), _rows)

    def __len__(self) -> int:
        """Windows of an epoch."""
        return self.weft_splitter.count(len(self.batches))  # type: ignore[arg-type]

    @property
    def remaining(self) -> int:
        """Windows that are left of the running epoch, or of the one that the next iteration reads."""
        return len(self) - self.weft_splitter.done


class _WindowLoader(Extension[Any]):
    """Mixed in before the class of a loader, so that it yields windows."""

    weft_splitter: WindowSplitter[Any]

    def __iter__(self) -> Iterator[Window[Any]]:  # type: ignore[override]
        return self._split(iter(super().__iter__()))

    def _split(self, batches: Iterator[Any]) -> Iterator[Window[Any]]:
        return self.weft_splitter.split(batches, known_length(self, super().__len__), _rows)

    def __len__(self) -> int:
        """Windows of an epoch."""
        return self.weft_splitter.count(super().__len__())

    @property
    def remaining(self) -> int:
        """Windows that are left of the running epoch, or of the one that the next iteration reads."""
        return len(self) - self.weft_splitter.done


class _ShardedWindowLoader(_WindowLoader):
    """Over a loader of `shard_data`, which can leave batches unread; see [Note: position in windows]."""

    weft_cursor: Any
    weft_reading: Any

    @override
    def _split(self, batches: Iterator[Any]) -> Iterator[Window[Any]]:
        splitter, loader = self.weft_splitter, _sharded(super())
        self.weft_cursor.has_windows = False
        self.weft_cursor.weighed = True  # its own `share` is not asked for
        length, _ = loader.weft_lengths()
        if length is not None and splitter.remainder != "step":
            rest = splitter.fit(splitter.windows, length)[1]
            length -= rest if loader.weft_leave_out(rest, carry=splitter.remainder == "carry") else 0
        planned, ask = loader.weft_planned(), self.weft_reading.shares.ask
        return splitter.split(batches, length, lambda _: loader.weft_size(), planned, ask)

    @override
    def __len__(self) -> int:
        """Windows of an epoch, with what is carried over into it, whether some of it are read already or not."""
        if self.__dict__.get("weft_inside"):  # the user's `__iter__` asks how many batches it yields
            return super(_WindowLoader, self).__len__()
        batches = _sharded(super()).weft_lengths()[1]
        return self.weft_splitter.count(super(_WindowLoader, self).__len__() if batches is None else batches)

    @property
    @override
    def remaining(self) -> int:
        """Windows that are left of the running epoch, or of the one that the next iteration reads."""
        splitter = self.weft_splitter
        batches, window = cast("Any", super(_WindowLoader, self)).remaining, splitter.sync.current
        if window is not None and not window.used_up and not self.weft_cursor.now.is_over:
            batches -= window.length - window.taken
        windows, left = splitter.fit(splitter.windows, batches + len(splitter.carried))
        return windows + (1 if left and splitter.remainder == "step" else 0)

    @property
    def share(self) -> float:
        """Not of this loader: its windows have one."""
        raise ContractError(
            "share: a loader of windows has no share",
            found="loader.share after accumulate_grads",
            expected="the share of a micro-batch of its window",
            fix="for x, y in window:\n    loss = cross_entropy(model(x), y) * window.share",
        )

    def state_dict(self) -> dict[str, Any]:
        """The position between two windows, free of the number of ranks; in a window: where it begins."""
        splitter, loader = self.weft_splitter, _sharded(super())
        window = splitter.sync.current
        if window is None or window.used_up:
            # What is carried over from a loader that cannot hold it back lies in memory, and is read again.
            found = loader.weft_position(len(splitter.carried)) | {"windows": splitter.windows}
        else:
            found = loader.weft_position(window.taken) | {"windows": splitter.windows - 1}
        is_within = callable(splitter.steps) and found["epoch"] == self.weft_cursor.now.epoch and splitter.done
        return found | ({"first_window": splitter.windows - splitter.done} if is_within else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position, also one saved with other `steps` or before there were windows."""
        windows, base = _windows_in(state), cast("Any", super())
        first = _windows_in(state, "first_window") if "first_window" in state else windows
        base.load_state_dict(state)
        self.weft_splitter.go_to(windows, first)
        left, _ = _sharded(base).weft_lengths()
        if self.weft_splitter.remainder == "drop" and left is not None and self.remaining == 0 < len(self):
            base.set_epoch(self.weft_cursor.now.epoch + 1)  # no window is left of this one

    def check_savable(self) -> None:
        """Raise in the middle of a window."""
        window = self.weft_splitter.sync.current
        if window is not None and not window.used_up and window.begun:
            raise unfinished_window_error(window)


class _StatefulWindowLoader(_WindowLoader):
    """Over a loader with a state of its own kind, which is asked between two windows only."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the loader below, and the number of windows."""
        base = cast("Any", super())
        return self.weft_splitter.state_between_windows(base.state_dict)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from it."""
        windows, base = _windows_in(state), cast("Any", super())
        base.load_state_dict(state["loader"])
        self.weft_splitter.go_to(windows)


class _StatefulWindows(Windows[B]):
    """The same over an iterable that is no `DataLoader`."""

    def state_dict(self) -> dict[str, Any]:
        """The state of the iterable below, and the number of windows."""
        return self.weft_splitter.state_between_windows(cast("Stateful", self.batches).state_dict)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from it."""
        windows = _windows_in(state)
        cast("Stateful", self.batches).load_state_dict(state["loader"])
        self.weft_splitter.go_to(windows)


def _rows(batch: object) -> Size:
    return rows_of(batch), None


def _sharded(loader: object) -> ShardedLoader[Any]:
    return cast("ShardedLoader[Any]", loader)


def _windows_in(state: Mapping[str, Any], name: str = "windows") -> int:
    windows: int = state.get(name, 0)
    check_count("load_state_dict", name, windows, least=0, fix="loader.load_state_dict(saved_loader.state_dict())")
    return windows


def known_length(batches: object, measure: Callable[[], int] | None = None) -> int | None:
    """How many batches, or windows, there will be; None if that is not known for sure."""
    if isinstance(batches, DataLoader) and isinstance(batches.dataset, IterableDataset):
        return None  # with several workers its length is a guess
    return length_of(batches, measure)
