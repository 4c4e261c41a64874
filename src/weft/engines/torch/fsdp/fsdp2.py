"""Shard a module over ranks with torch's FSDP2, and take the shards off again.

FSDP2 gathers the parameters of a unit before its forward and backward and frees them after; the
gradients of a unit are summed and cut up (reduce-scatter) when its backward ends. Parameters,
gradients and what an optimizer makes of them are DTensors.

[Note: torn passes] An exception in forward or backward leaves units gathered and half-way. FSDP2
is put back to the start of a pass: after forward at once, after backward when forward is called
next (nothing tells that backward was torn).
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from weft import torch_internals
from weft.engines.options import Reduction, ShardOptions
from weft.engines.torch.fsdp.gather_order import watch_order
from weft.engines.torch.fsdp.own_parameters import OwnParameters
from weft.engines.torch.fsdp.pending_gradients import PendingGradients
from weft.engines.torch.fsdp.refusals import (
    allow_copies,
    check_reduces,
    check_without_gradients,
    refuse_calls_of_parts,
    refuse_copies,
)
from weft.engines.torch.fsdp.remove import remove_fsdp
from weft.engines.torch.fsdp.trained import TrainedShards
from weft.engines.torch.fsdp.units import Units, called_as_forward
from weft.engines.torch.fsdp.unused import Unused, watch_reductions
from weft.engines.torch.hooks.backward_session import BackwardSession, inside_backward, when_entered
from weft.engines.torch.hooks.graph_walk import running_backward
from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.engines.torch.hooks.parameter_reads import explain_read
from weft.engines.torch.parallel.experts.local_losses import refuse_local_losses
from weft.engines.torch.parts.dtensor_reads import ReadChecks
from weft.engines.torch.parts.linear_loss import HeadReads
from weft.engines.torch.reducing.separate_reduction import SeparateReduction
from weft.engines.torch.reducing.strategy import Strategy
from weft.peers.ledger import Ledger
from weft.tensors.dtensor import spec_of, state_of


class ShardedModule(Strategy):
    """FSDP2 on one module, as later transforms see it."""

    def __init__(
        self, module: nn.Module, mesh: DeviceMesh, group: dist.ProcessGroup, options: ShardOptions, peers: Ledger
    ) -> None:
        super().__init__(module, group, options, peers)
        self._only_inputs = False  # the backward pass that runs is for gradients of inputs
        self._retains_graph = False  # another one may follow through the same graph
        self._calls: list[Any] = []  # of the module: where the order goes back to after an evaluation, or None
        self._session = BackwardSession(self._begin, self._end, rounds=1)
        self._entrance = self._session.entrance(self.enter)
        self._units = Units(module, mesh, options, self._removable)
        hooks: dict[str, Any] = {"before": self._before, "after": self._after, "around": self._around}
        attach(module, self._removable, **hooks, methods=options.methods, first=True, always=True)
        heads = HeadReads(gathering=weakref.WeakMethod(self._units.call_gathered))
        self._removable.add(ReadChecks(heads).release)
        refuse_copies(self._what, module, self._removable)
        refuse_local_losses(self._what, module, self._removable)
        self._refused = Removable()  # of parts, until the module is called
        self._removable.add(self._refused.remove)
        self._held = PendingGradients(self._what, self._class_name, self._units, peers)
        how = {name: options.apart.get(name, Reduction(group, self.mean_over)) for name in options.ignored}
        apart = SeparateReduction(how, options.dtype)
        self._trained = TrainedShards(self._what, module, self._units, apart, lambda: self._entrance)
        self._unused = Unused(mesh.device_type, self._trained.watch)
        refuse_calls_of_parts(self._what, module, self._units.ids, options.methods, self._refused)
        self._order = watch_order(self._what, module, list(self._units.groups()), group, peers, mesh.device_type)
        watch_reductions(self._units.groups(), self._unused, self._entrance)
        self._own = OwnParameters(self._what, module, self._units, self._removable)

    @override
    def same_weights(self) -> tuple[Ledger, Iterable[nn.Parameter]] | None:
        """The shards, and the ranks that hold the same ones."""
        others = self._peers.copies
        if others is None or not (self.compares_weights and self._units.are_copied):
            return None
        return others, self._trained.named().values()

    @override
    def same_gradients(self) -> Iterable[nn.Parameter]:
        """The shards."""
        return (one.sharded_param for one in self._units.parameters())

    # -- what others may ask ---------------------------------------------------------------------

    @override
    def begin_window(self) -> None:
        """Backward passes keep their gradients in the units from now on."""
        self._held.settle()
        super().begin_window()

    def begin_scattered_window(self) -> None:
        """Backward passes scatter their gradients; the units add them up until the replicas do.

        Without replicas nothing is left to be done later: every backward pass reduces.
        """
        if self._units.are_copied:
            self.begin_window()
            self._units.scatter_only()

    def end_window(self, *, left: bool = False) -> None:
        """Reduce what the window still owes; if it was left early, see [Note: gradients of a window].

        Collectives: if no backward pass of the window has communicated, a meeting, and the reduce-scatters of a
        backward pass if a rank has gradients.
        """
        owes = self._close_window()
        if left and self._held.pending:
            self._held.leave(next(iter(self._trained.named().values())))
        elif owes and not left:
            self._reduce_now("the end of a window whose last micro-batch was skipped")

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Keep the units full, which are full now, through calls of the module by this rank alone."""
        return self._units.kept_full(self._module())

    @override
    def release(self) -> None:
        """Let the process group go."""
        super().release()
        self._order.release()

    @override
    def undo(self) -> None:
        """Make the parameters what they were, and take FSDP2 off. Collectives: one all-gather per parameter."""
        module = self._module()
        if module is None:
            return
        self._units.reshard()
        self._trained.unsharded.release()
        self._removable.remove()
        remove_fsdp(module, {torch_internals.PARAM_NAME.of(one): spec_of(one) for one in self._units.parameters()})
        allow_copies(module)
        self.release()

    # -- around the calls of the module ----------------------------------------------------------

    @override
    def _before(self, module: Any = None, args: Any = (), kwargs: Any = None) -> None:
        """The module is about to be called; see [Note: torn passes]."""
        if torch_internals.graph_task_id() != -1:
            return  # computed again, inside backward
        module = self._module()
        if self._units.alone:
            check_without_gradients(self._what, self._class_name)
            self._own.check(module)
            return
        if self._trained.on_meta:
            self._trained.take_loaded(self._class_name, module)
        else:
            self._own.check(module)
        self._refused.remove()
        shared = torch_internals.STATE_SHARED.of(state_of(module))
        if self._session.was_torn() or shared.post_backward_final_callback_queued:
            self._order.note_broken_pass()
            self._units.start_anew(module)
            self._held.drop()
        super()._before(module, args, kwargs)
        if torch.is_grad_enabled() and self._group is not None and not self._calls:
            self._units.free_left()  # before the look: what is left may have been frozen or unfrozen
            self._trained.look(module, self._peers)
            self._look_for_optimizers()
        if not self._calls:
            self._units.begin_call(module)
        self._calls.append(self._order.begin_forward())

    def _after(self, module: Any, args: Any, output: Any) -> None:
        """The module was called, or its call raised."""
        if torch_internals.graph_task_id() != -1 or self._units.alone:
            return
        if not self._calls:
            return  # it was refused before it began
        place = self._calls.pop()
        if not self._calls:
            self._units.end_call(module)
        if torch_internals.STATE_TRAINING.of(state_of(module)) == torch_internals.IN_FORWARD.found:
            explain_read(self._what, module, sys.exception())
            self._order.note_broken_pass()
            self._units.start_anew(module)
        elif torch.is_grad_enabled():
            when_entered(output, self._entrance)
            self._buffers.watch(output)
        else:
            # No backward will free what was gathered, and `parameters()` shall be what is trained.
            if not self._calls:
                self._units.reshard()
            self._order.end_forward(place)

    def _around(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A listed method is called: the same as around forward."""
        if self._calls:
            return call(*args, **kwargs)  # by forward, or by another one
        self._before(None, args, kwargs)
        output = None
        try:
            output = called_as_forward(self._module(), call, args, kwargs)
        finally:
            self._after(self._module(), args, output)
        return output

    @override
    def _synchronize(self, *, enabled: bool) -> None:
        if enabled != self.enabled:
            self.enabled = enabled
            self._units.synchronize(enabled=enabled)

    @torch_internals.untraced
    def _look_for_optimizers(self) -> None:
        self._steps.look(self._trained.first(), lambda: self._trained.named().values())

    # -- one backward pass -----------------------------------------------------------------------

    def enter(self) -> None:
        """The first gradient of a backward pass is here."""
        self._session.enter()

    def _begin(self) -> None:
        running = running_backward()
        self._units.check_left()
        self._first_steps.begin_backward(self._trained.first())
        self._retains_graph, self._only_inputs = running.retains_graph, bool(running.returned)
        check_reduces(self._what, self._class_name, running, self._trained.ids() if running.returned else ())
        if self._only_inputs and self.enabled:  # no parameter gets a gradient that could be reduced
            self._units.synchronize(enabled=False)
        if self.enabled and not self._only_inputs:
            self._held.settle()  # a window that was left early, and no new one
        if not self._held.pending:
            self._unused.begin(self._trained.named() if self.finds_unused else None)

    def _end(self) -> None:
        if self._only_inputs or not self.enabled or self._group is None:
            self._pass_on_buffers(lambda: self._retains_graph, reduced=False)
            if not self._only_inputs:
                self._held.pending = not self.enabled
            elif self.enabled:
                self._units.synchronize(enabled=True)
            self._only_inputs = False
            return
        self._order.check_called(self._unused.reduced)
        self._order.end()
        self._note_reduction()
        self._held.pending = False
        unused = self._unused.names().union(self._trained.unsharded.average())
        if self.finds_unused:
            self._unused.forget(unused, self._trained.named(), self._trained.every, self._group)
        self._pass_on_buffers(lambda: self._retains_graph)
        if unused and not self.finds_unused:
            self._raise_unused(sorted(unused))

    def _reduce_now(self, what: str) -> None:
        """Reduce what the units hold, as the end of a backward pass does."""
        self._look_for_optimizers()  # no rank may have called the module yet
        if any(self._peers.meet(what, self._held.pending)):
            module: Any = self._module()
            finish = torch_internals.STATE_LAST.of(state_of(module))

            def end() -> None:
                self._session.enter()
                finish()

            inside_backward(end)

    # -- one step --------------------------------------------------------------------------------

    @override
    def reduced_in_backward(self) -> list[torch.Tensor]:
        """The sharded parameters; none if those that no rank used get their gradient taken away when backward ends."""
        return [] if self.finds_unused else [one.sharded_param for one in self._units.parameters()]

    @override
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce what is pending, so that a step never leaves gradients out."""
        if self._module() is None or torch_internals.graph_task_id() != -1:
            return  # inside backward FSDP2 calls hooks with gradients that it has reduced
        self._units.free_left()  # it would not be what is trained
        if self._held.pending and not self.enabled:
            self._raise_in_window()
        if self._held.pending and self._held.settle():
            self._reduce_now("a step after a window that was left early")
