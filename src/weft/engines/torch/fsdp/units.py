"""The units that FSDP2 gathers and frees together: how they are made, and what they hold.

[Note: what stays gathered] A unit that is freed where forward ends is gathered again where backward begins. torch
leaves the outermost unit as it is; the same is done here with the one that forward ends with: the last one by name in
the first call, and then the one that the call before ended with. It takes no more memory than backward is about to.
What a call left gathered is freed before the next call if no backward pass did that, or that call would compute with
what the shards were before a step or a load.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from weft import torch_internals
from weft.engines.options import ShardOptions
from weft.engines.torch.fsdp.gather_dtype import gather_in
from weft.engines.torch.hooks.method_hooks import Removable
from weft.engines.torch.parts.left_gathered import check_left, free_left, note_left
from weft.private_names import replaced
from weft.tensors.dtensor import groups_of, kept_prefetches, reset_units, set_spec_of, state_of
from weft.tensors.nested import map_tensors, tensors
from weft.tensors.remote_parameter import is_elsewhere


class Units:
    """The units of one module.

    Attributes:
        alone: Whether this rank alone calls the module now.
        are_copied: Whether other ranks hold copies of the shards of every unit.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, options: ShardOptions, removable: Removable) -> None:
        for number, unit in enumerate((*options.units, (module,))):
            other = options.other_meshes.get(number)
            reshard = options.reshard_units.get(number, options.reshard_after_forward)
            if other is None:
                _shard_unit(unit, module, mesh, replace(options, reshard_after_forward=reshard), removable)
            else:
                # A number of ranks to stay sharded over is one of the others' mesh.
                own = replace(options, reshard_after_forward=bool(reshard))
                _shard_unit(unit, module, other.mesh, own, removable)
                for part in cast("tuple[FSDPModule, ...]", unit):
                    part.set_gradient_divide_factor(other.divide)
                    part.set_force_sum_reduction_for_comms(True)  # gloo cannot scale on the way
        self.alone = False
        self.are_copied = mesh.ndim > 1 and not options.other_meshes
        self._keeps_last = options.reshard_after_forward is True
        self._last: Callable[[], Any] = _no_unit  # that the next call is to end with; see [Note: what stays gathered]
        self._freed_to: Any = None  # the mesh that it is freed to in other calls
        self._left: weakref.WeakSet[Any] = weakref.WeakSet()  # what the last call left gathered
        self._calls: list[Any] = []  # FSDP2's list of the calls of units
        self._place = 0  # in it, where the running call of the module begins
        self._units = [weakref.ref(part) for part in module.modules() if isinstance(part, FSDPModule)]
        names = {id(p): name for name, p in module.named_parameters()}
        for parameter in self.parameters():
            set_spec_of(parameter, options.specs.get(names[id(parameter.sharded_param)]))
        gather_in(options.gather, {names[id(one.sharded_param)]: one for one in self.parameters()}, module, removable)
        self._expect_last(self.groups(), module)

    def __iter__(self) -> Iterator[FSDPModule]:
        """Those that are alive."""
        for ref in self._units:
            unit = ref()
            if isinstance(unit, FSDPModule):
                yield unit

    def groups(self) -> Iterator[Any]:
        """What FSDP2 keeps of each unit's parameters."""
        seen = set()
        for unit in self:
            for group in groups_of(unit):
                if id(group) not in seen:  # several modules may be one unit
                    seen.add(id(group))
                    yield group

    def parameters(self) -> Iterator[Any]:
        """What FSDP2 keeps of each parameter."""
        for group in self.groups():
            yield from group.fsdp_params

    def ids(self) -> set[int]:
        """Of the parameters an optimizer sees."""
        return {id(one.sharded_param) for one in self.parameters()}

    def synchronize(self, *, enabled: bool) -> None:
        """Let the next backward passes reduce, or not."""
        for unit in self:
            unit.set_requires_gradient_sync(enabled, recurse=False)

    def scatter_only(self) -> None:
        """Let the next backward passes reduce over the ranks that shard a parameter, and not over its copies."""
        for unit in self:
            unit.set_requires_gradient_sync(requires_gradient_sync=True, recurse=False)
            unit.set_requires_all_reduce(requires_all_reduce=False, recurse=False)

    def begin_call(self, module: Any) -> None:
        """The module is about to be called; see [Note: what stays gathered]."""
        self.free_left()
        state = state_of(module)
        torch_internals.STATE_INIT.of(state)()  # makes the list, once
        self._calls = torch_internals.CONTEXT_CALLS.of(torch_internals.STATE_COMM.of(state))
        self._place = len(self._calls)
        last = self._last()
        if last is not None and torch.is_grad_enabled():
            self._freed_to, last.post_forward_mesh_info = last.post_forward_mesh_info, None

    def end_call(self, module: Any) -> None:
        """The module was called, or its call raised."""
        last = self._last()
        if last is not None and self._freed_to is not None:
            last.post_forward_mesh_info, self._freed_to = self._freed_to, None
        called, self._calls = self._calls[self._place :], []
        if called and torch.is_grad_enabled():
            self._left = weakref.WeakSet([one for one in called if not one.is_sharded])
            note_left(self._left)
            self._expect_last(called, module)

    def _expect_last(self, called: Iterable[Any], module: Any) -> None:
        """Expect that the next call ends with the last of these units, besides the module's own."""
        own = groups_of(module)
        units = [one for one in called if one not in own] if self._keeps_last else []
        # One that is called several times would be kept between its calls.
        self._last = weakref.ref(units[-1]) if units and units.count(units[-1]) == 1 else _no_unit

    def free_left(self) -> None:
        """Free what the last call of the module left gathered."""
        free_left(self._left)

    def check_left(self) -> None:
        """Raise if that was written to, where a backward pass begins."""
        check_left(self._left)

    def reshard(self) -> None:
        """Free what is gathered."""
        self.free_left()
        for unit in self:
            unit.reshard()

    def drop_gradients(self) -> None:
        """Forget the gradients that are not reduced."""
        for parameter in self.parameters():
            torch_internals.PARAM_KEPT.set(parameter, None)
            full = torch_internals.PARAM_WHOLE.get(parameter)
            if full is not None:
                full.grad = None
        for group in self.groups():
            torch_internals.GROUP_PARTIAL.set(group, None)

    def stands_in(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is one that FSDP2 has put into the module."""
        return isinstance(parameter, DTensor) or any(
            torch_internals.PARAM_WHOLE.get(one) is parameter for one in self.parameters()
        )

    def call_gathered(
        self,
        call: Callable[..., torch.Tensor],
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """`call(hidden, weight, bias)` with gathered parameters, around which their unit does as around its forward.

        Returns:
            What it returns; None if `weight` is no shard, or one of the outermost unit, which forward gathers.
        """
        for unit in self:
            shards = {id(one.sharded_param): one for group in groups_of(unit) for one in group.fsdp_params}
            if id(weight) in shards and not torch_internals.STATE_IS_ROOT.of(state_of(unit)):
                inside = partial(_call_with_whole, call, (weight, bias), shards)
                found: torch.Tensor = called_as_forward(unit, inside, (hidden,), {})
                return found
        return None

    @contextlib.contextmanager
    def kept_full(self, module: Any) -> Iterator[None]:
        """Keep the units full, which are full now, through calls of the module by this rank alone."""
        torch_internals.STATE_INIT.of(state_of(module))()  # decides about the outermost unit, once
        groups = list(self.groups())
        with contextlib.ExitStack() as stack:
            stack.enter_context(replaced(self, alone=True))
            for one in groups:
                stack.enter_context(replaced(one, post_forward_mesh_info=None))  # not to be freed after forward
            stack.enter_context(kept_prefetches(groups))
            yield

    def start_anew(self, module: Any) -> None:
        """Put FSDP2 back to the start of a pass."""
        self._expect_last(self.groups(), module)  # the pass may have ended elsewhere on other ranks
        if hasattr(module, "reset_iter_state"):  # torch 2.13
            module.reset_iter_state()
        else:
            reset_units(module)


def _no_unit() -> None:
    """In the place of a weak reference."""


def _shard_unit(
    unit: tuple[nn.Module, ...], root: nn.Module, mesh: DeviceMesh, options: ShardOptions, removable: Removable
) -> None:
    for part in unit:
        if options.make_real is not None:
            options.make_real(part)
        for p in part.parameters():
            if not isinstance(p, DTensor) and not p.is_contiguous():
                p.data = p.data.contiguous()  # FSDP2 takes no others
        # Before FSDP2's own hook, which an in-place operation on a view would lose.
        removable.add(part.register_forward_hook(_return_no_views).remove)
    # By name: those of a module on meta are other objects by now.
    ignored = set(options.ignored)
    named = root.named_parameters(remove_duplicate=False)
    full = {p for name, p in named if name in ignored or is_elsewhere(p)}
    reshard: bool | int | None = options.reshard_after_forward
    parts: list[nn.Module] = list(unit)
    target: Any = parts if len(parts) > 1 else parts[0]
    fully_shard(
        target,
        mesh=mesh,
        # None: torch leaves the outermost unit, which backward needs first, as it is.
        reshard_after_forward=None if unit == (root,) and reshard is True else reshard,
        mp_policy=MixedPrecisionPolicy(reduce_dtype=options.dtype, cast_forward_inputs=False),
        offload_policy=offload_policy(mesh.device_type, offload=options.offload),
        ignored_params=full,
    )


def offload_policy(device_type: str, *, offload: bool) -> OffloadPolicy:
    """That of torch; on a CPU the shards are where they are to be."""
    return CPUOffloadPolicy() if offload and device_type != "cpu" else OffloadPolicy()


def called_as_forward(module: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a method of a unit as FSDP2 calls its forward."""
    state = state_of(module)
    args, kwargs = torch_internals.STATE_BEFORE.of(state)(module, args, kwargs)
    return torch_internals.STATE_AFTER.of(state)(module, args, _without_views(call(*args, **kwargs)))


def _call_with_whole(
    call: Callable[..., torch.Tensor], parameters: Iterable[Any], shards: Mapping[int, Any], hidden: torch.Tensor
) -> torch.Tensor:
    """Call a function with gathered parameters in place of those that are shards."""
    return call(hidden, *(torch_internals.PARAM_WHOLE.get(shards[id(p)]) if id(p) in shards else p for p in parameters))


def _return_no_views(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook; nearly all units return one tensor that is none."""
    return None if type(output) is torch.Tensor and torch_internals.BASE.of(output) is None else _without_views(output)


def _without_views(output: Any) -> Any:
    """The same values, in tensors that are no views for autograd, and copies of parameters, which may be freed."""
    if all(torch_internals.BASE.of(t) is None and not isinstance(t, nn.Parameter) for t in tensors(output)):
        return output
    return map_tensors(_without_view, output)


def _without_view(tensor: torch.Tensor) -> torch.Tensor:
    base = torch_internals.BASE.of(tensor)
    if isinstance(tensor if base is None else base, nn.Parameter):
        return tensor.clone()
    is_view = base is not None and tensor.requires_grad and torch.is_grad_enabled()
    return _Same.apply(tensor) if is_view else tensor  # type: ignore[no-untyped-call]


class _Same(torch.autograd.Function):
    """The identity, in the form that torch.func takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(tensor: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del ctx
        return gradient
