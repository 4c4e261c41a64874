"""Shard a module over ranks with torch's FSDP2, and take the shards off again.

FSDP2 gathers the parameters of a unit before its forward and backward and frees them after; the
gradients of a unit are summed and cut up (reduce-scatter) when its backward ends. Parameters,
gradients and what an optimizer makes of them are DTensors.

[Note: gradients of a window] Inside of a window FSDP2 keeps whole gradients in its units; `.grad` shows them after
the reduced backward that ends the window, or, where the last micro-batch was skipped on all ranks, when the window
ends. A window that is left early leaves them there: nothing may be sent then, for other ranks may not have left it.
What happens to them is what would happen to gradients in `.grad`: `zero_grad` drops them, a step takes them, the next
window adds to them. As they are not in `.grad`, a made-up gradient of one parameter stands for them, the marker: if
it is gone, zero or another, the user's program has cleared or changed gradients.

[Note: torn passes] An exception in forward or backward leaves units gathered and half-way. FSDP2
is put back to the start of a pass: after forward at once, after backward when forward is called
next (nothing tells that backward was torn).
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
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
from weft.engines.peers import Peers
from weft.engines.torch.amp.graph_walk import Running, running_backward
from weft.engines.torch.fsdp.gather_order import GatherOrder, UnitGather, UnitReduce
from weft.engines.torch.fsdp.remove import replace_parameters, take_fsdp_off, whole_parameter
from weft.engines.torch.hooks.backward_session import BackwardSession, inside_backward
from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.engines.torch.hooks.parameter_reads import explain_read
from weft.engines.torch.hooks.parameter_watch import ParameterWatch
from weft.engines.torch.optim.full_param_step import check_steps_on_shards
from weft.engines.torch.optim.step_watch import Steps, settings_of
from weft.errors import ContractError, NotSynchronized, UnusedParameters, listed
from weft.tensors.dtensor import groups_of, local, reset_units
from weft.tensors.nested import map_tensors, tensors

__all__ = ["ShardedModule"]


class ShardedModule:
    """FSDP2 on one module, as later transforms see it.

    Attributes:
        enabled: Whether the next backward pass communicates.
        mean_over: Number of ranks the gradients are averaged over.
    """

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, options: ShardOptions, peers: Peers
    ) -> None:
        self.enabled = True
        self.mean_over = mesh.size()
        self._what = options.strategy
        self._module = weakref.ref(module)
        self._class_name = type(module).__name__
        self._group: dist.ProcessGroup | None = group
        self._peers = peers
        self._device_type = mesh.device_type
        self._dtype = options.dtype
        self._unused_is_zero = options.unused == "zero"
        self._removable = Removable()
        self._due = False  # the window owes a reduction
        self._reductions = 0
        self._place = 0  # of the last one among those of all modules
        self._pending = False  # the units hold gradients
        self._marker: _Marker | None = None
        self._missing: set[str] = set()  # no gradient when a unit was reduced in this backward pass
        self._used: set[str] = set()
        self._had_gradient: set[str] = set()
        self._only_inputs = False  # the backward pass that runs is for gradients of inputs
        self._is_alone = False  # other ranks do not call the module now
        self._retains_graph = False  # another one may follow through the same graph
        self._calls: list[Any] = []  # of the module: where the order goes back to after an evaluation, or None
        self._session = BackwardSession(self._begin, self._end, rounds=1)
        for unit in (*options.units, (module,)):
            _shard_unit(unit, module, mesh, options, self._removable)
        self._units = [weakref.ref(part) for part in module.modules() if isinstance(part, FSDPModule)]
        around, methods = self._around, options.methods
        attach(
            module,
            self._removable,
            before=self._before,
            after=self._after,
            around=around,
            methods=methods,
            first=True,
            always=True,
        )
        for part in _with_parameters(module):
            vars(part).update(dict.fromkeys(_COPYING, _NoCopy(self._what, type(part).__name__.removeprefix("FSDP"))))
        self._ignored = frozenset(options.ignored)
        self._entrances = Removable()
        self._take_whole(module)
        self._buffers = options.buffers == "broadcast" and any(True for _ in module.buffers())
        self._buffers_due = False
        self._order = self._watch_order(module, group)
        self._parameter_watch = ParameterWatch(self._what, module, stands_in=self._stands_in)
        self._steps = Steps(self._what, self, group, peers)
        self._on_meta = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        self._first: nn.Parameter | None = None  # a trained one, whose version tells of steps
        self._seen = (0, 0)  # number of steps and that version

    def _watch_order(self, module: nn.Module, group: dist.ProcessGroup) -> GatherOrder:
        """Let each unit say what it gathers and reduces."""
        names = {id(part): name for name, part in module.named_modules()}
        groups = list(self._parameter_groups())
        named = [", ".join(names[id(part)] for part in one.modules) for one in groups]
        order = GatherOrder(self._what, named, group, self._peers, self._device_type)
        parameters = {id(p): name for name, p in module.named_parameters()}
        for number, one in enumerate(groups):
            for held in one.fsdp_params:  # FSDP2 itself names them in the first forward pass
                held._param_fqn = parameters[id(held.sharded_param)]
            one._all_gather_comm, one._reduce_scatter_comm = UnitGather(order, number), UnitReduce(order, number)
            # Unused parameters count as zero, so that all ranks reduce the same; and are noted.
            fills = not hasattr(one, "reduce_scatter_unused_params")  # torch before 2.13
            if not fills:
                one.reduce_scatter_unused_params = True
            one.post_backward = _noting(weakref.ref(self), weakref.ref(one), fills=fills)
        return order

    def _take_whole(self, module: nn.Module) -> None:
        """Average the gradients of the parameters that are not sharded and are trained now."""
        self._entrances.remove()
        self._whole = {n: p for n, p in module.named_parameters() if n in self._ignored and p.requires_grad}
        for p in self._whole.values():
            entrance = _entrance(self._session.flag, weakref.ref(self))
            self._entrances.add(p.register_post_accumulate_grad_hook(entrance).remove)

    def _stands_in(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is one that FSDP2 has put into the module."""
        return isinstance(parameter, DTensor) or any(
            getattr(one, "_unsharded_param", None) is parameter
            for g in self._parameter_groups()
            for one in g.fsdp_params
        )

    # -- what others may ask ---------------------------------------------------------------------

    def begin_window(self) -> None:
        """Backward passes keep their gradients in the units from now on."""
        self._settle_marker()
        self._due = True
        self._synchronize(enabled=False)

    def last_backward(self) -> None:
        """The next backward pass reduces the gradients of the window."""
        self._synchronize(enabled=True)

    @property
    def owes(self) -> bool:
        """Whether no backward pass has reduced the gradients of the running window."""
        return self._due and self._group is not None

    def end_window(self, *, left: bool = False) -> None:
        """Reduce what the window still owes; if it was left early, see [Note: gradients of a window].

        Collectives: if no backward pass of the window has communicated, a meeting, and the reduce-scatters of a
        backward pass if a rank has gradients.
        """
        self._synchronize(enabled=True)
        owes, self._due = self.owes, False
        if left and self._pending:
            self._marker = _Marker(next(iter(self._trained().values())))
        elif owes and not left:
            self._reduce_now("the end of a window whose last micro-batch was skipped")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep the units whole, which are whole now, through calls of the module by this rank alone."""
        module: Any = self._module()
        module._get_fsdp_state()._lazy_init()  # decides about the outermost unit, once
        groups = list(self._parameter_groups())
        before = [(one.post_forward_mesh_info, list(one._post_forward_indices)) for one in groups]
        order: list[Any] = groups[0].comm_ctx.post_forward_order
        length = len(order)
        self._is_alone = True
        for one in groups:
            one.post_forward_mesh_info = None  # not to be freed after forward
        try:
            yield
        finally:
            self._is_alone = False
            del order[length:]  # by which backward gathers ahead
            for one, (info, indices) in zip(groups, before, strict=True):
                one.post_forward_mesh_info, one._post_forward_indices[:] = info, indices

    def release(self) -> None:
        """Let the process group go."""
        self._steps.release()
        self._order.release()
        self._group = None

    def undo(self) -> None:
        """Make the parameters whole again and take FSDP2 off. Collectives: one all-gather per parameter."""
        module = self._module()
        if module is None:
            return
        for unit in self._live_units():
            unit.reshard()
        self._removable.remove()
        self._entrances.remove()
        cut = [p for p in module.parameters() if isinstance(p, DTensor)]
        replace_parameters(module, {p: whole_parameter(p) for p in cut})
        for part in module.modules():
            take_fsdp_off(part)
            for name in _COPYING:
                vars(part).pop(name, None)
        self.release()

    # -- windows ---------------------------------------------------------------------------------

    def _synchronize(self, *, enabled: bool) -> None:
        if enabled != self.enabled:
            self.enabled = enabled
            for unit in self._live_units():
                unit.set_requires_gradient_sync(enabled, recurse=False)

    def _settle_marker(self) -> bool:
        """Do to what the units hold what was done to the marker; are gradients pending after that?

        Collectives: if there is a marker, a meeting: the rows of its parameter may lie on other ranks.
        """
        marker, self._marker = self._marker, None
        if marker is not None:
            states = set(self._peers.meet("gradients of a window that was left early", marker.state()))
            if "changed" in states:
                _raise_changed(self._what, self._class_name)
            if "cleared" in states:
                self._drop_held()
            elif marker.is_ours:
                marker.parameter.grad = None
        return self._pending

    def _reduce_now(self, what: str) -> None:
        """Reduce what the units hold, as the end of a backward pass does."""
        self._look_for_optimizers()  # no rank may have called the module yet
        if any(self._peers.meet(what, self._pending)):
            module: Any = self._module()
            state = module._get_fsdp_state()

            def end() -> None:
                self._session.enter()
                state._register_root_post_backward_final_callback()

            inside_backward(end)

    # -- around the calls of the module ----------------------------------------------------------

    def _before(self, *unused: Any) -> None:
        """The module is about to be called; see [Note: torn passes]."""
        if torch._C._current_graph_task_id() != -1:
            return  # computed again, inside of backward
        module: Any = self._module()
        if self._is_alone:
            _check_without_gradients(self._what, self._class_name)
            return
        if self._on_meta:
            self._take_loaded(module)
        torn = self._session.was_torn()
        if torn or module._get_fsdp_state()._state_ctx.post_backward_final_callback_queued:
            self._start_anew(module)
            self._drop_held()
        if self._buffers_due:
            self._broadcast_buffers(module)
        if torch.is_grad_enabled() and self._group is not None and not self._calls:
            self._look(module)
        self._calls.append(self._order.begin_forward())

    def _after(self, module: Any, args: Any, output: Any) -> None:
        """The module was called, or its call raised."""
        if torch._C._current_graph_task_id() != -1 or self._is_alone:
            return
        place = self._calls.pop() if self._calls else None
        if module._get_fsdp_state()._training_state.name == "FORWARD":
            explain_read(self._what, module, sys.exception())
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
            self._order.end_forward(place)

    def _take_loaded(self, module: nn.Module) -> None:
        """Go on with what `load_weights` has put in the place of tensors on meta."""
        kinds = (module.named_parameters(), module.named_buffers())
        empty = [name for kind in kinds for name, tensor in kind if tensor.is_meta]
        if empty:
            raise ContractError(
                f"{self._what}: {self._class_name} is called before its weights were loaded",
                found=f"{listed(empty)} on meta",
                expected='weights="later", then load_weights, then the first call',
                fix="weft.load_weights(model, path, ctx)",
            )
        self._parameter_watch.look(module)
        self._take_whole(module)
        self._on_meta = False

    def _look(self, module: nn.Module) -> None:
        """Notice parameters that were added, frozen or unfrozen since the last call, and new optimizers.

        Collectives: if others are trained now, a meeting: ranks that reduce other ones would send other sizes.
        """
        self._parameter_watch.check_same(module)
        if self._parameter_watch.changed_flags():
            self._parameter_watch.look(module)
            self._peers.agree("trained parameters", {"trained": list(self._parameter_watch.trained)})
            self._take_whole(module)
        self._look_for_optimizers()

    def _look_for_optimizers(self) -> None:
        seen = (self._steps.number, -1 if self._first is None else self._first._version)
        if self._first is None or (seen[0] == self._seen[0] and seen[1] != self._seen[1]):
            trained = self._trained()
            self._steps.search(trained.values(), again=self._first is not None)
            self._first = next(iter(trained.values()), None)
            seen = (seen[0], -1 if self._first is None else self._first._version)
        self._seen = seen

    def _around(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A listed method is called: the same as around forward."""
        module: Any = self._module()
        state = module._get_fsdp_state()
        self._before()
        output = None
        try:
            args, kwargs = state._pre_forward(module, args, kwargs)
            output = state._post_forward(module, args, without_views(call(*args, **kwargs)))
        finally:
            self._after(module, args, output)
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
        self._pending = False
        for group in self._parameter_groups():
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                whole = getattr(parameter, "_unsharded_param", None)
                if whole is not None:
                    whole.grad = None

    def _start_anew(self, module: Any) -> None:
        self._order.tear()
        if hasattr(module, "reset_iter_state"):  # torch 2.13
            module.reset_iter_state()
        else:
            reset_units(module)

    # -- one backward pass -----------------------------------------------------------------------

    def _begin(self) -> None:
        self._missing.clear()
        self._used.clear()
        running = running_backward()
        self._retains_graph = running.retains_graph
        self._only_inputs = bool(running.returned)
        self._check_supported(running)
        if self._only_inputs and self.enabled:  # no parameter gets a gradient that could be reduced
            for unit in self._live_units():
                unit.set_requires_gradient_sync(False, recurse=False)
        if self._unused_is_zero:
            self._had_gradient = {name for name, p in self._trained().items() if p.grad is not None}

    def _check_supported(self, running: Running) -> None:
        """Raise for what FSDP2 cannot do, before it does half of it."""
        own = set(map(id, self._whole.values()))
        for group in self._parameter_groups() if running.returned else ():
            for one in group.fsdp_params:
                own |= {id(one.sharded_param), id(getattr(one, "_unsharded_param", None))}
        if running.creates_graph or any(id(tensor) in own for tensor in running.returned):
            asked = "a backward pass with create_graph=True" if running.creates_graph else "torch.autograd.grad"
            raise ContractError(
                f"{self._what}: {asked} through {self._class_name}, whose parameters are sharded",
                found="a gradient penalty, or gradients of gradients"
                if running.creates_graph
                else "gradients of parameters that are returned instead of added to `.grad`",
                expected="loss.backward(): FSDP2, also without weft, frees parameters after their backward, and "
                "reduces `.grad` only",
                fix="model, ctx = weft.replicate(model, ctx)  # instead of sharding",
            )

    def _end(self) -> None:
        if self._only_inputs:
            self._only_inputs = False
            for unit in self._live_units() if self.enabled else ():
                unit.set_requires_gradient_sync(True, recurse=False)
            return
        unused = self._missing - self._used
        if not self.enabled or self._group is None:
            self._pending = not self.enabled
            return
        self._order.end()
        self._reductions += 1
        self._place = self._peers.next_reduction()
        self._due = self._pending = False
        unused.update(self._average_whole(self._group))
        if self._unused_is_zero:
            self._forget_unused(unused, self._group)
        module = self._module()
        if self._buffers and module is not None:
            self._buffers_due = True
            if not self._retains_graph:  # else another backward pass reads them as they are
                self._broadcast_buffers(module)
        if unused and not self._unused_is_zero:
            self._raise_unused(sorted(unused))

    def _broadcast_buffers(self, module: nn.Module) -> None:
        self._buffers_due = False
        if self._group is not None:
            dist._broadcast_coalesced(self._group, [b.detach() for b in module.buffers()], 250 * 2**20, 0)

    # -- one step --------------------------------------------------------------------------------

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer cannot step on shards, or would come to other numbers."""
        check_steps_on_shards(self._what, optimizer)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce what is pending, so that a step never leaves gradients out."""
        module = self._module()
        if module is None or torch._C._current_graph_task_id() != -1:
            return  # inside of backward FSDP2 calls hooks with gradients that it has reduced
        if self._buffers_due:
            self._broadcast_buffers(module)
        if self._pending and not self.enabled:
            _raise_in_window(self._what, self._class_name)
        if self._pending and self._settle_marker():
            self._reduce_now("a step after a window that was left early")

    def settings(self) -> Mapping[str, object]:
        """What of the module has to be equal on all ranks and may change."""
        module = self._module()
        # A rank that skipped a backward pass would otherwise meet the next one of the others with its own. So would
        # two modules that are reduced in another order.
        facts = {"gradients averaged so far": self._reductions, "of all modules": self._place}
        return facts if module is None else {**facts, **settings_of(module)}

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
        for p in self._whole.values():
            if not p.numel():
                p.grad = None  # torch's clip_grad_norm_ would refuse a plain one among DTensors
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
        error = UnusedParameters(
            f"{self._what}: {len(names)} parameter(s) of {self._class_name} got no gradient in this backward pass",
            found=listed(names),
            expected="every parameter that requires a gradient takes part in the loss, on every rank",
            fix=f'weft.{self._what}(..., unused="zero"), or requires_grad_(False) on them',
        )
        self._peers.report(error)
        raise error


