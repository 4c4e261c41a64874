"""Shard a module over ranks with torch's FSDP2, and take the shards off again.

FSDP2 gathers the parameters of a unit before its forward and backward and frees them after; the
gradients of a unit are summed and cut up (reduce-scatter) when its backward ends. Parameters,
gradients and what an optimizer makes of them are DTensors.

[Note: gradients of a window] While `set(False)` holds, FSDP2 keeps whole gradients inside of its
units; `.grad` shows them after the reduced backward that ends the window. A window that is left
early would leave them there for the next one, so they are dropped when `set(True)` comes a second
time in a row.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from weft.engines.options import ShardOptions
from weft.engines.torch.backward import BackwardSession
from weft.engines.torch.calls import Hook, Removable
from weft.engines.torch.shards import groups_of
from weft.errors import UnusedParameters, listed, message
from weft.nested import tensors

__all__ = ["ShardedModule", "replace_parameters"]


class ShardedModule:
    """FSDP2 on one module, as later transforms see it.

    Attributes:
        enabled: Whether the next backward pass communicates; see `set`.
        mean_over: Number of ranks the gradients are averaged over.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, options: ShardOptions) -> None:
        self.enabled = True
        self.mean_over = mesh.size()
        self._module = weakref.ref(module)
        self._class_name = type(module).__name__
        self._group: dist.ProcessGroup | None = group
        self._removable = Removable()
        self._held = False
        self._unused: list[str] = []
        for unit in (*options.units, (module,)):
            _shard_unit(unit, mesh, options)
        self._units = [weakref.ref(part) for part in module.modules() if isinstance(part, FSDPModule)]
        for name in options.methods:
            register_fsdp_forward_method(module, name)
            self._removable.add(functools.partial(module.__dict__.pop, name, None))
        self._session = BackwardSession(self._begin, self._end, rounds=1)
        self._buffers = options.buffers == "broadcast" and any(True for _ in module.buffers())
        if self._buffers:
            handle = module.register_forward_hook(_AfterForward(self))
            self._removable.add(handle.remove)
        # Those on meta are other objects by now, and named by where they are.
        self._plain = PlainGradients(options.ignored, group, self) if options.ignored else None
        self._note_unused(module, options.unused)

    # -- what other rooms may ask ----------------------------------------------------------------

    def set(self, enabled: bool) -> None:
        """Decide whether backward passes from now on communicate; see [Note: gradients of a window]."""
        if enabled and self.enabled:
            if self._held:
                self._drop_held()
            return
        self.enabled = enabled
        self._held = True
        for unit in self._live_units():
            unit.set_requires_gradient_sync(enabled, recurse=False)

    def release(self) -> None:
        """Let the process group go."""
        self._group = None

    def undo(self) -> None:
        """Make the parameters whole again and take FSDP2 off. Collectives: one all-gather per parameter."""
        module = self._module()
        if module is None:
            return
        self._removable.remove()
        if self._plain is not None:
            self._plain.undo()
        for unit in self._live_units():
            unit.reshard()
        replace_parameters(module, {p: _whole(p) for p in module.parameters() if isinstance(p, DTensor)})
        for part in module.modules():
            _take_fsdp_off(part)
        self.release()

    # -- inside ----------------------------------------------------------------------------------

    def _live_units(self) -> Iterator[FSDPModule]:
        for ref in self._units:
            unit = ref()
            if isinstance(unit, FSDPModule):
                yield unit

    def _parameter_groups(self) -> Iterator[Any]:
        for unit in self._live_units():
            yield from groups_of(unit)

    def _drop_held(self) -> None:
        self._held = False
        for group in self._parameter_groups():
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    whole.grad = None

    def watch(self, output: Any) -> None:
        """Forward was called: learn when backward comes back, to send the buffers after it."""
        if torch.is_grad_enabled():
            entrance = self._session.enter
            for tensor in tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: entrance())

    def _begin(self) -> None:
        """Nothing has to be done when backward begins."""

    def _end(self) -> None:
        if self._unused:
            self._raise_unused()
        module = self._module()
        if self._buffers and self.enabled and module is not None and self._group is not None:
            dist._broadcast_coalesced(self._group, [b.detach() for b in module.buffers()], 250 * 2**20, 0)

    # -- parameters without gradient -------------------------------------------------------------

    def _note_unused(self, module: nn.Module, unused: str) -> None:
        """Let unused parameters count as zero, so that all ranks reduce the same; and take note of them."""
        names = {id(p): name for name, p in module.named_parameters()}
        for group in self._parameter_groups():
            if not hasattr(group, "reduce_scatter_unused_params"):
                continue  # torch before 2.13
            group.reduce_scatter_unused_params = True if unused == "zero" else _Noting(self, group, names)

    def note_unused(self, names: list[str]) -> None:
        """Parameters were found to have no gradient in the running backward pass."""
        self._session.enter()
        self._unused += names

    def _raise_unused(self) -> NoReturn:
        names, self._unused = list(dict.fromkeys(self._unused)), []
        raise UnusedParameters(
            message(
                f"fully_shard: {len(names)} parameter(s) of {self._class_name} got no gradient in this backward pass",
                found=listed(names),
                expected="every parameter that requires a gradient takes part in the loss, on every rank",
                fix='weft.fully_shard(model, ctx, unused="zero"), or requires_grad_(False) on them before it',
            )
        )


