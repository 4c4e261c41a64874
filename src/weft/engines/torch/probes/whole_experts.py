"""Expert parallelism, measured: experts on several ranks, and all of them on each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from weft.engines.torch.parallel.experts.listed import ListedExperts
from weft.engines.torch.parallel.experts.stacked import StackedExperts
from weft.engines.torch.probes.whole_unit import WholeUnits
from weft.tensors.dtensor import full_tensor, is_sharded

__all__ = ["ExpertUnits"]


class ExpertUnits(WholeUnits):
    """The probe of `expert_parallel`; its units are the modules whose forward calls experts."""

    cause = "an expert computes something else for a token if other tokens come with it"
    fix = 'weft.expert_parallel(..., experts=...) without these, or weft.replicate(model, ctx, unused="zero") alone'

    def __init__(
        self,
        units: Mapping[str, nn.Module],
        group: dist.ProcessGroup,
        divided: Mapping[str, StackedExperts | ListedExperts],
        owners: Mapping[str, Mapping[str, int]],
    ) -> None:
        """Remember who has what.

        Args:
            units: Modules, by name.
            group: The ranks of the axis.
            divided: What is around their forward.
            owners: By unit: the rank that has a parameter of a single expert.
        """
        super().__init__(units, group)
        self._divided = divided
        self._owners = owners

    def equal_inputs(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Nothing: each rank has tokens of its own."""
        return ()

    def _whole(self, name: str) -> dict[str, torch.Tensor]:
        owners, found = self._owners[name], {}
        device = next((t.device for t in self.units[name].parameters() if not t.is_meta), torch.device("cpu"))
        for own, p in self.units[name].named_parameters():
            owner = owners.get(own)
            if owner is None:
                found[own] = full_tensor(p.detach())
                continue
            mine = owner == dist.get_rank(self.group)
            # A copy: what is sent counts as changed.
            found[own] = full_tensor(p.detach()).clone() if mine else torch.empty_like(p, device=device)
            dist.broadcast(found[own].detach(), group=self.group, group_src=owner)
        return found

    def _is_elsewhere(self, name: str, own: str) -> bool:
        return own in self._owners[name] or is_sharded(self.units[name].get_parameter(own))

    def _other_leaves(self, ends: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All of them: a rank that brings no rows sends its part of the backward pass all the same."""
        nodes: list[Any] = [end.grad_fn for end in ends if end.grad_fn is not None]
        seen: set[Any] = set()
        found: dict[int, torch.Tensor] = {}
        while nodes:
            node = nodes.pop()
            if node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                found[id(node.variable)] = node.variable
            nodes += [before for before, _ in node.next_functions if before is not None]
        return [leaf for at, leaf in found.items() if all(at != id(one) for one in known)]

    @contextlib.contextmanager
    def _undivided(self, name: str) -> Iterator[None]:
        self._divided[name].off = True
        try:
            yield
        finally:
            self._divided[name].off = False
