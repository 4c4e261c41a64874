"""Ask about DTensors without importing them.

`torch.distributed.tensor` takes half a second to import. Who has a DTensor has imported it already, so
the answers here come from `sys.modules`; what works on DTensors in earnest is imported when it is used.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from weft.tensors.sharded_grad import CutGradient

__all__ = [
    "axes_of",
    "forget_groups",
    "full_tensor",
    "groups_of",
    "is_fsdp",
    "is_sharded",
    "local",
    "reset_units",
    "resting_parameters",
]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a DTensor: cut over ranks, or known to be equal on them."""
    loaded: Any = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def axes_of(tensor: torch.Tensor) -> str:
    """The names of the mesh axes of a DTensor, as text."""
    cut: Any = tensor
    return " and ".join(cut.device_mesh.mesh_dim_names or ("axes without names",))


def is_fsdp(module: nn.Module) -> bool:
    """Whether FSDP2 was applied to a part of a module, or to a module around it."""
    return any(getattr(part, "_is_fsdp_managed_module", False) for part in module.modules())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, in the same memory; the tensor itself if it is not cut."""
    if isinstance(tensor, CutGradient):
        return tensor.piece()
    if not is_sharded(tensor):
        return tensor
    cut: Any = tensor.detach()
    part: torch.Tensor = cut.to_local()
    return part


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor. Collectives: one all-gather, if it is cut."""
    cut: Any = tensor
    found: torch.Tensor = cut.full_tensor() if is_sharded(tensor) else tensor
    return found


def groups_of(unit: Any) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together in one unit."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.12 has one
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)


def reset_units(module: Any) -> None:
    """Let FSDP2 forget a pass that was not finished, as `reset_iter_state` of torch 2.13 does, in older ones."""
    root: Any = module._get_fsdp_state()
    if not hasattr(root._comm_ctx, "post_forward_order"):
        return  # no pass has begun
    if root._device.type != "cpu":
        torch.accelerator.synchronize()
    root._comm_ctx.all_gather_state = root._comm_ctx.reduce_scatter_state = None
    root._comm_ctx.post_forward_order.clear()
    for state in root._state_ctx.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = type(state._training_state).IDLE
        group = state._fsdp_param_group
        if group is not None:
            group.finalize_backward()
            group._partial_reduce_output = None
            group._training_state = state._training_state
            group._to_sharded()
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def resting_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters as they are between steps, also while FSDP2 has some of them gathered."""
    parameters = list(module.parameters())
    loaded: Any = sys.modules.get("torch.distributed.fsdp")
    if loaded is None:
        return parameters
    units = [part for part in module.modules() if isinstance(part, loaded.FSDPModule)]
    shards = {
        id(one._unsharded_param): one.sharded_param
        for unit in units
        for group in groups_of(unit)
        for one in group.fsdp_params
        if hasattr(one, "_unsharded_param")
    }
    return [shards.get(id(p), p) for p in parameters]


def forget_groups() -> None:
    """Let DTensor forget the process groups it has seen.

    It remembers how operations are cut up by mesh, and takes a mesh with new groups for the old one of
    the same ranks, whose groups are gone.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor, debug  # noqa: PLC0415  (see above)

        # The first is torch 2.13's and clears two memories, the other is older and there is one; 2.9 has neither.
        clear: Any = getattr(debug, "_clear_sharding_prop_cache", None) or getattr(
            debug, "_clear_python_sharding_prop_cache", None
        )
        memory: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        if clear is None and hasattr(memory, "cache"):
            clear = memory.cache.cache_clear
        if clear is not None:
            clear()
