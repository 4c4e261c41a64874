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

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch import nn

from weft.engines.options import ReduceOptions
from weft.engines.peers import Peers
from weft.engines.torch.amp.graph_walk import running_backward
from weft.engines.torch.ddp.buckets import Buckets
from weft.engines.torch.ddp.flat_buffer import FlatBuffer
from weft.engines.torch.hooks.backward_session import BackwardSession
from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.engines.torch.hooks.parameter_watch import ParameterWatch
from weft.engines.torch.hooks.past_forward import raise_past_forward
from weft.engines.torch.optim.step_watch import Steps, check_same_gradients, raise_step_inside, settings_of
from weft.errors import ContractError, NotSynchronized, UnusedParameters, listed
from weft.tensors.nested import map_tensors, tensors

__all__ = ["GradientReducer", "check_hooks", "is_reduced"]

_VERSION = operator.attrgetter("_version")


class Channel(Protocol):
    """What moves the gradients: `Buckets` or `FlatBuffer`."""

    def prepare(self) -> None:
        """Forward was called: a backward pass is to be expected."""

    def begin(self, outputs: list[torch.Tensor]) -> None:
        """A backward pass that communicates has begun."""

    def end(self, got: bytearray) -> None:
        """It has ended; `got[i]` tells whether parameter i got a gradient."""

    def undo(self) -> None:
        """Leave the parameters as they were found."""


