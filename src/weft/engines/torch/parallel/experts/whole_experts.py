"""Expert parallelism, measured: experts on several ranks, and all of them on each; and the layers around them.

Each rank has its own rows of a batch. What a layer makes of one may depend on the others: a capacity per expert, tokens
that experts choose, a softmax over tokens, a loss of the router. Then it depends on which rows are on the same rank. So
a layer is also computed for some of its rows, for as many others, and for both together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from typing_extensions import override

from weft import torch_internals
from weft.engines.probes import Args, Compared, Kwargs
from weft.engines.torch.hooks.graph_walk import walk_to_leaves
from weft.engines.torch.parallel.experts.listed import ListedExperts
from weft.engines.torch.parallel.experts.stacked import StackedExperts
from weft.engines.torch.probes.compare import is_low, parts_suppressed, returned_tensors
from weft.engines.torch.probes.no_trace import copied, no_trace, switched_off
from weft.engines.torch.probes.repeated_hooks import hooks_off
from weft.engines.torch.probes.same_draws import SameDraws
from weft.engines.torch.probes.whole_unit import WholeUnits, gathers, is_in, same
from weft.tensors.blocks import full_tensor
from weft.tensors.dtensor import is_fsdp_unit, is_sharded
from weft.tensors.messages import broadcast
from weft.tensors.nested import map_tensors, tensors

_OF_TORCH = frozenset(vars(nn.Module()))
_SOME = 64  # tokens: of a few, none might be over a capacity
_Call = tuple[tuple[Any, ...], dict[str, Any]]
_Left = tuple[list[torch.Tensor], dict[str, torch.Tensor]]  # what a call leaves: values, and buffers


class ExpertUnits(WholeUnits):
    """The probe of `expert_parallel`; its units are the modules whose forward calls experts."""

    cause = "an expert computes something else for a token if other tokens come with it"
    fix = 'weft.expert_parallel(..., experts=...) without these, or weft.replicate(model, ctx, unused="zero") alone'

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        group: dist.ProcessGroup,
        divided: Mapping[str, StackedExperts | ListedExperts],
        owners: Mapping[str, int | None],
    ) -> None:
        """Remember who has what.

        Args:
            units: Modules, by name.
            group: The ranks of the axis.
            divided: What is around the forward of modules that call experts, by name.
            owners: By parameter of experts: the rank that has it; None: each one has a part.
        """
        super().__init__(units, group)
        self._divided = divided
        self._owners = owners

    @override
    def equal_inputs(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """Nothing: each rank has tokens of its own."""
        return ()

    @override
    def _whole(self, name: str) -> dict[str, torch.Tensor]:
        others = [(n, p) for n, p in self.units[name].named_parameters() if _full(name, n) not in self._owners]
        return {n: full_tensor(p.detach()) for n, p in others} | self._experts(name)

    def _experts(self, name: str) -> dict[str, torch.Tensor]:
        """The parameters of the experts in a unit, whole.

        Collectives: an all-gather for each that is stacked, and a broadcast per rank.
        """
        unit, found = self.units[name], {}
        lent: dict[int, list[torch.Tensor]] = {}
        device = next((t.device for t in unit.parameters() if not t.is_meta), torch.device("cpu"))
        for own, p in unit.named_parameters():
            owner = self._owners.get(_full(name, own), -1)
            if owner is None:
                found[own] = full_tensor(p.detach())
            elif owner >= 0:
                mine = owner == dist.get_rank(self.group)
                # A copy: what is sent counts as changed.
                found[own] = full_tensor(p.detach()).clone() if mine else torch.empty_like(p, device=device)
                lent.setdefault(owner, []).append(found[own])
        assert self.group is not None
        for owner, ones in sorted(lent.items()):
            broadcast(ones, self.group, owner)
        return found

    @override
    def _is_elsewhere(self, name: str, own: str) -> bool:
        return _full(name, own) in self._owners or is_sharded(self.units[name].get_parameter(own))

    @override
    def _other_leaves(self, ends: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All of them: a rank that brings no rows sends its part of the backward pass all the same."""
        roots = [end.grad_fn for end in ends if end.grad_fn is not None]
        leaves = walk_to_leaves(roots, crosses=lambda _: None).outside
        return [leaf for leaf in leaves if all(leaf is not one for one in known)]

    @override
    def _undivided(self, name: str) -> AbstractContextManager[None]:
        return switched_off(layer for own, layer in self._divided.items() if is_in(own, name))


