"""The norm of gradients that lie whole on every rank, in shards, or both; and changing them in place.

Works on what this rank holds: the shard of a DTensor shares its storage, and no DTensor operation
runs, so nothing is communicated but a few numbers.

[Note: who adds up what] Along every mesh axis that cuts a gradient into shards, the p-th powers of
the shards' norms are added up; along an axis of copies nothing is. Gradients cut in the same way
share one number, and all numbers for one set of ranks share one message. Of parameters that only some ranks have, as
those of the stages of a pipeline, the powers are added up over these ranks last, as one number.

Source: `torch.nn.utils.clip_grad_norm_`; its bits wherever nothing is sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from weft import torch_internals
from weft.errors import value_error
from weft.precision import LOW
from weft.tensors.dtensor import is_sharded, local
from weft.tensors.messages import grouped
from weft.tensors.remote_parameter import is_elsewhere
from weft.tensors.sharded_grad import CutGradient

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


Ranks = tuple[int, ...]
Cut = tuple[Ranks, ...]  # the sets of ranks over which the shards of a gradient lie; () for a whole one
Kind = tuple[torch.device, torch.dtype]


class GradientRanks(NamedTuple):
    """Who holds gradients of one kind.

    Attributes:
        cut: The sets of ranks over which their shards lie.
        line: The ranks of which only some have them; None if all have.
        is_copy: Whether another rank of the line adds them up, as of weights that are tied over stages.
    """

    cut: Cut = ()
    line: dist.ProcessGroup | None = None
    is_copy: bool = False


class TotalNorm(NamedTuple):
    """What the ranks found together.

    Attributes:
        value: The norm, a plain 0-d tensor.
        is_finite: Whether it is finite on every rank; None if that was not asked.
    """

    value: torch.Tensor
    is_finite: bool | None


class Gradients:
    """The gradients of some parameters, as this rank holds them."""

    def __init__(
        self, parameters: Iterable[torch.Tensor], device: torch.device, partly: Mapping[int, GradientRanks]
    ) -> None:
        self._device = device
        self._partly = partly  # who has parameters that not all ranks have, by their ids
        self._lines = list(dict.fromkeys(held.line for held in partly.values()))
        self._dtype = torch.float32  # of the norm, if gradients are cut
        self._groups: dict[Ranks, dist.ProcessGroup] = {}
        with torch.no_grad():
            pieces = self._collect(parameters)
        self._pieces = {place: grouped(same, lambda one: (one.device, one.dtype)) for place, same in pieces.items()}
        self._alike = [item for kinds in self._pieces.values() for item in kinds.items()]

    def _collect(self, parameters: Iterable[torch.Tensor]) -> dict[GradientRanks, list[torch.Tensor]]:
        pieces: dict[GradientRanks, list[torch.Tensor]] = {GradientRanks(): []}
        layouts: dict[tuple[int, object, torch.dtype, GradientRanks], list[torch.Tensor]] = {}
        for p in parameters:
            gradient, line = p.grad, self._partly.get(id(p), GradientRanks())
            if is_elsewhere(p):
                continue
            if isinstance(gradient, CutGradient):
                group = gradient.group
                cut = () if group is None or dist.get_world_size(group) == 1 else (self._ranks_of(group),)
                pieces.setdefault(line._replace(cut=cut), []).append(gradient.piece())
                self._dtype = torch.promote_types(self._dtype, gradient.dtype.to_real())
                continue
            layout = gradient if gradient is not None and is_sharded(gradient) else p
            if not is_sharded(layout):
                if gradient is not None:
                    values = gradient if gradient.layout is torch.strided else _values(p, gradient)
                    pieces.setdefault(line, []).append(values)
                continue
            # Also for a parameter without gradient: the other ranks may have one and wait for our number.
            key = (id(layout.device_mesh), layout.placements, layout.dtype, line)
            if key not in layouts:
                layouts[key] = pieces.setdefault(line._replace(cut=self._cut_of(layout)), [])
                self._dtype = torch.promote_types(self._dtype, layout.dtype.to_real())
            if gradient is not None:
                # Without grad mode no detach is needed, which is ten times the work on a DTensor.
                layouts[key].append(gradient.to_local() if is_sharded(gradient) else gradient)
        return pieces

    def _ranks_of(self, group: dist.ProcessGroup) -> Ranks:
        ranks = tuple(dist.get_process_group_ranks(group))
        self._groups.setdefault(ranks, group)
        return ranks

    def _cut_of(self, tensor: DTensor) -> Cut:
        cut: list[Ranks] = []
        for axis, placement in enumerate(tensor.placements):
            if placement.is_partial():
                raise value_error(
                    "clip_grads: a gradient has not been reduced over the ranks yet",
                    found=f"shape {tuple(tensor.shape)}, placements {tensor.placements}",
                    expected="gradients that are replicated or sharded along every axis of their mesh",
                    fix="p.grad = p.grad.redistribute(placements=p.placements)",
                )
            if not placement.is_replicate() and tensor.device_mesh.size(axis) > 1:
                cut.append(self._ranks_of(tensor.device_mesh.get_group(axis)))
        return tuple(cut)

    # -- the norm --------------------------------------------------------------------------------

    @torch.no_grad()
    def norm(self, norm_type: float) -> torch.Tensor:
        """Compute the norm of all gradients together, a plain 0-d tensor; norm_type > 0, also inf."""
        return self._combined(norm_type, None)

    @torch.no_grad()
    def checked_norm(self, norm_type: float, everyone: dist.ProcessGroup | None) -> TotalNorm:
        """As `norm`, and let all ranks of `everyone` know whether it is finite on all of them.

        Waits for the device. Sends a number of its own only if no set of shards lies on just these ranks.
        """
        ranks = tuple(dist.get_process_group_ranks(everyone)) if everyone is not None else ()
        value = self._combined(norm_type, ranks)
        bad = ~value.isfinite()
        if everyone is not None and ranks not in self._groups:
            flag = bad.to(torch.float32)
            dist.all_reduce(flag, dist.ReduceOp.MAX, group=everyone)
            bad = flag > 0
        if not bad.item():
            return TotalNorm(value, is_finite=True)
        # Where it is finite here, but not on another rank, the ranks shall return the same.
        return TotalNorm(torch.where(value.isfinite(), math.nan, value), is_finite=False)

    def _combined(self, p: float, everyone: Ranks | None) -> torch.Tensor:
        counted = {place: kinds for place, kinds in self._pieces.items() if not place.is_copy}
        norms = {place: _norm(kinds, p, self._device) for place, kinds in counted.items()}
        whole = norms.pop(GradientRanks())
        if not norms and not self._lines:
            return whole
        # Sums of powers need more bits than their root; mps has no more.
        wide = torch.float32 if self._device.type == "mps" else torch.float64
        powers = {place: _power(norm.to(wide), p) for place, norm in norms.items()}
        rest = _power(whole.to(wide), p)
        # The message to everyone comes last: it tells what this rank alone knows of the others.
        for ranks in sorted(self._groups, key=lambda ranks: ranks == everyone):
            members = [place for place in powers if ranks in place.cut]
            if not members:  # the shards of copies alone
                continue
            numbers = torch.stack([powers[place] for place in members])
            if ranks == everyone:
                others = [power for place, power in powers.items() if place not in members]
                numbers += 0 * sum(others, rest)  # 0, or nan if one of them is not finite
            numbers = _all_reduce(numbers, p, self._groups[ranks])
            powers.update(zip(members, numbers.unbind(), strict=True))
        parts = [rest, *(power for place, power in powers.items() if not place.line)]
        for line in self._lines:
            mine = [torch.zeros_like(rest), *(power for place, power in powers.items() if place.line == line)]
            parts += _all_reduce(_joined(mine, p).reshape(1), p, line).unbind()
        value = _joined(parts, p)
        if p != math.inf:
            value = value.pow(1 / p)
        for (_, dtype), _ in self._alike if self._lines else ():
            self._dtype = torch.promote_types(self._dtype, dtype.to_real())
        return value.to(torch.promote_types(self._dtype, whole.dtype))

    # -- changes in place ------------------------------------------------------------------------

    @torch.no_grad()
    def scale_to(self, max_norm: float, norm: torch.Tensor) -> None:
        """Scale down so that a norm above `max_norm` becomes `max_norm`; torch's formula."""
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for (device, _), tensors in self._alike:
            torch_internals.foreach_mul(tensors, factor if factor.device == device else factor.to(device))

    @torch.no_grad()
    def clamp(self, max_value: float) -> None:
        """Bring every element into [-max_value, max_value]."""
        for _, tensors in self._alike:
            torch_internals.foreach_clamp_min(tensors, -max_value)
            torch_internals.foreach_clamp_max(tensors, max_value)

    @torch.no_grad()
    def zero(self) -> None:
        """Make every element 0, also those that are not finite."""
        for _, tensors in self._alike:
            torch_internals.foreach_zero(tensors)


