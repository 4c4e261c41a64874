"""`F.linear_cross_entropy` of a head whose weight is sharded: the logits of a whole batch are never made.

With `options`, torch's function (2.13) computes logits and losses in chunks of rows, by operations that know whole
weights only. Their place is taken while a strategy that cuts parameters lives, see [Note: whose DTensors]:

- the weight of a unit of FSDP2 is gathered around all chunks, as around a call of the unit, and torch's operation
  computes with it;
- of a weight that is divided among the ranks of a tensor axis, each rank makes the logits of its part of the
  vocabulary. Two numbers per row travel in forward, and the gradient of the hidden states in backward; each once for
  all chunks. Source: Shoeybi et al., "Megatron-LM", 2019, section 3.

Without `options`, or with label smoothing, torch makes the logits of the whole batch, by `F.linear`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft import torch_internals
from weft.tensors.blocks import as_dtensor
from weft.tensors.dtensor import is_sharded
from weft.tensors.messages import gathered

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class HeadReads(NamedTuple):
    """What a strategy knows of weights that are read instead of used in the call of their layer.

    Attributes:
        gathering: A method (call, hidden, weight, bias) -> call(hidden, weight, bias) with gathered ones; it returns
            None if they are in no unit of the strategy.
        mesh: The ranks among which the strategy divides layers that stay divided; None for no such ranks.
    """

    gathering: weakref.WeakMethod[Callable[..., torch.Tensor | None]] | None = None
    mesh: Any = None


def for_sharded_heads(original: Callable[..., Any], reads: Callable[[], Iterable[HeadReads]]) -> Callable[..., Any]:
    """An operation of `F.linear_cross_entropy` that knows sharded weights.

    Args:
        original: torch's: (hidden, weight, target, bias, weight of classes, [reduction,] ignore_index,
            [label smoothing,] rows of a chunk, ...), of which `reduction="none"` has neither of both.
        reads: What the strategies that live know.
    """
    is_reduced = original is torch_internals.linear_losses[0].found

    @torch_internals.untraced  # torch runs its own operation outside of compiled code as well
    def run(
        hidden: torch.Tensor,
        weight: torch.Tensor,
        target: torch.Tensor,
        bias: torch.Tensor | None,
        of_classes: torch.Tensor | None,
        *more: Any,
    ) -> Any:
        if not is_sharded(weight):
            return original(hidden, weight, target, bias, of_classes, *more)

        def again(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            found: Any = run(hidden, weight, target, bias, of_classes, *more)
            loss: torch.Tensor = found[0] if is_reduced else found
            return loss

        reduction, ignore_index, rows = (more[0], more[1], more[3]) if is_reduced else ("none", *more[:2])
        loss = _gathered(reads(), again, hidden, weight, bias)
        if loss is None and any(one.mesh == weight.device_mesh for one in reads()) and _is_by_rows(weight):
            losses = _losses(hidden, weight, bias, target, ignore_index, rows)
            loss = _reduced(losses, target, weight.shape[0], of_classes, reduction, ignore_index)
        if loss is None:
            return original(hidden, weight, target, bias, of_classes, *more)  # which raises
        return (loss,) if is_reduced else loss

    return run


def _gathered(
    reads: Iterable[HeadReads], call: Call, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor | None:
    for one in reads:
        gathering = one.gathering() if one.gathering is not None else None
        loss = gathering(call, hidden, weight, bias) if gathering is not None else None
        if loss is not None:
            return loss
    return None


def _is_by_rows(weight: Any) -> bool:
    return len(weight.placements) == 1 and bool(weight.placements[0].is_shard(0))


def _losses(
    hidden: torch.Tensor, weight: Any, bias: Any, target: torch.Tensor, ignore_index: int, rows: int
) -> torch.Tensor:
    """The loss of each row, as if no class had a weight."""
    from torch.distributed.tensor import Partial, Replicate  # noqa: PLC0415  (half a second)

    mesh = weight.device_mesh
    as_one: Any = hidden if is_sharded(hidden) else as_dtensor(hidden, mesh, [Replicate()])
    whole = as_one.redistribute(placements=[Replicate()])
    first = mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())
    losses: torch.Tensor = _DividedLosses.apply(  # type: ignore[no-untyped-call]
        whole.to_local(grad_placements=[Partial()]),
        weight.to_local(),
        None if bias is None else bias.to_local(),
        torch.where(target == ignore_index, -1, target - first),
        rows,
        mesh.get_group(),
    )
    return losses


def _reduced(
    losses: torch.Tensor,
    target: torch.Tensor,
    num_classes: int,
    of_classes: torch.Tensor | None,
    reduction: str,
    ignore_index: int,
) -> torch.Tensor:
    """As `F.cross_entropy`; a class outside the vocabulary is an error of the lookup."""
    counts = target != ignore_index
    weights = losses.new_ones(()).expand(num_classes) if of_classes is None else of_classes.to(losses)
    shares = torch.where(counts, weights.index_select(0, torch.where(counts, target, 0)), 0)
    losses = torch.where(counts, losses, 0) * shares
    if reduction == "none":
        return losses
    return losses.sum() / shares.sum() if reduction == "mean" else losses.sum()


class _DividedLosses(torch.autograd.Function):
    """Losses per row [rows]; the logits of a chunk are made again in backward, which sends nothing."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        places: torch.Tensor,
        rows: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        """See `_losses`.

        Args:
            ctx: Of torch.
            hidden: [rows, features], the same on all ranks.
            weight: [this rank's classes, features].
            bias: [this rank's classes].
            places: Classes [rows], counted from this rank's first one; others are those of other ranks, or of no one.
            rows: Of a chunk.
            group: The ranks that have the classes.
        """
        is_here = (places >= 0) & (places < len(weight))
        places = torch.where(is_here, places, 0)
        own = []
        for x, at in zip(hidden.split(rows), places.split(rows), strict=True):
            logits = _logits(x, weight, bias)
            own.append(torch.stack([logits.logsumexp(1), logits.gather(1, at[:, None])[:, 0]]))
        sums, chosen = torch.cat(own, 1)
        sums, chosen = torch.stack(gathered(torch.stack([sums, torch.where(is_here, chosen, 0)]), group), 1)
        total = sums.logsumexp(0)
        ctx.rows = rows
        ctx.save_for_backward(hidden, weight, bias, places, is_here, total)
        losses: torch.Tensor = total - chosen.sum(0)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, places, is_here, total = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = torch.zeros_like(weight, dtype=total.dtype) if needs_weight else None
        of_bias = torch.zeros_like(bias, dtype=total.dtype) if needs_bias else None
        of_chosen = torch.where(is_here, -gradient, 0)
        per_row = (hidden, places, total, gradient, of_chosen)
        for number, (x, at, sums, arriving, chosen) in enumerate(
            zip(*(t.split(ctx.rows) for t in per_row), strict=True)
        ):
            of_logits = _logits(x, weight, bias).sub_(sums[:, None]).exp_().mul_(arriving[:, None])
            of_logits.scatter_add_(1, at[:, None], chosen[:, None])
            low = of_logits.to(x.dtype)
            if of_hidden is not None:
                of_hidden.split(ctx.rows)[number].copy_(low @ weight.to(x.dtype))
            if of_weight is not None:
                of_weight += low.t() @ x
            if of_bias is not None:
                of_bias += of_logits.sum(0)
        found = (one if one is None else one.to(like) for one, like in ((of_weight, weight), (of_bias, bias)))
        return of_hidden, *found, None, None, None


def _logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """In 32 bits, if the hidden states have 16; in forward and backward alike, which autocast would not see."""
    with torch.autocast(x.device.type, enabled=False):
        logits = torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
    return logits.float() if logits.dtype.itemsize < 4 else logits