def _full(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own


class SplitRows(ExpertUnits):
    """The second probe of `expert_parallel`; its units are the modules that route tokens to experts."""

    cause = "what it makes of a token depends on other tokens, of which each rank has some"
    fix = (
        "experts chosen for each token alone, such as router(x).topk(k, -1); for a loss of the router, "
        "weft.balance_loss(probs, chosen, ctx), of what forward returns"
    )
    _rows = 0

    def note_rows(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The whole module is called, with so many rows."""
        self._rows = next((len(t) for t in tensors((args, kwargs)) if t.ndim), 0)

    @override
    def measure(self, name: str, args: Args, kwargs: Kwargs, *, gradients: bool) -> Iterator[Compared]:
        """Compare what a layer returns, what it leaves in attributes to be trained on, and what its new buffers change.

        Not measured is a layer that communicates by itself, or that cannot be computed with half of its rows.

        Yields:
            One pair after the other.
        """
        unit, given = self.units[name], (args, dict(kwargs))
        is_nested = any(is_fsdp_unit(part) for part in unit.modules() if part is not unit)
        held = self._whole(name) if is_nested else dict(unit.named_parameters()) | self._experts(name)
        parts = self._parts(given)
        if not parts or any(isinstance(p, DTensor) for p in held.values()):
            return
        device_type = next(tensors(given)).device.type
        low = is_low(device_type, tensors((held, given)))

        def leaf(tensor: torch.Tensor) -> torch.Tensor:
            # In 16 bits, rounding could send a token to another expert.
            wide = tensor.detach().float() if low and tensor.is_floating_point() else tensor.detach()
            return wide.requires_grad_(tensor.requires_grad)

        held = {own: leaf(p) for own, p in held.items()}
        draws = SameDraws()

        def run(call: _Call, buffers: Mapping[str, torch.Tensor], *, together: bool = False) -> _Left:
            draws.begin(together=together)
            own = {n: b.clone() for n, b in buffers.items()}
            with no_trace(unit), hooks_off(unit, lambda _, hook: gathers(hook)), _NoMessages(), draws:
                for place, part in unit.named_modules(remove_duplicate=False):  # where forward may assign others
                    slots = torch_internals.BUFFERS.of(part)
                    slots.update({n: own[full] for n in slots if (full := _full(place, n)) in own})
                output = functional_call(unit, held, *map_tensors(leaf, copied(call)))
                own.update(unit.named_buffers())
                kept = [value for part in unit.modules() for n, value in vars(part).items() if n not in _OF_TORCH]
                left = [t for t in tensors(kept) if t.requires_grad and not t.is_leaf]
            return [*returned_tensors(output, numbers=False), *left], own

        autocast = torch.autocast(device_type, enabled=False)
        hooks = torch.autograd.graph.saved_tensors_hooks(same, same)
        with self._undivided(name), hooks, autocast, parts_suppressed():
            yield from _differences(run, parts, {n: leaf(b) for n, b in unit.named_buffers()})

    def _parts(self, given: _Call) -> list[_Call]:
        """The arguments for some rows, for as many others, and for both; of a single row, the other is made of it."""
        first = next((t for t in tensors(given) if t.is_floating_point() and t.ndim > 1 and t.numel()), None)
        if first is None:
            return []
        dim = 1 if first.ndim > 2 and first.shape[0] != self._rows == first.shape[1] else 0
        size = first.shape[dim]
        each = size // self._rows if self._rows and not size % self._rows else 1  # of that dimension, one row has
        rows, tokens = size // each, first.numel() // first.shape[-1]
        cut = min(max(2, rows // 4, _SOME * rows // tokens), rows) // 2 * each

        def of_rows(change: Callable[[torch.Tensor], torch.Tensor]) -> _Call:
            return map_tensors(lambda t: change(t) if t.ndim > dim and t.shape[dim] == size else t, given)

        if cut:
            spans = (0, cut), (cut, cut), (0, 2 * cut)
            return [of_rows(lambda t, at=start, n=n: t.narrow(dim, at, n)) for start, n in spans]  # type: ignore[misc]
        stranger = first.roll(1, -1)
        other = map_tensors(lambda t: stranger if t is first else t, given)
        return [given, other, of_rows(lambda t: torch.cat([t, stranger if t is first else t], dim))]


class _NoMessages(torch_internals.dispatch_mode.base):  # type: ignore[name-defined, misc]
    """A layer that communicates is not computed: ranks without rows do not take part."""

    def __init__(self) -> None:
        super().__init__()
        self._namespaces = ("c10d", torch_internals.functional_all_reduce.found.default.namespace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation.

        Raises:
            RuntimeError: It sends something.
        """
        if func.namespace in self._namespaces:
            raise RuntimeError("the layer communicates")
        return func(*args, **(kwargs or {}))


def _differences(
    run: Callable[..., _Left], parts: list[_Call], buffers: Mapping[str, torch.Tensor]
) -> Iterator[Compared]:
    (one, after_one), (other, _) = run(parts[0], buffers), run(parts[1], buffers)
    whole, after = run(parts[2], buffers, together=True)
    for number, (a, b, expected) in enumerate(zip(one, other, whole, strict=False)):
        found = _together(a, b, expected)
        if found is not None:
            yield Compared(f"output {number} of half of the rows", found, expected.detach())
    # All rows may leave what is there already: this was the call of all of them.
    if any(not torch.equal(b, left[n]) for left in (after_one, after) for n, b in buffers.items()):
        (one, _), (whole, _) = (run(parts[2], state) for state in (after_one, after))
        for number, (a, expected) in enumerate(zip(one, whole, strict=False)):
            yield Compared(f"output {number} of the next call, with buffers of half of the rows", a, expected)


def _together(one: torch.Tensor, other: torch.Tensor, whole: torch.Tensor) -> torch.Tensor | None:
    """What two parts give, as of all rows: joined, or their mean if it is trained on; None for anything else."""
    if not one.ndim == other.ndim == whole.ndim:
        return None
    dims = [dim for dim, size in enumerate(whole.shape) if one.shape[dim] != size]
    if len(dims) == 1 and one.shape[dims[0]] + other.shape[dims[0]] == whole.shape[dims[0]]:
        return torch.cat([one.detach(), other.detach()], dims[0])
    return (one.detach() + other.detach()) / 2 if not dims and whole.requires_grad else None
