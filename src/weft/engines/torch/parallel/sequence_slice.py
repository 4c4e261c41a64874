"""Context parallelism, measured: a slice of a batch through the model, in parts on several ranks, and whole on each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from weft.engines.probes import Args, Compared, Kwargs, OnlyInParts
from weft.engines.torch.parallel.sequence_exchange import SequenceRanks, gather_places
from weft.engines.torch.probes.compare import (
    LIMIT,
    LOW_LIMIT,
    OF_PARTS,
    OTHERS,
    difference,
    parts_suppressed,
    returned_tensors,
)
from weft.engines.torch.probes.no_trace import no_trace
from weft.engines.torch.probes.observed import WithoutDropout
from weft.tensors.nested import leaves, map_leaves, map_tensors, tensors
from weft.tensors.sequence_order import SequencePart, added_arguments, is_added, note_part, part_of, places

# Tokens that are computed whole, at least and at most; between, as many as a rank has, and later the least.
_FEW, _MANY = 2048, 8192
_LOW_LOSS = 1e-3  # the limit where 16 bits are in it: the rounding of a loss averages out
_MEAN = (
    "losses.mean(), of all places; where not all count: count = weft.metrics.denominator(number, ctx) "
    "of this rank's places, model(..., count), and in it losses.sum() / count"
)
_GIVEN = (
    "part = weft.data.split_sequence(batch, ctx, shifts_labels=False)  # if the model does not shift labels; "
    'or batch["position_ids"] = positions  # before it is split, if the model counts them in another way than 0, 1, 2'
)


class SlicedSequences:
    """The probe of `context_parallel`.

    Attributes:
        units: The module itself.
        group: The ranks of the axis.
    """

    spare: nn.Module | None = None
    outside = True
    cause = "something but attention depends on several places of a sequence, of which each rank has a part"
    fix = (
        "model(**weft.data.split_sequence(batch, ctx)) with all that it returns, as the positions of this rank's "
        "tokens and shifted labels; or return what each place computes, and outside, on all ranks: "
        'every = weft.gather(output.transpose(0, 1), ctx.on("context"), grad=True)'
        '[weft.gather(position_ids[0], ctx.on("context")).argsort()]  # [places, rows, ...]'
    )

    def __init__(
        self, module: nn.Module, ranks: SequenceRanks, undivided: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Remember what is called.

        Args:
            module: Whose attention is over all ranks.
            ranks: They.
            undivided: A context in which calls are those of one process.
        """
        self.units: Mapping[str, nn.Module] = {"": module}
        self.group: dist.ProcessGroup | None = ranks.group
        self._ranks = ranks
        self._undivided = undivided
        self._turn = 0
        self._needs = 0  # 0: some rows at a time can be computed, and some of their places; 1: all rows; 2: all of them

    def equal_inputs(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """The shapes: the parts differ."""
        return [torch.tensor(t.shape) for t in tensors((args, kwargs))]

    def alone(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """The module, called with whole sequences. Collectives: one all-gather per argument."""
        return self._call(*self._sliced(args, kwargs)[1], whole=True)

    def measure(self, name: str, args: Args, kwargs: Kwargs, *, gradients: bool) -> Iterator[Compared]:
        """Compare what is returned: of each place, and a loss as the mean over the ranks.

        At first a loss of few rows is compared as well: in that of all of them, differences of rows may cancel out. And
        so is a call without what `split_sequence` has added, which the model may compute in another way.

        Yields:
            What differs between the parts and the whole, if the model mixes places.
        """
        del gradients  # of each place; the strategy that averages them over this axis is measured itself
        self._turn += 1
        is_loss = yield from self._compare(args, kwargs)
        if is_loss and self._turn == 1:
            with parts_suppressed():  # of so few, it may be undefined
                yield from self._compare(args, kwargs, few=True)
        if any(map(is_added, kwargs.values())):
            with parts_suppressed():  # the model may need it
                yield from self._compare(args, kwargs, few=True, given=True)

    def _compare(
        self, args: Any, kwargs: Any, *, few: bool = False, given: bool = False
    ) -> Generator[Compared, None, bool]:
        n, trains, fix = self._ranks.number, torch.is_grad_enabled(), _GIVEN if given else ""
        with torch.no_grad(), WithoutDropout() as observed, _without_fast_path():
            parts, whole, expected = self._whole(args, kwargs, few, given)
            is_loss = any(one.ndim == 0 and one.is_floating_point() for one in expected)
            counted = self._counted(whole) if is_loss and trains else []
            try:
                found = self._returned(parts, whole=False)
            except OTHERS:
                raise
            except OF_PARTS as error:
                raise OnlyInParts(str(error)) from error
        yield Compared("the number of outputs", torch.tensor(len(found)), torch.tensor(len(expected)))
        here = next((t for t in tensors(parts) if t.ndim > 1), None)
        length = 0 if here is None else here.shape[1] * n
        at = places(length, SequencePart(self._ranks.order, n, self._ranks.rank)) if length else None
        for number, (one, other) in enumerate(zip(found, expected, strict=False)):
            if not other.is_floating_point():
                continue
            limit = (LOW_LIMIT if other.ndim else _LOW_LOSS) if observed.low else LIMIT
            what = "what is returned" if len(found) == 1 else f"output {number}"
            if other.ndim == 0:
                mean = one.clone()
                dist.all_reduce(mean, group=self.group)
                mean /= n
                nearest = mean if given else _nearest([mean, mean * n], other)
                yield Compared(f"{what}, over the ranks,", nearest, other, 0.0, limit, fix)
                if trains and not given:  # gradients are averaged
                    # A sum that is divided by a number is a mean if that is a count per rank: n times as many in all.
                    right = _nearest([other, *(more[number] / n**2 for more in counted if len(more) > number)], mean)
                    text = f"the mean over the ranks of {what}"
                    yield Compared(text, mean, right, 0.0, limit, _MEAN, number)
            else:
                wanted = [other] if at is None else _parts_of(other, one.shape, length, at)
                yield Compared(what, one, _nearest(wanted, one), 0.0, limit, fix)
        return is_loss

    def _whole(self, args: Any, kwargs: Any, few: bool, given: bool) -> tuple[Any, Any, list[torch.Tensor]]:
        """Some rows, in parts and whole, and what is returned for them whole; more, if some cannot be computed."""
        while not few and self._needs < 2:  # of groups of rows, or of documents whose ends are given
            with parts_suppressed():
                parts, whole = self._sliced(args, kwargs)
                return parts, whole, self._returned(whole, whole=True)
            self._needs += 1
        parts, whole = self._sliced(args, kwargs, few, given)
        return parts, whole, self._returned(whole, whole=True)

    def _counted(self, whole: Any) -> list[list[torch.Tensor]]:
        """What is returned where one number among the arguments is smaller, for each that may be so."""
        found = []
        for call in _with_counts(whole, self._ranks.number):
            with parts_suppressed():  # it may be no count
                found.append(self._returned(call, whole=True))
        return found

    def _returned(self, call: Any, *, whole: bool) -> list[torch.Tensor]:
        with no_trace(self.units[""]):  # all begin with the same random states and attributes
            return returned_tensors(self._call(*call, whole=whole), numbers=False)

    def _call(self, args: Any, kwargs: Any, *, whole: bool) -> Any:
        module = self.units[""]
        with self._undivided() if whole else contextlib.nullcontext():
            return functional_call(module, {n: b.clone() for n, b in module.named_buffers()}, args, kwargs)

    def _sliced(self, args: Any, kwargs: Any, few: bool = False, given: bool = False) -> tuple[Any, Any]:
        """Some rows, in parts and whole. Collectives: one all-gather per argument, and one where not all is taken.

        Args:
            args: Of the call, on this rank.
            kwargs: Likewise.
            few: Whether to take few rows.
            given: Whether the whole is as it was before it was split; it then begins with the first place.
        """
        n, order = self._ranks.number, self._ranks.order
        found = [t for t in tensors((args, kwargs)) if t.ndim > 1]
        here = next((t.shape[1] for t in found if part_of(t) is not None), found[0].shape[1] if found else 0)
        rows = next((t.shape[0] for t in found if t.shape[1] == here), 0)
        part = SequencePart(order, n, self._ranks.rank)
        count, length = self._size(rows, here, few)
        mine = places(length, part)

        def is_part(tensor: torch.Tensor) -> bool:
            return tensor.ndim > 1 and tensor.shape[1] == here and tensor.shape[-2:] != (here * n, here * n)

        chosen, start = torch.arange(rows), 0
        if (count, length) != (rows, here * n) and found:
            empty = found[0].new_zeros(rows, here, dtype=torch.float32)
            hidden = sum((_hidden(t) for t in found if t.shape == (rows, here)), empty)
            everywhere = gather_places(self._ranks, hidden).cpu()
            is_noted = any(part_of(t) is not None for t in found)  # else it has to begin with the first place
            if given:  # a row that hides little, and one that begins with padding
                chosen = torch.stack(
                    [everywhere.sum(1).argmin(), everywhere[:, : length // 2].sum(1).argmax()]
                ).unique()
            else:
                chosen, start = self._choose(everywhere, count, length, moves=is_noted)

        def joined(tensor: torch.Tensor) -> torch.Tensor:
            some = tensor.detach()
            if tensor.ndim and tensor.shape[0] == rows:
                some = some[chosen.to(some.device)]
            if is_part(tensor):
                some = gather_places(self._ranks, some)
            for dim in _of_places(some, here * n, rows, is_part=is_part(tensor)):
                some = some.narrow(dim, start, length)
            return some

        whole = map_tensors(joined, (args, kwargs))
        as_given, again = {name: value for name, value in whole[1].items() if not is_added(kwargs[name])}, whole
        if given and found:
            shape, device, shifts = (len(chosen), length), found[0].device, is_added(kwargs.get("shift_labels"))
            again = whole[0], whole[1] | added_arguments(as_given, shape, device, n, dim=1, shifts=shifts)
            again = whole[0], {name: again[1][name] for name in kwargs}

        def cut(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            if not is_part(old):
                return new
            noted = part_of(old)
            piece = new[:, mine.to(new.device)]
            return piece if noted is None else note_part(piece, noted)

        news = iter(list(tensors(again)))
        parts = map_tensors(lambda old: cut(old, next(news)), (args, kwargs))
        return parts, (whole[0], as_given) if given else whole

    def _size(self, rows: int, here: int, few: bool) -> tuple[int, int]:
        """How many rows are computed whole, and how many places of them: whole ones, and a divisor of all if it can."""
        n = self._ranks.number
        length, limit = here * n, _FEW if few or self._turn > 1 else min(max(rows * here, _FEW), _MANY)
        count = rows
        if few:
            count = min(rows, max(rows // 2, 1), 2)
        elif rows * length > limit and not self._needs:
            most = min(limit // length, rows)
            count = next((k for k in range(most, 1, -1) if rows % k == 0), min(2, rows))
        if count * length > limit and self._needs < 2:
            length = max(limit // (count * 2 * n), 1) * 2 * n
        return count, length

    def _choose(self, hidden: torch.Tensor, count: int, length: int, *, moves: bool) -> tuple[torch.Tensor, int]:
        """Rows, and the first of their places, in which parts differ most in how much is hidden; else each in turn."""
        (rows, every), n, split = hidden.shape, self._ranks.number, self._ranks.order
        first, last = (places(length, SequencePart(split, n, rank)) for rank in (0, n - 1))
        starts = [*range(0, every - length, max(length // 2, 1)), every - length] if moves else [0]
        order = torch.arange(rows).roll(-self._turn * count)
        best, found = -1.0, (order, 0)
        for start in starts[self._turn % len(starts) :] + starts[: self._turn % len(starts)]:
            off = (hidden[:, start + first].sum(1) - hidden[:, start + last].sum(1))[order]
            most = off.argsort(descending=True, stable=True)[:count]
            if float(off[most].sum().abs()) > best:
                best, found = float(off[most].sum().abs()), (order[most].sort().values, start)
        return found


def _with_counts(call: Any, ranks: int) -> Iterator[Any]:
    """The call with each number in it divided by that of the ranks, in turn."""
    for place, leaf in leaves(call):
        is_count = leaf.numel() == 1 if isinstance(leaf, torch.Tensor) else isinstance(leaf, (int, float))
        if is_count and not isinstance(leaf, bool):
            yield map_leaves(lambda at, one, place=place: one / ranks if at == place else one, call)  # type: ignore[misc]


def _of_places(tensor: torch.Tensor, length: int, rows: int, *, is_part: bool) -> list[int]:
    """The dimensions of whole sequences: of a part, once gathered, of a mask, and of what masks are made of."""
    dims = [dim for dim, size in enumerate(tensor.shape) if size == length and (dim or length != rows)]
    if tensor.is_floating_point():  # other dimensions are of features
        is_mask = not is_part and dims[-2:] == [tensor.ndim - 2, tensor.ndim - 1]
        return dims[-2:] if is_mask else [1] * is_part
    return dims


def _hidden(tensor: torch.Tensor) -> torch.Tensor:
    """Where labels are ignored, or a mask is zero."""
    return (tensor == 0 if tensor.is_floating_point() else tensor <= 0).float()


def _nearest(values: Sequence[torch.Tensor], wanted: torch.Tensor) -> torch.Tensor:
    return min(values, key=lambda value: difference(Compared("", value, wanted)))


def _parts_of(whole: torch.Tensor, shape: torch.Size, length: int, at: torch.Tensor) -> list[torch.Tensor]:
    """This rank's places of an output, in the one dimension that holds those of all: of a sequence, or of all rows.

    Rows may come first in it, or places.
    """
    dims = [dim for dim, (all_of, mine) in enumerate(zip(whole.shape, shape, strict=False)) if all_of != mine]
    if whole.ndim != len(shape) or len(dims) != 1 or whole.shape[dims[0]] % length:
        return [whole]
    (dim,) = dims
    at = at.to(whole.device)
    return [
        whole.unflatten(dim, sizes).index_select(dim + inner, at).flatten(dim, dim + 1)
        for inner, sizes in enumerate([(length, -1), (-1, length)])
    ]


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """Without gradients, torch's attention is a kernel of its own in eval mode, which cannot be caught."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
