"""Collectives over nested tensors: `reduce`, `gather`, `pad_across`."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist

from weft.checks import check_choice
from weft.collectives.exchange import Gathered, Routes, Summing
from weft.collectives.objects import gather_packed
from weft.collectives.primitives import (
    enter_collective,
    name_lost_peer,
    only_tensors,
    rebuilt,
    tensors_of,
    wait_for_collective,
)
from weft.context import DistContext, World
from weft.engines.torch.parallel.exchange import exchanged
from weft.errors import ContextError, type_error, value_error
from weft.peers.agreement import compare
from weft.tensors.messages import grouped
from weft.tensors.nested import leaves, map_tensors

T = TypeVar("T")
ReduceOp = Literal["sum", "mean", "max", "min"]
_OPS = MappingProxyType(
    {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
)
_CARRIERS = MappingProxyType({torch.bool: torch.uint8, torch.int16: torch.int32})  # what gloo does not know


def reduce(value: T, ctx: DistContext, op: ReduceOp = "sum", *, grad: bool = False) -> T:
    """Combine tensors over the ranks; every rank gets the result.

    Changes: nothing; `value` is left alone. Collectives: one all-reduce per dtype; with `grad`, the same in backward.
    Operations, structures, shapes and dtypes that come for the first time are compared, in a meeting through the store.

    Args:
        value: A nested value of tensors, the same structure, shapes and dtypes on all ranks.
        ctx: The context whose ranks take part; `ctx.on(axis)` for part of them.
        op: "sum", "mean", "max" or "min". The mean of integers and booleans is float32 (float64
            for int64), never rounded; their sum keeps the dtype, booleans count as int64.
        grad: Whether gradients flow back to all ranks; for sums and means. See `gather`.

    Returns:
        The same structure with the results.

    Raises:
        TypeError: A leaf is not a tensor, or requires grad without `grad=True`.
        ValueError: Unknown `op`, or one without gradients with `grad=True`.
        ContextError: Structures, shapes, dtypes, `op` or `grad` that are new on all ranks differ between them.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> reduce({"loss": torch.tensor(2.0)}, weft.local(), "mean")
        {'loss': tensor(2.)}
    """
    check_op("reduce", op)
    found, tracked = tensors_of("reduce", value, grad=grad)
    if tracked and op not in ("sum", "mean"):
        raise value_error(
            f"reduce: op = {op!r} sends no gradients back",
            found=f"grad=True, op={op!r}",
            expected='"sum" or "mean"',
            fix=f"weft.gather(value[None], ctx, grad=True).a{op}(0)",
        )
    world = enter_collective("reduce", ctx, value, {"op": op, "grad": bool(tracked)})
    inputs = [_for_op(tensor, op) for tensor in found]
    if world.group is None:
        return rebuilt(value, inputs)

    def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        with name_lost_peer("reduce", world):
            return _reduce_packed(tensors, op, world)

    return rebuilt(value, Summing.apply(run, *inputs) if tracked else run(inputs))  # type: ignore[no-untyped-call]


def check_op(what: str, op: str) -> None:
    """Raise if there is no such operation.

    Raises:
        ValueError: There is none.
    """
    check_choice(what, "op", op, tuple(_OPS), fix=f'weft.collectives.{what}(value, ctx, "sum")')


def _for_op(tensor: torch.Tensor, op: str) -> torch.Tensor:
    if op == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.to(mean_dtype(tensor.dtype))
    if op == "sum" and tensor.dtype == torch.bool:
        return tensor.to(torch.int64)
    return tensor.clone()


def mean_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the mean of integers or booleans."""
    return torch.float64 if dtype == torch.int64 else torch.float32


def _reduce_packed(inputs: list[torch.Tensor], op: str, world: World) -> list[torch.Tensor]:
    """One message per dtype and device instead of one per tensor."""
    outputs = list(inputs)
    for indices in grouped(range(len(inputs)), lambda i: (inputs[i].dtype, inputs[i].device)).values():
        packed = torch.cat([inputs[i].reshape(-1) for i in indices])
        dtype = packed.dtype
        packed = packed.to(_CARRIERS.get(dtype, dtype))
        sent = torch.view_as_real(packed) if packed.is_complex() and op in ("sum", "mean") else packed
        work = dist.all_reduce(sent, op=_OPS[op], group=world.group, async_op=True)
        wait_for_collective(work, world, on_cpu=sent.device.type == "cpu")
        packed = packed.to(dtype)
        packed = packed / world.size if op == "mean" else packed
        for i, part in zip(indices, packed.split([inputs[i].numel() for i in indices]), strict=True):
            outputs[i] = part.view(inputs[i].shape)
    return outputs


