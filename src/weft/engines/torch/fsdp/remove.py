"""Take FSDP2 off a module; torch has no function for that.

What FSDP2 leaves: a class made for each unit, hooks, flags on every module, a registry of what was
applied, and methods that were routed through it. All of it is found by where it comes from.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from weft import torch_internals
from weft.tensors.blocks import unsharded_parameter
from weft.tensors.dtensor import replace_parameters

_KINDS = (
    torch_internals.FORWARD_PRE_HOOKS,
    torch_internals.FORWARD_HOOKS,
    torch_internals.STATE_DICT_PRE_HOOKS,
    torch_internals.LOAD_PRE_HOOKS,
    torch_internals.LOAD_POST_HOOKS,
)
_HOOKS = (
    *_KINDS,
    torch_internals.FORWARD_PRE_HOOKS_WITH_KWARGS,
    torch_internals.FORWARD_HOOKS_WITH_KWARGS,
    torch_internals.FORWARD_HOOKS_ALWAYS,
)


def remove_fsdp(module: nn.Module, specs: Mapping[str, Any]) -> None:
    """Make parameters what they were, and take FSDP2 off. Collectives: one all-gather per parameter.

    Args:
        module: What FSDP2 was applied to, with its parts.
        specs: By the name of each sharded parameter, what it was before, see `unsharded_parameter`.
    """
    sharded = [(p, specs[name]) for name, p in module.named_parameters() if name in specs and isinstance(p, DTensor)]
    replace_parameters(module, {p: unsharded_parameter(p, spec) for p, spec in sharded})
    for part in module.modules():
        _take_fsdp_off(part)


def _take_fsdp_off(part: nn.Module) -> None:
    """Make one module what it was before FSDP2."""
    for kind in _KINDS:
        ours = [key for key, hook in kind.of(part).items() if _comes_from_fsdp(hook)]
        for key in ours:
            for each in _HOOKS:
                each.of(part).pop(key, None)
    part.__dict__.pop(torch_internals.IS_MANAGED.name, None)
    part.__dict__.pop(torch_internals.HAS_PARAMETERS.name, None)
    if isinstance(part, FSDPModule):
        torch_internals.module_states.found.pop(part, None)
        for key in [key for key, value in part.__dict__.items() if _is_registry(value)]:
            del part.__dict__[key]
        kinds: tuple[type, ...] = type(part).__mro__
        part.__class__ = kinds[2]  # FSDP2 put its own two before it


def _comes_from_fsdp(hook: Any) -> bool:
    hook = getattr(hook, "hook", hook)  # torch wraps hooks that take the module
    while isinstance(hook, functools.partial):
        hook = hook.func
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def _is_registry(value: object) -> bool:
    """Whether a value is what torch's `contract` decorator keeps in a module for `fully_shard`."""
    return isinstance(value, dict) and any(
        key is fully_shard or key == "fully_shard" or getattr(key, "__name__", "") == "fully_shard" for key in value
    )