class GradientReducer:
    """Keeps the gradients of a module equal on all ranks of a group.

    Attributes:
        enabled: Whether the next backward pass communicates.
        mean_over: Number of ranks the gradients are averaged over.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, options: ReduceOptions, peers: Peers) -> None:
        self.enabled = True
        self.mean_over = dist.get_world_size(group)
        self._module = weakref.ref(module)
        self._class_name = type(module).__name__
        self._group: dist.ProcessGroup | None = group
        self._what = options.strategy
        self._options = options
        self._peers = peers
        self._outputs: list[weakref.ref[torch.Tensor]] = []
        self._armed = False
        self._called_at = -1
        self._buffers = options.buffers == "broadcast" and any(True for _ in module.buffers())
        self._buffers_due = False
        self._reductions = 0
        self._place = 0  # of the last one among those of all modules
        self._unreduced_versions: int | None = None
        self._due = False  # see [Note: what is due]
        self._pending = False  # see [Note: pending gradients]
        self._pending_versions: int | None = None
        self._stepped_at: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        # Buckets finish in a callback of their own, which has to be over before ours.
        self.session = BackwardSession(self._begin, self._end, rounds=0 if options.flat else 1)
        self.channel: Channel | None = None
        self._removable = Removable()
        self._guards = Removable()
        self._steps = Steps(self._what, self, group, peers)
        self._steps_before = 0
        self._searched = False
        self._parameter_watch = ParameterWatch(self._what, module)
        self._take_parameters(module)
        self._steps.search(self._parameters)
        self._attach(module)

    # -- what others may ask ---------------------------------------------------------------------

    def begin_window(self) -> None:
        """Backward passes keep their gradients on this rank from now on."""
        self.enabled = False
        self._due = True

    def last_backward(self) -> None:
        """The next backward pass reduces the gradients of the window."""
        self.enabled = True

    def end_window(self, *, left: bool = False) -> None:
        """Reduce what the window still owes; if it was left early, see [Note: pending gradients].

        Collectives: those of one backward pass, if none of the window has communicated.
        """
        self.enabled = True
        owes, self._due = self.owes, False
        if left:
            self._pending_versions = self._gradient_versions() if self._pending else None
        elif owes:
            self._reduce_now()

    @property
    def owes(self) -> bool:
        """Whether no backward pass has reduced the gradients of the running window."""
        return self._due and self._group is not None and bool(self._parameters)

    @property
    def finds_unused(self) -> bool:
        """Whether parameters may be without gradient."""
        return self._options.unused == "zero"

    def release(self) -> None:
        """Let the process group go; backward raises from now on."""
        self._steps.release()
        self._group = None
        self.channel = None

    def undo(self) -> None:
        """Take everything off the module again."""
        self._removable.remove()
        self._guards.remove()
        if self.channel is not None:
            self.channel.undo()
        self.release()

    # -- set-up ----------------------------------------------------------------------------------

    def _take_parameters(self, module: nn.Module) -> None:
        """Average the gradients of the parameters that are trained now."""
        self._guards.remove()
        trained = self._parameter_watch.trained
        self._names = list(trained)
        self._parameters = list(trained.values())
        self._got = bytearray(len(trained))
        self._nothing = bytes(len(trained))
        if isinstance(self.channel, FlatBuffer):
            self.channel.take(self._parameters)
        elif self._parameters:
            self.channel = self._make_channel(module)
        for index, parameter in enumerate(self._parameters):
            guard = _guard(self.session.flag, self._got, weakref.ref(self), index)
            self._guards.add(parameter.register_post_accumulate_grad_hook(guard).remove)

    def _make_channel(self, module: nn.Module) -> Channel:
        assert self._group is not None
        options = self._options
        if options.flat:
            return FlatBuffer(self._parameters, self._group, find_unused=self.finds_unused, dtype=options.dtype)
        return Buckets(
            module,
            self._names,
            self._parameters,
            self._group,
            bucket_bytes=options.bucket_bytes,
            find_unused=self.finds_unused,
            dtype=options.dtype,
        )

    def _attach(self, module: nn.Module) -> None:
        methods = self._options.methods
        attach(module, self._removable, before=self._before, after=self._watch, around=self._around, methods=methods)

    # -- one step --------------------------------------------------------------------------------

    def _before(self, *unused: Any) -> None:
        """Forward or a listed method is about to be called."""
        if self._buffers_due:
            self._broadcast_buffers()

    def _around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._before()
        return self._watch(None, args, call(*args, **kwargs))

    def _watch(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        """Note that forward or a listed method was called."""
        if self.session.flag[0] and self.session.was_torn():
            self._start_anew()
        if self._unreduced_versions is not None:
            self._check_not_stepped()
        if torch.is_grad_enabled() and self._group is not None:
            self._look()
        if not self._parameter_watch.trained:
            return output
        if self.finds_unused and all(p.grad is None for p in self._parameters):
            self._got[:] = self._nothing  # zero_grad: what a window that was left early used is gone
        if torch.is_grad_enabled():
            self._called_at = self._parameters[0]._version
            if self.channel is not None:
                self.channel.prepare()
        return self._watch_unused(output) if self.finds_unused else output

    def arrive(self, index: int) -> None:
        """The first gradient of a backward pass has reached parameter `index`."""
        # Steps change the version: a call before the last step is no excuse for this backward.
        if self._called_at != self._parameters[0]._version:
            name, methods = self._names[index], self._options.methods
            raise_past_forward(self._what, name, self._module(), self._class_name, methods)
        self.session.enter()

    @torch._disable_dynamo
    def _look(self) -> None:
        """Notice what is other than in the last forward pass: parameters, which of them are trained, optimizers.

        Collectives: if others are trained now, a meeting, and one reduction if gradients are pending.
        """
        module = self._module()
        if module is not None:
            self._look_at_parameters(module)
        if self._parameters:
            self._look_for_optimizers()

    def _look_at_parameters(self, module: nn.Module) -> None:
        if not self._pending:  # once per window: this runs in each forward pass, and layers are rarely added in a loop
            self._parameter_watch.check_same(module)
        if not self._parameter_watch.changed_flags():
            return
        self._parameter_watch.look(module)
        trained = list(self._parameter_watch.trained)
        if not trained or trained == self._names:
            return  # frozen as a whole: nothing reaches its parameters until it is unfrozen
        entries = self._peers.meet("trained parameters", {"trained": trained, "pending": self._has_pending()})
        self._peers.agree("trained parameters", {"trained": trained})
        if any(entry["pending"] for entry in entries):
            self._reduce_now()
        self._take_parameters(module)

    def _look_for_optimizers(self) -> None:
        version = self._parameters[0]._version
        if not self._searched or (version != self._called_at and self._steps.number == self._steps_before):
            self._steps.search(self._parameters, again=self._searched)
            check_hooks(self._what, self._class_name, zip(self._names, self._parameters, strict=True), own=1)
            self._searched = True
        self._steps_before = self._steps.number

    def _watch_unused(self, output: Any) -> Any:
        """Find the parameters the outputs do not depend on."""
        if self._armed and not self.enabled:
            self._renew_channel()  # a forward pass had no backward; this one shall not communicate
        output = _through_one_node(output)
        # Several calls may come before one backward: all their outputs count.
        self._outputs = [ref for ref in self._outputs if ref() is not None]
        self._outputs += [weakref.ref(t) for t in tensors(output) if t.requires_grad]
        if self.enabled and self._outputs:
            self._arm([t for t in (ref() for ref in self._outputs) if t is not None])
        return output

    def _arm(self, outputs: list[torch.Tensor]) -> None:
        if self.channel is None:
            raise NotSynchronized(
                f"{self._what}: backward through {self._class_name} after its context was closed",
                found="no process group",
                expected="backward inside of `with weft.start() as ctx:`",
                fix="model, ctx = weft.undo(model, ctx)  # before the context is closed",
            )
        self.channel.begin(outputs)
        self._armed = True

    def _begin(self) -> None:
        if self._armed or not self.enabled:
            return
        if self.finds_unused:
            raise NotSynchronized(
                f'{self._what}: a second backward through {self._class_name} with unused="zero"',
                found="the outputs of the forward pass are gone, so unused parameters cannot be found",
                expected="one backward pass for the forward passes before it",
                fix="add the losses up and call backward once",
            )
        self._arm([])

    def _end(self) -> None:
        if not self.enabled:
            self._outputs.clear()  # their graph is done: the backward that communicates has its own
            if not self.finds_unused:
                self._got[:] = self._nothing  # else a parameter used so far is used in the window
            self._pending = True
            self._unreduced_versions = self._versions()
            return
        self._armed = False
        self._due = False
        if self._outputs:
            self._outputs.clear()
        missing = [] if self.finds_unused or all(self._got) else [i for i, got in enumerate(self._got) if not got]
        if missing and not self._options.flat:
            # Peers wait for the buckets of these parameters, and shall not find out by waiting.
            self.session.flag[0] = 1  # it is no pass of its own
            _Touch.reach([self._parameters[i] for i in missing])
            self.session.flag[0] = 0
        assert self.channel is not None
        self.channel.end(self._got)
        self._got[:] = self._nothing
        self._reductions += 1
        self._place = self._peers.next_reduction()
        self._pending = False
        self._unreduced_versions = None
        if self._buffers:
            self._buffers_due = True
            if not running_backward().retains_graph:  # else another backward pass reads them as they are
                self._broadcast_buffers()
        if missing:
            self._raise_unused([self._names[i] for i in missing])

    def _broadcast_buffers(self) -> None:
        module = self._module()
        self._buffers_due = False
        if module is not None and self._group is not None:
            dist._broadcast_coalesced(self._group, [b.detach() for b in module.buffers()], 250 * 2**20, 0)

    # -- reduction outside of a backward pass of the user's -----------------------------------------

    def _has_pending(self) -> bool:
        return self._pending and any(p.grad is not None for p in self._parameters)

    def _reduce_now(self) -> None:
        """Reduce what is in `.grad` by the messages of a backward pass; see [Note: what is due]."""
        self._look()  # as in the forward passes that other ranks may make meanwhile, or this one has not made yet
        pending = self._has_pending()
        without = [i for i, p in enumerate(self._parameters) if p.grad is None]
        number = str(self._reductions)
        if not pending:
            self._got[:] = self._nothing
            self._peers.count(number, 1)
        used = [p for p, got in zip(self._parameters, self._got, strict=True) if got or not self.finds_unused]
        self._called_at = self._parameters[0]._version
        if self._options.flat:
            assert self.channel is not None
            self.channel.prepare()
        if not self.finds_unused:
            self._got[:] = b"\1" * len(self._got)
        flags = [p.requires_grad for p in self._parameters]
        for p in self._parameters:  # some may have been frozen since
            p.requires_grad_(True)  # noqa: FBT003  (torch's signature)
        touched = _Touch.of([] if self._options.flat else used, self._parameters[0], self.session.enter)
        if not self._armed:
            self._arm([touched])
        enabled, due, self.enabled = self.enabled, self._due, True  # it may be in the middle of a window
        touched.backward()
        self.enabled, self._due = enabled, due
        for p, flag in zip(self._parameters, flags, strict=True):
            p.requires_grad_(flag)
        if not pending and self._peers.count(number, 0) == self.mean_over:
            for i in without:  # no rank had a gradient: as in one process, there is none
                self._parameters[i].grad = None
        elif pending and without and not self.finds_unused:
            self._raise_unused([self._names[i] for i in without])

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Whole parameters: any will do."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce what is pending, so that a step never sees gradients of one rank alone."""
        if torch._C._current_graph_task_id() != -1:
            raise_step_inside(self._what, self._class_name)
        if self._buffers_due:
            self._broadcast_buffers()
        if self._has_pending():
            if not self.enabled:
                self._raise_in_window()
            if self._pending_versions == self._gradient_versions():
                self._reduce_now()
        fresh = self._reductions != self._stepped_at.get(optimizer, 0) and not self._has_pending()
        if not fresh and self._group is not None:
            self._check_same_gradients(optimizer, self._group)
        self._stepped_at[optimizer] = self._reductions

    def _check_same_gradients(self, optimizer: torch.optim.Optimizer, group: dist.ProcessGroup) -> None:
        held = {id(p) for entry in optimizer.param_groups for p in entry["params"]}
        mine = [(n, p) for n, p in zip(self._names, self._parameters, strict=True) if id(p) in held]
        if any(p.grad is not None for _, p in mine):
            check_same_gradients(self._what, mine, group)
            self._pending = False

    def settings(self) -> Mapping[str, object]:
        """What of the module has to be equal on all ranks and may change."""
        module = self._module()
        # A rank that skipped a backward pass would otherwise meet the next one of the others with its own. So would
        # two modules that are reduced in another order.
        facts = {"gradients averaged so far": self._reductions, "of all modules": self._place}
        return facts if module is None else {**facts, **settings_of(module)}

    # -- what can go wrong -----------------------------------------------------------------------

    def _start_anew(self) -> None:
        """A backward pass broke off half-way: its communication cannot be continued."""
        self._outputs.clear()
        self._got[:] = self._nothing
        self._renew_channel()

    def _renew_channel(self) -> None:
        module = self._module()
        self._armed = False
        if module is not None and not isinstance(self.channel, FlatBuffer) and self._group is not None:
            self.channel = self._make_channel(module)

    def _raise_unused(self, names: list[str]) -> NoReturn:
        error = UnusedParameters(
            f"{self._what}: {len(names)} parameter(s) of {self._class_name} got no gradient in this backward pass",
            found=listed(names),
            expected="every parameter that requires a gradient takes part in the loss, on every rank",
            fix=f'weft.{self._what}(..., unused="zero"), or requires_grad_(False) on them',
        )
        self._peers.report(error)
        raise error

    def _versions(self) -> int:
        return sum(map(_VERSION, self._parameters))

    def _gradient_versions(self) -> int:
        return sum(p.grad._version + 1 for p in self._parameters if p.grad is not None)

    def _check_not_stepped(self) -> None:
        """Raise if the parameters were changed while their gradients had not been reduced."""
        unreduced, self._unreduced_versions = self._unreduced_versions, None
        if self._versions() != unreduced and self._has_pending():
            self._raise_in_window()
        self._unreduced_versions = unreduced

    def _raise_in_window(self) -> NoReturn:
        raise NotSynchronized(
            f"{self._what}: a step on gradients of {self._class_name} before they were averaged over the ranks",
            found="an optimizer step in the middle of a window",
            expected="one optimizer step after the last micro-batch of a window",
            fix="for batch in window: ...; then optimizer.step(), after the inner loop",
        )


