"""`sync_batch_norm`: batch statistics over the batch of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from torch import nn

from weft import torch_internals
from weft.context import DistContext
from weft.contract import Part, Phase, transform
from weft.engines.torch.compute.sync_batch_norm import Synchronized

M = TypeVar("M", bound=nn.Module)


@transform(phase=Phase.PREPARE, changes=Part.FORWARD, collective=True)
def sync_batch_norm(module: M, ctx: DistContext, *, axis: str | Sequence[str] | None = None) -> tuple[M, DistContext]:
    """Let every batch norm of `module` compute mean and variance over the batches of all ranks.

    Without it a batch norm sees its own rank's batch only, and training differs from one process
    with the whole batch. Works on every device; torch's own `SyncBatchNorm` refuses CPU tensors.
    Exact if all ranks have equally many samples or the loss is normalised over all ranks, and each rank's batch holds
    what is in that of one process: rows that `uneven="pad"` repeats count, as does padding to the longest row of a
    rank alone. Both are warned of.

    Source: Ioffe and Szegedy, "Batch Normalization", 2015; `torch.nn.SyncBatchNorm` on GPUs.

    Changes: in place, the class of each `BatchNorm1d/2d/3d` inside becomes a subclass of itself;
    parameters, buffers and keys stay. `copy.deepcopy` keeps it, as with torch's; a pickle does not.
    Nothing with one rank.
    Collectives: none here; per call of a batch norm in training two all-reduces of 1x channels
    (one on GPUs), and one of 2x channels in its backward; one of two numbers in each of the first calls.

    Args:
        module: Contains batch norms; without any this does nothing.
        ctx: The current context.
        axis: Mesh axes over which batches differ; default: all data axes.

    Returns:
        `module` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: It was applied before.
        OrderError: After `replicate` or another strategy.
        ContextError: No such axis, or the ranks disagree.

    Example:
        >>> import weft
        >>> model, ctx = weft.sync_batch_norm(nn.Sequential(nn.BatchNorm1d(2)), weft.local())
    """
    line = ctx.on(ctx.data_axes if axis is None else axis)
    ctx.agree(
        "sync_batch_norm",
        {"batch norms": sum(isinstance(m, torch_internals.batch_norm.found) for m in module.modules())},
    )
    if line.world_size == 1:
        return module, ctx
    ctx.require_collective("sync_batch_norm")
    ctx.world.root.next_number("sync_batch_norm")
    return module, ctx.offering(Synchronized(module, line.group))