def with_nonfinite_gradient(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those whose gradient, as far as it lies on this rank, is not finite."""
    with_gradient = [(p, p.grad) for p in parameters if p.grad is not None and not is_elsewhere(p)]
    return [p for p, gradient in with_gradient if not _values(p, local(gradient)).isfinite().all()]


def _values(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The values of a sparse gradient; each place once, which is what norms and limits are about."""
    if gradient.layout is not torch.sparse_coo:
        return gradient
    if not gradient.is_coalesced():
        parameter.grad = gradient = gradient.coalesce()
    return gradient.values()


def _norm(kinds: Mapping[Kind, list[torch.Tensor]], p: float, device: torch.device) -> torch.Tensor:
    """The norm of what lies here, in float32 for 16-bit tensors."""
    if p == math.inf:  # has no value for an empty shard
        full = {kind: [t for t in same if t.numel()] for kind, same in kinds.items()}
        kinds = {kind: same for kind, same in full.items() if same}
    if not kinds:
        return torch.zeros((), device=device)
    if len(kinds) > 1 and not any(dtype in LOW for _, dtype in kinds):
        # The order of the kinds decides the last bit.
        total: torch.Tensor = torch.nn.utils.get_total_norm([t for same in kinds.values() for t in same], p)
        return total
    norms: list[torch.Tensor] = []
    for (_, dtype), same in kinds.items():
        norms += torch_internals.foreach_norm(same, p, dtype=torch.float32 if dtype in LOW else None)
    if len(kinds) > 1:
        norms = [norm.to(norms[0].device) for norm in norms]
    joined: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), p)
    return joined


def _joined(powers: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """The power of the norm of parts together, from those of each."""
    stacked = torch.stack(list(powers))
    return stacked.amax() if p == math.inf else stacked.sum()


def _power(norm: torch.Tensor, p: float) -> torch.Tensor:
    return norm if p == math.inf else norm.pow(p)


def _all_reduce(numbers: torch.Tensor, p: float, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The sums over the ranks of `group`, or the maxima for p = inf."""
    if p != math.inf:
        dist.all_reduce(numbers, dist.ReduceOp.SUM, group=group)
        return numbers
    # A maximum may lose a nan on the way, so it travels as a number of its own.
    nans = numbers.isnan()
    both = torch.stack([torch.where(nans, math.inf, numbers), nans.to(numbers.dtype)])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
    return torch.where(both[1] > 0, math.nan, both[0])
