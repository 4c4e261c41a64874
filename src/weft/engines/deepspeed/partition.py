"""One module and its optimizer, divided among the ranks by DeepSpeed, under a plain loop.

DeepSpeed cuts, averages, offloads and steps; when it does so is decided here, by hooks, so that the loop
stays torch's. Its own bookkeeping of backward passes is not used: it takes two forward passes before one
backward for an error, and keeps gradients that `zero_grad` should have dropped.

[Note: the truth is in p.grad] As in torch, `p.grad` says what gradient a parameter has. Between backward
passes it holds a `CutGradient` in place of one that lies in DeepSpeed's buffers. Whoever sets it to None,
`zero_grad`, a policy for gradients that are not finite, the user, drops the gradient: this is seen at the
next backward pass or step. After a step it is one that is spent, so that a forgotten `zero_grad` is seen.

Hooks on parameters live in C++, where no collector looks: they hold this object weakly.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from weft.engines.deepspeed.buffers import Buffers
from weft.engines.deepspeed.library import GroupView, Lent
from weft.engines.deepspeed.optimizer_state import State
from weft.engines.peers import Peers
from weft.engines.torch.hooks.backward_session import BackwardSession, inside_backward
from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.engines.torch.optim.closures import check_no_closure
from weft.engines.torch.optim.step_watch import Steps, settings_of
from weft.errors import ContractError, NotSynchronized, UnusedParameters, listed, message
from weft.tensors.nested import tensors
from weft.tensors.sharded_grad import CutGradient

__all__ = ["Partition", "PartitionOptions"]


class PartitionOptions(NamedTuple):
    """What is to be made.

    Attributes:
        stage: 1, 2 or 3.
        config: As `complete` returned it.
        methods: Methods besides forward through which gradients flow.
        buffers: Whether all ranks get the first one's buffers after each averaged backward pass.
        local_rank: Of this process on its node.
        make_real: Makes one part of a module on meta real; None if the module is real.
        moved: Called when parameters were exchanged for real ones.
        peers: The same on the other ranks.
    """

    stage: int
    config: Mapping[str, Any]
    methods: Sequence[str]
    buffers: bool
    local_rank: int
    make_real: Callable[[nn.Module], None] | None
    moved: Callable[[], None]
    peers: Peers


class Partition:
    """What is hung on a module and its optimizer, as later transforms see it.

    Attributes:
        enabled: Whether the next backward pass communicates.
        mean_over: Number of ranks the gradients are averaged over.
        stage: 1, 2 or 3.
        elsewhere: Whether the module has no values of its parameters between steps.
        engine: DeepSpeed's.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        engine: Any,
        buffers: Buffers,
        state: State,
        *,
        options: PartitionOptions,
        group: dist.ProcessGroup,
        view: GroupView,
        groups: Sequence[tuple[int, Mapping[str, Any]]],
    ) -> None:
        self.enabled = True
        self._due = False  # the window owes a reduction
        self._pending = False  # gradients of this rank wait in `.grad`
        self._peers = options.peers
        self.stage = options.stage
        self.elsewhere = options.stage == 3
        self.engine = engine
        self.mean_over = dist.get_world_size(group)
        self._group: dist.ProcessGroup | None = group
        self._view = view
        self._lent = Lent(module, options.local_rank) if options.stage == 3 else None
        self._module = weakref.ref(module)
        self._optimizer = weakref.ref(optimizer)
        self._class_name = type(module).__name__
        self._buffers = buffers
        self._state = state
        self._inner_groups = groups  # number of the optimizer's group, and the engine's group for it
        self._names = {p: name for name, p in module.named_parameters() if p in buffers.places}
        self._held: dict[nn.Parameter, CutGradient] = {}  # what lies in DeepSpeed's buffers
        self._reduced: set[nn.Parameter] = set()  # in this backward pass
        self._received = False
        self._passes: list[_Pass] = []
        self._versions: dict[nn.Parameter, int] = {}
        self._stepped = False
        self._session = BackwardSession(self._begin, self._end, rounds=1)
        self._steps = Steps("zero_partition", self, group, options.peers)
        self._removable = Removable()
        self._keeps_buffers = options.buffers and any(True for _ in module.buffers())
        self._hang_on(module, optimizer, options.methods)

    def _hang_on(self, module: nn.Module, optimizer: torch.optim.Optimizer, methods: Sequence[str]) -> None:
        add = self._removable.add
        before, after, around = self.before, self.after, self.around
        attach(
            module,
            self._removable,
            before=before,
            after=after,
            around=around,
            methods=methods,
            first=True,
            always=True,
        )
        for parameter in self._names:
            hook = _arrival(self._session.flag, weakref.ref(self))
            add(parameter.register_post_accumulate_grad_hook(hook).remove)
        add(optimizer.register_step_pre_hook(self._before_step).remove)
        self._steps.attach(optimizer)
        add(self._steps.release)
        add(optimizer.register_step_post_hook(self._after_step).remove)
        add(optimizer.register_state_dict_pre_hook(self._show_state).remove)
        add(optimizer.register_state_dict_post_hook(self._hide_state).remove)
        add(optimizer.register_load_state_dict_post_hook(self._take_state).remove)
        self._take_state(optimizer)
        self._note_versions()

    # -- what other rooms may ask ----------------------------------------------------------------

    def begin_window(self) -> None:
        """Backward passes keep their gradients whole in `p.grad` from now on."""
        self.enabled, self._due = False, True

    def last_backward(self) -> None:
        """The next backward pass reduces the gradients of the window."""
        self.enabled = True

    def end_window(self, *, left: bool = False) -> None:
        """Reduce what the window still owes; what one that was left early holds stays in `p.grad`.

        Collectives: if no backward pass of the window has communicated, a meeting, and the messages of a backward
        pass if a rank has gradients.
        """
        self.enabled = True
        due, self._due = self._due, False
        if due and not left and self._group is not None:
            self._reduce_now("the end of a window whose last micro-batch was skipped")

    def _reduce_now(self, what: str) -> None:
        if any(self._peers.meet(what, self._pending and any(p.grad is not None for p in self._names))):
            for parameter in self._names:
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            inside_backward(self._session.enter)

    def release(self) -> None:
        """Let the process group go."""
        self._steps.release()
        self._group = None
        self._state.release()
        self._view.release()

    def parameter_shards(self) -> dict[str, torch.Tensor]:
        """The parameters that are not in the module between steps, by name, cut over the ranks.

        Collectives: one message per parameter.
        """
        return self._state.parameter_shards() if self.stage == 3 else {}

    def parameters_changed(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Take values: of `shards` for the parameters in it, of the module for all others."""
        module = self._module()
        if module is not None:
            self._state.set_parameters(shards)
        for parameter in self._names:
            self._buffers.take_weights(parameter)
        self._note_versions()

    def state_layout(self, name: str) -> torch.Tensor | None:
        """A tensor without values, cut up as the optimizer's state of this parameter is shown."""
        return self._state.layout(name)

    def gathered(self, *, write: bool) -> contextlib.AbstractContextManager[None]:
        """A context in which the module holds whole parameters; see `weft.full_params`."""
        return self._state.gathered(write=write, then=lambda: self.parameters_changed({}))

    def full_gradient(self, name: str) -> torch.Tensor | None:
        """A gradient from all ranks, whole. Collectives: one message."""
        for parameter, held in self._held.items():
            if self._names[parameter] == name and parameter.grad is held:
                return self._state.whole(parameter, held.piece())
        return None

    def undo(self) -> None:
        """Make the parameters plain again, and give the optimizer its state. Collectives: of both."""
        optimizer, module = self._optimizer(), self._module()
        self._drop()
        if optimizer is not None:
            self._state.show(optimizer, whole=True)
        self._removable.remove()
        if module is not None:
            self._state.make_plain(self.engine.destroy)
        self._held.clear()
        self.release()

    # -- around the calls of the module ----------------------------------------------------------

    def before(self, *unused: Any) -> None:
        """The module is about to be called."""
        if torch._C._current_graph_task_id() != -1:
            return  # computed again, inside of backward
        if self._session.was_torn():
            self._start_anew()
        if self._lent is not None:
            self._lent.lend()
        self.engine._forward_prologue((), {})

    def after(self, module: Any, args: Any, output: Any) -> None:
        """The module was called, or its call raised."""
        if torch._C._current_graph_task_id() != -1:
            return
        self.engine._forward_epilogue()
        if self._lent is not None:
            self._lent.take_back()
        if torch.is_grad_enabled():
            one = _Pass()
            entrance = _entrance(weakref.ref(self), one)
            for tensor in tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(entrance)

    def around(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A listed method is called: the same as around forward."""
        self.before()
        output = None
        try:
            output = call(*args, **kwargs)
        finally:
            self.after(None, args, output)
        return output

    # -- one backward pass -----------------------------------------------------------------------

    def enter(self, one: _Pass) -> None:
        """Backward comes back to the output of a forward pass."""
        if one.used and one not in self._passes:
            self._raise_second()
        if one not in self._passes:
            self._passes.append(one)
        if self._session.was_torn():
            self._start_anew()
        self._session.enter()

    def arrived(self, parameter: nn.Parameter) -> None:
        """A gradient was added to `p.grad`."""
        self._session.enter()
        self._received = True
        if self.enabled and self.stage > 1 and parameter not in self._reduced:
            self._reduce(parameter)

    def _begin(self) -> None:
        self._reduced.clear()
        self._received = False
        for parameter, held in list(self._held.items()):
            if held.cleared and parameter.grad is held:
                parameter.grad = held.pending
        kept = [p for p, held in self._held.items() if p.grad is held]
        if any(self._held[p].spent for p in kept):
            self._raise_spent()
        if len(kept) < len(self._held):
            self._forget(kept)
        if self.enabled:
            self._buffers.begin()
            for parameter in kept:
                if self._held[parameter].pending is None:
                    parameter.grad = None  # autograd puts the next one here

    def _reduce(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if isinstance(gradient, CutGradient):
            parameter.grad, gradient.pending = gradient.pending, None
        self._reduced.add(parameter)
        self._buffers.reduce(parameter)

    def _end(self) -> None:
        passes, self._passes = self._passes, []
        if self._received:
            for one in passes:
                one.used = True
        self._pending = not self.enabled
        if not self.enabled:
            if self.stage == 3:
                self._buffers.end()
            return
        self._due = False
        for parameter in self._names:
            gradient = parameter.grad
            waits = gradient is not None and (not isinstance(gradient, CutGradient) or gradient.pending is not None)
            if waits and parameter not in self._reduced:
                self._reduce(parameter)
        self._buffers.finish()
        self._buffers.end()
        for parameter in self._reduced:
            if parameter not in self._held:
                self._held[parameter] = self._stand_in(parameter)
        for parameter, held in self._held.items():
            parameter.grad = self._fitting(parameter, held)
        module = self._module()
        if self._keeps_buffers and module is not None and self._group is not None:
            dist._broadcast_coalesced(self._group, [b.detach() for b in module.buffers()], 250 * 2**20, 0)
        missing = [name for p, name in self._names.items() if p.requires_grad and p not in self._held]
        if missing and self._received:
            self._raise_unused(missing)

    def _stand_in(self, parameter: nn.Parameter) -> CutGradient:
        return CutGradient(parameter, self._names[parameter], self._group, _piece_of(self._buffers, parameter))

    def _fitting(self, parameter: nn.Parameter, held: CutGradient) -> CutGradient:
        """A stand-in of the shape the parameter has now: in stage 3 it may be gathered, or not."""
        if held.shape != parameter.shape:
            held = self._held[parameter] = self._stand_in(parameter)
        return held

    def _forget(self, kept: Sequence[nn.Parameter]) -> None:
        """Somebody set gradients to None: drop them."""
        if not kept:
            self._drop()
            return
        for parameter in set(self._held) - set(kept):
            if not self._held[parameter].spent:
                self._buffers.gradient(parameter).zero_()
            del self._held[parameter]

    def _drop(self) -> None:
        self._held.clear()
        self._buffers.drop()

    def _start_anew(self) -> None:
        """The last backward pass raised, and what it left is of no use."""
        for parameter in self._names:
            parameter.grad = None
        self._held.clear()
        self._passes.clear()
        self._buffers.reset()

    # -- the step --------------------------------------------------------------------------------

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """DeepSpeed was asked before anything was changed."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce what a window that was left early holds."""
        if self._pending and self.enabled and any(p.grad is not None for p in self._names):
            self._reduce_now("a step after a window that was left early")

    def settings(self) -> Mapping[str, object]:
        """What of the module has to be equal on all ranks and may change."""
        module = self._module()
        return {} if module is None else settings_of(module)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        check_no_closure("zero_partition", (*args[1:], *kwargs.values()))
        self._stepped = False
        local = [
            name
            for p, name in self._names.items()
            if p.grad is not None and (not isinstance(p.grad, CutGradient) or p.grad.pending is not None)
        ]
        if local:
            self._raise_not_reduced(local)
        kept = [p for p, held in self._held.items() if p.grad is held]
        if any(self._held[p].spent for p in kept):
            self._raise_spent()
        if len(kept) < len(self._held):
            self._forget(kept)
        if not kept:
            return  # no gradients: torch's step does nothing either
        missing = [name for p, name in self._names.items() if p not in self._held]
        if missing:
            self._raise_unused(missing)
        self._step(optimizer)

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        for number, group in self._inner_groups:
            given = optimizer.param_groups[number]
            group.update({key: value for key, value in given.items() if key != "params"})  # type: ignore[attr-defined]
        for parameter, version in self._versions.items():
            if parameter._version != version:
                self._buffers.take_weights(parameter)
        for parameter in self._names:
            parameter.grad = None
        self._buffers.before_step()
        self.engine.step()
        skipped = bool(self.engine.optimizer.overflow)
        names = list(self._names.values())
        self._drop()
        self._note_versions()
        if skipped:
            raise FloatingPointError(
                message(
                    "zero_partition: gradients are not finite, and DeepSpeed left the step out",
                    found=f"a norm that is not finite, over {listed(names)}",
                    expected="finite gradients on all ranks; torch would step, to weights that are not finite",
                    fix='weft.clip_grads(model, ctx, nonfinite="skip")  # before optimizer.step()',
                )
            )
        torch.autograd.graph.increment_version(list(self._names))
        self._note_versions()
        self._stepped = True

    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._stepped:
            return
        self._stepped = False
        for parameter in self._names:
            held = self._held[parameter] = self._stand_in(parameter)
            held.spent = True
            parameter.grad = held

    def _note_versions(self) -> None:
        if self.stage < 3:
            self._versions = {p: p._version for p in self._names}

    # -- the optimizer's state -------------------------------------------------------------------

    def _show_state(self, optimizer: torch.optim.Optimizer) -> None:
        self._state.show(optimizer)

    def _hide_state(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        optimizer.state.clear()

    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        self._state.take(optimizer)
        optimizer.state.clear()

    # -- errors ----------------------------------------------------------------------------------

    def _raise_second(self) -> NoReturn:
        raise ContractError(
            f"a second backward pass through one forward pass of {self._class_name}",
            found="retain_graph=True, or two losses of one output with a backward each",
            expected="one backward per forward pass: DeepSpeed averages gradients as they come, and frees weights",
            fix="(loss_a + loss_b).backward()",
        )

    def _raise_spent(self) -> NoReturn:
        raise ContractError(
            f"the gradients of {self._class_name} were used by a step, and were not dropped since",
            found="optimizer.step() without optimizer.zero_grad() after it",
            expected="zero_grad() between a step and what comes next: DeepSpeed keeps no gradient after a step",
            fix="optimizer.zero_grad()",
        )

    def _raise_not_reduced(self, names: Sequence[str]) -> NoReturn:
        raise NotSynchronized(
            f"optimizer.step() with gradients of {self._class_name} that are not averaged over the ranks",
            found=listed(names),
            expected="a step after the last micro-batch of a window, and gradients made by backward",
            fix="for window in loader:\n    for batch in window: ...\n    optimizer.step()",
        )

    def _raise_unused(self, names: Sequence[str]) -> NoReturn:
        raise UnusedParameters(
            f"zero_partition: {len(names)} parameter(s) of {self._class_name} got no gradient",
            found=listed(names),
            expected="a gradient for every trained parameter: DeepSpeed steps on all of them together",
            fix='requires_grad_(False) on them before zero_partition, or engine="torch"',
        )


class _Pass:
    """One forward pass of the module, and whether a backward pass came through it."""

    __slots__ = ("__weakref__", "used")

    def __init__(self) -> None:
        self.used = False


def _piece_of(buffers: Buffers, parameter: nn.Parameter) -> Callable[[], torch.Tensor]:
    # A gradient hangs on its parameter in C++: strong references here would close a cycle that nobody sees.
    holder, target = weakref.ref(buffers), weakref.ref(parameter)

    def piece() -> torch.Tensor:
        alive, of = holder(), target()
        assert alive is not None
        assert of is not None
        return alive.gradient(of)

    return piece


def _entrance(owner: weakref.ref[Partition], one: _Pass) -> Callable[[torch.Tensor], None]:
    def enter(_: torch.Tensor) -> None:
        alive = owner()
        if alive is not None:
            alive.enter(one)

    return enter


def _arrival(flag: bytearray, owner: weakref.ref[Partition]) -> Callable[[torch.Tensor], None]:
    def arrived(parameter: Any) -> None:
        alive = owner()
        if alive is not None:
            alive.arrived(parameter)

    return arrived


def each_trained(partition: Partition) -> Iterator[nn.Parameter]:
    """The parameters that are stepped on."""
    yield from partition._names