class _Noting:
    """Stands in for a flag of FSDP2 that is read exactly when a parameter of a group has no gradient."""

    def __init__(self, owner: ShardedModule, group: Any, names: dict[int, str]) -> None:
        self._owner = weakref.ref(owner)
        self._group = weakref.ref(group)
        self._names = names

    def __bool__(self) -> bool:
        owner, group = self._owner(), self._group()
        if owner is not None and group is not None:
            missing = [
                self._names.get(id(parameter.sharded_param), "a parameter")
                for parameter in group.fsdp_params
                if parameter.unsharded_accumulated_grad is None
                and parameter.unsharded_param.grad is None
                and parameter.unsharded_param.requires_grad
            ]
            if missing:
                owner.note_unused(missing)
        return True


class _AfterForward(Hook):
    def __init__(self, sharded: ShardedModule) -> None:
        self._watch = sharded.watch

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._watch(output)


class PlainGradients:
    """Average the gradients of parameters that are not sharded, when backward has ended."""

    def __init__(self, parameters: tuple[nn.Parameter, ...], group: dist.ProcessGroup, owner: ShardedModule) -> None:
        self._parameters = [p for p in parameters if p.requires_grad]
        self._group = group
        self._owner = weakref.ref(owner)
        self._session = BackwardSession(lambda: None, self._end, rounds=1)
        enter = self._session.enter
        self._handles = [p.register_post_accumulate_grad_hook(lambda _: enter()) for p in self._parameters]

    def undo(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()

    def _end(self) -> None:
        owner = self._owner()
        if owner is None or not owner.enabled:
            return
        # All of a gradient: what was reduced before is equal on all ranks, and stays what it is.
        for p in self._parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        for dtype in dict.fromkeys(g.dtype for g in gradients):
            same = [g for g in gradients if g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in same])
            dist.all_reduce(flat, group=self._group)
            flat /= dist.get_world_size(self._group)
            for gradient, part in zip(same, flat.split([g.numel() for g in same]), strict=True):
                gradient.copy_(part.view_as(gradient))


# -- laying FSDP2 on ---------------------------------------------------------------------------------


def _shard_unit(unit: tuple[nn.Module, ...], mesh: DeviceMesh, options: ShardOptions) -> None:
    if options.make_real is not None:
        for part in unit:
            options.make_real(part)
    policy = MixedPrecisionPolicy(reduce_dtype=options.dtype, cast_forward_inputs=False)
    target: Any = unit[0] if len(unit) == 1 else list(unit)
    fully_shard(
        target,
        mesh=mesh,
        reshard_after_forward=options.reshard_after_forward,
        mp_policy=policy,
        offload_policy=CPUOffloadPolicy() if options.offload else OffloadPolicy(),
        ignored_params=set(options.ignored),
    )


# -- taking it off -----------------------------------------------------------------------------------


def _whole(parameter: DTensor) -> nn.Parameter:
    values: Any = parameter.detach()
    whole = nn.Parameter(values.full_tensor(), requires_grad=parameter.requires_grad)
    if isinstance(parameter.grad, DTensor):
        whole.grad = parameter.grad.full_tensor()
    return whole


def replace_parameters(module: nn.Module, new: dict[Any, nn.Parameter]) -> None:
    """Exchange parameters for others, wherever they are used, so that tied ones stay tied."""
    by_id = {id(old): parameter for old, parameter in new.items()}
    for part in module.modules():
        for name, old in part._parameters.items():
            if id(old) in by_id:
                part._parameters[name] = by_id[id(old)]


_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
)


def _take_fsdp_off(part: nn.Module) -> None:
    """Make one module what it was before FSDP2; torch has no function for that."""
    ours = {
        key
        for kind in ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
        for key, hook in part.__dict__[kind].items()
        if _comes_from_fsdp(hook)
    }
    for kind in _HOOKS:
        for key in ours & set(part.__dict__[kind]):
            del part.__dict__[kind][key]
    part.__dict__.pop("_is_fsdp_managed_module", None)
    part.__dict__.pop("_fsdp_use_orig_params", None)
    if isinstance(part, FSDPModule):
        _module_state_mapping.pop(part, None)
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
    return isinstance(value, dict) and (fully_shard in value or "fully_shard" in value or _names_fsdp(value))


def _names_fsdp(value: dict[Any, Any]) -> bool:
    return any(getattr(key, "__name__", "") == "fully_shard" for key in value)
