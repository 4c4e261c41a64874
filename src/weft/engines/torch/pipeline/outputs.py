"""What a call without gradients returns on every rank: the outputs of the micro-batches, joined."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from weft.engines.torch.pipeline.losses import MicroBatchLoss
from weft.errors import ContractError
from weft.tensors.nested import map_tensors, tensors

_SENT = frozenset({"form", "is_sum", "values"})


def sendable(output: Any, loss: MicroBatchLoss | None, *, is_sum: bool) -> Any:
    """The output of a micro-batch, in containers that can be sent.

    Args:
        output: Of the last stage.
        loss: What was made of it, if the call returns that.
        is_sum: Whether a loss in the output is part of one sum.
    """
    if loss is not None:
        value = loss.value.reshape(())
        return value if loss.terms is None else {"form": "terms", "is_sum": True, "values": [value, loss.terms]}
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


def batch_output(outputs: Sequence[Any]) -> Any:
    """The output of the batch, from those of its parts, of which the first has twice as many rows as the others.

    Raises:
        ContractError: Something in it has no dimension of rows, and is another one for each part.
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    dims = row_dims(outputs[1], first)
    for dim, *found in zip(dims or [None], *map(tensors, outputs), strict=False):
        if dims is None or (dim is None and found[0].dim() and not all(torch.equal(found[0], one) for one in found)):
            raise ContractError(
                "pipeline: the outputs of micro-batches cannot be joined",
                found=f"{[tuple(t.shape) for t in tensors(first)]} for one of twice as many rows as those with "
                f"{[tuple(t.shape) for t in tensors(outputs[1])]}",
                expected="outputs with one dimension that grows with the rows of the batch: no statistics over it",
                fix='weft.pipeline(..., micro_batches=1, schedule="gpipe"), or outputs for each row',
            )
    is_sum = isinstance(first, dict) and set(first) == _SENT and first["is_sum"]
    return join_rows(
        outputs, dims or [], [1.0] * len(outputs) if is_sum else [2.0] + [1.0] * (len(outputs) - 1), is_sum
    )


def row_dims(few: Any, more: Any) -> list[int | None] | None:
    """The dimension of each tensor, if any, in which `more` has twice as much as `few`; None: they differ in others."""
    pairs = list(itertools.zip_longest(tensors(few), tensors(more)))
    if any(one is None or other is None or one.dim() != other.dim() for one, other in pairs):
        return None
    changed = [[d for d in range(one.dim()) if one.shape[d] != other.shape[d]] for one, other in pairs]
    if any(
        len(ds) > 1 or any(2 * a.shape[d] != b.shape[d] for d in ds) for ds, (a, b) in zip(changed, pairs, strict=True)
    ):
        return None
    return [next(iter(ds), None) for ds in changed]


def join_rows(parts: Sequence[Any], dims: Sequence[int | None], weights: Sequence[float], is_sum: bool = False) -> Any:
    """Nested values, joined: tensors in their dimension of rows, and of numbers the mean."""
    columns, at = zip(*map(tensors, parts), strict=True), iter(dims)

    def one(tensor: torch.Tensor) -> torch.Tensor:
        pieces, dim = next(columns), next(at)
        if dim is not None:
            return torch.cat(pieces, dim)
        if tensor.dim():
            return tensor
        total = torch.stack([piece * weight for piece, weight in zip(pieces, weights, strict=True)]).sum()
        return total if is_sum else total / sum(weights)

    return map_tensors(one, parts[0])


def with_cache(output: Any, cache: Any) -> Any:
    """The output with the cache of this rank, where the module returns one by name."""
    if isinstance(output, dict):
        output["past_key_values"] = cache
    elif isinstance(output, types.SimpleNamespace):
        output.past_key_values = cache
    return output


def as_output(value: Any) -> Any:
    """What `batch_output` made and the ranks have received, as the module returns it."""
    if not isinstance(value, dict) or set(value) != _SENT:
        return value
    if value["form"] == "terms":
        total, count = value["values"]
        return total / count.to(total.dtype)
    return _output(value["values"], value["form"])