def _guard(
    flag: bytearray, got: bytearray, reducer: weakref.ref[GradientReducer], index: int
) -> Callable[[torch.Tensor], None]:
    """The hook of one parameter; it must not hold the reducer, which holds the parameter in C++."""

    def guard(parameter: torch.Tensor) -> None:
        if not flag[0]:
            alive = reducer()
            if alive is not None:
                alive.arrive(index)
        got[index] = 1

    return guard


def is_reduced(parameter: nn.Parameter) -> bool:
    """Whether a reducer watches this parameter already."""
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    return any(getattr(hook, "__qualname__", "") == "_guard.<locals>.guard" for hook in hooks.values())


def check_hooks(what: str, class_name: str, named: Iterable[tuple[str, nn.Parameter]], *, own: int = 0) -> None:
    """Raise if a hook waits for gradients that it would see before they are averaged over the ranks.

    Args:
        what: Name of the strategy, for errors.
        class_name: Of the module.
        named: Its parameters.
        own: Hooks that are ours, per parameter.

    Raises:
        ContractError: There is one.
    """
    hooked = [name for name, p in named if len(getattr(p, "_post_accumulate_grad_hooks", None) or ()) > own]
    if hooked:
        raise ContractError(
            f"{what}: hooks on parameters of {class_name} would see the gradients of one rank",
            found=f"register_post_accumulate_grad_hook on {listed(hooked)}",
            expected="gradients are read, and parameters are stepped, after backward, when they are averaged",
            fix="loss.backward(); optimizer.step()  # p.register_hook(...) to look at gradients of one rank",
        )


