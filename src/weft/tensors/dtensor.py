"""Ask about DTensors without importing them.

`torch.distributed.tensor` takes half a second to import. Who has a DTensor has imported it already, so
the answers here come from `sys.modules`; what works on DTensors in earnest is imported when it is used.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from typing_extensions import TypeIs

from weft import torch_internals
from weft.tensors.sharded_grad import CutGradient

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: torch.Tensor) -> TypeIs[DTensor]:
    """Whether a tensor is a DTensor: cut over ranks, or known to be equal on them."""
    loaded: Any = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def axes_of(tensor: torch.Tensor) -> str:
    """The names of the mesh axes of a DTensor, as text."""
    cut: Any = tensor
    return " and ".join(cut.device_mesh.mesh_dim_names or ("axes without names",))


def is_fsdp(module: nn.Module) -> bool:
    """Whether FSDP2 was applied to a part of a module, or to a module around it."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    return any(torch_internals.IS_MANAGED.get(part, False) for part in module.modules())


def is_fsdp_unit(module: nn.Module) -> bool:
    """Whether FSDP2 was applied to this very module."""
    loaded: Any = sys.modules.get("torch.distributed.fsdp")
    return loaded is not None and isinstance(module, loaded.FSDPModule)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor, in the same memory; the tensor itself if it is not cut."""
    if isinstance(tensor, CutGradient):
        return tensor.piece()
    if not is_sharded(tensor):
        return tensor
    cut: Any = tensor.detach()
    part: torch.Tensor = cut.to_local()
    return part


def state_of(unit: Any) -> Any:
    """What FSDP2 keeps of one unit."""
    return torch_internals.FSDP_STATE.of(unit)()


def groups_of(unit: Any) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together in one unit."""
    state = state_of(unit)
    if torch_internals.STATE_GROUPS.exists:
        return list(torch_internals.STATE_GROUPS.of(state))
    group = torch_internals.STATE_GROUP.of(state)  # torch before 2.12 has one
    return [] if group is None else [group]


@contextlib.contextmanager
def kept_prefetches(groups: Iterable[Any]) -> Iterator[None]:
    """Let calls inside not change by which groups of parameters backward gathers ahead."""
    calls: list[list[Any]] = []
    for one in groups:
        order = torch_internals.CONTEXT_CALLS.get(torch_internals.GROUP_CONTEXT.of(one))
        if order is not None:
            calls += [order, torch_internals.GROUP_CALLS.of(one)]
    before = [list(one) for one in calls]
    try:
        yield
    finally:
        for one, found in zip(calls, before, strict=True):
            one[:] = found


def spec_of(parameter: Any) -> Any:
    """Mesh and placements of what FSDP2 gathers for one of its parameters; None if that is a plain tensor."""
    return _spec().get(parameter)


def set_spec_of(parameter: Any, spec: Any) -> None:
    """Let the gathered parameter lie on another mesh of the same ranks; does nothing without one."""
    if spec is not None:
        _spec().set(parameter, spec)


def _spec() -> Any:
    return torch_internals.PARAM_SPEC if torch_internals.PARAM_SPEC.exists else torch_internals.PARAM_SPEC_BEFORE


def reset_units(module: Any) -> None:
    """Let FSDP2 forget a pass that was not finished, as `reset_iter_state` of torch 2.13 does, in older ones."""
    root = state_of(module)
    context, shared = torch_internals.STATE_COMM.of(root), torch_internals.STATE_SHARED.of(root)
    calls = torch_internals.CONTEXT_CALLS.get(context)
    if calls is None:
        return  # no pass has begun
    if torch_internals.STATE_DEVICE.of(root).type != "cpu":
        torch.accelerator.synchronize()
    context.all_gather_state = context.reduce_scatter_state = None
    calls.clear()
    for state in shared.all_states:
        torch_internals.STATE_TO_RUN.of(state).clear()
        torch_internals.STATE_TRAINING.set(state, torch_internals.IDLE.found)
        group = torch_internals.STATE_GROUP.of(state)
        if group is not None:
            group.finalize_backward()
            torch_internals.GROUP_PARTIAL.set(group, None)
            torch_internals.GROUP_TRAINING.set(group, torch_internals.IDLE.found)
            torch_internals.GROUP_RESHARD.of(group)()
    shared.iter_forward_root = None
    shared.post_backward_final_callback_queued = False


def resting_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters as they are between steps, also while FSDP2 has some of them gathered."""
    shards = {
        id(torch_internals.PARAM_WHOLE.get(one)): one.sharded_param
        for unit in filter(is_fsdp_unit, module.modules())
        for group in groups_of(unit)
        for one in group.fsdp_params
    }
    return [shards.get(id(p), p) for p in module.parameters()]


def replace_parameters(module: nn.Module, new: dict[Any, nn.Parameter]) -> None:
    """Exchange parameters for others, wherever they are used, so that tied ones stay tied."""
    by_id = {id(old): parameter for old, parameter in new.items()}
    for part in module.modules():
        slots = torch_internals.PARAMETERS.of(part)
        for name, old in slots.items():
            if id(old) in by_id:
                slots[name] = by_id[id(old)]


def forget_groups(*, is_device_usable: bool = True) -> None:
    """Let DTensor forget the process groups it has seen.

    It remembers how operations are cut up by mesh, and takes a mesh with new groups for the old one of
    the same ranks, whose groups are gone. It does so in each thread, of which backward has one per accelerator.

    Args:
        is_device_usable: Whether the accelerator may be asked: after a failure, it may wait for ever.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import DTensor  # noqa: PLC0415  (see above)

        version: Any = torch.__version__
        memories = [torch_internals.DISPATCHER.of(DTensor).sharding_propagator.propagate_op_sharding.cache.cache_clear]
        if version >= (2, 13) or torch_internals.clear_propagation.exists:  # there was one memory before
            memories.append(torch_internals.clear_propagation.found)

        def clear() -> None:
            for memory in memories:
                memory()

        clear()
        if is_device_usable:
            _call_in_backward(clear)


def _call_in_backward(call: Callable[[], object]) -> None:
    """Call a function in the thread in which backward runs on the accelerator."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None or not torch.get_device_module(device).is_initialized():
        return
    with torch.enable_grad():
        number = torch.zeros((), device=device, requires_grad=True)
        number.register_hook(lambda _: call() and None)
        number.backward()
