"""Live bytes of tensors: what is allocated and freed, by kind and line.

[Note: events] Only storages count, once each, from the operation that makes them until they are freed. What they are
is known later: a storage that holds a gradient at a step was one from the start. So events are written down, and run
through again when all is known.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from weft import torch_internals
from weft.rehearsal.memory import Holder, Memory, Moment
from weft.rehearsal.simulation.lines import code_position

_HOLDERS = 8
_ORDER = ("other", "activations", "gathered", "buffers", "gradients", "optimizer", "parameters")  # later ones win


class _Event(NamedTuple):
    number: int  # of a storage
    bytes: int  # from now on
    line: str  # that runs


class Allocations:
    """Every storage that was seen.

    Attributes:
        events: See [Note: events].
        computes: What is not known to be something else is an activation now.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}  # of living storages, by address
        self._watched: dict[int, weakref.ref[Any]] = {}  # likewise, by number
        self._kinds: list[str] = []  # by number, as the following
        self._lines: list[str] = []
        self._sizes: list[int] = []
        self.events: list[_Event] = []
        self.computes = False

    # -- what happens --------------------------------------------------------------------------------------

    def see(self, tensor: torch.Tensor) -> None:
        """A tensor was made, or returned once more."""
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = torch_internals.STORAGE_ADDRESS.of(storage), storage.nbytes()
        if key in self._numbers:
            self._resize(self._numbers[key], size)
            return
        number = self._numbers[key] = len(self._kinds)
        self._watched[number] = weakref.ref(storage, lambda _: self._free(key, number))
        line, caller, _ = code_position()
        kind = "activations" if self.computes else "other"
        self._kinds.append({"strategy": "gathered", "optimizer": "other"}.get(caller, kind))
        self._lines.append(line)
        self._sizes.append(size)
        self.events.append(_Event(number, size, line))

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage may have another size now."""
        key = torch_internals.STORAGE_ADDRESS.of(storage)
        if key in self._numbers:
            self._resize(self._numbers[key], storage.nbytes())

    def _resize(self, number: int, size: int) -> None:
        if self._sizes[number] != size:
            self._sizes[number] = size
            self.events.append(_Event(number, size, code_position().line))

    def _free(self, key: int, number: int) -> None:
        if self._numbers.get(key) == number:
            del self._numbers[key]
        del self._watched[number]
        self.events.append(_Event(number, 0, ""))

    # -- what it is ----------------------------------------------------------------------------------------

    def look_at_modules(self) -> None:
        """Find out which storages hold parameters, their gradients and buffers of living modules."""
        parameters, buffers = torch_internals.PARAMETERS.name, torch_internals.BUFFERS.name
        for module in (each for each in gc.get_objects() if issubclass(type(each), nn.Module)):
            members = module.__dict__
            for p in (each for each in members.get(parameters, {}).values() if each is not None):
                # What a strategy has gathered is a parameter of the module, too, while it is.
                self.name("parameters", p, but_for="gathered" if _is_plain(p) else None)
                self.name("gradients", p.grad)
            for buffer in members.get(buffers, {}).values():
                self.name("buffers", buffer)

    def look_at_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Find out which storages an optimizer steps on and keeps."""
        for group in optimizer.param_groups:
            for p in group["params"]:
                self.name("parameters", p)
                self.name("gradients", p.grad)
                for value in optimizer.state.get(p, {}).values():
                    self.name("optimizer", value)

    def name(self, kind: str, tensor: Any, *, but_for: str | None = None) -> None:
        """Know of what kind the memory of a tensor is."""
        for part in plain_parts(tensor) if isinstance(tensor, torch.Tensor) else ():
            number = self._numbers.get(torch_internals.STORAGE_ADDRESS.of(part.untyped_storage()))
            if number is None or self._kinds[number] == but_for:
                continue
            if _ORDER.index(kind) > _ORDER.index(self._kinds[number]):
                self._kinds[number] = kind

    # -- what was found ------------------------------------------------------------------------------------

    def moments(self, labels: Sequence[str], bounds: Sequence[int], *, ends_in_step: bool) -> tuple[Moment, ...]:
        """Each part of the program: what is live at its end, and at its peak.

        Args:
            labels: Of the parts.
            bounds: The first event of each, and of what comes after the last.
            ends_in_step: The last part is not whole; what is live between steps was seen before it.
        """
        ends, totals = bounds[1:], [0]
        sizes: dict[int, int] = {}
        for event in self.events:
            totals.append(totals[-1] + event.bytes - sizes.get(event.number, 0))
            sizes[event.number] = event.bytes
        peaks = [max(range(start, end + 1), key=totals.__getitem__) for start, end in itertools.pairwise(bounds)]
        memories = {end: self._memory(end) for end in {*peaks, *ends}}
        rests = [*ends[:-1], ends[-2]] if ends_in_step and len(ends) > 2 else ends
        return tuple(
            Moment(label, memories[rest], memories[peak])
            for label, rest, peak in zip(labels, rests, peaks, strict=True)
        )

    def _memory(self, end: int) -> Memory:
        """What is live after so many events."""
        sizes = {event.number: event.bytes for event in self.events[:end]}
        line = self.events[end - 1].line if end else ""
        kinds: Counter[str] = Counter()
        holders: Counter[tuple[str, str]] = Counter()
        for number, size in sizes.items():
            kinds[self._kinds[number]] += size
            holders[self._kinds[number], self._lines[number]] += size
        largest = tuple(Holder(kind, size, at or None) for (kind, at), size in holders.most_common(_HOLDERS) if size)
        return Memory(**kinds, where=line or None, holders=largest)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter, torch_internals.fake_tensor.found)


def plain_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a sparse one, or one of another class such as a DTensor, is made of; else itself."""
    if tensor.layout is torch.sparse_coo:
        yield torch_internals.SPARSE_INDICES.of(tensor)()
        yield torch_internals.SPARSE_VALUES.of(tensor)()
        return
    if _is_plain(tensor) or not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    wrapper: Any = tensor
    names: Iterable[str] = wrapper.__tensor_flatten__()[0]
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, torch.Tensor):
            yield from plain_parts(part)
