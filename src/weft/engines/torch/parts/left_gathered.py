"""What a call with gradients leaves gathered for its backward pass, and freeing it when that pass has not come.

Until then `model.parameters()` holds the gathered copies, and what is written into them is lost when they are freed. If
they are frozen or unfrozen meanwhile, so are the shards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from weft import torch_internals
from weft.engines.torch.hooks.function_transforms import in_torch_func
from weft.errors import ContractError, listed
from weft.tensors.blocks import redistributed_as
from weft.tensors.checksums import can_be_read
from weft.tensors.dtensor import groups_of, is_sharded, local

_Versions = tuple[int, int, int]  # those of what a group has left are its `weft_left`


@torch_internals.untraced
def note_left(groups: Iterable[Any]) -> None:
    """These groups stay gathered for a backward pass."""
    for one in groups:
        one.weft_left = [_versions(p) for p in one.fsdp_params]
        one.weft_trained = list(map(_is_trained, one.fsdp_params))


@torch_internals.untraced
def check_left(groups: Iterable[Any]) -> None:
    """Raise if copies that a backward pass is about to use were written to; what was assigned to `.data` is not seen.

    Raises:
        ContractError: They were; they are freed.
    """
    lost = []
    for one in [one for one in groups if hasattr(one, "weft_left")]:
        _keep_flags(one)
        changed = [] if one.is_sharded else _changed(one, one.weft_left)
        if changed:
            one.reshard()
        lost += changed
    _raise_lost(lost)


@torch_internals.untraced
def free_left(groups: Iterable[Any]) -> None:
    """Free what was left gathered.

    Raises:
        ContractError: The copies were written to; they are freed all the same.
    """
    lost = []
    for one in [one for one in dict.fromkeys(groups) if hasattr(one, "weft_left")]:  # tied modules share a group
        before = vars(one).pop("weft_left")
        _keep_flags(one)
        if not one.is_sharded:
            lost += _changed(one, before) or [p for p, v in zip(one.fsdp_params, before, strict=True) if _differs(p, v)]
            one.reshard()
    _raise_lost(lost)


def drop_gathered(module: nn.Module) -> None:
    """Let FSDP2 forget gathered parameters, wherever it lies in a module; raises as `free_left` does."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    units: list[Any] = [part for part in module.modules() if isinstance(part, kind)] if kind else []
    free_left(group for unit in units for group in groups_of(unit))
    for unit in units:
        unit.reshard()


def _shown(one: Any) -> Any:
    """What `parameters()` has of one of FSDP2's parameters."""
    home = torch_internals.PARAM_HOME.of(one)
    return torch_internals.PARAMETERS.of(home.module).get(home.param_name)


def _is_trained(one: Any) -> bool:
    shown = _shown(one)
    return shown is not None and bool(shown.requires_grad)


def _keep_flags(group: Any) -> None:
    """Freeze and unfreeze shards as what is gathered of them was since the call."""
    for one, was in zip(() if group.is_sharded else group.fsdp_params, group.weft_trained, strict=False):
        if _is_trained(one) != was:
            one.sharded_param.requires_grad_(not was)


def _versions(one: Any) -> _Versions:
    shown, shard = _shown(one), one.sharded_param
    version = torch_internals.VERSION.of
    return 0 if shown is None else version(shown), version(shard), version(torch_internals.DTENSOR_PART.of(shard))


def _changed(group: Any, before: list[_Versions]) -> list[Any]:
    return [one for one, was in zip(group.fsdp_params, before, strict=True) if _versions(one)[0] != was[0]]


@torch.no_grad()
def _differs(one: Any, before: _Versions) -> bool:
    """Whether this rank's part of a copy is other than the shard, which was not written to."""
    copy = _shown(one)
    if in_torch_func() or _versions(one) != before or not isinstance(copy, nn.Parameter) or is_sharded(copy):
        return False
    shard = local(one.sharded_param)
    part = local(redistributed_as(copy.detach().to(shard.device), one.sharded_param))
    if not (can_be_read(part) and can_be_read(shard)):  # no bytes, or none at all
        return False
    return not torch.allclose(part, shard.to(part.dtype), rtol=0, atol=0, equal_nan=True)


def _raise_lost(lost: list[Any]) -> None:
    if lost:
        names = listed(map(torch_internals.PARAM_NAME.of, lost))
        raise ContractError(
            "sharded parameters were written to between a call with gradients and its backward pass",
            found=f"{names}: copies that are gathered for backward, and freed then",
            expected="writes after backward, or after a call without gradients; or with weft.full_params",
            fix="with weft.full_params(model, ctx, write=True), torch.no_grad(): [p.mul_(0.5) for p in "
            "model.parameters()]",
        )
