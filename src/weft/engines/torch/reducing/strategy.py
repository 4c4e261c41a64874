"""What `replicate` and `fully_shard` have in common: they reduce the gradients of one module over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from weft.engines.options import StrategyOptions
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.hooks.first_steps import FirstSteps
from weft.engines.torch.hooks.method_hooks import Removable
from weft.engines.torch.hooks.shared_buffers import SharedBuffers
from weft.engines.torch.steps.watch import Steps, settings_of
from weft.errors import NotSynchronized, UnusedParameters, listed
from weft.peers.ledger import Ledger
from weft.tensors.dtensor import is_sharded


class Strategy:
    """A strategy on one module.

    Attributes:
        enabled: Whether the next backward pass communicates.
        mean_over: Number of ranks the gradients are averaged over.
        finds_unused: Whether parameters may be without gradient, which then counts as zero.
        compares_weights: Whether weights are compared with those of other ranks now and then.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup, options: StrategyOptions, peers: Ledger) -> None:
        self.enabled = self.compares_weights = True
        self.mean_over = dist.get_world_size(group)
        self._what = options.strategy
        self._class_name = type(module).__name__
        self._module = weakref.ref(module)
        self._group: dist.ProcessGroup | None = group
        self._peers = peers
        self._due = False  # the running window owes a reduction
        self._reductions = 0
        self._place = 0  # of the last one among those of all modules
        self._buffers = SharedBuffers(module, shared=options.buffers == "broadcast")
        self.finds_unused = options.unused == "zero"
        self._removable = Removable()
        self._first_steps = FirstSteps(self._what, self._class_name, peers)
        self._steps = Steps(self._what, self, group, peers, module)

    _trained: Any = None  # the parameters: `first()`, and those with the `same_on_all()` ranks

    def begin_window(self) -> None:
        """Backward passes keep their gradients on this rank from now on."""
        self._due = True
        self._first_steps.begin_window()
        self._synchronize(enabled=False)

    def last_backward(self) -> None:
        """The next backward pass reduces the gradients of the window."""
        self._synchronize(enabled=True)

    def _close_window(self) -> bool:
        """The window has ended: whether it owes a reduction."""
        self._synchronize(enabled=True)
        owes, self._due = self.owes, False
        return owes

    def _synchronize(self, *, enabled: bool) -> None:
        self.enabled = enabled

    @property
    def owes(self) -> bool:
        """Whether no backward pass has reduced the gradients of the running window."""
        return self._due and self._group is not None

    def release(self) -> None:
        """Let the process group go; backward raises from now on."""
        self._steps.release()
        self._group = None

    def undo(self) -> None:
        """Take everything off the module again."""
        self._removable.remove()
        self.release()

    def reduced_in_backward(self) -> Sequence[torch.Tensor]:
        """The parameters whose gradients are reduced and handed over while backward runs, each once."""
        return ()

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise if an optimizer cannot step on shards, or would come to other numbers."""
        if any(is_sharded(p) for p in parameters_of(optimizer)):
            from weft.engines.torch.sharded_step import full_params  # noqa: PLC0415  (DTensors are there)

            full_params.check_steps_on_shards(self._what, optimizer)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        raise NotImplementedError

    def is_stepped(self, number: int, optimizer: torch.optim.Optimizer) -> None:
        """All ranks are about to make step `number`; see `FirstSteps`."""
        trained = self._trained
        self._first_steps.compare(number, {} if number > 1 or trained is None else trained.same_on_all())
        if trained is not None:
            self._first_steps.note_step(number, trained.first(), optimizer)

    def settings(self) -> Mapping[str, object]:
        """What of the module has to be equal on all ranks and may change."""
        module = self._module()
        # A rank that skipped a backward pass would otherwise meet the next one of the others with its own. So would
        # two modules that are reduced in another order.
        facts = {"gradients averaged so far": self._reductions, "of all modules": self._place}
        return facts if module is None else {**facts, **settings_of(module)}

    def same_weights(self) -> tuple[Ledger, Iterable[nn.Parameter]] | None:
        """Parameters that this rank steps on as other ranks do, and those ranks."""
        if self._trained is None or not self.compares_weights:
            return None
        return self._peers, self._trained.same_on_all().values()

    def same_gradients(self) -> Iterable[nn.Parameter]:
        """Parameters of which every rank has a gradient, or a part of it, if one has."""
        return () if self._trained is None else self._trained.same_on_all().values()

    def _note_reduction(self) -> None:
        self._due = False
        self._reductions += 1
        self._place = self._peers.next_reduction()
        self._steps.check_called()

    def _pass_on_buffers(self, retains_graph: Callable[[], bool], *, reduced: bool = True) -> None:
        """Broadcast buffers after a backward pass, if it was reduced; see [Note: passes that wait]."""
        if self._buffers.shared:
            self._buffers.passed(retained=retains_graph())
            if reduced and self._group is not None:
                self._first_steps.note_buffers(*self._buffers.by_rule())
                self._buffers.broadcast(self._group)

    def _before(self, module: Any = None, args: Any = (), kwargs: Any = None) -> None:
        """The module is about to be called."""
        if self._first_steps.wants_inputs and torch.is_grad_enabled():
            self._first_steps.see_inputs(self._module(), args, kwargs)

    def _raise_unused(self, names: Sequence[str], *, follows: bool = False) -> NoReturn:
        error = unused_error(self._what, self._class_name, names, "rank", follows=follows)
        self._peers.report(error)
        raise error

    def _raise_in_window(self) -> NoReturn:
        raise NotSynchronized(
            f"{self._what}: a step on gradients of {self._class_name} before they were averaged over the ranks",
            found="an optimizer step in the middle of a window",
            expected="one optimizer step after the last micro-batch of a window",
            fix="for batch in window: ...; then optimizer.step(), after the inner loop",
        )


def unused_error(
    what: str, class_name: str, names: Sequence[str], where: str, *, follows: bool = False
) -> UnusedParameters:
    """The error for parameters that got no gradient, which they should on every rank, or replica.

    Args:
        what: The strategy.
        class_name: Of the module.
        names: Of the parameters.
        where: What each of them needs a gradient on.
        follows: They have one of another backward pass in this step.
    """
    return UnusedParameters(
        f"{what}: {len(names)} parameter(s) of {class_name} got no gradient in this backward pass",
        found=listed(names),
        expected=f"every parameter that requires a gradient takes part in the loss, on every {where}",
        fix="add the losses up and call backward once; the passes before this one gave them gradients"
        if follows
        else f'weft.{what}(..., unused="zero"), or requires_grad_(False) on them; on all of '
        f"{class_name} while the loss of another model flows through it (a critic, a discriminator)",
    )
