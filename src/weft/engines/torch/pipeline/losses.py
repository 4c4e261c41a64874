"""The loss of a pass over the micro-batches: what the last stage computes, and how all ranks learn of it.

And that of a pipeline of one stage, which is a module whose calls give a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from weft.engines.torch.hooks.method_hooks import Attached, attach
from weft.engines.torch.pipeline.batch_parts import NOTHING, Inputs, inputs_of
from weft.errors import ContractError, ProbeFailed, type_error
from weft.tensors.dtensor import local
from weft.tensors.messages import control_device
from weft.tensors.nested import map_tensors

LossFunction = Callable[[Any, Any], Any]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ROUNDING = MappingProxyType(dict(zip(_DTYPES, (1e-11, 1e-5, 1e-2, 2e-3), strict=True)))
FORMS = ("tensor", "output", "dict")


class SingleStage(Attached):
    """Calls of a module take a target."""

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Any] | None) -> None:
        self._loss = loss
        super().__init__()
        attach(module, self._removable, around=self._around, methods=["forward"])

    def _around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._loss is not None
        inputs = inputs_of(call, args, kwargs, has_loss=True)
        output = call(*inputs.args, **inputs.kwargs)
        if inputs.target is NOTHING:
            return output
        value = self._loss(output, inputs.target)
        return value[0] / value[1] if isinstance(value, (tuple, list)) and len(value) == 2 else value


class MicroBatchLoss(NamedTuple):
    """The loss of one micro-batch.

    Attributes:
        value: One number: a mean, or the sum of `terms` terms.
        terms: The number of its terms, if it tells that.
        form: Index into `FORMS`: how it came.
    """

    value: torch.Tensor
    terms: torch.Tensor | None
    form: int

    def mean(self) -> torch.Tensor:
        """The mean over its terms, 0-d."""
        value = self.value.reshape(())
        return value if self.terms is None else (value / self.terms).to(value.dtype)


class Result(NamedTuple):
    """What all ranks learn of a pass.

    Attributes:
        loss: Of the batch, 0-d.
        scale: What gradients are multiplied by.
        form: Index into `FORMS`: what the call returns.
        is_mean: Whether it is the mean over the micro-batches.
        whole: The loss that the last stage computed of the whole batch at once; None if it did not.
        checked: What is to be equal to it: `loss`, or without dropout.
    """

    loss: torch.Tensor
    scale: torch.Tensor
    form: int
    is_mean: bool
    whole: torch.Tensor | None
    checked: torch.Tensor


def loss_of(output: Any, part: Inputs, function: LossFunction | None, device: torch.device) -> MicroBatchLoss:
    """The loss of a micro-batch.

    Args:
        output: Of the last stage.
        part: The micro-batch.
        function: Of the output and the target; None: the output has the loss.
        device: Of this rank.

    Raises:
        TypeError: There is no loss.
    """
    form, value = 0, output
    if function is not None:
        # As after the call of a module with a precision: in float32, and without autocast.
        output = _wide(output) if torch.is_autocast_enabled(device.type) else output
        with torch.autocast(device.type, enabled=False):
            value = function(output, part.target)
    elif isinstance(output, Mapping):
        form, value = (1 if hasattr(output, "loss") else 2), output.get("loss")
    elif hasattr(output, "loss"):
        form, value = 1, output.loss
    count = None
    if isinstance(value, (tuple, list)) and len(value) == 2 and function is not None:
        value, terms = value
        wide = torch.float64 if isinstance(terms, float) else None  # torch would round it to 32 bits
        count = torch.as_tensor(terms, dtype=wide, device=device)
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise type_error(
            "pipeline: the call gives no loss",
            found=type(value).__name__ + shape,
            expected="a forward that returns the loss (for transformers: labels=...), or loss=fn(output, target), "
            "which returns one number, or a sum and the number of its terms",
            fix="weft.pipeline(model, ctx, loss=torch.nn.functional.cross_entropy); model(x, y)",
        )
    return MicroBatchLoss(value, count, form)


def batch_loss(losses: Sequence[MicroBatchLoss], whole: torch.Tensor | None, *, is_sum: bool) -> Result:
    """The loss of the batch.

    Args:
        losses: Of the micro-batches.
        whole: The loss of the whole batch at once, if it was computed.
        is_sum: Whether the losses are parts of one sum.
    """
    total, counts = torch.stack([loss.value.reshape(()) for loss in losses]), [loss.terms for loss in losses]
    if is_sum:
        scale = torch.ones((), device=total.device, dtype=torch.float64)
    elif counts[0] is not None:
        scale = 1 / torch.stack([count.reshape(()).to(torch.float64) for count in counts if count is not None]).sum()
    else:
        scale = torch.full((), 1 / len(total), device=total.device, dtype=torch.float64)
    loss = (total.sum() * scale).to(total.dtype)
    is_mean = not is_sum and counts[0] is None
    return Result(loss, scale, losses[0].form, is_mean, None if whole is None else whole.to(loss.dtype), loss)


def share_result(found: Result | None, device: torch.device, group: dist.ProcessGroup, source: int) -> Result:
    """Tell all ranks what the last stage found, on the rank `source` of the group.

    Collectives: one broadcast; and one of what the host reads, where the CPU has a backend beside the device's.
    """
    wide = torch.float32 if device.type == "mps" else torch.float64
    control = control_device(group, device)
    words = torch.zeros(8, dtype=wide, device=device)
    numbers, facts = words[:4], words[4:] if control == device else torch.zeros(4, dtype=wide, device=control)
    if found is not None:
        numbers[0], numbers[1], numbers[2] = found.loss, found.scale, found.loss if found.whole is None else found.whole
        numbers[3] = found.checked
        facts[0], facts[1] = found.form, _DTYPES.index(found.loss.dtype)
        facts[2], facts[3] = found.is_mean, found.whole is not None
    for message in (words,) if control == device else (numbers, facts):
        dist.broadcast(message, group=group, group_src=source)
    told: Any = getattr(group, "told", None)
    if told is not None:  # in a rehearsal, messages have no values
        result: Result = told(found, source)
        return result
    form, dtype, is_mean, has_whole = map(int, facts.tolist())
    loss, whole, checked = (numbers[n].to(_DTYPES[dtype]) for n in (0, 2, 3))
    return Result(loss, numbers[1], form, bool(is_mean), whole if has_whole else None, checked)


def check_mean_is_batch_loss(result: Result) -> None:
    """Raise if the mean over the micro-batches is not the loss of the whole batch, where that was computed.

    Raises:
        ProbeFailed: It is not.
    """
    if result.whole is None:
        return
    loss, whole = torch.stack([result.checked, result.whole]).tolist()  # one read of the host
    is_equal = loss == whole or (loss != loss and whole != whole)  # infinite or no number on both sides
    off, limit = abs(loss - whole), _ROUNDING[result.loss.dtype] * max(abs(loss), abs(whole))
    if not is_equal and not (math.isfinite(off) and off <= limit):
        raise ProbeFailed(
            "pipeline: the mean over the micro-batches is not the loss of the batch",
            found=f"{loss:.12g} over the micro-batches, {whole:.12g} of the whole batch",
            expected="a loss that is a mean over rows, or one that tells its number of terms",
            fix="weft.pipeline(..., loss=lambda out, y: (cross_entropy(out, y, reduction='sum'), (y != -100).sum()))"
            '  # or, for a loss that is no mean over rows, micro_batches=1, schedule="gpipe"',
        )


def with_gradients(
    result: Result, parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> torch.Tensor:
    """The loss of a pass, whose backward brings parameters the gradients that were computed already."""
    anchor = torch.zeros((), device=result.loss.device, requires_grad=True)
    made: torch.Tensor = _LossOfParameters.apply(result, gradients, anchor, *parameters)  # type: ignore[no-untyped-call]
    return made


class _LossOfParameters(torch.autograd.Function):
    """The loss as a function of the parameters of this rank, whose gradients are known."""

    @staticmethod
    def forward(
        ctx: Any, result: Result, gradients: Sequence[torch.Tensor], anchor: torch.Tensor, *parameters: torch.Tensor
    ) -> torch.Tensor:
        del anchor, parameters  # that the loss depends on them is all
        ctx.gradients, ctx.scale = gradients, result.scale
        return result.loss.clone()

    @staticmethod
    def backward(ctx: Any, arrived: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients = ctx.gradients
        if torch.is_grad_enabled() or gradients is None:
            raise ContractError(
                "pipeline: a loss has one backward pass, without a graph of its own",
                found="a second backward pass of one loss" if gradients is None else "create_graph=True",
                expected="one backward pass per call: the call computes the gradients, and this one uses them up",
                fix="loss = model(x, y); loss.backward()",
            )
        ctx.gradients = None
        factor = arrived * ctx.scale.to(arrived.dtype)
        with torch.no_grad():
            for gradient in gradients:
                local(gradient).mul_(factor)
        return None, None, None, *gradients


def _wide(output: Any) -> Any:
    return map_tensors(lambda t: t.float() if t.dtype in _DTYPES[2:] else t, output)
