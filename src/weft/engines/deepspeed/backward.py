"""Backward passes of a plain loop, as DeepSpeed's buffers see them.

Its own bookkeeping of backward passes is not used: it takes two forward passes before one backward for an error, and
keeps gradients that `zero_grad` should have dropped.

Hooks on parameters live in C++, where no collector looks: they hold this object weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn

from weft.engines.deepspeed.placeholders import GradientPlaceholders, is_local
from weft.engines.torch.hooks.backward_session import BackwardSession, inside_backward, when_entered
from weft.engines.torch.hooks.method_hooks import Removable
from weft.engines.torch.hooks.shared_buffers import SharedBuffers
from weft.errors import ContractError, UnusedParameters, listed
from weft.peers.ledger import Ledger
from weft.tensors.sharded_grad import CutGradient


@dataclass(eq=False)
class BackwardPasses:
    """The backward passes through one module: which gradients are reduced, and when.

    Attributes:
        stand_ins: What is left in `p.grad`.
        stage: 1, 2 or 3.
        peers: The same on the other ranks.
        shared: The module's buffers, which are made equal after each of them.
        enabled: Whether the next one reduces.
    """

    stand_ins: GradientPlaceholders
    stage: int
    peers: Ledger
    shared: SharedBuffers
    enabled: bool = True
    _due: bool = False  # the window owes a reduction
    _pending: bool = False  # gradients of this rank wait in `.grad`
    _reduced: set[nn.Parameter] = field(default_factory=set)  # in this backward pass
    _received: bool = False
    _passes: list[_ForwardPass] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.names, self.buffers = self.stand_ins.names, self.stand_ins.buffers
        self._session = BackwardSession(self._begin, self._end, rounds=1)

    def watch(self, removable: Removable) -> None:
        """Hook the parameters."""
        hook = _weakly(self, BackwardPasses.arrived)
        for parameter in self.names:
            removable.add(parameter.register_post_accumulate_grad_hook(hook).remove)

    def watch_output(self, output: Any) -> None:
        """The module was called: hook what it returned."""
        self.shared.watch(output)
        one = _ForwardPass()
        if torch.is_grad_enabled():
            when_entered(output, _weakly(self, lambda owner, _: owner.enter(one)))

    # -- windows ---------------------------------------------------------------------------------

    def begin_window(self) -> None:
        """Backward passes keep their gradients whole in `p.grad` from now on."""
        self.enabled, self._due = False, True

    def end_window(self) -> bool:
        """Reduce again; whether the window still owes a reduction."""
        self.enabled = True
        due, self._due = self._due, False
        return due

    def reduce_pending(self, what: str) -> None:
        """Reduce what any rank holds. Collectives: a meeting, and the messages of a backward pass."""
        if any(self.peers.meet(what, self.is_pending())):
            for parameter in self.names:
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            inside_backward(self._session.enter)

    def is_pending(self) -> bool:
        """Whether gradients of this rank wait to be reduced."""
        return self._pending and any(p.grad is not None for p in self.names)

    # -- one backward pass -----------------------------------------------------------------------

    def restart_if_torn(self) -> None:
        """If the last backward pass raised, what it left is of no use."""
        if self._session.was_torn():
            self.stand_ins.start_anew()
            self._passes.clear()

    def enter(self, one: _ForwardPass) -> None:
        """Backward comes back to the output of a forward pass."""
        if one not in self._passes:
            if one.used:
                self._raise_second()
            self._passes.append(one)
        self.restart_if_torn()
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
        self.stand_ins.take_pending()
        kept = self.stand_ins.settle()
        if self.enabled:
            self.buffers.begin()
            self.stand_ins.make_way(kept)

    def _reduce(self, parameter: nn.Parameter) -> None:
        gradient = parameter.grad
        if isinstance(gradient, CutGradient):
            parameter.grad, gradient.pending = gradient.pending, None
        self._reduced.add(parameter)
        self.buffers.reduce(parameter)

    def _end(self) -> None:
        passes, self._passes = self._passes, []
        if self._received:
            for one in passes:
                one.used = True
        self.shared.passed(retained=False)  # there is no second pass
        self._pending = not self.enabled
        if self._pending:
            if self.stage == 3:
                self.buffers.end()
            return
        self._due = False
        for parameter in self.names:
            if is_local(parameter.grad) and parameter not in self._reduced:
                self._reduce(parameter)
        self.buffers.finish()
        self.buffers.end()
        self.stand_ins.put(self._reduced)
        if self.stand_ins.view.group is not None:
            self.shared.broadcast(self.stand_ins.view.group)
        missing = [name for p, name in self.names.items() if p.requires_grad and p not in self.stand_ins]
        if missing and self._received:
            raise_unused(self.stand_ins.class_name, missing)

    def _raise_second(self) -> NoReturn:
        raise ContractError(
            f"a second backward pass through one forward pass of {self.stand_ins.class_name}",
            found="retain_graph=True, or two losses of one output with a backward each",
            expected="one backward per forward pass: DeepSpeed averages gradients as they come, and frees weights",
            fix="(loss_a + loss_b).backward()",
        )


def raise_unused(class_name: str, names: Sequence[str]) -> NoReturn:
    """Raise because parameters got no gradient.

    Raises:
        UnusedParameters: Always.
    """
    raise UnusedParameters(
        f"zero_partition: {len(names)} parameter(s) of {class_name} got no gradient",
        found=listed(names),
        expected="a gradient for every trained parameter: DeepSpeed steps on all of them together",
        fix='requires_grad_(False) on them before zero_partition, or engine="torch", unused="zero"',
    )


class _ForwardPass:
    """One forward pass of the module, and whether a backward pass came through it."""

    __slots__ = ("__weakref__", "used")

    def __init__(self) -> None:
        self.used = False


def _weakly(owner: BackwardPasses, call: Callable[[BackwardPasses, Any], None]) -> Callable[[torch.Tensor], None]:
    """A hook that calls a function with `owner`, as long as that is alive, and a tensor."""
    holder = weakref.ref(owner)

    def hook(tensor: torch.Tensor) -> None:
        alive = holder()
        if alive is not None:
            call(alive, tensor)

    return hook
