"""What a call without gradients returns on every rank: the outputs of the micro-batches, joined."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from typing import Any

import torch

from weft.engines.torch.pipeline.losses import Loss
from weft.tensors.nested import tensors

__all__ = ["as_output", "form_of", "joined", "sendable"]


def sendable(output: Any, loss: Loss | None, *, is_sum: bool) -> Any:
    """The output of a micro-batch, in containers that can be sent.

    Args:
        output: Of the last stage.
        loss: What was made of it, if the call returns that.
        is_sum: Whether a loss in the output is part of one sum.
    """
    if loss is not None:
        value = loss.value
        return [value.reshape(()), torch.ones((), device=value.device) if loss.terms is None else loss.terms]
    if isinstance(output, Mapping):
        found = {key: value for key, value in output.items() if any(True for _ in tensors(value))}
        kind = "output" if hasattr(output, "to_tuple") else "dict"
        return {"form": kind, "is_sum": is_sum, "values": found}
    return output


def form_of(loss: torch.Tensor, form: str) -> Any:
    """The loss as the module returns it."""
    return loss if form == "tensor" else _output({"loss": loss}, form)


def _output(values: dict[str, Any], form: str) -> Any:
    if form == "dict":
        return values
    kind: Any = getattr(sys.modules.get("transformers.utils"), "ModelOutput", None)
    return types.SimpleNamespace(**values) if kind is None else kind(**values)


def joined(outputs: list[Any]) -> Any:
    """The output of the batch, from those of its micro-batches."""
    first = outputs[0]
    if isinstance(first, dict) and set(first) == {"form", "is_sum", "values"}:
        names = list(first["values"])
        values = {
            name: _joined_tensors([one["values"][name] for one in outputs], is_sum=first["is_sum"]) for name in names
        }
        return {**first, "values": values}
    if isinstance(first, list) and len(first) == 2 and all(isinstance(t, torch.Tensor) and not t.dim() for t in first):
        totals, counts = zip(*outputs, strict=True)
        return torch.stack(totals).sum() / torch.stack(counts).sum().to(totals[0].dtype)
    return _joined_tensors(outputs, is_sum=False)


def _joined_tensors(parts: list[Any], *, is_sum: bool) -> Any:
    first = parts[0]
    if isinstance(first, torch.Tensor):
        if first.dim():
            return torch.cat(parts)
        stacked = torch.stack(parts)
        return stacked.sum() if is_sum else stacked.mean()
    if isinstance(first, Mapping):
        return {key: _joined_tensors([part[key] for part in parts], is_sum=is_sum) for key in first}
    if isinstance(first, (list, tuple)):
        return type(first)(_joined_tensors(list(one), is_sum=is_sum) for one in zip(*parts, strict=True))
    return first


def as_output(value: Any) -> Any:
    """What `joined` made and the ranks have received, as the module returns it."""
    if isinstance(value, dict) and set(value) == {"form", "is_sum", "values"}:
        return _output(value["values"], value["form"])
    return value
