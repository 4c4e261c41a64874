"""What leaves one stage and enters the next: tensors, and the form in which a layer gives them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.errors import type_error
from weft.tensors.dtensor import is_sharded

_WORDS = 64  # of int64, in the message that describes a border
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex128, torch.complex64)


class LayerOutput(NamedTuple):
    """What one layer gives.

    Attributes:
        form: "tensor", "tuple" or "list".
        shapes: Of each of its tensors, with the dtype; None for an entry that is None.
    """

    form: str
    shapes: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]


_FORMS = ("tensor", "tuple", "list")


class Borders:
    """The borders of the stages of this rank."""

    def __init__(self, group: dist.ProcessGroup, owners: Sequence[int], device: torch.device) -> None:
        self._group = group
        self._owners = owners
        self._device = device
        self._rank = dist.get_rank(group)
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
        peer = self._owners[stage + 1]
        if peer == self._rank:
            self._here[stage] = tensors
            return
        self._put((_words(border, self._device), *tensors), peer)

    def receive(self, key: Hashable, stage: int) -> Any:
        """Receive what enters a stage, in the form in which a layer gave it; remember what it is."""
        if stage == 0:
            self._known[key, -1] = LayerOutput("tuple", ())
            return None
        peer = self._owners[stage - 1]
        if peer == self._rank:
            return self.rebuilt(key, stage - 1, self._here.pop(stage - 1))
        (words,) = self._take([((_WORDS,), torch.int64)], peer)
        border = self._known[key, stage - 1] = _border(words.tolist())
        return self.rebuilt(key, stage - 1, self._take([one for one in border.shapes if one is not None], peer))

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
        border, given = self._known[key, stage], iter(tensors)
        values = [None if shape is None else next(given) for shape in border.shapes]
        return values[0] if border.form == "tensor" else tuple(values) if border.form == "tuple" else values

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
    form = "tensor" if isinstance(output, torch.Tensor) else "tuple" if type(output) is tuple else "list"
    if form == "list" and type(output) is not list:
        _refuse(type(output).__name__)
    entries: list[Any] = [output] if form == "tensor" else list(output)
    for one in entries:
        if one is not None and (not isinstance(one, torch.Tensor) or one.dtype not in _DTYPES or is_sharded(one)):
            kind = type(one).__name__
            _refuse(f"{kind} of {one.dtype}" if isinstance(one, torch.Tensor) else f"a {form} with a {kind}")
    shapes = tuple(None if one is None else (tuple(one.shape), one.dtype) for one in entries)
    return LayerOutput(form, shapes), tuple(one for one in entries if one is not None)


def _refuse(found: str) -> None:
    raise type_error(
        "pipeline: what leaves a stage cannot be sent",
        found=found,
        expected="the last layer of a stage to give a plain floating-point tensor, or a tuple or list of them",
        fix="weft.pipeline(..., stages=[...]) that end where a layer gives such tensors",
    )


def _words(border: LayerOutput, device: torch.device) -> torch.Tensor:
    words = [_FORMS.index(border.form), len(border.shapes)]
    for shape in border.shapes:
        words += [-1] if shape is None else [_DTYPES.index(shape[1]), len(shape[0]), *shape[0]]
    return torch.tensor(words + [0] * (_WORDS - len(words)), dtype=torch.int64, device=device)


def _border(words: list[int]) -> LayerOutput:
    given = iter(words)
    form, count = _FORMS[next(given)], next(given)
    shapes: list[tuple[tuple[int, ...], torch.dtype] | None] = []
    for _ in range(count):
        dtype = next(given)
        shapes.append(None if dtype < 0 else (tuple(next(given) for _ in range(next(given))), _DTYPES[dtype]))
    return LayerOutput(form, tuple(shapes))
