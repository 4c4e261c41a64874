"""`keyed_dropout`: dropout whose masks follow from the samples, on any number of ranks."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.utils.data import DataLoader

from weft.checks import check_count
from weft.context import DistContext
from weft.contract import Part, Phase, transform
from weft.data.split.position import KeyedBatches
from weft.data.split.sharded_loader import ShardedLoader
from weft.engines.torch.keyed_dropout.keyed import KeyedDropout
from weft.errors import ContextError, ContractError, listed, type_error
from weft.rng import mix

M = TypeVar("M", bound=nn.Module)
L = TypeVar("L", bound=DataLoader[Any])


@transform(phase=Phase.PREPARE, changes=Part.FORWARD, collective=True)
def keyed_dropout(module: M, loader: L, ctx: DistContext, *, seed: int | None = None) -> tuple[M, L, DistContext]:
    """Let every dropout of `module` draw masks that follow from the samples, not from a random state.

    Which elements are dropped is a function of (seed, epoch, sample, module, number of the call, place of the element).
    So a run with dropout is the run of one process at any number of ranks and with any strategy, also when it is
    resumed on another number. It is about `nn.Dropout` and its kinds, `F.dropout` in a forward, attention
    (`F.scaled_dot_product_attention`, `nn.MultiheadAttention`) and `x.bernoulli_(p)`, by which branches are dropped.
    A sample that is padded to another length keeps the masks of its places. Blocks that are computed again in backward
    drop the same, by `recompute` or by torch's `checkpoint`. Two calls with the same batch have masks of their own.

    Rows are found by the tensors that the loader gives; where the model is called with others, it has to be called once
    per batch. On a CPU a mask takes about twice the time of torch's own. Attention with dropout is computed step by
    step, with memory for all its weights: torch's kernels draw by themselves. Evaluation is untouched, as are torch's
    random states: what else the forward draws is not keyed, and a warning says so. A compiler leaves the parts that may
    drop as they are.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x32-10).

    Changes: `forward` of the parts that may drop is an attribute of the instance; class, names and keys stay, and a
    copy or pickle is plain. The loader notes the samples on the tensors of its batches.
    Collectives: none; the ranks agree on the seed through the store.

    Args:
        module: What trains. Its dropout may be on tensors with a row per sample, in the first dimension or the second,
            or on [rows * places, ...] with as many places as a tensor it is called with.
        loader: From `shard_data`, before `accumulate_grads`.
        ctx: The current context.
        seed: 0 <= seed < 2**63; default: `ctx.seed`.

    Returns:
        `module` and `loader` themselves, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: `module` or `loader` has it already.
        OrderError: Before `shard_data`, or after a strategy.
        TypeError: The loader is not one of `shard_data`.
        ContractError: A recurrent layer drops inside a kernel of torch. In forward, if it cannot be told which rows are
            which samples, or a block is computed again with another random state.
        ContextError: The ranks have different seeds; or the engine is that of torch-xla.
        PeerError: Another rank failed.

    Example:
        >>> import torch, weft
        >>> loader, ctx = weft.shard_data(DataLoader(torch.ones(4, 3), batch_size=2), weft.local())
        >>> model, loader, ctx = weft.keyed_dropout(nn.Dropout(0.5), loader, ctx)
        >>> [model(x) for x in loader][0].tolist()
        [[2.0, 2.0, 0.0], [2.0, 0.0, 2.0]]
    """
    if not isinstance(loader, ShardedLoader):
        raise type_error(
            "keyed_dropout: the loader does not say which samples its batches hold",
            found=type(loader).__name__,
            expected="a loader of shard_data, also on one rank",
            fix="loader, ctx = weft.shard_data(loader, ctx)",
        )
    chosen = ctx.seed if seed is None else seed
    check_count(
        "keyed_dropout", "seed", chosen, least=0, below=2**63, fix="weft.keyed_dropout(model, loader, ctx, seed=0)"
    )
    _check_engine(ctx)
    _check_recurrent(module)
    ctx.agree("keyed_dropout", {"seed": chosen})
    batches = loader.weft_cursor.keyed = KeyedBatches()

    def key(epoch: int, name: str, number: int) -> int:
        return mix(chosen, epoch, name, number, "dropout")

    return module, loader, ctx.offering(KeyedDropout(module, batches.latest, key))


def _check_engine(ctx: DistContext) -> None:
    if ctx.engine.name == "xla":
        raise ContextError(
            "keyed_dropout: not with torch-xla",
            found="engine 'xla', which would compile a program anew for each mask",
            expected="a device of torch itself",
            fix='weft.start(engine="torch")',
        )


def _check_recurrent(module: nn.Module) -> None:
    found = [
        name or type(part).__name__
        for name, part in module.named_modules()
        if isinstance(part, nn.RNNBase) and part.dropout and part.num_layers > 1
    ]
    if found:
        raise ContractError(
            "keyed_dropout: recurrent layers drop elements inside a kernel of torch, whose masks cannot be given",
            found=listed(found),
            expected="layers with dropout=0.0, and dropout between them",
            fix="nn.LSTM(..., num_layers=1), nn.Dropout(p), nn.LSTM(..., num_layers=1)",
        )
