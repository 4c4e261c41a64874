"""Average gradients over ranks during backward, without a wrapper around the module.

Communication starts when the first gradient of a backward pass reaches a parameter ([Note:
backward session]), not when forward runs as in DDP. So whether a backward pass communicates is
decided when it happens, and a module may be called several times before one backward, or have
several backwards follow.

[Note: guard] The one thing done per parameter is a hook that sees the first gradient. It also sees
a gradient that comes although forward or a listed method was never called: precision and other
things that are attached to these calls were left out then, and that is an error.

[Note: what is due] A window owes one reduction on every rank, in the backward of its last micro-batch or, where
that was skipped, when the window ends. So a rank that skips always meets the others, and those that had no gradient
in the window contribute zeros. Whether any rank had one cannot be told from zeros: ranks without one add
themselves to a number in the store before they reduce, and read after it whether all of them did.

[Note: pending gradients] A window that is left early leaves gradients that are not reduced in `.grad`. Nothing may be
sent then, for other ranks may not have left it. They are reduced with those of the next window, or by the next
step; if they were changed in between (clipped, say), the step raises unless they are equal on all ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from weft import torch_internals
from weft.engines.options import ReduceOptions
from weft.engines.torch.hooks.backward_session import BackwardSession
from weft.engines.torch.hooks.bypassed_forward import raise_bypassed_forward
from weft.engines.torch.hooks.function_transforms import in_torch_func
from weft.engines.torch.hooks.graph_walk import running_backward
from weft.engines.torch.hooks.method_hooks import attach
from weft.engines.torch.parallel.experts.local_losses import refuse_local_losses
from weft.engines.torch.probes.gradient_hooks import GradientHooks
from weft.engines.torch.reducing.flat_buffer import fit_one_message
from weft.engines.torch.reducing.separate_reduction import SeparateReduction
from weft.engines.torch.reducing.strategy import Strategy
from weft.engines.torch.reducing.trained import TrainedParameters, check_hooks
from weft.engines.torch.reducing.transport import Transport
from weft.engines.torch.reducing.zero_gradients import bring_zeros, zeros_for
from weft.errors import ContractError, NotSynchronized
from weft.peers.ledger import Ledger


class GradientReducer(Strategy):
    """Keeps the gradients of a module equal on all ranks of a group.

    Attributes:
        transport: How gradients travel.
        chosen: What of it the options did not say.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, options: ReduceOptions, peers: Ledger) -> None:
        super().__init__(module, group, options, peers)
        self._options = options = replace(options, at_end=options.flat or fit_one_message(module, options))
        self.transport = Transport(module, group, options)
        self.chosen = "small gradients travel as one message" if options.at_end and not options.flat else ""
        self._called_at = -1  # version of the first parameter
        self._stepped_at: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        # Buckets finish in a callback of their own, which has to be over before ours.
        self._session = BackwardSession(self._begin, self._end, rounds=0 if options.at_end else 1)
        self._trained = TrainedParameters(self._what, module, options)
        self._apart = SeparateReduction(options.apart, options.dtype)
        self._gradient_hooks = GradientHooks(self._what, self._class_name)
        for end in (self.transport.undo, self._apart.release, self._trained.release, self._gradient_hooks.release):
            self._removable.add(end)
        self._take_parameters(module)
        self._steps.search(self._trained.parameters)
        calls: Any = {"before": self._before, "after": self._watch, "around": self._around}
        attach(module, self._removable, **calls, methods=options.methods)
        refuse_local_losses(self._what, module, self._removable)

    # -- what others may ask ---------------------------------------------------------------------

    def end_window(self, *, left: bool = False) -> None:
        """Reduce what the window still owes; if it was left early, see [Note: pending gradients].

        Collectives: those of one backward pass, if none of the window has communicated.
        """
        owes = self._close_window()
        if left:
            self._trained.note_left()
        elif owes:
            self._reduce_now()

    @property
    @override
    def owes(self) -> bool:
        """Whether no backward pass has reduced the gradients of the running window."""
        return super().owes and bool(self._trained.parameters)

    def sum_order(self) -> dict[str, Any] | None:
        """See `KeepsOrder`."""
        return self.transport.sum_order()

    def resume_order(self, orders: Sequence[Any]) -> None:
        """See `KeepsOrder`."""
        self.transport.resume_order(orders)

    @override
    def release(self) -> None:
        """Let the process group go; backward raises from now on."""
        super().release()
        self.transport.release()

    # -- forward ---------------------------------------------------------------------------------

    def _around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._before(None, args, kwargs)
        return self._watch(None, args, call(*args, **kwargs))

    def _watch(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        """Note that forward or a listed method was called."""
        trained = self._trained
        if self._session.flag[0] and self._session.was_torn():
            trained.forget()
            self.transport.start_anew()
        if trained.were_stepped():
            self._raise_in_window()
        with_gradients = torch.is_grad_enabled()
        if with_gradients and self._group is not None:
            self._look()
        if not trained.watch.trained:
            return output
        if self.finds_unused and all(p.grad is None for p in trained.parameters):
            trained.forget()  # zero_grad: what a window that was left early used is gone
        if with_gradients:
            self._called_at = torch_internals.VERSION.of(trained.parameters[0])
            self.transport.prepare()
            self._buffers.watch(output)
        finds_unused = self.finds_unused and not in_torch_func()
        return self.transport.expect(output, enabled=self.enabled) if finds_unused else output

    @torch_internals.untraced
    def _look(self) -> None:
        """Notice what is other than in the last forward pass: parameters, which of them are trained, optimizers.

        Collectives: if others are trained now, a meeting, and one reduction if gradients are pending.
        """
        module, trained = self._module(), self._trained
        if module is not None and not in_torch_func():  # which may be given other parameters, and adds nothing up
            pending = trained.agreed_anew(module, self._peers)
            if any(pending):
                self._reduce_now()
            if pending:
                self._take_parameters(module)
        self._gradient_hooks.watch(trained.by_name)
        self._first_steps.check_kept(trained.checked(self._what, self._class_name))
        if trained.parameters and self._steps.look(trained.parameters[0], lambda: trained.parameters):
            check_hooks(self._what, self._class_name, trained.by_name.items(), own=1)
            if self._steps.changed and self.enabled and not (self._reductions or trained.pending):
                self._first_steps.compare_changed(trained.same_on_all())

    def _take_parameters(self, module: nn.Module) -> None:
        """Average the gradients of the parameters that are trained now."""
        named = self._trained.watch.trained
        self.transport.take(module, {name: p for name, p in named.items() if name not in self._apart.how})
        self._trained.take(named, self._session.flag, weakref.WeakMethod(self.arrive))
        self._apart.take(named)

    # -- backward --------------------------------------------------------------------------------

    def arrive(self, index: int) -> None:
        """The first gradient of a backward pass has reached parameter `index`."""
        trained = self._trained
        # Steps change the version: a call before the last step is no excuse for this backward.
        if self._called_at != torch_internals.VERSION.of(trained.parameters[0]):
            name = list(trained.by_name)[index]
            raise_bypassed_forward(self._what, name, self._module(), self._class_name, self._options.methods)
        if torch.is_grad_enabled():
            raise ContractError(
                f"{self._what}: a backward pass with create_graph=True through {self._class_name}",
                found="gradients in `.grad` that may be differentiated again",
                expected="loss.backward(): `.grad` is averaged over the ranks in place, which autograd does not see",
                fix="torch.autograd.grad(..., create_graph=True), for a penalty; of parameters, it takes the mean "
                'first:\n            gradient = weft.reduce(gradient, ctx, "mean", grad=True)',
            )
        self._first_steps.begin_backward(trained.first() if index else None)
        self._session.enter()

    def _begin(self) -> None:
        if self.enabled:
            self.transport.begin()

    def _end(self) -> None:
        trained, transport = self._trained, self.transport
        transport.forget_outputs()  # a later backward that communicates has its own
        if not self.enabled:
            if not self.finds_unused:
                trained.forget()  # else a parameter used so far is used in the window
            trained.note_pending()
            self._first_steps.note_kept(trained.first())
            self._pass_on_buffers(lambda: running_backward().retains_graph, reduced=False)
            self._gradient_hooks.check()
            return
        missing = [] if self.finds_unused else trained.missing()
        lacking = [p for name, p in trained.together().items() if name in missing] if missing else []
        # Before it is reduced: what other ranks bring is no gradient of an earlier pass. After a step, what is left of
        # that is no part of the next one.
        follows = bool(lacking) and self._reductions not in self._stepped_at.values()
        follows = follows and all(p.grad is not None and bool(p.grad.any()) for p in lacking)
        if lacking and not self._options.at_end:
            # The others wait for the buckets of these parameters, and shall not find out by waiting.
            bring_zeros(lacking, self._session.flag)
        transport.end(trained.got)
        if self._apart.named:
            self._apart.average(forget_unused=self.finds_unused)
        trained.drop_frozen()
        self._note_reduction()
        trained.note_reduced()
        if self._reductions == 1:
            self._first_steps.note_reduced(trained.same_on_all())
        self._pass_on_buffers(lambda: running_backward().retains_graph)
        if missing:
            self._raise_unused(missing, follows=follows)
        self._gradient_hooks.check()

    # -- reduction outside a backward pass of the user's --------------------------------------

    def _reduce_now(self) -> None:
        """Reduce what is in `.grad` by the messages of a backward pass; see [Note: what is due]."""
        self._look()  # as in the forward passes that other ranks may make meanwhile, or this one has not made yet
        trained, transport = self._trained, self.transport
        pending = trained.has_pending()
        without = [name for name, p in trained.by_name.items() if p.grad is None]
        number = str(self._reductions)
        if not pending:
            trained.forget()
            self._first_steps.note_empty_window(self._reductions)
            self._peers.count(number, 1)
        self._called_at = torch_internals.VERSION.of(trained.parameters[0])
        transport.prepare()
        if not self.finds_unused:
            trained.got[:] = b"\1" * len(trained.got)
        with trained.unfrozen():
            together = trained.together()
            reached = () if self._options.at_end else trained.reached()
            bucketed = [together[name] for name in reached if name in together]
            anchor = next(iter(together.values()), torch.zeros((), requires_grad=True))
            zeros = zeros_for(bucketed, anchor, self._session.enter)
            if not transport.armed:
                transport.arm([zeros])
            enabled, due, self.enabled = self.enabled, self._due, True  # it may be in the middle of a window
            zeros.backward()
            self.enabled, self._due = enabled, due
        if not pending and self._peers.count(number, 0) == self.mean_over:
            for name in without:  # no rank had a gradient: as in one process, there is none
                trained.by_name[name].grad = None
        elif pending and without and not self.finds_unused:
            self._raise_unused(without)

    # -- one step --------------------------------------------------------------------------------

    @override
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce what is pending, so that a step never sees gradients of one rank alone."""
        trained = self._trained
        if torch_internals.graph_task_id() != -1:
            raise NotSynchronized(
                f"{self._what}: parameters of {self._class_name} were updated inside a backward pass",
                found="a step in a hook on a parameter, on the gradient of this rank alone",
                expected="a step after backward, when gradients were averaged over the ranks",
                fix="loss.backward(); optimizer.step()",
            )
        if trained.has_pending() and not self.enabled:
            self._raise_in_window()
        if trained.has_pending() and trained.are_as_left():
            self._reduce_now()
        fresh = self._reductions != self._stepped_at.get(optimizer, 0) and not trained.has_pending()
        if not fresh and self._group is not None:
            trained.check_same_gradients(self._what, optimizer, self._peers)
        self._stepped_at[optimizer] = self._reductions
