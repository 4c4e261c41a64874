"""Optimizers that were made before the parameters of a module were exchanged.

An optimizer holds the parameter objects it was given. If a module's parameters are exchanged for
others, it keeps updating the old ones, and the model silently does not train. Here it is moved to
the new parameters with groups and state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from weft.tensors.blocks import redistributed_as
from weft.tensors.nested import map_tensors


def rebind(optimizers: Sequence[torch.optim.Optimizer], new: Mapping[Any, nn.Parameter]) -> None:
    """Move optimizers from old parameters to new ones, in place; options, state and gradients are kept.

    State of the shape of its parameter is cut up or made whole as the new parameter is, everything
    else stays. Collectives: where shards are made whole, one all-gather per tensor.
    """
    for old, parameter in new.items():
        if not (old.grad is None or old.grad.is_meta) and parameter.grad is None and not parameter.is_meta:
            parameter.grad = redistributed_as(old.grad, parameter)
    for optimizer in optimizers:
        for entry in optimizer.param_groups:
            entry["params"][:] = [new.get(p, p) for p in entry["params"]]  # some optimizers keep the list
        held = {p: optimizer.state.pop(p) for p in new if p in optimizer.state}  # in the same order on all ranks
        for old, state in held.items():
            if new[old].is_meta and not old.is_meta:  # another rank has it now, and its state
                continue
            optimizer.state[new[old]] = map_tensors(partial(state_as, parameter=new[old]), dict(state))


def state_as(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """State of a parameter, cut or whole as that is; numbers stay."""
    return redistributed_as(value, parameter) if value.dim() else value