def gather(value: T, ctx: DistContext, *, grad: bool = False) -> T:
    """Join tensors of all ranks along their first dimension, in rank order; every rank gets all.

    The ranks may bring different numbers of rows, also none; nothing is padded or cut. A 0-d
    tensor counts as one row. Ranks may differ in further dimensions only if one of them is empty.

    With `grad` gradients flow back to the ranks that the rows came from. Strategies minimize the mean of the ranks'
    losses, and so they do here: a contrastive loss over the rows of all ranks, computed on every rank, is that of one
    process, and so is one of each rank's own rows against all. Nothing has to be scaled.

    Changes: nothing. Collectives: one small all-gather of shapes, one all-gather of the bytes; with `grad`, one
    all-to-all in backward.

    Args:
        value: A nested value of tensors [rows, ...], the same structure and dtypes on all ranks.
        ctx: The context whose ranks take part.
        grad: Whether gradients flow through. All ranks then take part in the backward pass through the result.

    Returns:
        The same structure; each tensor [sum of rows, ...], on the device it came from.

    Raises:
        TypeError: A leaf is not a tensor, or requires grad without `grad=True`.
        ContextError: Structures, dtypes or inner shapes differ between ranks.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> gather(torch.tensor(3), weft.local())
        tensor([3])
    """
    found, tracked = tensors_of("gather", value, grad=grad)
    found = [tensor.reshape(1) if tensor.dim() == 0 else tensor for tensor in found]
    world = enter_collective("gather", ctx, value, {})
    if world.group is None:
        return rebuilt(value, [tensor.clone() for tensor in found])
    with name_lost_peer("gather", world):
        everyone = _of_all("gather", value, found, [tensor.detach() for tensor in found], {"grad": tracked}, ctx)
    parts = list(zip(*everyone, strict=True))  # by tensor and rank
    _check_inner(parts)
    joined = [_joined(pieces, tensor) for pieces, tensor in zip(parts, found, strict=True)]
    if not tracked:
        return rebuilt(value, joined)
    rows = [[len(piece) for piece in pieces] for pieces in parts]
    routes = Routes("gather", world, [[each[ctx.rank]] * ctx.world_size for each in rows], rows, ctx.device)
    return rebuilt(value, exchanged(Gathered(joined, [tensor.shape for tensor in found], routes), found))


def _of_all(
    what: str, value: object, found: Sequence[torch.Tensor], mine: list[Any], asked: dict[str, Any], ctx: DistContext
) -> list[list[Any]]:
    """What every rank brings for its tensors; raises on all of them if it does not fit together."""
    paths = [".".join(path) or "value" for path, _ in leaves(value)]
    named = [f"{path}: {t.dtype}, {t.dim()}-d" for path, t in zip(paths, found, strict=True)]
    everyone = gather_packed(what, [{"value": "; ".join(named), **asked}, mine], ctx)
    compare(what, [facts for facts, _ in everyone])
    return [theirs for _, theirs in everyone]


def _joined(pieces: Sequence[torch.Tensor], mine: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks; those without any may differ in further dimensions."""
    filled = [piece for piece in pieces if piece.numel()]
    rows = sum(map(len, pieces))
    return torch.cat(filled).to(mine.device) if filled else mine.new_empty([rows, *pieces[0].shape[1:]])


def _check_inner(parts: Sequence[Sequence[torch.Tensor]]) -> None:
    for pieces in parts:
        sizes = list(zip(*(piece.shape for piece in pieces if piece.numel()), strict=True))
        wrong = [dim for dim, each in enumerate(sizes) if dim and len(set(each)) > 1]
        if wrong:
            raise ContextError(
                "gather: rows have different shapes on the ranks",
                found=", ".join(f"{tuple(piece.shape)} on rank {rank}" for rank, piece in enumerate(pieces)),
                expected="shapes that are equal except for the first dimension",
                fix="; ".join(f"value = weft.collectives.pad_across(value, ctx, dim={dim})" for dim in wrong),
            )


def pad_across(
    value: T, ctx: DistContext, *, dim: int = 0, fill: float = 0, side: Literal["start", "end"] = "end"
) -> T:
    """Pad tensors to the longest of all ranks along one dimension.

    Changes: nothing. Collectives: one all-gather of shapes.

    Args:
        value: A nested value of tensors; the same structure, dtypes and numbers of dimensions on all ranks.
        ctx: The context whose ranks take part.
        dim: Dimension to pad; negative counts from the end. Tensors that have no such dimension
            are returned as they are.
        fill: Value to pad with.
        side: Where the padding goes.

    Returns:
        The same structure, every tensor as long along `dim` as the longest.

    Raises:
        TypeError: A leaf is not a tensor, or a tensor is nested (jagged).
        ContextError: Structures, dtypes, numbers of dimensions or the other arguments differ between ranks.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> pad_across(torch.ones(2), weft.local())
        tensor([1., 1.])
    """
    found = only_tensors("pad_across", value)
    nested = [tensor for tensor in found if tensor.is_nested]
    if nested:
        raise type_error(
            "pad_across: nested tensors have no common length",
            found="a torch.nested tensor",
            expected="dense tensors",
            fix="torch.nested.to_padded_tensor(value, 0.0)",
        )
    world = enter_collective("pad_across", ctx, None, {"dim": dim, "side": side, "fill": fill})
    if world.group is None:
        return value
    with name_lost_peer("pad_across", world):
        asked = {"dim": dim, "fill": str(fill), "side": side}  # as text: nan is not equal to nan
        rows = _of_all("pad_across", value, found, [list(tensor.shape) for tensor in found], asked, ctx)
    sizes = [[row[index] for row in rows] for index in range(len(found))]
    longest = iter([max(shape[dim] if -len(shape) <= dim < len(shape) else 0 for shape in each) for each in sizes])

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        goal = next(longest)
        if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] == goal:
            return tensor
        shape = list(tensor.shape)
        shape[dim] = goal - tensor.shape[dim]
        padding = tensor.new_full(shape, fill)
        return torch.cat([tensor, padding] if side == "end" else [padding, tensor], dim=dim)

    return map_tensors(pad, value)