def _through_one_node(output: Any) -> Any:
    """Route all outputs through one autograd node, so that those the loss ignores get a gradient too.

    Otherwise a parameter that only feeds an ignored output would look used and never be ready.
    """
    needing = [t for t in tensors(output) if t.requires_grad]
    if not needing:
        return output
    passed = dict(zip(map(id, needing), _Pass.apply(*needing), strict=True))  # type: ignore[no-untyped-call]
    return map_tensors(lambda tensor: passed.get(id(tensor), tensor), output)


class _Pass(torch.autograd.Function):
    """The identity, as one node for many tensors."""

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        del ctx  # nothing was saved
        return gradients


class _Touch(torch.autograd.Function):
    """A number that depends on parameters, and brings them gradients of zeros."""

    @staticmethod
    def of(parameters: Sequence[torch.Tensor], anchor: torch.Tensor, enter: Callable[[], None]) -> torch.Tensor:
        """The number; it also leads to `anchor`, which gets no gradient unless it is one of `parameters`."""
        others = [p for p in (anchor,) if not any(p is one for one in parameters)]
        touched: torch.Tensor = _Touch.apply(enter, len(parameters), *parameters, *others)  # type: ignore[no-untyped-call]
        return touched

    @staticmethod
    def reach(parameters: Sequence[torch.Tensor]) -> None:
        """Bring them gradients of zeros in a backward pass inside of the one that is ending."""
        with torch.enable_grad():
            touched = _Touch.of(parameters, parameters[0], lambda: None)
        touched.backward()

    @staticmethod
    def forward(ctx: Any, enter: Callable[[], None], given: int, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.enter, ctx.given, ctx.parameters = enter, given, parameters
        return parameters[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        del gradient
        ctx.enter()
        zeros = [_zeros(p) if i < ctx.given else None for i, p in enumerate(ctx.parameters)]
        return None, None, *zeros


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    if parameter.grad is not None and parameter.grad.is_sparse:
        return torch.zeros_like(parameter.grad)
    return torch.zeros_like(parameter)