_COPYING = ("__deepcopy__", "__reduce_ex__")  # looked up on the instance, before its class


class _NoCopy:
    """What copying and pickling of a sharded module come to."""

    def __init__(self, what: str, class_name: str) -> None:
        self._what = what
        self._class_name = class_name

    def __call__(self, *unused: Any) -> NoReturn:
        raise ContractError(
            f"{self._what}: a sharded {self._class_name} can be neither copied nor pickled",
            found="copy.deepcopy, pickle or torch.save of the module itself",
            expected="weft.save or weft.export for files, weft.average_weights for averages; or a plain module",
            fix="model, ctx = weft.undo(model, ctx)  # before it is copied",
        )


def _with_parameters(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if any(True for _ in part.parameters()))


class _Marker:
    """A gradient that stands for those in the units; see [Note: gradients of a window].

    Attributes:
        parameter: Whose.
        is_ours: There was none before.
    """

    # Large, so that clipping changes it, and of a square that float32 has.
    _VALUE = 2.0**50

    def __init__(self, parameter: nn.Parameter) -> None:
        self.parameter = parameter
        self.is_ours = parameter.grad is None
        if parameter.grad is None:
            parameter.grad = torch.full_like(parameter, self._VALUE)
        self._gradient = parameter.grad
        self._values = local(self._gradient).clone()

    def state(self) -> str:
        """Whether it is "kept", "cleared" or "changed", as far as this rank can see."""
        if self.parameter.grad is not self._gradient:
            return "cleared"
        now = local(self._gradient)
        if torch.equal(now, self._values):  # the state of an empty part is what the others see
            return "kept"
        return "changed" if bool(now.any()) else "cleared"


