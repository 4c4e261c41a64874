"""What leaves one stage and enters the next: tensors, and the form in which a layer gives them.

With them goes what all layers before have returned, without values: the forward of the next stage computes masks and
positions from it, of the whole sequence where an embedding has returned that and the layers after it only a part.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.errors import type_error
from weft.tensors.dtensor import is_sharded

_WORDS = 256  # of int64, in the message that describes a border
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64)


class LayerOutput(NamedTuple):
    """What one layer gives.

    Attributes:
        form: "tensor", "tuple" or "list".
        shapes: Of each of its tensors, with the dtype; None for an entry that is None.
    """

    form: str
    shapes: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]

    def filled(self, make: Callable[[tuple[int, ...], torch.dtype], Any]) -> Any:
        """The like of it, of what is made for each shape and dtype."""
        values = [None if shape is None else make(*shape) for shape in self.shapes]
        return values[0] if self.form == "tensor" else tuple(values) if self.form == "tuple" else values


_FORMS = ("tensor", "tuple", "list")
Earlier = tuple[tuple[int, LayerOutput], ...]  # the layers, by number, from which on others are returned than before


@dataclass(eq=False, repr=False)
class Borders:
    """The borders of the stages of this rank.

    Args:
        group: The ranks of the pipeline.
        owners: The rank of each stage.
        device: Of this rank.
        returned: What the layers up to the end of a stage have returned, by number.
    """

    _group: dist.ProcessGroup
    _owners: Sequence[int]
    _device: torch.device
    _returned: Callable[[int], Iterable[tuple[int, Any]]]

    def __post_init__(self) -> None:
        self._rank = dist.get_rank(self._group)
        self._earlier: dict[tuple[Hashable, int], Earlier] = {}
        self._known: dict[tuple[Hashable, int], LayerOutput] = {}
        self._here: dict[int, tuple[torch.Tensor, ...]] = {}  # between two stages of this rank
        self._back: dict[int, Sequence[torch.Tensor]] = {}  # the gradients
        self._sent: list[Any] = []

    def send(self, key: Hashable, stage: int, output: Any) -> None:
        """Send what leaves a stage, and what it is, to the next one; remember what it is."""
        border, tensors = _described(output)
        self._known[key, stage] = border
        if stage + 1 == len(self._owners):
            return
        earlier = self._earlier[key, stage] = _runs(self._returned(stage))
        peer = self._owners[stage + 1]
        if peer == self._rank:
            self._here[stage] = tensors
            return
        self._put((_words(border, earlier, self._device), *tensors), peer)

    def receive(self, key: Hashable, stage: int) -> Any:
        """Receive what enters a stage, in the form in which a layer gave it; remember what it is."""
        if stage == 0:
            self._known[key, -1] = LayerOutput("tuple", ())
            return None
        peer = self._owners[stage - 1]
        if peer == self._rank:
            return self.rebuilt(key, stage - 1, self._here.pop(stage - 1))
        (words,) = self._take([((_WORDS,), torch.int64)], peer)
        border, self._earlier[key, stage - 1] = _border(words.tolist())
        self._known[key, stage - 1] = border
        return self.rebuilt(key, stage - 1, self._take([one for one in border.shapes if one is not None], peer))

    def earlier(self, key: Hashable, stage: int) -> Earlier:
        """What the layers before a stage have returned."""
        return self._earlier.get((key, stage - 1), ())

    def send_back(self, stage: int, gradients: Sequence[torch.Tensor]) -> None:
        """Send the gradients of what entered a stage to the one before it."""
        if stage == 0:
            return
        peer = self._owners[stage - 1]
        if peer == self._rank:
            self._back[stage - 1] = gradients
            return
        self._put(gradients, peer)

    def receive_back(self, stage: int, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Receive the gradients of what left a stage."""
        peer = self._owners[stage + 1]
        if peer == self._rank:
            return self._back.pop(stage)
        return self._take([(t.shape, t.dtype) for t in outputs], peer)

    def _put(self, tensors: Sequence[torch.Tensor], peer: int) -> None:
        for tensor in (each.contiguous() for each in tensors if each.numel()):
            self._sent.append((dist.isend(tensor, group=self._group, group_dst=peer), tensor))

    def _take(self, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]], peer: int) -> list[torch.Tensor]:
        found = [torch.empty(shape, dtype=dtype, device=self._device) for shape, dtype in shapes]
        for tensor in (each for each in found if each.numel()):
            dist.recv(tensor, group=self._group, group_src=peer)
        return found

    def wait(self) -> None:
        """Wait until all that was sent has arrived."""
        while self._sent:
            self._sent.pop(0)[0].wait()

    def examples(self, key: Hashable, stage: int) -> tuple[torch.Tensor, ...]:
        """Tensors on meta like those that leave a stage."""
        self.wait()
        shapes = self._known[key, stage].shapes
        return tuple(torch.empty(s[0], dtype=s[1], device="meta", requires_grad=True) for s in shapes if s is not None)

    def rebuilt(self, key: Hashable, stage: int, tensors: Sequence[torch.Tensor]) -> Any:
        """Tensors in the form in which the last layer of a stage gave them."""
        if stage < 0:
            return None
        given = iter(tensors)
        return self._known[key, stage].filled(lambda *_: next(given))

    def flat(self, key: Hashable, stage: int, output: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of what leaves a stage, each with a graph.

        Raises:
            TypeError: It is of another form or shape than in the first micro-batch.
        """
        border, tensors = _described(output)
        if border != self._known[key, stage]:
            raise type_error(
                "pipeline: a layer gives other shapes for one micro-batch than for another",
                found=f"{border.shapes} after stage {stage}, {self._known[key, stage].shapes} before",
                expected="shapes that depend on those of the inputs only",
                fix="weft.pipeline(..., stages=[...]) that end where all micro-batches have the same shapes",
            )
        # Where nothing is trained there is no graph, and schedules want one; they send what is contiguous.
        return tuple(t.contiguous() if t.requires_grad else t.detach().contiguous().requires_grad_() for t in tensors)


def _described(output: Any) -> tuple[LayerOutput, tuple[torch.Tensor, ...]]:
    found, entries = _entries(output)
    if found is not None:
        raise type_error(
            "pipeline: what leaves a stage cannot be sent",
            found=found,
            expected="the last layer of a stage to give a plain floating-point tensor, or a tuple or list of them",
            fix="weft.pipeline(..., stages=[...]) that end where a layer gives such tensors",
        )
    return _form(output, entries), tuple(one for one in entries if one is not None)


def _entries(output: Any) -> tuple[str | None, list[Any]]:
    """What cannot be sent of what a layer gives, if anything; and its tensors."""
    if not isinstance(output, torch.Tensor) and type(output) not in (tuple, list):
        return type(output).__name__, []
    entries: list[Any] = [output] if isinstance(output, torch.Tensor) else list(output)
    for one in entries:
        if one is not None and (not isinstance(one, torch.Tensor) or one.dtype not in _DTYPES or is_sharded(one)):
            kind = type(one).__name__
            is_tensor = isinstance(one, torch.Tensor)
            return f"{kind} of {one.dtype}" if is_tensor else f"a {type(output).__name__} with a {kind}", []
    return None, entries


def _form(output: Any, entries: Sequence[Any]) -> LayerOutput:
    form = "tensor" if isinstance(output, torch.Tensor) else type(output).__name__
    return LayerOutput(form, tuple(None if one is None else (tuple(one.shape), one.dtype) for one in entries))


def _runs(returned: Iterable[tuple[int, Any]]) -> Earlier:
    """What layers have returned, where it is another form or shape than that of the layer before."""
    runs: list[tuple[int, LayerOutput]] = []
    for number, output in returned:
        found, entries = _entries(output)
        if found is None and (not runs or runs[-1][1] != _form(output, entries)):
            runs.append((number, _form(output, entries)))
    return tuple(runs)


def _words(border: LayerOutput, earlier: Earlier, device: torch.device) -> torch.Tensor:
    words, runs = _numbers(border), [[number, *_numbers(output)] for number, output in earlier]
    fitting = [run for end, run in enumerate(runs, 1) if len(words) + 1 + sum(map(len, runs[:end])) <= _WORDS]
    words += [len(fitting), *(word for run in fitting for word in run)]
    return torch.tensor(words + [0] * (_WORDS - len(words)), dtype=torch.int64, device=device)


def _numbers(output: LayerOutput) -> list[int]:
    words = [_FORMS.index(output.form), len(output.shapes)]
    for shape in output.shapes:
        words += [-1] if shape is None else [_DTYPES.index(shape[1]), len(shape[0]), *shape[0]]
    return words


def _border(words: list[int]) -> tuple[LayerOutput, Earlier]:
    given = iter(words)
    output = _output(given)
    return output, tuple((next(given), _output(given)) for _ in range(next(given)))


def _output(given: Iterator[int]) -> LayerOutput:
    form, count = _FORMS[next(given)], next(given)
    shapes: list[tuple[tuple[int, ...], torch.dtype] | None] = []
    for _ in range(count):
        dtype = next(given)
        shapes.append(None if dtype < 0 else (tuple(next(given) for _ in range(next(given))), _DTYPES[dtype]))
    return LayerOutput(form, tuple(shapes))
