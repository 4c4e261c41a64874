"""Experts that are modules in a list, each whole on one rank; on the others their parameters are on meta.

The module around the list calls its experts as it likes, those that have tokens, in a loop of its own. So its forward
runs twice: first with stand-ins, which note what each expert is called with; then all rows travel in one exchange, and
the second run receives the results. What forward changes or draws in the first run is put back before the second.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from weft import torch_internals
from weft.engines.torch.parallel.exchange import exchanged
from weft.engines.torch.parallel.experts.all_to_all import Line, RowRoute
from weft.engines.torch.parallel.experts.expert_placeholders import (
    DTYPES,
    Answering,
    ExpertCall,
    ExpertPlaceholder,
)
from weft.engines.torch.probes.no_trace import no_trace
from weft.private_names import replaced
from weft.tensors.dtensor import is_sharded
from weft.tensors.messages import control_device
from weft.tensors.nested import map_tensors

_End: TypeAlias = tuple[torch.Size, torch.dtype]  # the shape of the result of one row, and the dtype


class ListedExperts:
    """What is done around the forward of a module with a list of experts.

    Attributes:
        off: Whether it computes alone, with all experts.
    """

    def __init__(self, name: str, part: nn.Module, own: str, experts: nn.ModuleList, line: Line) -> None:
        self._name = name
        self._part = weakref.ref(part)
        self._own = own
        self._template = weakref.ref(experts[0 if line.place else -1])  # of another rank: on meta
        self._line = line
        self.off = False
        self._ends: dict[object, _End] = {}  # of results, by those of inputs
        self._compared = False

    def __call__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run forward twice; see the top of this file."""
        if self.off:
            return call(*args, **kwargs)
        part: Any = self._part()
        experts = torch_internals.MODULES.of(part)[self._own]
        calls: list[ExpertCall] = []
        with self._put_back(part), self._stand_ins(part, experts, partial(self._note, calls)):
            call(*args, **kwargs)
        results, rows = self._compute(experts, calls)
        answers = Answering(self._name, calls, results, compares=not self._compared)
        with self._stand_ins(part, experts, answers):
            output = call(*args, **kwargs)
        answers.check_all()
        self._compared = True
        return _tied(output, rows)

    @contextlib.contextmanager
    def _stand_ins(self, part: nn.Module, experts: nn.ModuleList, book: Any) -> Iterator[None]:
        lent = nn.ModuleList(ExpertPlaceholder(number, book) for number in range(len(experts)))
        torch_internals.MODULES.of(part)[self._own] = lent
        try:
            yield
        finally:
            torch_internals.MODULES.of(part)[self._own] = experts

    @contextlib.contextmanager
    def _put_back(self, part: nn.Module) -> Iterator[None]:
        """Put buffers back after the first run, and all else that it may have changed."""
        places = map(torch_internals.BUFFERS.of, part.modules())
        buffers = [(place, name, b) for place in places for name, b in place.items() if b is not None]
        values = [(buffer.clone(), torch_internals.VERSION.of(buffer)) for _, _, buffer in buffers]
        with no_trace(part):
            yield
        with torch.no_grad():
            for (place, name, buffer), (value, version) in zip(buffers, values, strict=True):
                if torch_internals.VERSION.of(buffer) != version:
                    buffer.copy_(value)
                place[name] = buffer

    def _note(self, calls: list[ExpertCall], number: int, rows: torch.Tensor) -> torch.Tensor:
        """Note a call, and answer with numbers that nothing may depend on."""
        calls.append(ExpertCall(number, rows))
        end, dtype = self._end_of(rows)
        return torch.full((*rows.shape[:-1], *end), float("nan"), dtype=dtype, device=rows.device)

    def _end_of(self, rows: torch.Tensor) -> _End:
        """The shape of the result of one row, and the dtype."""
        key = rows.shape[-1:], rows.dtype, torch.is_autocast_enabled(rows.device.type)
        if key not in self._ends:
            template = self._template()
            assert template is not None
            zeros = {
                name: torch.zeros((), dtype=p.dtype, device=rows.device).expand(p.shape)
                for name, p in template.named_parameters()
            }
            with torch.no_grad():
                result = torch.func.functional_call(template, zeros, (rows.new_zeros(1, rows.shape[-1]),))
            self._ends[key] = result.shape[1:], result.dtype
        return self._ends[key]

    # -- the exchange ------------------------------------------------------------------------------

    def _compute(
        self, experts: nn.ModuleList, calls: list[ExpertCall]
    ) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The results of all calls, and all rows of them in one tensor; None if no rank calls an expert."""
        count = len(experts) // self._line.size
        here = slice(self._line.place * count, (self._line.place + 1) * count)
        held = list(experts)[here]
        plan = _exchange_plans(experts, calls, here, self._line)
        if plan is None:
            return [], self._join_gathers(held)
        order = sorted(range(len(calls)), key=lambda index: calls[index].number)
        flat = [calls[index].rows.reshape(-1, plan.width) for index in order]
        mine = torch.cat(flat) if flat else torch.zeros(0, plan.width, dtype=plan.dtype, device=plan.device)
        if plan.tracked and not mine.requires_grad:
            mine = mine.requires_grad_()  # the peers wait for this rank's part of the backward pass
        (rows,) = exchanged(plan.route, [mine])
        (back,) = exchanged(plan.route.back(), [self._run(held, rows, plan)])
        results: dict[int, torch.Tensor] = {}
        for index, part in zip(order, back.split([len(one) for one in flat]), strict=True):
            results[index] = part.view(*calls[index].rows.shape[:-1], *part.shape[1:])
        return [results[index] for index in range(len(calls))], back

    def _run(self, held: list[nn.Module], rows: torch.Tensor, plan: _ExchangePlan) -> torch.Tensor:
        """The results of rows that came from each rank for each expert that is held."""
        pieces = iter(rows.split([count for theirs in plan.rows for count in theirs]))
        parts = [[next(pieces) for _ in held] for _ in plan.rows]
        found: list[list[torch.Tensor]] = []
        for expert, own, is_called in zip(held, zip(*parts, strict=True), plan.called, strict=True):
            result = self._result(expert, torch.cat(own), is_called=is_called)
            found.append([] if result is None else list(result.split([len(one) for one in own])))
        results = [column[place] for place in range(len(plan.rows)) for column in found if column]
        if results:
            return torch.cat(results)
        end, dtype = self._end_of(rows)
        nothing = torch.zeros(0, *end, dtype=dtype, device=rows.device)
        if not torch.is_grad_enabled():
            return nothing
        if rows.requires_grad:
            return nothing + rows.sum()
        return nothing.requires_grad_(any(p.requires_grad for expert in held for p in expert.parameters()))

    def _result(self, expert: nn.Module, rows: torch.Tensor, *, is_called: bool) -> torch.Tensor | None:
        """What an expert makes of rows; not called by any rank, it gets no gradient, as in one process."""
        if is_called:
            return expert(rows)  # type: ignore[no-any-return]
        if not any(is_sharded(p) for p in expert.parameters()):
            return None
        # The ranks that have the other shards may have rows: its parameters are gathered here too, and not used.
        end, dtype = self._end_of(rows)
        one = torch.cat([rows, rows.new_zeros(1, rows.shape[-1])])
        if torch.is_grad_enabled() and not one.requires_grad:
            one.requires_grad_()

        def unused(row: torch.Tensor) -> torch.Tensor:
            return torch.zeros(1, *end, dtype=dtype, device=row.device) + row.sum() * 0

        with replaced(expert, forward=unused):
            return expert(one)[:0]  # type: ignore[no-any-return]

    def _join_gathers(self, held: list[nn.Module]) -> torch.Tensor | None:
        """Gather what no rank of this line calls: other lines, which have the other shards, may call it."""
        sharded = [expert for expert in held if any(is_sharded(p) for p in expert.parameters())]
        if not sharded:
            return None
        device = next(sharded[0].parameters()).device
        row = torch.zeros(1, 1, device=device, requires_grad=torch.is_grad_enabled())
        found = []
        for expert in sharded:
            with replaced(expert, forward=lambda row: row * 0):
                found.append(expert(row))
        return torch.cat(found)


class _ExchangePlan(NamedTuple):
    """What travels: by which route, rows of which kind, and which experts this rank holds.

    Attributes:
        route: Of the rows.
        rows: Received, by rank and expert.
        called: Which of the experts of this rank are called by a rank, perhaps without rows.
        width: Numbers in a row.
        dtype: Of rows.
        device: Of rows.
        tracked: Whether gradients flow back through rows.
    """

    route: RowRoute
    rows: list[list[int]]
    called: list[bool]
    width: int
    dtype: torch.dtype
    device: torch.device
    tracked: bool


def _exchange_plans(experts: nn.ModuleList, calls: list[ExpertCall], here: slice, line: Line) -> _ExchangePlan | None:
    """Tell each rank how many rows of which kind there are for each expert; None if there are none anywhere.

    Args:
        experts: Of all ranks.
        calls: Of this one.
        here: Which of the experts it has.
        line: The ranks.
    """
    size, held = line.size, len(experts) // line.size
    counts, called = [0] * len(experts), [0] * len(experts)
    for call in calls:
        called[call.number] = 1
        counts[call.number] += call.rows[..., 0].numel()
    first = calls[0].rows if calls else None
    tracked = any(one.rows.requires_grad for one in calls)
    kind = [0, 0, 0] if first is None else [first.shape[-1], DTYPES.index(first.dtype), int(tracked)]
    device = next(p.device for expert in experts for p in expert.parameters() if not p.is_meta)
    mine = torch.tensor([[*kind, *counts, *called]] * size, device=control_device(line.group, device))
    theirs = torch.empty_like(mine)
    dist.all_to_all_single(theirs, mine, group=line.group)
    heard: list[list[int]] = theirs.tolist()  # messages have sizes
    width, dtype, _ = max(each[:3] for each in heard)
    if not width:
        return None
    rows = [each[3 : 3 + len(experts)][here] for each in heard]
    calls_of = [each[3 + len(experts) :][here] for each in heard]
    sent = [sum(counts[rank * held : (rank + 1) * held]) for rank in range(size)]
    route = RowRoute(line.group, sent, [sum(each) for each in rows])
    is_called = [any(each) for each in zip(*calls_of, strict=True)]
    return _ExchangePlan(route, rows, is_called, width, DTYPES[dtype], device, any(each[2] for each in heard))


def _tied(output: Any, rows: torch.Tensor | None) -> Any:
    """The same output; a backward pass through it goes through `rows` too, as it does on the peers."""
    if rows is None or not rows.requires_grad:
        return output
    tied = False

    def tie(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal tied
        if tied or not tensor.is_floating_point():
            return tensor
        tied = True
        return _Tie.apply(tensor, rows)  # type: ignore[no-untyped-call,no-any-return]

    return map_tensors(tie, output)


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        del ctx, rows
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        del ctx
        return gradients[0], None