def _check_without_gradients(what: str, class_name: str) -> None:
    if torch.is_grad_enabled():
        raise ContractError(
            f"{what}: {class_name} is called with gradients while its parameters are gathered for one rank alone",
            found="a call inside of weft.full_params(..., forward=True)",
            expected="calls without gradients: backward needs all ranks",
            fix="with weft.full_params(model, ctx, forward=True), torch.no_grad(): ...",
        )


def _raise_in_window(what: str, class_name: str) -> NoReturn:
    raise NotSynchronized(
        f"{what}: a step before the gradients of {class_name} were reduced",
        found="an optimizer step in the middle of a window",
        expected="one optimizer step after the last micro-batch of a window",
        fix="for batch in window: ...; then optimizer.step(), after the inner loop",
    )


def _raise_changed(what: str, class_name: str) -> NoReturn:
    raise NotSynchronized(
        f"{what}: gradients of {class_name} were changed (clipped?) before they were reduced",
        found="a window that was left early, by `break` or an exception, and then clip_grad_norm_ or the like",
        expected="gradients are changed after they were reduced",
        fix="for _ in window: pass  # after the break: ends the window, and reduces its gradients",
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
    name: str = parameter._param_fqn
    return name


def _entrance(flag: bytearray, owner: weakref.ref[ShardedModule]) -> Callable[[torch.Tensor], None]:
    """A hook on a tensor; it must not hold the owner, which may hold the tensor, in C++."""

    def enter(_: torch.Tensor) -> None:
        if not flag[0]:
            alive = owner()
            if alive is not None:
                alive.enter()

    return enter


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
        # Before FSDP2's own hook, which an in-place operation on a view would lose.
        attach(part, removable, after=lambda *call: without_views(call[-1]))
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
