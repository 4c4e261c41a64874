"""Shard a module over ranks with torch's FSDP2, and take the shards off again.

FSDP2 gathers the parameters of a unit before its forward and backward and frees them after; the
gradients of a unit are summed and cut up (reduce-scatter) when its backward ends. Parameters,
gradients and what an optimizer makes of them are DTensors.

[Note: gradients of a window] While `set(False)` holds, FSDP2 keeps whole gradients inside of its
units; `.grad` shows them after the reduced backward that ends the window. A window that is left
early leaves them there, and they must not get into the next one; but a user may also go on with
the rest of the window. Who cuts windows calls `set(True)` when the loop over one is left, and once
more when it takes the next, so the third call in a row after `set(False)` belongs to another window.

[Note: torn passes] An exception in forward or backward leaves units gathered and half-way. FSDP2
is put back to the start of a pass: after forward at once, after backward when forward is called
next (nothing tells that backward was torn).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from weft.engines.options import ShardOptions
from weft.engines.torch.backward import BackwardSession
from weft.engines.torch.calls import Hook, Removable, around_methods
from weft.engines.torch.rebinding import optimizers_of
from weft.engines.torch.shards import groups_of, reset_units
from weft.engines.torch.unsharding import replace_parameters, take_fsdp_off, whole_parameter
from weft.engines.torch.whole_step import check_steps_on_whole
from weft.errors import UnusedParameters, listed, message
from weft.nested import map_tensors, tensors

__all__ = ["ShardedModule"]


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
        self._device_type = mesh.device_type
        self._dtype = options.dtype
        self._unused_is_zero = options.unused == "zero"
        self._removable = Removable()
        self._calls_after_held = 3
        self._missing: set[str] = set()  # no gradient when a unit was reduced in this backward pass
        self._used: set[str] = set()
        self._had_gradient: set[str] = set()
        self._knows_optimizers = False
        self._session = BackwardSession(self._begin, self._end, rounds=1)
        for unit in (*options.units, (module,)):
            _shard_unit(unit, module, mesh, options, self._removable)
        self._units = [weakref.ref(part) for part in module.modules() if isinstance(part, FSDPModule)]
        self._removable.add(module.register_forward_pre_hook(_Before(self), prepend=True).remove)
        self._removable.add(module.register_forward_hook(_After(self), always_call=True).remove)
        around_methods(module, options.methods, _Around(self), self._removable)
        self._whole = {n: p for n, p in module.named_parameters() if n in set(options.ignored) and p.requires_grad}
        for p in self._whole.values():
            entrance = _entrance(self._session.flag, weakref.ref(self))
            self._removable.add(p.register_post_accumulate_grad_hook(entrance).remove)
        self._buffers = options.buffers == "broadcast" and any(True for _ in module.buffers())
        for fsdp_group in self._parameter_groups():
            # Unused parameters count as zero, so that all ranks reduce the same; and are noted.
            fills = not hasattr(fsdp_group, "reduce_scatter_unused_params")  # torch before 2.13
            if not fills:
                fsdp_group.reduce_scatter_unused_params = True
            fsdp_group.post_backward = _noting(weakref.ref(self), weakref.ref(fsdp_group), fills=fills)

    # -- what other rooms may ask ----------------------------------------------------------------

    def set(self, enabled: bool) -> None:
        """Decide whether backward passes from now on communicate; see [Note: gradients of a window]."""
        if enabled:
            self._calls_after_held += 1
            if self._calls_after_held == 3:
                self._drop_held()
        else:
            if self._calls_after_held == 2:
                self._drop_held()
            self._calls_after_held = 0
        if enabled != self.enabled:
            self.enabled = enabled
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
        for unit in self._live_units():
            unit.reshard()
        self._removable.remove()
        cut = [p for p in module.parameters() if isinstance(p, DTensor)]
        replace_parameters(module, {p: whole_parameter(p) for p in cut})
        for part in module.modules():
            take_fsdp_off(part)
        self.release()

    # -- around the calls of the module ----------------------------------------------------------

    def before(self) -> None:
        """The module is about to be called; see [Note: torn passes]."""
        if torch._C._current_graph_task_id() != -1:
            return  # computed again, inside of backward
        module: Any = self._module()
        torn = self._session.was_torn()
        if torn or module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued:
            self._start_anew(module)
            self._drop_held()

    def after(self, output: Any) -> None:
        """The module was called, or its call raised."""
        module: Any = self._module()
        if torch._C._current_graph_task_id() != -1:
            return
        if module._get_fsdp_state()._training_state.name == "FORWARD":
            self._start_anew(module)
        elif torch.is_grad_enabled():
            # Learn when backward comes back through this output.
            entrance = _entrance(self._session.flag, weakref.ref(self))
            for tensor in tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(entrance)
        else:
            # No backward will free what was gathered, and `parameters()` shall be what is trained.
            for unit in self._live_units():
                unit.reshard()

    def around(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A listed method is called: the same as around forward."""
        module: Any = self._module()
        state = module._get_fsdp_state()
        self.before()
        output = None
        try:
            args, kwargs = state._pre_forward(module, args, kwargs)
            output = state._post_forward(module, args, without_views(call(*args, **kwargs)))
        finally:
            self.after(output)
        return output

    def enter(self) -> None:
        """The first gradient of a backward pass is here."""
        self._session.enter()

    # -- inside ----------------------------------------------------------------------------------

    def _live_units(self) -> Iterator[FSDPModule]:
        for ref in self._units:
            unit = ref()
            if isinstance(unit, FSDPModule):
                yield unit

    def _parameter_groups(self) -> Iterator[Any]:
        seen = set()
        for unit in self._live_units():
            for group in groups_of(unit):
                if id(group) not in seen:  # several modules may be one unit
                    seen.add(id(group))
                    yield group

    def _trained(self) -> dict[str, nn.Parameter]:
        """The parameters an optimizer sees, by name."""
        sharded = {_name(one): one.sharded_param for group in self._parameter_groups() for one in group.fsdp_params}
        return {name: p for name, p in {**sharded, **self._whole}.items() if p.requires_grad}

    def _drop_held(self) -> None:
        for group in self._parameter_groups():
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    whole.grad = None

    def _start_anew(self, module: Any) -> None:
        if hasattr(module, "reset_iter_state"):  # torch 2.13
            module.reset_iter_state()
        else:
            reset_units(module)

    # -- one backward pass -----------------------------------------------------------------------

    def _begin(self) -> None:
        self._missing.clear()
        self._used.clear()
        if self._unused_is_zero:
            self._had_gradient = {name for name, p in self._trained().items() if p.grad is not None}

    def _end(self) -> None:
        unused = self._missing - self._used
        if not self.enabled or self._group is None:
            return
        unused.update(self._average_whole(self._group))
        if self._unused_is_zero:
            self._forget_unused(unused, self._group)
        module = self._module()
        if self._buffers and module is not None:
            dist._broadcast_coalesced(self._group, [b.detach() for b in module.buffers()], 250 * 2**20, 0)
        if unused and not self._unused_is_zero:
            self._raise_unused(sorted(unused))
        if not self._knows_optimizers:  # the first backward pass, before the first step
            check_steps_on_whole(optimizers_of(self._trained().values()))
            self._knows_optimizers = True

    def _average_whole(self, group: dist.ProcessGroup) -> list[str]:
        """Average the gradients of parameters that are not cut; returns the names of those without."""
        missing = [name for name, p in self._whole.items() if p.grad is None]
        for name in missing:
            self._whole[name].grad = torch.zeros_like(self._whole[name])
        # All of a gradient: what was reduced before is equal on all ranks, and stays what it is.
        gradients = [p.grad for p in self._whole.values() if p.grad is not None]
        for dtype in dict.fromkeys(g.dtype for g in gradients):
            same = [g for g in gradients if g.dtype == dtype]
            flat = torch.cat([g.reshape(-1) for g in same]) / dist.get_world_size(group)
            flat = flat if self._dtype is None else flat.to(self._dtype)
            dist.all_reduce(flat, group=group)
            for gradient, part in zip(same, flat.split([g.numel() for g in same]), strict=True):
                gradient.copy_(part.view_as(gradient))
        return missing

    # -- parameters without gradient -------------------------------------------------------------

    def note(self, group: Any, *, fills: bool) -> None:
        """The gradients of a unit are about to be reduced; after several forward passes, several times.

        Args:
            group: Of the unit.
            fills: Put zeros where there is no gradient.
        """
        self._session.enter()
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param") and parameter.unsharded_param.requires_grad:
                kept, new = parameter.unsharded_accumulated_grad, parameter.unsharded_param.grad
                (self._missing if kept is None and new is None else self._used).add(_name(parameter))
                if fills and kept is None and new is None:
                    parameter.unsharded_param.grad = torch.zeros_like(parameter.unsharded_param)

    def _forget_unused(self, unused: Collection[str], group: dist.ProcessGroup) -> None:
        """What no rank used has no gradient, as in one process, and not one of zeros."""
        trained = self._trained()
        used = torch.tensor([name not in unused for name in trained], dtype=torch.uint8, device=self._device_type)
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        for (name, parameter), somewhere in zip(trained.items(), used.tolist(), strict=True):
            if not somewhere and name not in self._had_gradient:
                parameter.grad = None

    def _raise_unused(self, names: list[str]) -> NoReturn:
        raise UnusedParameters(
            message(
                f"fully_shard: {len(names)} parameter(s) of {self._class_name} got no gradient in this backward pass",
                found=listed(names),
                expected="every parameter that requires a gradient takes part in the loss, on every rank",
                fix='weft.fully_shard(model, ctx, unused="zero"), or requires_grad_(False) on them before it',
            )
        )


