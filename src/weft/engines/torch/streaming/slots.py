"""Memory that parts take in turns, and what reads the next one ahead.

[Note: from both ends] The part in use lies at one end of the memory, the next one at the other. What of the next one
does not reach into the part in use is read at once, the rest as soon as that part is done. So memory for one part is
enough, and memory for two lets all of it be read ahead.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeAlias

import torch

_ALIGNMENT = 64  # bytes: of tensors side by side
Fill: TypeAlias = Callable[[Sequence[tuple[Any, torch.Tensor]]], None]


class Wanted(NamedTuple):
    """A tensor that a part needs.

    Attributes:
        source: Where its values are; for whom fills memory.
        shape: Of the tensor.
        dtype: Of the tensor.
    """

    source: Any
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


def slot_bytes(num_bytes: int) -> int:
    """The bytes that a tensor takes beside others."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class _Loaded:
    """A part at one end of the memory; tensors of it are there, or on their way, from the first one on."""

    def __init__(self, part: int, ends: list[int]) -> None:
        self.part = part
        self.ends = ends  # where each tensor ends, counted from the end of the memory that the part lies at
        self.count = 0
        self.reading: _Reading | None = None
        self.copied: torch.Event | None = None


class _Reading(threading.Thread):
    """Reads tensors of a part ahead, after those that an earlier one reads; when nothing is read, no thread is left."""

    def __init__(self, read: Callable[[], None], earlier: _Reading | None) -> None:
        super().__init__(name="weft-place")  # joined at exit: a daemon in C++ would abort
        self._read = read
        self._earlier = earlier
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Read."""
        try:
            if self._earlier is not None:
                self._earlier.result()
            self._read()
        except BaseException as error:  # noqa: BLE001  (raised by `result`, where the part is needed)
            self._error = error

    def result(self) -> None:
        """Wait, and raise what reading raised."""
        self.join()
        if self._error is not None:
            raise self._error


class Slots:
    """Memory on a device for the parts of a module, in the order in which they were called before.

    Args:
        parts: The tensors of each part.
        device: Of the memory.
        room: Bytes of it; at least those of the largest part.
        fill: Fills tensors on the device from sources; called in a thread.
        ahead: Whether to read ahead.
    """

    def __init__(
        self, parts: Sequence[Sequence[Wanted]], device: torch.device, room: int, fill: Fill, *, ahead: bool
    ) -> None:
        self._parts = [tuple(part) for part in parts]
        self._ends = [list(accumulate(slot_bytes(one.num_bytes) for one in part)) for part in self._parts]
        self._size = max(room - room % _ALIGNMENT, max((ends[-1] for ends in self._ends), default=0))
        with torch.inference_mode(mode=False):  # it is written to in every mode
            self._memory = torch.empty(self._size, dtype=torch.uint8, device=device)
        self._fill = fill
        self._stream = None if device.type == "cpu" else torch.Stream(device=device)
        self._ahead = ahead
        self._loaded: list[_Loaded | None] = [None, None]
        self._next = {i: (i + 1) % len(self._parts) for i in range(len(self._parts))}
        self._before: int | None = None
        self._side = 0  # the end of the last part
        self.in_use: int | None = None

    def enter(self, part: int) -> list[torch.Tensor]:
        """The tensors of a part, which are whole until `leave`."""
        known = [side for side in (0, 1) if (one := self._loaded[side]) is not None and one.part == part]
        side = known[0] if known else 1 - self._side
        if not known:
            self._drop(side)
            self._loaded[side] = _Loaded(part, self._ends[part])
        loaded = self._at(side)
        if not self._apart(loaded, self._loaded[1 - side]):
            self._drop(1 - side)
        try:
            if loaded.reading is not None:
                loaded.reading.result()
            self._read(loaded, side, len(loaded.ends), self._now())
        except BaseException:
            self._loaded[side] = None
            raise
        if self._stream is not None and loaded.copied is not None:
            torch.accelerator.current_stream(self._memory.device).wait_event(loaded.copied)
        if self._before is not None:
            self._next[self._before] = part
        self._before, self.in_use, self._side = part, part, side
        self._read_ahead(self._size - loaded.ends[-1])
        return [self._view(loaded, side, index) for index in range(len(loaded.ends))]

    def leave(self) -> None:
        """The part is not used any more; what of the next one had to wait for it is read now."""
        side, self.in_use = self._side, None
        ahead = self._loaded[1 - side]
        if ahead is not None and not self._apart(self._at(side), ahead):
            self._loaded[side] = None
        self._read_ahead(self._size)

    def close(self) -> None:
        """Stop reading, and let go of the memory."""
        self._drop(0)
        self._drop(1)
        if self._stream is not None:
            self._memory.record_stream(self._stream)  # may still write what was read ahead
        self._memory = self._memory.new_empty(0)

    def _at(self, side: int) -> _Loaded:
        loaded = self._loaded[side]
        assert loaded is not None
        return loaded

    def _apart(self, one: _Loaded, other: _Loaded | None) -> bool:
        return other is None or one.ends[-1] + other.ends[-1] <= self._size

    def _read_ahead(self, space: int) -> None:
        """Read what of the next part has space, at the end across from the last one."""
        if not self._ahead or self._before is None or self._next[self._before] == self._before:
            return
        following, side = self._next[self._before], 1 - self._side
        loaded = self._loaded[side]
        if loaded is None or loaded.part != following:
            self._drop(side)
            loaded = self._loaded[side] = _Loaded(following, self._ends[following])
        upto = sum(end <= space for end in loaded.ends)
        if upto <= loaded.count:
            return
        with contextlib.suppress(RuntimeError):  # no memory for a thread: `enter` reads
            loaded.reading = _Reading(partial(self._read, loaded, side, upto, self._now()), loaded.reading)

    def _read(self, loaded: _Loaded, side: int, upto: int, after: torch.Event | None) -> None:
        """Fill the next tensors of a part: on an accelerator when what was asked of it until `after` is done."""
        if loaded.count >= upto:
            return
        wanted = self._parts[loaded.part]
        pairs = [(wanted[i].source, self._view(loaded, side, i)) for i in range(loaded.count, upto)]
        if self._stream is None or after is None:
            self._fill(pairs)
        else:
            with self._stream:
                self._stream.wait_event(after)
                self._fill(pairs)
                loaded.copied = self._stream.record_event()
        loaded.count = upto

    def _view(self, loaded: _Loaded, side: int, index: int) -> torch.Tensor:
        one, end = self._parts[loaded.part][index], loaded.ends[index]
        start = end - slot_bytes(one.num_bytes) if side == 0 else self._size - end
        return self._memory[start : start + one.num_bytes].view(one.dtype).view(one.shape)

    def _now(self) -> torch.Event | None:
        """What the accelerator was asked for so far."""
        if self._stream is None:
            return None
        event: torch.Event = torch.accelerator.current_stream(self._memory.device).record_event()
        return event

    def _drop(self, side: int) -> None:
        loaded = self._loaded[side]
        if loaded is not None and loaded.reading is not None:
            loaded.reading.join()
        self._loaded[side] = None
