"""One module and its optimizer, divided among the ranks by DeepSpeed, under a plain loop.

DeepSpeed shards, averages, offloads and steps; when it does so is decided here, in `backward.py` and in `step.py`, by
hooks, so that the loop stays torch's.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from weft import torch_internals
from weft.engines.deepspeed import internals
from weft.engines.deepspeed.backward import BackwardPasses
from weft.engines.deepspeed.buffers import Buffers
from weft.engines.deepspeed.library import GroupView, lend_process_state
from weft.engines.deepspeed.parameters import Parameters
from weft.engines.deepspeed.placeholders import GradientPlaceholders
from weft.engines.deepspeed.step import Step
from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.engines.torch.hooks.shared_buffers import SharedBuffers
from weft.engines.torch.steps.watch import Steps, settings_of
from weft.peers.ledger import Ledger


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
    peers: Ledger


class Partition:
    """What is hung on a module and its optimizer, as later transforms see it.

    Attributes:
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
        parameters: Parameters,
        *,
        options: PartitionOptions,
        view: GroupView,
        groups: Sequence[tuple[int, Mapping[str, Any]]],
    ) -> None:
        self.stage = options.stage
        self.elsewhere = options.stage == 3
        self.engine = engine
        self.mean_over = view.get_data_parallel_world_size()
        self._view = view
        self._local_rank = options.local_rank
        self._lent: list[contextlib.AbstractContextManager[None]] = []  # one for each call that is running
        self._module = weakref.ref(module)
        self._optimizer = weakref.ref(optimizer)
        self._buffers = buffers
        self._parameters = parameters
        self._names = {p: name for name, p in module.named_parameters() if p in buffers.places}
        self._stand_ins = GradientPlaceholders(type(module).__name__, self._names, buffers, view)
        shared = SharedBuffers(module, shared=options.buffers)
        self._passes = BackwardPasses(self._stand_ins, options.stage, options.peers, shared)
        self._step = Step(engine, groups, self._stand_ins, watches=options.stage < 3)
        assert view.group is not None
        self._steps = Steps("zero_partition", self, view.group, options.peers)
        self._removable = Removable()
        self._hang_on(module, optimizer, options.methods)

    def _hang_on(self, module: nn.Module, optimizer: torch.optim.Optimizer, methods: Sequence[str]) -> None:
        add = self._removable.add
        calls: Any = {"before": self.before, "after": self.after, "around": self.around, "methods": methods}
        attach(module, self._removable, **calls, first=True, always=True)
        self._passes.watch(self._removable)
        add(optimizer.register_step_pre_hook(self._step.before).remove)
        self._steps.attach(optimizer)
        add(self._steps.release)
        add(optimizer.register_step_post_hook(self._step.after).remove)
        add(optimizer.register_state_dict_pre_hook(self._parameters.show_state).remove)
        add(optimizer.register_state_dict_post_hook(lambda optimizer, _: optimizer.state.clear()).remove)
        add(optimizer.register_load_state_dict_post_hook(self._take_state).remove)
        self._take_state(optimizer)
        self._step.note_versions()

    # -- what later transforms may ask ----------------------------------------------------------------

    def begin_window(self) -> None:
        """Backward passes keep their gradients whole in `p.grad` from now on."""
        self._passes.begin_window()

    def last_backward(self) -> None:
        """The next backward pass reduces the gradients of the window."""
        self._passes.enabled = True

    def end_window(self, *, left: bool = False) -> None:
        """Reduce what the window still owes; what one that was left early holds stays in `p.grad`.

        Collectives: if no backward pass of the window has communicated, a meeting, and the messages of a backward
        pass if a rank has gradients.
        """
        if self._passes.end_window() and not left and self._view.group is not None:
            self._passes.reduce_pending("the end of a window whose last micro-batch was skipped")

    def release(self) -> None:
        """Let the process group go."""
        self._steps.release()
        self._parameters.release()
        self._view.group = None

    def parameter_shards(self) -> dict[str, torch.Tensor]:
        """The parameters that are not in the module between steps, by name, cut over the ranks.

        Collectives: one message per parameter.
        """
        return self._parameters.parameter_shards() if self.stage == 3 else {}

    def parameters_changed(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Take values: of `shards` for the parameters in it, of the module for all others."""
        module = self._module()
        if module is not None:
            self._parameters.set_parameters(shards)
        for parameter in self._names:
            self._buffers.take_weights(parameter)
        self._step.note_versions()

    def state_layout(self, name: str) -> torch.Tensor | None:
        """A tensor without values, cut up as the optimizer's state of this parameter is shown."""
        return self._parameters.layout(name)

    def gathered(self, *, write: bool) -> contextlib.AbstractContextManager[None]:
        """A context in which the module holds whole parameters; see `weft.full_params`."""
        return self._parameters.gathered(write=write, then=lambda: self.parameters_changed({}))

    def full_gradient(self, name: str) -> torch.Tensor | None:
        """A gradient from all ranks, whole. Collectives: one message."""
        found = self._stand_ins.named(name)
        return None if found is None else self._parameters.whole(*found)

    def undo(self) -> None:
        """Make the parameters plain again, and give the optimizer its state. Collectives: of both."""
        optimizer, module = self._optimizer(), self._module()
        self._stand_ins.drop()
        if optimizer is not None:
            self._parameters.show_state(optimizer, whole=True)
        self._removable.remove()
        if module is not None:
            self._parameters.make_plain(self.engine.destroy)
        self.release()

    # -- around the calls of the module ----------------------------------------------------------

    def before(self, *unused: Any) -> None:
        """The module is about to be called."""
        if torch_internals.graph_task_id() != -1:
            return  # computed again, inside backward
        self._passes.restart_if_torn()
        if self.stage == 3:
            self._lent.append(lend_process_state(self._module(), self._local_rank))
            self._lent[-1].__enter__()
        internals.BEGIN_FORWARD.of(self.engine)((), {})

    def after(self, module: Any, args: Any, output: Any) -> None:
        """The module was called, or its call raised."""
        if torch_internals.graph_task_id() != -1:
            return
        internals.END_FORWARD.of(self.engine)()
        if self._lent:
            self._lent.pop().__exit__(None, None, None)
        self._passes.watch_output(output)

    def around(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A listed method is called: the same as around forward."""
        self.before()
        output = None
        try:
            output = call(*args, **kwargs)
        finally:
            self.after(None, args, output)
        return output

    # -- the step --------------------------------------------------------------------------------

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """DeepSpeed was asked before anything was changed."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Reduce what a window that was left early holds."""
        if self._passes.enabled and self._passes.is_pending():
            self._passes.reduce_pending("a step after a window that was left early")

    def is_stepped(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """Gradients and weights are DeepSpeed's."""

    def settings(self) -> Mapping[str, object]:
        """What of the module has to be equal on all ranks and may change."""
        module = self._module()
        return {} if module is None else settings_of(module)

    def same_weights(self) -> None:
        """None: DeepSpeed keeps the values that it steps on in parts."""

    def same_gradients(self) -> tuple[()]:
        """None: gradients are DeepSpeed's."""
        return ()

    # -- the optimizer's state -------------------------------------------------------------------

    def _take_state(self, optimizer: torch.optim.Optimizer) -> None:
        self._parameters.take_state(optimizer)
        optimizer.state.clear()
