"""The optimizer's state, between DeepSpeed's flat tensors and the form that all of weft understands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from weft.engines.deepspeed.buffers import Buffers, FlatRange, chunks_of
from weft.engines.deepspeed.parameters import Parameters
from weft.engines.torch.steps.swapped import SHARED_STATE
from weft.errors import ContractError, listed
from weft.tensors.blocks import full_tensor


class OptimizerState:
    """The state of the optimizer of a module's parameters."""

    def __init__(self, parameters: Parameters, buffers: Buffers) -> None:
        self._parameters = parameters
        self._buffers = buffers
        self._is_new = True  # DeepSpeed's optimizer was given no state yet

    @torch.no_grad()
    def show(self, optimizer: torch.optim.Optimizer, *, whole: bool = False) -> None:
        """Put the state into `optimizer.state`, by parameter."""
        buffers = self._buffers
        for group in range(buffers.groups()):
            flat, state = buffers.opened(group)
            for parameter, place in chunks_of(buffers.places, group):
                shown: dict[str, Any] = {}
                for key, value in state.items():
                    if _is_flat(value, flat):
                        full = self._parameters.whole(parameter, value.view(-1)[place.at : place.at + place.number])
                        shown[key] = full if whole else self._parameters.shown(full)
                    else:
                        shown[key] = value.clone() if isinstance(value, torch.Tensor) else value
                if shown:
                    optimizer.state[parameter] = shown
            buffers.close(group, changed=False)

    @torch.no_grad()
    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the state out of `optimizer.state`.

        What lies on a disk is known there by its tensor: tensors are overwritten and not replaced.
        """
        buffers = self._buffers
        if self._is_new and not optimizer.state:
            return
        self._is_new = False
        for group in range(buffers.groups()):
            given = {p: optimizer.state.get(p) or {} for p, _ in chunks_of(buffers.places, group)}
            self._check(given)
            flat, state = buffers.opened(group)
            values = next(iter(given.values()), {})
            for key in set(state) - set(values):
                del state[key]
            for key, value in values.items():
                if not isinstance(value, torch.Tensor) or key in SHARED_STATE:
                    state[key] = value.clone() if isinstance(value, torch.Tensor) else value
                elif not _is_flat(state.get(key), flat):
                    state[key] = torch.zeros_like(flat)
            for parameter, place in chunks_of(buffers.places, group):
                self._fill(flat, state, given[parameter], place)
            buffers.close(group, changed=True)

    def _fill(self, flat: torch.Tensor, state: Mapping[str, Any], given: Mapping[str, Any], place: FlatRange) -> None:
        for key, value in given.items():
            target = state[key]
            if _is_flat(target, flat):
                values = full_tensor(value).reshape(-1)[place.start : place.start + place.number]
                target.view(-1)[place.at : place.at + place.number].copy_(values)

    def _check(self, given: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """All parameters of a flat tensor share one state: raise if they differ."""
        keys = {tuple(state) for state in given.values()}
        counts = {float(state["step"]) for state in given.values() if "step" in state}
        differing = [f"step = {sorted(counts)}"] if len(counts) > 1 else []
        if len(keys) > 1:
            differing.append(
                f"state of {listed(sorted(self._parameters.names[p] for p, state in given.items() if state))} only"
            )
        if differing:
            raise ContractError(
                "zero_partition: the parameters of one group have been trained differently",
                found=listed(differing),
                expected="one count of steps per group of the optimizer: DeepSpeed steps on all of it together",
                fix="a group of its own for each kind of parameters",
            )


def _is_flat(value: Any, flat: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == flat.numel()
