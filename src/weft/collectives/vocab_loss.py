"""Cross-entropy of logits of which every rank holds those of a part of the vocabulary.

The logits are never gathered: two numbers per position travel instead of a row of the vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from weft import torch_internals
from weft.checks import check_choice
from weft.collectives.primitives import enter_collective
from weft.context import DistContext
from weft.errors import type_error, value_error
from weft.tensors.dtensor import is_sharded

_WHAT = "vocab_cross_entropy"
_CALL = f"weft.collectives.{_WHAT}"


def vocab_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ctx: DistContext,
    *,
    axis: str = "tensor",
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> torch.Tensor:
    """Compute `torch.nn.functional.cross_entropy` of logits that are divided among the ranks by vocabulary.

    For the output of a head of style "vocab" in `weft.tensor_parallel`, as in
    `plan={**weft.tensor_plan(model), "lm_head": "vocab"}`. With one rank along `axis` it is torch's function.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3; `torch.distributed.tensor.parallel.loss_parallel`.

    Changes: nothing. Collectives: two all-reduces, of one and of three numbers per position; none in backward.

    Args:
        logits: [..., vocabulary], a DTensor that is sharded in its last dimension over one axis; or
            [..., this rank's part of it], a plain tensor. Floating-point. The parts lie in rank order and are as long
            as `torch.chunk` makes them: as long as the first, but for the last ones. 16-bit logits are
            computed with in float32, as under autocast.
        target: Classes [...], int64, in the whole vocabulary; the same on all ranks.
        ctx: The current context.
        axis: Mesh axis over whose ranks the vocabulary is divided.
        ignore_index: Class of the positions that do not count.
        reduction: "mean" over the positions that count, "sum" or "none".

    Returns:
        The loss, the same on all ranks: a number, or one per position.

    Raises:
        TypeError: `logits` is another DTensor or not floating-point, or `target` not int64.
        ValueError: The shapes do not fit, an option is unknown, or a class lies outside the vocabulary
            (on accelerators, the assertion of the device).
        ContextError: There is no such axis.

    Example:
        >>> import weft
        >>> vocab_cross_entropy(torch.zeros(2, 4), torch.tensor([0, 3]), weft.local())
        tensor(1.3863)
    """
    check_choice(_CALL, "reduction", reduction, ("mean", "sum", "none"))
    held: Any = logits
    over_axis = is_sharded(logits) and held.device_mesh.mesh_dim_names == (axis,)
    if over_axis and held.placements[0].is_shard(held.dim() - 1):
        logits = held.to_local()
    _check(logits, target)
    sub = ctx if ctx.world_size == 1 else ctx.on(axis)
    if sub.world_size == 1:
        wide, flat = _wide(logits).flatten(0, -2), target.flatten()
        one = torch.nn.functional.cross_entropy(wide, flat, ignore_index=ignore_index, reduction=reduction)
        return one.view(target.shape) if reduction == "none" else one
    world = enter_collective(_WHAT, sub, None, {})
    losses: torch.Tensor = _VocabLoss.apply(logits, target, ignore_index, world.group, sub.rank)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    return losses.sum() / (target != ignore_index).sum() if reduction == "mean" else losses.sum()


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits.float() if logits.dtype.itemsize < 4 else logits


def _check(logits: torch.Tensor, target: torch.Tensor) -> None:
    if is_sharded(logits) or not logits.is_floating_point() or target.dtype != torch.int64:
        raise type_error(
            f"{_WHAT}: the arguments are not logits and class indices",
            found=f"{type(logits).__name__} {logits.dtype}, {type(target).__name__} {target.dtype}",
            expected='logits of a head of style "vocab", or this rank\'s as a plain tensor; classes of int64',
            fix=f"{_CALL}(logits.redistribute(placements=[Shard(-1)]), target, ctx)  # over this axis alone"
            if is_sharded(logits)
            else f"{_CALL}(logits.float(), target.long(), ctx)",
        )
    if logits.dim() < 2 or logits.shape[:-1] != target.shape:
        raise value_error(
            f"{_WHAT}: logits and classes do not fit",
            found=f"logits {tuple(logits.shape)}, classes {tuple(target.shape)}",
            expected="logits [..., vocabulary] and classes [...]",
            fix=f"{_CALL}(logits.reshape(-1, logits.shape[-1]), target.reshape(-1), ctx)"
            if logits.shape[:-1].numel() == target.numel()
            else f"{_CALL}(logits[:, :-1], target[:, 1:], ctx)",
        )


class _VocabLoss(torch.autograd.Function):
    """Losses per position; the gradient needs no message."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignore_index: int, group: dist.ProcessGroup, rank: int
    ) -> torch.Tensor:
        wide = _wide(logits)
        own = logits.shape[-1]
        # The length of the first part, which all offsets are multiples of, travels with the largest logits.
        largest = wide.amax(-1) if own else wide.new_full(target.shape, -torch.inf)
        first = torch.cat([largest.reshape(-1), largest.new_tensor([float(own)])])
        dist.all_reduce(first, dist.ReduceOp.MAX, group=group)
        largest, step = first[:-1].view(target.shape), first[-1].long()
        place = target - rank * step
        here = (place >= 0) & (place < own)
        place = torch.where(here, place, 0)
        exps = (wide - largest.unsqueeze(-1)).exp()
        picked = (wide - largest.unsqueeze(-1)).gather(-1, place.unsqueeze(-1)).squeeze(-1) if own else 0 * largest
        sums = torch.stack([exps.sum(-1), torch.where(here, picked, 0), here.to(wide.dtype)])
        dist.all_reduce(sums, group=group)
        total, chosen, found = sums.unbind()
        counts = target != ignore_index
        _check_classes((found > 0) | ~counts, target)
        ctx.save_for_backward(exps, total, place, here, counts)
        ctx.dtype = logits.dtype
        return torch.where(counts, total.log() - chosen, 0)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        exps, total, place, here, counts = ctx.saved_tensors
        gradient = torch.where(counts, gradient, 0)
        result = exps * (gradient / total).unsqueeze(-1)
        if result.shape[-1]:
            result.scatter_add_(-1, place.unsqueeze(-1), -torch.where(here, gradient, 0).unsqueeze(-1))
        return result.to(ctx.dtype), None, None, None, None


def _check_classes(known: torch.Tensor, target: torch.Tensor) -> None:
    if target.device.type != "cpu":
        torch_internals.check_later(known.all())  # without waiting for the device, as torch's own loss
    elif not known.all():
        raise value_error(
            f"{_WHAT}: class indices are outside the vocabulary",
            found=f"{sorted(set(target[~known].tolist()))[:5]}",
            expected="0 to the length of all parts together, or ignore_index",
            fix=f"{_CALL}(logits, target, ctx, ignore_index=...)",
        )
