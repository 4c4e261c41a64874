"""What stands in `p.grad` for gradients that lie in DeepSpeed's buffers.

[Note: the truth is in p.grad] As in torch, `p.grad` says what gradient a parameter has. Between backward
passes it holds a `CutGradient` in place of one that lies in DeepSpeed's buffers. Setting it to None, as
`zero_grad`, a policy for gradients that are not finite or the user does, drops the gradient: this is seen at the
next backward pass or step. After a step it is one that is spent, so that a forgotten `zero_grad` is seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn

from weft.engines.deepspeed.buffers import Buffers
from weft.engines.deepspeed.library import GroupView
from weft.errors import ContractError
from weft.tensors.sharded_grad import CutGradient


@dataclass(eq=False)
class GradientPlaceholders:
    """The stand-ins of one module's gradients.

    Attributes:
        class_name: Of the module, for errors.
        names: Of the parameters that are stepped on.
        buffers: Where gradients and weights lie.
        view: Of the ranks that divide.
    """

    class_name: str
    names: Mapping[nn.Parameter, str]
    buffers: Buffers
    view: GroupView
    _held: dict[nn.Parameter, CutGradient] = field(default_factory=dict)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return parameter in self._held

    def named(self, name: str) -> tuple[nn.Parameter, torch.Tensor] | None:
        """The parameter of this name and this rank's piece of its gradient; None if that lies elsewhere."""
        for parameter, held in self._held.items():
            if self.names[parameter] == name and parameter.grad is held:
                return parameter, held.piece()
        return None

    def settle(self) -> list[nn.Parameter]:
        """Forget the gradients that were set to None, and return the parameters of the others.

        Raises:
            ContractError: A step has used them.
        """
        kept = [p for p, held in self._held.items() if p.grad is held]
        if any(self._held[p].spent for p in kept):
            raise ContractError(
                f"the gradients of {self.class_name} were used by a step, and were not dropped since",
                found="optimizer.step() without optimizer.zero_grad() after it",
                expected="zero_grad() between a step and what comes next: DeepSpeed keeps no gradient after a step",
                fix="optimizer.zero_grad()",
            )
        if not kept and self._held:
            self.drop()
        for parameter in set(self._held) - set(kept):
            if not self._held[parameter].spent:
                self.buffers.gradient(parameter).zero_()
            del self._held[parameter]
        return kept

    def take_pending(self) -> None:
        """Put in place what came in after a step whose gradients were set to zero."""
        for parameter, held in self._held.items():
            if held.cleared and parameter.grad is held:
                parameter.grad = held.pending

    def make_way(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let autograd put the next gradient of these parameters into `p.grad`."""
        for parameter in parameters:
            if self._held[parameter].pending is None:
                parameter.grad = None

    def put(self, reduced: Iterable[nn.Parameter]) -> None:
        """Stand in for the gradients that were reduced now, and for those of earlier passes."""
        for parameter in reduced:
            if parameter not in self._held:
                self._held[parameter] = self._stand_in(parameter)
        for parameter, held in self._held.items():
            if held.shape != parameter.shape:  # in stage 3 a parameter may be gathered, or not
                self._held[parameter] = self._stand_in(parameter)
            parameter.grad = self._held[parameter]

    def spend(self) -> None:
        """Stand in for the gradients that a step has used."""
        for parameter in self.names:
            held = self._held[parameter] = self._stand_in(parameter)
            held.spent = True
            parameter.grad = held

    def drop(self) -> None:
        """Forget all gradients in the buffers."""
        self._held.clear()
        self.buffers.drop()

    def start_anew(self) -> None:
        """Forget what a backward pass that raised has left."""
        for parameter in self.names:
            parameter.grad = None
        self._held.clear()
        self.buffers.reset()

    def _stand_in(self, parameter: nn.Parameter) -> CutGradient:
        piece = partial(_piece, weakref.ref(self.buffers), weakref.ref(parameter))
        return CutGradient(parameter, self.names[parameter], self.view.group, piece)


def is_local(gradient: torch.Tensor | None) -> bool:
    """Whether there is a gradient, or a part of one, that is not reduced over the ranks."""
    return gradient is not None and (not isinstance(gradient, CutGradient) or gradient.pending is not None)


def _piece(buffers: weakref.ref[Buffers], parameter: weakref.ref[nn.Parameter]) -> torch.Tensor:
    # A gradient hangs on its parameter in C++: strong references here would close a cycle that is never collected.
    alive, of = buffers(), parameter()
    assert alive is not None
    assert of is not None
    return alive.gradient(of)
