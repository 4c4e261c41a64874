"""See every step of the optimizers that hold the parameters of a strategy, before it changes anything.

A strategy is given a module, and an optimizer may be made at any time; torch has no list of them. The living ones
are found before the first backward pass, and again when parameters changed although no step was seen. One that steps on
a rank that has not called the module is seen by a hook for all optimizers: the other ranks may be in a backward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from weft import torch_internals
from weft.engines.torch.hooks.every_optimizer import after_every_step, before_every_step, optimizers_of, parameters_of
from weft.engines.torch.parts.refuse_pickle import refuse_optimizer_file
from weft.engines.torch.steps.swapped import StepsOnOthers, replace_closure, step_hooks
from weft.errors import ContractError, NotSynchronized, listed
from weft.peers.ledger import Ledger
from weft.tensors.checksums import begin_checksums, can_be_read, checksums
from weft.tensors.dtensor import is_sharded, local
from weft.version import TESTED_TORCH

# Settings and weights are compared at each of the first 16 steps, at every 16th of the first 128, and at every 128th
# after that: a comparison costs about a tenth of a small step. Weights on a device are added up in one comparison, and
# the sums are compared in the next.
_OFTEN = 16
_RARELY = 128
_SAME_SETTINGS = (
    "the same learning rate and model.train() on all ranks; scheduler.step(weft.reduce(loss, ctx, 'mean')) where a "
    "schedule follows a loss, and that mean where it decides about zero_grad"
)
_SAME_WEIGHTS = (
    "weft.reduce(loss.detach(), ctx, 'mean') where a loss decides about zero_grad, clipping or a step; and what writes "
    "into weights or gradients after backward, on all ranks alike"
)
_MAX_SEARCHES = 8  # for a loop that changes parameters by hand, and would be searched for in each step


class StepOwner(Protocol):
    """A strategy, as its steps see it."""

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer cannot step on the parameters as the strategy keeps them."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step: reduce what is pending, or raise."""

    def is_stepped(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """All ranks are about to make step `number` of those that were seen."""

    def settings(self) -> Mapping[str, object]:
        """What of the module has to be equal on all ranks and may change: dropout, training or evaluation."""
        ...

    def same_weights(self) -> tuple[Ledger, Iterable[nn.Parameter]] | None:
        """Parameters that this rank steps on as other ranks do, and those ranks."""
        ...

    def same_gradients(self) -> Iterable[nn.Parameter]:
        """Parameters of which every rank has a gradient, or a part of it, if one has."""
        ...


class Steps:
    """The steps of the optimizers that hold the parameters of one strategy.

    Attributes:
        number: How many were seen.
        changed: Whether parameters had changed without a step at the last look.
    """

    def __init__(
        self, what: str, owner: StepOwner, group: dist.ProcessGroup, peers: Ledger, module: nn.Module | None = None
    ) -> None:
        """Begin to see steps.

        Args:
            what: Name of the strategy.
            owner: The strategy.
            group: Its ranks.
            peers: The same ones.
            module: Whose parameters an optimizer may hold that weft was not given; None: every one is attached.
        """
        self.number = 0
        self.changed = False
        self._what = what
        self._owner = weakref.ref(owner)
        self._group: dist.ProcessGroup | None = group
        self._peers = peers
        self._seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, _WatchedOptimizer] = weakref.WeakKeyDictionary()
        self._searches_left = _MAX_SEARCHES
        self._looked = False
        self._version = self._number = 0  # of a parameter, and of steps, at the last look
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._module = None if module is None else weakref.ref(module)
        self._hooks = (
            () if module is None else (before_every_step(self, Steps._see), after_every_step(self, Steps._note_fused))
        )

    def search(self, parameters: Iterable[nn.Parameter]) -> None:
        """Find the optimizers that hold `parameters`, all those of the strategy."""
        for optimizer in optimizers_of(parameters):
            self.attach(optimizer)

    def look(self, first: nn.Parameter | None, parameters: Callable[[], Iterable[nn.Parameter]]) -> bool:
        """Search in the first call, and when a parameter has changed although no step was seen.

        Args:
            first: The parameter, whose version tells of changes.
            parameters: All of them.

        Returns:
            Whether optimizers were searched for; not any more when that was often in vain.
        """
        version = -1 if first is None else torch_internals.VERSION.of(first)
        self.changed = self._looked and version != self._version and self.number == self._number
        searches = not self._looked or (self.changed and self._searches_left > 0)
        if searches:
            self._searches_left -= self.changed
            self.search(parameters())
            self._looked = True
        self._version, self._number = version, self.number
        return searches

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """See the steps of this optimizer."""
        if optimizer not in self._seen:
            steps = optimizer.register_step_pre_hook(self._before)
            # First of all: other hooks read gradients, which may be pending.
            torch_internals.STEP_PRE_HOOKS.of(optimizer).move_to_end(steps.id, last=False)
            files = optimizer.register_state_dict_post_hook(partial(refuse_optimizer_file, self._what))
            self._seen[optimizer] = _WatchedOptimizer((steps, files))

    def check_called(self) -> None:
        """Raise if an optimizer that is to step on parts has stepped, and torch has called no hook on it.

        Raises:
            NotSynchronized: It has; as every rank has done the same, on all of them.
        """
        for optimizer in () if self.number else self._seen:
            if any(isinstance(one, StepsOnOthers) and one.is_left_out(optimizer) for one in step_hooks(optimizer)):
                kind = type(optimizer).__name__
                raise NotSynchronized(
                    f"{self._what}: {kind} steps on whole parameters",
                    found=f"state of whole parameters after a step, and no hook on {kind} was called; "
                    f"torch {torch.__version__}",
                    expected="the step of the class, around which torch calls hooks: they let it step on a part",
                    fix=f"optimizer.step()  # of {kind} itself; or pip install 'torch=={TESTED_TORCH[-1]}'",
                )

    def check_other(self, optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
        """Raise if an optimizer that holds nothing of the module was meant for it.

        Raises:
            ContractError: The module has gradients and no optimizer, and this one has no gradients.
        """
        held = parameters_of(optimizer)
        if self.number or len(self._seen) or self._group is None or any(p.grad is not None for p in held):
            return  # a module that was stepped on had an optimizer, which may be gone
        if any(p.grad is not None for p in module.parameters()):
            kind = type(optimizer).__name__
            of = "torch.optim." if type(optimizer).__module__.startswith("torch.optim.") else ""
            raise ContractError(
                f"{self._what}: {kind} updates none of the parameters of {type(module).__name__}",
                found=f"{len(held)} parameters without gradients in the optimizer, of another model or of an earlier "
                "one; and gradients in the module, which no optimizer holds",
                expected="an optimizer over the parameters of the module that is trained",
                fix=f"optimizer = {of}{kind}(model.parameters())  # after the model has its final form",
            )

    def release(self) -> None:
        """Take the hooks off and let the process group go."""
        for seen in self._seen.values():
            for handle in seen.handles:
                handle.remove()
        self._seen.clear()
        for hook in self._hooks:
            hook.release()
        self._group = None

    def _see(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer is about to step: attach it before its first step, if it holds parameters of the module.

        One whose steps are seen steps on tensors of one kind.
        """
        module = None if self._module is None else self._module()
        if module is None:
            return
        if optimizer not in self._known:
            self._known.add(optimizer)
            wanted = {id(p) for p in module.parameters()}
            if any(id(p) in wanted for p in parameters_of(optimizer)):
                self.attach(optimizer)
            else:
                self.check_other(optimizer, module)
        seen = self._seen.get(optimizer)
        if seen is not None and any(is_sharded(p) for p in parameters_of(optimizer)):  # no hook on it has run yet
            from weft.engines.torch.sharded_step.one_kind import step_on_one_kind  # noqa: PLC0415  (DTensors are there)

            seen.handles += step_on_one_kind(optimizer)

    def _note_fused(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the versions of parameters tell of every step of ours: torch's fused kernels leave them as they are."""
        if optimizer in self._seen:
            fused = (entry["params"] for entry in optimizer.param_groups if entry.get("fused"))
            torch.autograd.graph.increment_version([p for held in fused for p in held if p.grad is not None])

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner = self._owner()
        if owner is None or self._group is None:
            return None
        owner.check_optimizer(optimizer)
        owner.before_step(optimizer)
        self.number += 1
        self._compare(optimizer, owner)
        owner.is_stepped(self.number, optimizer)
        # The mean over the ranks, so that optimizers that compare losses decide alike.
        return replace_closure(args, kwargs, lambda closure: lambda: self._mean(closure(), optimizer))

    def _compare(self, optimizer: torch.optim.Optimizer, owner: StepOwner) -> None:
        """Compare settings with those of the other ranks, of which a different one lets weights drift; and weights."""
        seen = self._seen.setdefault(optimizer, _WatchedOptimizer())  # a wrapper may have the hooks of an optimizer
        seen.steps = number = seen.steps + 1
        what = f"step {number} of {type(optimizer).__name__}"
        compares = number <= _OFTEN or not number % (_OFTEN if number <= _RARELY else _RARELY)
        if compares:
            held = set(map(id, parameters_of(optimizer)))
            seen.counted = [p for p in owner.same_gradients() if id(p) in held]
        self._count_gradients(seen, what)
        if not compares:
            return
        facts = {**_settings(optimizer), **owner.settings(), "gradients stepped on so far": seen.gradients}
        if number == 1:
            self._peers.agree(what, facts, fix=_SAME_SETTINGS)
            return
        self._peers.compare(what, facts, fix=_SAME_SETTINGS)
        peers, weights = owner.same_weights() or (self._peers, ())
        parts = [part for p in weights if can_be_read(part := local(p.detach()))]
        if any(part.is_cuda for part in parts) and torch.cuda.is_current_stream_capturing():
            return  # nothing is waited for while a graph of the step is captured
        begun, seen.begun = seen.begun, None
        if begun is not None:
            begun()
        if not parts:
            return
        read = begin_checksums(parts)

        def compare_weights() -> None:
            peers.compare(f"weights before {what}", {"a sum of their bits": sum(read())}, fix=_SAME_WEIGHTS)
            peers.finish()  # what was noted last would be looked at in the next comparison

        if all(part.device.type == "cpu" for part in parts):
            compare_weights()
        else:  # this step would wait for the device
            seen.begun = compare_weights

    def _count_gradients(self, seen: _WatchedOptimizer, what: str) -> None:
        """Meet the other ranks where some gradients are gone, or others are there: steps may send what has any."""
        count, before = sum(p.grad is not None for p in seen.counted), seen.count
        seen.count = count
        seen.gradients += count
        if seen.steps > 1 and count != before and seen.changes < _OFTEN:
            seen.changes += 1
            self._peers.meet(f"{what}, with {count} gradients, {before} before", None)

    def _mean(self, loss: Any, optimizer: torch.optim.Optimizer) -> Any:
        if self._group is None or not isinstance(loss, (float, torch.Tensor)):
            return loss
        # A Python float has 64 bits; with fewer, a line search would decide otherwise than in one process.
        if isinstance(loss, float):
            device = next((p.device for p in parameters_of(optimizer) if not p.is_meta), None)
            mean = torch.tensor(loss, dtype=torch.float64, device=device)
        else:
            mean = loss.detach().clone()
        dist.all_reduce(mean, group=self._group)
        mean /= dist.get_world_size(self._group)
        return float(mean) if isinstance(loss, float) else mean


@dataclass
class _WatchedOptimizer:
    """What is kept of one optimizer.

    Attributes:
        handles: The hooks on it.
        steps: How many it has made.
        counted: Parameters whose gradients are counted.
        count: How many of them there were in the last step.
        changes: How often that was another number than before.
        gradients: How many there were in all steps together.
        begun: A comparison of weights that the device may not be ready for.
    """

    handles: tuple[RemovableHandle, ...] = ()
    steps: int = 0
    counted: Sequence[nn.Parameter] = ()
    count: int = 0
    changes: int = 0
    gradients: int = 0
    begun: Callable[[], None] | None = None


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """The numbers and switches of an optimizer's groups; those that lie on an accelerator are not read."""
    facts: dict[str, object] = {"optimizer": type(optimizer).__name__}
    for number, entry in enumerate(optimizer.param_groups):
        for name, value in entry.items():
            plain = len(value) if name == "params" else _plain(value)
            if plain is not None:
                facts[f"group {number}: {'parameters' if name == 'params' else name}"] = plain
    return facts


def settings_of(module: nn.Module) -> dict[str, object]:
    """What of a module makes it compute otherwise on one rank, and may be changed at any time."""
    parts: list[tuple[str, Any]] = list(module.named_modules())
    return {
        "trained parameters": sum(p.requires_grad for p in module.parameters()),
        "training": f"{sum(part.training for _, part in parts)} of {len(parts)} parts",
        "dropout": {name: float(part.p) for name, part in parts if torch_internals.dropout.holds(part)},
    }


def _plain(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if isinstance(value, (bool, int, float, str)) else None


def check_same_gradients(what: str, named: Iterable[tuple[str, torch.Tensor]], peers: Ledger) -> None:
    """Raise if gradients that no backward pass has reduced differ between the ranks. Collectives: none; a meeting.

    A rank that comes here alone, while the others reduce gradients in backward, is found at the meeting; in a
    collective the two would wait for each other.

    Args:
        what: Name of the strategy, for the error text.
        named: Its parameters by name.
        peers: The ranks.

    Raises:
        NotSynchronized: On all ranks; a step would let their weights drift apart.
        PeerError: Another rank is in a backward pass.
    """
    gradients = {name: _values(p.grad) for name, p in named}
    sums = iter(checksums(values for values in gradients.values() if values is not None))
    mine = {name: None if values is None else next(sums) for name, values in gradients.items()}
    wrong = peers.differing("optimizer.step() without a backward pass", mine)
    if wrong:
        raise NotSynchronized(
            f"{what}: a step on gradients that were not averaged over the ranks",
            found=f"gradients that differ between ranks: {listed(wrong)}; set by hand, by torch.autograd.grad, "
            "or changed after a window was left early",
            expected="gradients that come from a backward pass, or are equal on all ranks",
            fix="loss.backward()  # or p.grad = weft.reduce(gradient, ctx, 'mean'); "
            "in a window, continue in place of break",
        )


def _values(gradient: torch.Tensor | None) -> torch.Tensor | None:
    if gradient is None:
        return None
    gradient = local(gradient.detach())
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return values + 0.0  # -0.0 becomes 0.0: the same gradient
