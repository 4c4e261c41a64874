"""Context parallelism, measured: a slice of a batch through the model, in parts on several ranks, and whole on each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from weft.engines.probes import Compared
from weft.engines.torch.parallel.sequence_exchange import Ranks
from weft.engines.torch.probes.compare import returned
from weft.engines.torch.probes.no_trace import no_trace
from weft.engines.torch.probes.observed import Observed
from weft.tensors.nested import map_tensors, tensors
from weft.tensors.sequence_order import SequencePart, note_part, part_of, places

__all__ = ["SlicedSequences"]

_ROWS = 2
_TOKENS = 1024  # per sequence, of all ranks together
_LOW_OUTPUT, _LOW_LOSS = 5e-2, 1e-3  # limits where 16 bits are in it; the rounding of a loss averages out


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
        "tokens and shifted labels; or compute for each place alone, and the rest outside of the module"
    )

    def __init__(self, module: nn.Module, ranks: Ranks, undivided: Callable[[], AbstractContextManager[None]]) -> None:
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

    def equal_inputs(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The shapes: the parts differ."""
        del name
        return [torch.tensor(t.shape) for t in tensors((args, kwargs))]

    def alone(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The module, called with whole sequences. Collectives: one all-gather per argument."""
        return self._call(name, *self._sliced(args, kwargs)[1], whole=True)

    def measure(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, gradients: bool
    ) -> Iterator[Compared]:
        """Compare what is returned: of each place, and a loss as the mean over the ranks.

        Yields:
            What differs between the parts and the whole, if the model mixes places.
        """
        del gradients  # of each place; the strategy that averages them over this axis is measured itself
        parts, whole = self._sliced(args, kwargs)
        with torch.no_grad(), Observed() as observed, _without_fast_path():
            with no_trace(self.units[name]):  # both begin with the same random states and attributes
                found = returned(self._call(name, *parts, whole=False), numbers=False)
            with no_trace(self.units[name]):
                expected = returned(self._call(name, *whole, whole=True), numbers=False)
        yield Compared("the number of outputs", torch.tensor(len(found)), torch.tensor(len(expected)))
        here = next((t for t in tensors(parts) if t.ndim > 1), None)
        length = 0 if here is None else here.shape[1] * self._ranks.number
        at = places(length, SequencePart(self._ranks.order, self._ranks.number, self._ranks.rank)) if length else None
        for number, (one, other) in enumerate(zip(found, expected, strict=False)):
            if not other.is_floating_point():
                continue
            limit = (_LOW_OUTPUT if other.ndim else _LOW_LOSS) if observed.low else 1e-5
            what = "what is returned" if len(found) == 1 else f"output {number}"
            if other.ndim == 0:
                total = one.clone()
                dist.all_reduce(total, group=self.group)
                # A sum over tokens is one over the ranks; `num_items_in_batch` makes a mean into a part of a sum.
                both = [total / self._ranks.number, total]
                nearest = min(both, key=lambda value: float((value - other).abs().nan_to_num(float("inf"))))
                yield Compared(f"{what}, over the ranks,", nearest, other, limit=limit)
            else:
                yield Compared(what, one, other if at is None else _part_of(other, one.shape, length, at), limit=limit)

    def _call(self, name: str, args: Any, kwargs: Any, *, whole: bool) -> Any:
        module = self.units[name]
        with self._undivided() if whole else contextlib.nullcontext():
            return functional_call(module, {n: b.clone() for n, b in module.named_buffers()}, args, kwargs)

    def _sliced(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """A few rows, in parts and whole. Collectives: one all-gather per argument."""
        n, order = self._ranks.number, self._ranks.order
        given = [t for t in tensors((args, kwargs)) if t.ndim > 1]
        here = next((t.shape[1] for t in given if part_of(t) is not None), given[0].shape[1] if given else 0)
        rows = next((t.shape[0] for t in given if t.shape[1] == here), 0)
        length = here * n if here * n <= _TOKENS else _TOKENS // (2 * n) * 2 * n
        part = SequencePart(order, n, self._ranks.rank)
        mine = places(length, part)

        def is_part(tensor: torch.Tensor) -> bool:
            return tensor.ndim > 1 and tensor.shape[1] == here

        def joined(tensor: torch.Tensor) -> torch.Tensor:
            few = tensor[:_ROWS].detach().contiguous() if tensor.ndim and tensor.shape[0] == rows else tensor
            if not is_part(tensor):
                return few
            pieces = [torch.empty_like(few) for _ in range(n)]
            dist.all_gather(pieces, few.contiguous(), group=self.group)
            every = torch.cat([places(here * n, part._replace(rank=rank)) for rank in range(n)])
            return torch.cat(pieces, 1)[:, every.argsort().to(few.device)][:, :length]

        whole = map_tensors(joined, (args, kwargs))

        def cut(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
            if not is_part(old):
                return new
            noted = part_of(old)
            piece = new[:, mine.to(new.device)]
            return piece if noted is None else note_part(piece, noted)

        news = iter(list(tensors(whole)))
        parts = map_tensors(lambda old: cut(old, next(news)), (args, kwargs))
        return parts, whole


def _part_of(whole: torch.Tensor, shape: torch.Size, length: int, at: torch.Tensor) -> torch.Tensor:
    """This rank's places of an output, in the one dimension that holds those of all: of a sequence, or of all rows."""
    dims = [dim for dim, (all_of, mine) in enumerate(zip(whole.shape, shape, strict=False)) if all_of != mine]
    if whole.ndim != len(shape) or len(dims) != 1 or whole.shape[dims[0]] % length:
        return whole
    (dim,) = dims
    split: torch.Tensor = whole.unflatten(dim, (-1, length))
    return split.index_select(dim + 1, at.to(whole.device)).flatten(dim, dim + 1)


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    """Without gradients, torch's attention is a kernel of its own in eval mode, which cannot be caught."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
