"""Which mask comes next: by the samples of the rows, the module that draws, and how often it has drawn for them.

[Note: again] A block that is computed again in backward has to drop the same elements, whatever was computed since: for
another batch, another micro-batch, or by the same module a second time. What computes it again (`recompute`, torch's
`checkpoint`, a model of transformers) puts torch's random state back to that of the beginning of the block. So, while
the module runs, the seed of torch's generator on the CPU counts the draws: the first one of forward n has the seed
n << 20, the next one the seed after it. A seed that is known already belongs to a draw that is made again. After the
forward, the random state is what it was before.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from weft import torch_internals
from weft.engines.torch.hooks.method_hooks import Attached, Removable, attach
from weft.engines.torch.keyed_dropout.divided_layers import DividedLayers
from weft.engines.torch.keyed_dropout.functions import AttentionPart, DropoutMode
from weft.engines.torch.probes.no_trace import is_measured
from weft.errors import ContractError, warn
from weft.keyed_random.philox import keep_mask, line_keys
from weft.keyed_random.row_keys import RowKeys, noted_rows
from weft.tensors.nested import tensors
from weft.tensors.sequence_order import chunks, part_of

_SHIFT = 20  # bits of a seed that count the draws of one forward
_KEPT = 4096  # forwards that may still be computed again

Runs = Sequence[range]  # places in one dimension, ascending
Key = Callable[[int, str, int], int]  # of an epoch, a module and a number: separates masks


class _Draw(NamedTuple):
    """One mask.

    Attributes:
        module: Its name.
        number: How often that one has drawn for these rows before.
    """

    module: str
    number: int


class _Forward:
    """One call of the whole module, or of a part of it from outside.

    Attributes:
        rows: The samples; None if they are not known.
        part: Of the sequences, which several ranks share out; None: all of them.
        lengths: How many places each row has in what it was called with, and in what came to blocks with parts of them.
        draws: What was drawn.
    """

    def __init__(self, given: Sequence[torch.Tensor], rows: RowKeys | None) -> None:
        self.rows = rows
        self.part = next((part for part in map(part_of, given) if part is not None), None)
        self.lengths = _lengths(given, rows)
        self.draws: list[_Draw] = []


class KeyedDropout(Attached):
    """Every dropout of a module, drawn by sample."""

    def __init__(self, module: nn.Module, latest: Callable[[], RowKeys | None], key: Key) -> None:
        """Attach it.

        Args:
            module: Whose dropout it is.
            latest: The rows of the batch that a loader gave last, if one was given since this was called last.
            key: See `Key`.
        """
        super().__init__()
        self._kind = type(module).__name__
        self._parts = [weakref.ref(part) for part in module.modules()]
        self._latest = latest
        self._key = key
        self._mode = DropoutMode(self._masks)
        self._layers = DividedLayers()
        self._known: dict[tuple[str, int], int] = {}  # the dimension of the rows, by module and number of dimensions
        self._lines: tuple[RowKeys | None, dict[Any, tuple[torch.Tensor, torch.Tensor]]] = None, {}
        self._running: list[str] = []  # names of the modules that compute, outermost first
        self._hooks: list[Any] = []  # for saved tensors, as they were when each of them began
        self._forwards: OrderedDict[int, _Forward] = OrderedDict()
        self._warned = False
        # Where sizes do not tell, rows are in the second dimension if that is how the model has them.
        self._rows_second = any(getattr(part, "batch_first", None) is False for part in module.modules())
        for name, part in module.named_modules():
            if _may_draw(part):
                attach(part, self._removable, around=functools.partial(self._run, name), methods=["forward"])

    @torch_internals.untraced
    def _run(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the forward of a module."""
        self._running.append(name)
        self._hooks.append(_pack_hook())
        try:
            if len(self._running) > 1 or not self._trains():
                return call(*args, **kwargs)
            # In a backward pass, something is computed again; where that was not with its random state, drawing raises.
            is_again = torch_internals.graph_task_id() != -1 or torch.initial_seed() >> _SHIFT in self._forwards
            with contextlib.nullcontext() if is_again else self._forward(args, kwargs), self._mode:
                return call(*args, **kwargs)
        finally:
            self._running.pop()
            self._hooks.pop()

    def _trains(self) -> bool:
        parts = (part() for part in self._parts)  # most often, the first one says it
        return any(part is not None and part.training for part in parts)

    @contextlib.contextmanager
    def _forward(self, args: Any, kwargs: Any) -> Iterator[None]:
        """Around a call of the module: seeds count its draws; see [Note: again]."""
        generator = torch.default_generator
        before = generator.get_state()
        given = list(tensors((args, kwargs)))
        latest = self._latest()
        rows = noted_rows(given) or latest
        # A model may draw more than dropout: other numbers in each forward and on each rank, as the state before it.
        facts = [] if rows is None else [rows.epoch, *rows.ids[:1], rows.draws.total()]
        number = hash((*facts, int.from_bytes(before.numpy()[:64].tobytes()))) % 2**42
        self._forwards[number] = _Forward(given, rows)
        if len(self._forwards) > _KEPT:
            self._forwards.popitem(last=False)
        generator.manual_seed(number << _SHIFT)
        try:
            yield
            self._check_nothing_else(generator)
        finally:
            generator.set_state(before)

    def divide(
        self,
        module: nn.Module,
        styles: Mapping[str, object],
        rank: int,
        ranks: int,
        removable: Removable,
        *,
        first_block: str | None,
    ) -> None:
        """The layers of the module are divided over ranks from now on, and sequences from the first block on, if any.

        See `DividedLayers`.
        """
        self._layers = DividedLayers(rank, ranks, sequence=first_block is not None)
        self._layers.follow(module, styles, removable)
        if first_block is not None:
            attach(module.get_submodule(first_block), removable, before=self._note_length, first=True)

    def _note_length(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        """A sequence comes to the first block, perhaps of other places than the module was called with, as patches."""
        forward = self._forwards.get(torch.initial_seed() >> _SHIFT)
        hidden = next((x for x in tensors((args, kwargs)) if x.is_floating_point() and x.dim() > 2), None)
        if forward is not None and hidden is not None:
            forward.lengths |= {hidden.shape[1]}

    def _masks(
        self, x: torch.Tensor, shape: tuple[int, ...], p: float, *, attention: AttentionPart | None = None
    ) -> torch.Tensor | None:
        """The next mask; see `Masks`."""
        if is_measured():  # a probe compares what is computed without dropout, and notes that there was some
            torch.native_dropout(x.detach().new_empty(0, dtype=torch.float32), p, train=True)
            return None
        with torch_internals.without_functions():  # other modes around it are about what the model computes
            return self._mask(x, shape, p, attention)

    def _mask(self, x: torch.Tensor, shape: tuple[int, ...], p: float, attention: AttentionPart | None) -> torch.Tensor:
        forward, draw = self._next_draw(torch.initial_seed() - (attention is not None and attention.continues))
        assert forward.rows is not None
        dim, folded = self._rows_in(shape, forward, is_attention=attention is not None)
        sizes = [*shape[:dim], *([folded] if folded > 1 else []), *shape[dim + 1 :]] or [1]
        if attention is None and len(sizes) == 3 and {*sizes[1:]} <= forward.lengths:
            attention = AttentionPart()  # step by step, in the model's own code
        places = self._heads(sizes, attention) if attention else self._elements(sizes, forward)
        last = range(places[-1][0].start, places[-1][-1].stop)
        key = self._key(forward.rows.epoch, draw.module, draw.number)
        kept = keep_mask(self._lines_of(forward.rows, places[:-1], x.device), last, key, 1.0 - p)
        if len(places[-1]) > 1:
            kept = kept.index_select(-1, _tensor(places[-1], x.device) - last.start)
        return kept.movedim(0, dim).reshape(shape)

    def _lines_of(
        self, rows: RowKeys, places: Sequence[Runs], device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `line_keys`; kept as long as the same rows are computed."""
        if self._lines[0] is not rows:
            self._lines = rows, {}
        what = device, tuple(map(tuple, places))
        if what not in self._lines[1]:
            self._lines[1][what] = line_keys(rows.on(device), [_tensor(runs, device) for runs in places])
        return self._lines[1][what]

    def _elements(self, sizes: Sequence[int], forward: _Forward) -> list[Runs]:
        """Where the elements lie in each dimension but that of the rows, of which the first one may be a sequence."""
        layers, found = self._layers, list[Runs]([range(size)] for size in sizes)
        if (forward.part is not None or layers.sequence) and (len(sizes) > 1 or sizes[0] in forward.lengths):
            found[0] = self._sequence(sizes[0], forward)
        widths = layers.widths_at(self._running[-1])
        if widths and sizes[-1] not in widths:
            raise self._unclear(sizes, f"features of a part: {sorted(widths)} of this rank")
        if widths:
            found[-1] = [range(layers.rank * sizes[-1], (layers.rank + 1) * sizes[-1])]
        return found

    def _heads(self, sizes: Sequence[int], part: AttentionPart) -> list[Runs]:
        """Where weights of attention lie: their heads, queries and keys."""
        heads, queries, keys = sizes[-3:]
        is_divided = bool(self._layers.widths_at(self._running[-1]))
        first = part.head + (self._layers.rank * (part.heads or heads) if is_divided else 0)
        own = part.queries or [range(queries)]
        return [*([range(size)] for size in sizes[:-3]), [range(first, first + heads)], own, [range(keys)]]

    def _sequence(self, size: int, forward: _Forward) -> Runs:
        """The places of a sequence that this rank has, of which a dimension of this size holds its own."""
        layers, part = self._layers, forward.part
        for length in forward.lengths:
            runs = [range(length)] if part is None else chunks(length * part.ranks, part.ranks, part.rank, part.order)
            if size == length:
                return runs
            if (
                layers.sequence and size * layers.ranks == length
            ):  # between blocks, whose sequence is divided over the ranks of the layers
                starts = itertools.accumulate((len(run) for run in runs), initial=-layers.rank * size)
                found = [run[max(-at, 0) : max(size - at, 0)] for run, at in zip(runs, starts, strict=False)]
                return [run for run in found if run]
        if part is None:
            return [range(size)]
        raise self._unclear([size], f"the places of this rank: {sorted(forward.lengths)}")

    def _next_draw(self, seed: int) -> tuple[_Forward, _Draw]:
        """What is drawn now: something new, or what was drawn when a block was computed the first time.

        Raises:
            ContractError: It is not known what the block has drawn then, or for which samples.
        """
        name = self._running[-1]
        forward, number = self._forwards.get(seed >> _SHIFT), seed % (1 << _SHIFT)
        if forward is not None and forward.rows is None:
            raise ContractError(
                f"keyed_dropout: it is not known which samples {self._kind} is called with",
                found="tensors that the loader did not give, and no batch, or several, since the call before",
                expected="a call for each batch of the loader, or the loader's own tensors among the arguments",
                fix="for x, y in loader:\n                model(x)  # or model.eval(), where nothing is dropped",
            )
        if forward is not None and forward.rows is not None and number == len(forward.draws):
            self._check_computed_again()
            forward.draws.append(_Draw(name, forward.rows.draws[name]))
            forward.rows.draws[name] += 1
        if forward is None or number >= len(forward.draws) or forward.draws[number].module != name:
            raise ContractError(
                f"keyed_dropout: a block of {self._kind} is computed again with another random state",
                found=f"dropout of {name!r} in a backward pass, after a forward that is not known any more",
                expected="blocks that are computed again with the random state of their forward, as is the default",
                fix="weft.recompute(model, ctx, blocks=..., keep_rng=True); checkpoint(..., preserve_rng_state=True)",
            )
        torch.default_generator.manual_seed(seed + 1)
        return forward, forward.draws[number]

    def _check_computed_again(self) -> None:
        """Raise if dropout is in a function that backward calls again, not the forward of the module around it."""
        hook, of_checkpoint = _pack_hook(), torch_internals.checkpoint_hook.found.__qualname__
        if hook is not self._hooks[-1] and hook is not None and hook.__qualname__.startswith(of_checkpoint):
            raise ContractError(
                f"keyed_dropout: a function in the forward of {self._running[-1] or self._kind!r} is computed again",
                found="dropout in it, of which no module knows: the second run would drop other elements",
                expected="modules that are computed again as such, or dropout in modules of their own",
                fix="weft.recompute(model, ctx, blocks=...)  # in place of checkpoint or gradient_checkpointing_enable",
            )

    def _rows_in(self, shape: tuple[int, ...], forward: _Forward, *, is_attention: bool) -> tuple[int, int]:
        """The dimension of the rows, and how many places of each are folded into it."""
        assert forward.rows is not None
        rows, (first, second) = len(forward.rows.ids), (*shape, 0, 0)[:2]
        is_second = second == rows and not is_attention and (first in forward.lengths or self._rows_second)
        site = self._running[-1], len(shape)
        if is_second and first == rows > 1 and self._rows_second:  # which of both, calls of other sizes have shown
            if site not in self._known:
                raise self._unclear(shape, "other numbers of places and of rows, in a model that has places first")
            return self._known[site], 1
        is_folded = rows > 0 and first % rows == 0 and first // rows in forward.lengths
        if is_second and (self._rows_second or first != rows) and (rows == 1 or not is_folded):
            return self._known.setdefault(site, 1), 1
        if first == rows:
            return self._known.setdefault(site, 0), 1
        if is_folded:
            return 0, first // rows
        raise self._unclear(
            shape,
            f"a row per sample, {rows} of them, in the first dimension or in the second; or "
            "all places of the first row, then of the next one",
        )

    def _unclear(self, sizes: Sequence[int], expected: str) -> ContractError:
        return ContractError(
            "keyed_dropout: it cannot be told which elements of a tensor belong to which samples and places",
            found=f"dropout of {self._running[-1] or self._kind!r}, sizes {list(sizes)}",
            expected=expected,
            fix="x.unflatten(0, (rows, -1))  # before it is dropped from; or p = 0 there",
        )

    def _check_nothing_else(self, generator: torch.Generator) -> None:
        if self._warned:
            return
        fresh = torch.Generator()
        fresh.manual_seed(generator.initial_seed())
        if bytes(fresh.get_state().numpy()) != bytes(generator.get_state().numpy()):
            self._warned = True
            warn(
                f"keyed_dropout: forward of {self._kind} draws random numbers that are not those of dropout",
                found="torch's generator on the CPU was used, by torch.rand or the like",
                expected="dropout alone, or numbers that follow from the samples: others differ between ranks",
                fix="weft.rng.keyed_uniform(rows.ids, seed=ctx.seed, epoch=rows.epoch)  # in place of torch.rand",
            )


def _lengths(given: Sequence[torch.Tensor], rows: RowKeys | None) -> frozenset[int]:
    """How many places each row has in tensors [rows, places, ...] or [places, rows, ...]."""
    sizes = [tensor.shape[:2] for tensor in given if tensor.ndim > 1]
    number = 0 if rows is None else len(rows.ids)
    return frozenset(second if first == number else first for first, second in sizes if number in (first, second))


def _pack_hook() -> Any:
    """What is called with each tensor that is saved for backward, if something is."""
    hooks = torch_internals.saved_tensor_hooks(True)  # noqa: FBT003  (torch's)
    return hooks and hooks[0]


def _tensor(runs: Runs, device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def _may_draw(part: nn.Module) -> bool:
    """Whether its own forward may call dropout: layers of torch without parts do not, but those of dropout."""
    plain = type(part).__module__.startswith("torch.nn.modules") and not list(part.children())
    return not plain or torch_internals.dropout.holds(part)
