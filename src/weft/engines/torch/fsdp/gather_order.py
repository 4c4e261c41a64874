"""Make sure that all ranks gather and reduce the same units in the same order.

[Note: order of gathers] Collectives of one group match by their order alone. Ranks that gather different units at the
same moment, because a router sends their batches to other experts or because one of them makes another forward
pass, would compute with a mixture of two units, without an error if these are of one shape. So what a unit sends is
compared before it is sent, and yet nothing is sent for that as long as a program repeats itself: what was gathered and
reduced since the last reduced backward pass is a path in a tree of the paths that the ranks have taken together.
At each place of the tree one way is expected, the one taken last. A rank that takes it asks nobody. One that takes
another way first waits for all ranks at the store: if they take it too, it is expected from then on; if one does not,
that rank waits in a collective, which is noticed, and both are named. Where nothing is known yet, all ranks are new
and compare what they are about to do in one small message.

[Note: is it called] All of this hangs on torch calling the objects that it is given; a version that does not would lose
it without a word. So the first backward pass that reduces ends with a look: each unit that was gathered, and each that
had gradients when torch was about to reduce it, must have come along here.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft import torch_internals
from weft.errors import NotSynchronized, PeerError, listed
from weft.peers.ledger import Ledger
from weft.tensors.messages import as_sent

_KINDS = ("gathers {} in forward", "gathers {} in forward without gradients", "gathers {} in backward", "reduces {}")
_NUM_KINDS = len(_KINDS)
_FORWARD, _EVALUATION, _BACKWARD, _REDUCTION = range(_NUM_KINDS)
_END = -1
_MAX_PLACES = 100_000  # a program that never repeats itself shall not fill the memory
# torch 2.13 gave these two new names and deprecated the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _PathNode:
    """A place in the tree: the way that is expected from here, where it leads, and all that are known."""

    __slots__ = ("expected", "following", "ways")

    def __init__(self) -> None:
        self.expected: int | None = None
        self.following: _PathNode  # set together with `expected`
        self.ways: dict[int, _PathNode] = {}


class GatherOrder:
    """The path of this rank, and the tree of known paths; see [Note: order of gathers].

    Attributes:
        names: Of the units, by number.
        forward: What a gather outside of backward is now: one with gradients, or one of an evaluation.
    """

    def __init__(
        self, what: str, names: Mapping[Any, str], group: dist.ProcessGroup, peers: Ledger, device: str
    ) -> None:
        """Know nothing yet.

        Args:
            what: Name of the strategy.
            names: Of the units, by what FSDP2 keeps of each.
            group: The ranks.
            peers: The same strategy on them.
            device: The type of their devices.
        """
        self.names = list(names.values())
        self._what = what
        self._group: dist.ProcessGroup | None = group
        self._peers = peers
        self._device = device
        self._root = self._place = _PathNode()
        self._num_places = 0
        self._torn = False
        self._known: set[int] = set()  # steps that were taken
        shares = {one: unit for unit, one in enumerate(names) if torch_internals.MESH_SHARDS.of(one.mesh_info) > 1}
        self._unchecked = weakref.WeakKeyDictionary(shares)  # by what FSDP2 keeps of units: their number
        self.forward = _FORWARD

    def note_next(self, step: int) -> None:
        """Gather or reduce a unit next: `step` is `_NUM_KINDS` times its number, plus the kind.

        What is expected is done in as few calls as possible: it happens three times per unit and training step.
        """
        place = self._place
        if step == place.expected and not self._torn:
            self._place = place.following
        else:
            self._take_another(step)

    def end(self) -> None:
        """A backward pass that reduces has ended."""
        self.note_next(_END)
        self._place = self._root

    def check_called(self, reduced: Collection[str]) -> None:
        """A backward pass that reduces is about to end; see [Note: is it called].

        Args:
            reduced: The names of parameters whose gradients torch had when it was about to reduce them.

        Raises:
            ContextError: On all ranks.
        """
        if not self._unchecked:
            return
        whole, name = torch_internals.PARAM_WHOLE, torch_internals.PARAM_NAME.of
        gathered, missing = {}, []
        for one, unit in self._unchecked.items():
            is_called = not self._known.isdisjoint(range(unit * _NUM_KINDS, unit * _NUM_KINDS + _REDUCTION))
            found = [whole.of(p) if is_called else whole.get(p) for p in one.fsdp_params]
            if any(full is not None for full in found):
                gathered[unit] = {name(p) for p in one.fsdp_params}
                if not is_called:
                    missing.append(unit * _NUM_KINDS)
        for first, names in ((unit * _NUM_KINDS, names) for unit, names in gathered.items()):
            if first + _REDUCTION not in self._known and not names.isdisjoint(reduced):
                missing.append(first + _REDUCTION)
        if missing:
            raise torch_internals.LIBRARY.error(
                f"did not call the objects with which {self._what} gathers and reduces units",
                f"collectives without them where it {listed(map(self._words, missing))}",
            )
        if gathered:
            self._unchecked.clear()

    def begin_forward(self) -> _PathNode | None:
        """A call of the module begins. Returns where the path goes back to after it, if it is without gradients."""
        evaluates = not torch.is_grad_enabled()  # FSDP2 gathers without gradients in any case
        self.forward = _EVALUATION if evaluates else _FORWARD
        return self._place if evaluates else None

    def end_forward(self, place: _PathNode | None) -> None:
        """The call has ended; after an evaluation a program does what it would have done without it."""
        if place is not None:
            self._place = place

    def note_broken_pass(self) -> None:
        """A pass broke off. Whether on all ranks is asked before the next gather, if there is one."""
        self._torn = True

    def release(self) -> None:
        """Let the process group go."""
        self._group = None

    def _take_another(self, step: int) -> None:
        if self._torn:
            self._torn = False
            self._peers.meet("the first gather after a pass that broke off", None)
            self._place = self._root
        place = self._place
        self._known.add(step)
        if step != place.expected:
            self._compare(step)
            following = place.ways.get(step)
            if following is None:
                following = place.ways[step] = self._new_place()
            place.expected, place.following = step, following
        self._place = place.following

    def _new_place(self) -> _PathNode:
        self._num_places += 1
        if self._num_places > _MAX_PLACES:  # at the same moment on all ranks
            self._num_places = 0
            self._root = _PathNode()
        return _PathNode()

    def _compare(self, step: int) -> None:
        if self._group is None:
            return
        if self._place.expected is not None:
            steps = self._meet(step)
        else:
            mine = torch.tensor([step], device=self._device)
            everyone = mine.new_empty(dist.get_world_size(self._group))
            _all_gather(everyone, mine, group=self._group)
            steps = everyone.tolist()
        if any(one != step for one in steps):
            found = listed(f"rank {rank} {self._words(step)}" for rank, step in enumerate(steps))
            raise self._different(
                found, evaluates={step % _NUM_KINDS == _EVALUATION for step in steps} == {True, False}
            )

    def _meet(self, step: int) -> list[int]:
        try:
            return self._peers.meet(self._words(step), step, kind="order of units")
        except PeerError as error:
            waits = error.text.partition(", but ")[2]  # in a gather of another unit
            if not waits:
                self._peers.report(error)
                raise
            evaluates = any(known % _NUM_KINDS == _EVALUATION for known in self._known)
            found = f"this rank {self._words(step)}, while rank {error.rank} {waits}"
            raise self._different(found, evaluates=evaluates) from None

    def _words(self, step: int) -> str:
        if step == _END:
            return "ends a backward pass"
        unit, kind = divmod(step, _NUM_KINDS)
        return _KINDS[kind].format(repr(self.names[unit]) if self.names[unit] else "the outermost unit")

    def _different(self, found: str, *, evaluates: bool) -> NotSynchronized:
        """The error, which others that wait are told of."""
        error = NotSynchronized(
            f"{self._what}: the ranks gather different units at the same time",
            found=found,
            expected="the same units in the same order on all ranks, in every forward and backward pass",
            fix="evaluate on all ranks, equally often, or with weft.full_params(model, ctx, forward=True)"
            if evaluates
            else "call every unit on every rank (multiply what is not needed by zero), or "
            "weft.replicate(model, ctx, unused='zero')",
        )
        self._peers.report(error)
        return error


def watch_order(
    what: str, module: nn.Module, groups: Sequence[Any], group: dist.ProcessGroup, peers: Ledger, device: str
) -> GatherOrder:
    """Let each unit say what it gathers and reduces.

    Args:
        what: Name of the strategy.
        module: Whose units.
        groups: What FSDP2 keeps of each of them.
        group: The ranks.
        peers: The same strategy on them.
        device: The type of their devices.
    """
    names = {id(part): name for name, part in module.named_modules()}
    named = {one: ", ".join(names[id(part)] for part in one.modules) for one in groups}
    order = GatherOrder(what, named, group, peers, device)
    parameters = {id(p): name for name, p in module.named_parameters()}
    for number, one in enumerate(groups):
        for held in one.fsdp_params:  # FSDP2 itself names them in the first forward pass
            torch_internals.PARAM_NAME.set(held, parameters[id(held.sharded_param)])
        unit = one.modules[0]
        unit.set_custom_all_gather(UnitGather(order, number))
        unit.set_custom_reduce_scatter(UnitReduce(order, number))
    return order


class _Comm:
    """How FSDP2 gathers or reduces one unit: as by default, after `order` has seen it."""

    def __init__(self, order: GatherOrder, unit: int) -> None:
        self._order = order
        self._first = unit * _NUM_KINDS

    def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """The memory that is sent from or into, as by default."""
        return torch.empty(*size, dtype=dtype, device=device)


class UnitGather(_Comm):
    """An all-gather of the parameters of one unit."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **how: Any) -> dist.Work | None:
        """See `torch.distributed.fsdp.FSDPModule.set_custom_all_gather`."""
        order = self._order
        in_backward = torch_internals.graph_task_id() != -1
        order.note_next(self._first + (_BACKWARD if in_backward else order.forward))
        if output_tensor.dtype.itemsize == 1:
            output_tensor, input_tensor = as_sent(output_tensor), as_sent(input_tensor)
        work: dist.Work | None = _all_gather(output_tensor, input_tensor, **how)
        return work


class UnitReduce(_Comm):
    """A reduce-scatter of the gradients of one unit."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **how: Any) -> dist.Work | None:
        """See `torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter`."""
        self._order.note_next(self._first + _REDUCTION)
        work: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, **how)
        return work