def _noting(owner: weakref.ref[ShardedModule], group: weakref.ref[Any], *, fills: bool) -> Callable[..., None]:
    """FSDP2's function that reduces the gradients of a unit, after a look at which are there."""

    def post_backward(*unused: Any) -> None:
        sharded, reduced = owner(), cast("Any", group())
        if sharded is not None and reduced.reduce_grads:
            sharded.note(reduced, fills=fills)
        type(reduced).post_backward(reduced, *unused)

    return post_backward


def _name(parameter: Any) -> str:
    return getattr(parameter, "_param_fqn", None) or "a parameter"


def _entrance(flag: bytearray, owner: weakref.ref[ShardedModule]) -> Callable[[torch.Tensor], None]:
    """A hook on a tensor; it must not hold the owner, which may hold the tensor, in C++."""

    def enter(_: torch.Tensor) -> None:
        if not flag[0]:
            alive = owner()
            if alive is not None:
                alive.enter()

    return enter


class _Before(Hook):
    def __init__(self, sharded: ShardedModule) -> None:
        self._sharded = sharded

    def __call__(self, module: nn.Module, args: Any) -> None:
        self._sharded.before()


class _After(Hook):
    def __init__(self, sharded: ShardedModule) -> None:
        self._sharded = sharded

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._sharded.after(output)


