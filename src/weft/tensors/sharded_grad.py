"""A gradient of which this rank holds a piece, in memory that is not its own.

Stands in `p.grad` for a gradient that lies elsewhere. It has no values: what would read or change it as a
whole tensor raises and says what to call instead, so that nothing works on nothing. What works on every
element alike (`zero_`, `mul_`, `div_`, and their `_foreach` forms) works on the piece.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from weft import torch_internals
from weft.errors import ContractError
from weft.tensors.nested import tensors

_OPS = torch.ops.aten
_EACH = frozenset((_OPS.zero_.default, _OPS.mul_.Tensor, _OPS.mul_.Scalar, _OPS.div_.Tensor, _OPS.div_.Scalar))
_ADD = (_OPS.add.Tensor, _OPS.add_.Tensor)


@functools.cache
def _foreach() -> tuple[Any, ...]:
    """What works on the elements of many tensors, `zero_` first."""
    zero, mul, div = (one.found for one in torch_internals.FOREACH_OPS)
    return zero.default, mul.Scalar, mul.Tensor, div.Scalar, div.Tensor


class CutGradient(torch.Tensor):
    """The gradient of one parameter; see the module.

    Attributes:
        parameter_name: For errors.
        group: The ranks over which the pieces lie.
        spent: An optimizer's step has used it, and it is gone.
        cleared: It was set to zero after that.
        pending: What came in since, not reduced over the ranks.
    """

    parameter_name: str
    group: dist.ProcessGroup | None
    spent: bool
    cleared: bool
    pending: torch.Tensor | None
    _piece: Callable[[], torch.Tensor]

    @staticmethod
    def __new__(  # noqa: PYI034  (pyright takes no Self in a static method)
        cls: type[CutGradient],
        parameter: torch.Tensor,
        name: str,
        group: dist.ProcessGroup | None,
        piece: Callable[[], torch.Tensor],
    ) -> CutGradient:
        """A tensor without memory, of the parameter's shape."""
        made: CutGradient = torch_internals.make_subclass(
            cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
        )
        made.parameter_name, made.group, made._piece = name, group, piece
        made.spent, made.cleared, made.pending = False, False, None
        return made

    def piece(self) -> torch.Tensor:
        """What this rank holds, flat, in the memory where it lies.

        Raises:
            ContractError: A step has used it.
        """
        if self.spent:
            raise ContractError(
                f"the gradient of {self.parameter_name} was used by optimizer.step(), and is gone",
                found="a gradient between step() and zero_grad()",
                expected="gradients are read and clipped between backward and step()",
                fix="weft.clip_grads(model, ctx, max_norm=1.0)  # before optimizer.step()",
            )
        return self._piece()

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        del tensor_contents
        return f"CutGradient({self.parameter_name!r}{', spent' if self.spent else ''})"

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _nothing, ()

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Without the pieces of the other ranks there is nothing to copy."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is _OPS.detach.default:
            return args[0]
        if func in _ADD and torch_internals.graph_task_id() != -1 and isinstance(args[0], cls):
            return args[0]._take(args[1])  # autograd adds to the gradient there is
        if func is _OPS.zero_.default and isinstance(args[0], cls) and args[0].spent:
            args[0].cleared = True
            return args[0]
        if func in _EACH and isinstance(args[0], cls):
            func(args[0].piece(), *args[1:])
            return args[0]
        if func in _foreach():
            given: Sequence[torch.Tensor] = args[0]
            if func is _foreach()[0]:
                spent = [one for one in given if isinstance(one, cls) and one.spent]
                for one in spent:
                    one.cleared = True
                given = [one for one in given if not any(one is other for other in spent)]
            func([one.piece() if isinstance(one, cls) else one for one in given], *args[1:])
            return None
        names = [one.parameter_name for one in tensors(args) if isinstance(one, cls)]
        raise ContractError(
            f"the gradient of {names[0] if names else 'a parameter'} lies in pieces on all ranks",
            found=f"{func}, which would see nothing of it",
            expected="functions that know of pieces; torch.nn.utils.clip_grad_norm_ does not",
            fix="weft.clip_grads(model, ctx, max_norm=1.0), or weft.full_grads(model, ctx) to read them",
        )

    def _take(self, new: torch.Tensor) -> CutGradient:
        if self.spent and not self.cleared:
            raise ContractError(
                f"a second backward pass adds to the gradient of {self.parameter_name}, which a step has used",
                found="optimizer.step() without optimizer.zero_grad() after it",
                expected="zero_grad() between a step and the next backward pass",
                fix="optimizer.zero_grad()",
            )
        self.pending = new if self.pending is None else self.pending + new
        return self


def _nothing() -> None:
    """A pickled piece of a gradient is none."""