class _Around(Hook):
    def __init__(self, sharded: ShardedModule) -> None:
        self._sharded = sharded

    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self._sharded.around(call, args, kwargs)


# -- laying FSDP2 on ---------------------------------------------------------------------------------


def _shard_unit(
    unit: tuple[nn.Module, ...], root: nn.Module, mesh: DeviceMesh, options: ShardOptions, removable: Removable
) -> None:
    for part in unit:
        if options.make_real is not None:
            options.make_real(part)
        for p in part.parameters():
            if not isinstance(p, DTensor) and not p.is_contiguous():
                p.data = p.data.contiguous()  # FSDP2 takes no others
        removable.add(part.register_forward_hook(_WithoutViews()).remove)
    # By name: those of a module on meta are other objects by now.
    ignored = set(options.ignored)
    whole = {p for name, p in root.named_parameters(remove_duplicate=False) if name in ignored}
    reshard: bool | int | None = options.reshard_after_forward
    parts: list[nn.Module] = list(unit)
    target: Any = parts if len(parts) > 1 else parts[0]
    fully_shard(
        target,
        mesh=mesh,
        # None: torch leaves the outermost unit, which backward needs first, as it is.
        reshard_after_forward=None if unit == (root,) and reshard is True else reshard,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=options.dtype, cast_forward_inputs=False),
        offload_policy=CPUOffloadPolicy() if options.offload else OffloadPolicy(),
        ignored_params=whole,
    )


class _WithoutViews(Hook):
    """On a unit, before FSDP2's own hook: an in-place operation on a view would lose that hook."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return without_views(output)


def without_views(output: Any) -> Any:
    """The same values, in tensors that are no views for autograd."""
    if not torch.is_grad_enabled() or not any(t._base is not None for t in tensors(output)):
        return output
    return map_tensors(
        lambda t: _Same.apply(t) if t._base is not None and t.requires_grad else t,  # type: ignore[no-untyped-call]
        output,
    )


class _Same(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        del ctx  # nothing is saved
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return gradient
