"""`context_parallel`: each rank holds a part of every sequence, and attention exchanges what it needs.

Arguments and what the code of the model says are looked at here; attention is the engine's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from torch import nn

from weft.checks import check_choice, check_module
from weft.context import DistContext
from weft.context.placement import check_ranks_send
from weft.contract import Part, Phase, transform
from weft.engines.torch.compute.activation_checkpoint import already_recomputed
from weft.engines.torch.parallel.sequence_code import attention_modules, other_attention
from weft.engines.torch.parallel.sequence_exchange import SequenceRanks, find_collectives
from weft.engines.torch.parallel.sequence_inputs import SplitInputs
from weft.engines.torch.parallel.sequence_slice import SlicedSequences
from weft.engines.torch.parallel.split_attention import SplitAttention
from weft.engines.torch.probes.no_trace import switched_off
from weft.errors import ContextError, ContractError, OrderError, listed
from weft.loop_watch import PartsWatch
from weft.tensors.sequence_order import Order

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class InParts:
    """Offered: the ranks along these axes see other parts of the same batch; see `ReducesOver`."""

    axes: tuple[str, ...]


@transform(phase=Phase.SPLIT, changes=Part.FORWARD | Part.GRADIENTS, collective=True)
def context_parallel(
    module: M,
    ctx: DistContext,
    *,
    axis: str = "context",
    method: Literal["heads", "gather"] = "heads",
    order: Order = "zigzag",
) -> tuple[M, DistContext]:
    """Split every sequence over the ranks of an axis: for sequences whose activations do not fit on one device.

    Each rank computes with its part of every sequence, which `weft.data.split_sequence` takes of a batch. All layers
    but attention do so alone. Attention modules call `F.scaled_dot_product_attention` as usual; the call is intercepted
    and computes over the whole sequence. The strategy that comes afterwards averages gradients over this axis as well.

        model, ctx = weft.context_parallel(model, ctx)
        model, ctx = weft.fully_shard(model, ctx)
        for batch in loader:
            part = weft.data.split_sequence(batch, ctx)
            logits = model(part["input_ids"], position_ids=part["position_ids"]).logits

    Source: method "heads": Jacobs et al., "DeepSpeed Ulysses", 2023. Method "gather", zig-zag order: Grattafiori et
    al., "The Llama 3 Herd of Models", 2024.

    Changes: `module` in place: `forward` of each attention module is an attribute of the instance, and hooks check
    what the model is called with; class, names and keys stay, and a copy or pickle is plain.
    Collectives: none here. Per attention and forward pass, "heads": one all-to-all of queries, keys and values, and
    one of the outputs; "gather": one all-gather of keys and values. As many in backward (a reduce-scatter for the
    all-gather). Those in blocks of `recompute` are made again. In each forward of a model of transformers, one
    all-gather of positions and one of an attention mask, for each kind of mask. In each attention, one of a mask
    [..., part, length] by "heads", or [..., 1, part].

    Args:
        module: Attends with `F.scaled_dot_product_attention`, causally, fully, or with a mask of whole sequences
            [..., length, length] or the rows of this rank [..., part, length], as transformers makes them, or your
            model of what stays whole; with dropout of attention weights after `keyed_dropout` alone. Each place is
            computed alone otherwise. If it numbers tokens, it takes their positions. Both are measured when it is
            called.
        ctx: The current context.
        axis: The mesh axis whose ranks hold the parts.
        method: "heads": each rank computes whole sequences of some heads, which have to divide by the ranks; keys
            and values of fewer heads than ranks travel to several. "gather": each rank computes its places of all
            heads, with the keys and values of all places: any number of heads, more memory.
        order: "zigzag": each rank holds two chunks, one from either end, so that causal attention costs all ranks
            equally much under "gather". "contiguous": the k-th part of the sequence on rank k.

    Returns:
        `module` itself, and `ctx` with this transform in `applied`. With one rank along the axis nothing is done.

    Raises:
        AlreadyApplied: It was applied before.
        OrderError: After a strategy or `compile`; or a block of `recompute` is an attention module itself.
        ContractError: Attention that cannot be caught. In a call: inputs or positions that are not this rank's part,
            a mask of this part that is neither causal nor full, dropout of weights that is not keyed, heads that do
            not divide; or `ProbeFailed`: something else depends on several places, as positions that the model
            numbers itself. In the first step of an optimizer: no strategy averages gradients over `axis`.
        ContextError: There is no such axis, it is a data axis, or the ranks pass different models or options.
        ValueError: An option is unknown, or one process drives several devices.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> encoder = nn.TransformerEncoderLayer(8, nhead=2, dropout=0.0, batch_first=True)
        >>> encoder, ctx = weft.context_parallel(encoder, weft.local())
        >>> [record.name for record in ctx.applied]
        ['context_parallel']
    """
    fix = "weft.context_parallel(model, ctx, {})"
    check_choice("context_parallel", "method", method, ("heads", "gather"), fix=fix.format('method="heads"'))
    check_choice("context_parallel", "order", order, ("zigzag", "contiguous"), fix=fix.format('order="zigzag"'))
    check_module("context_parallel", module)
    if ctx.world_size == 1 and axis not in dict(ctx.axes):
        return module, ctx
    number = ctx.axis_size(axis)
    _check_axis(ctx, axis, number)
    attention = attention_modules(module)
    _check_attention(module, attention)
    ctx.agree("context_parallel", {"attention": list(attention), "axis": axis, "method": method, "order": order})
    if number == 1:
        return module, ctx
    line = ctx.on(axis)
    ctx.require_collective("context_parallel")
    assert line.group is not None
    ranks = SequenceRanks(line.group, number, line.rank, order, find_collectives())
    inputs = SplitInputs(module, ranks, method)
    split = SplitAttention(attention, ranks, method)
    probe = SlicedSequences(module, ranks, partial(switched_off, (inputs, split)))
    return module, ctx.offering(InParts((axis,)), inputs, split, probe, PartsWatch(module, line.group))


def _check_axis(ctx: DistContext, axis: str, number: int) -> None:
    if axis in ctx.data_axes and number > 1:
        raise ContextError(
            f"context_parallel: batches differ along {axis!r}",
            found=f"data axes {', '.join(map(repr, ctx.data_axes))}",
            expected="an axis along which all ranks read the same batches, and split them",
            fix='ctx = weft.start(mesh={"data": -1, "context": 2}); model, ctx = weft.context_parallel(model, ctx)',
        )
    fix = 'leave context_parallel out; or weft.start(device="cuda") on GPUs'
    check_ranks_send("context_parallel", ctx, "the torch engine", fix=fix)


def _check_attention(module: nn.Module, attention: Mapping[str, nn.Module]) -> None:
    others = other_attention(module)
    if not attention or others:
        raise ContractError(
            f"context_parallel: {type(module).__name__} has no attention that can be caught",
            found=listed(others) or "no module whose forward calls F.scaled_dot_product_attention",
            expected="attention through F.scaled_dot_product_attention, or nn.MultiheadAttention",
            fix='F.scaled_dot_product_attention(query, key, value)  # in transformers: attn_implementation="sdpa"',
        )
    again = [name for name, part in attention.items() if "the module itself" in already_recomputed(part)]
    if again:
        raise OrderError(
            "context_parallel: blocks of recompute are attention modules themselves",
            found=listed(again),
            expected="recompute of the blocks around them: their second run has to meet context_parallel, too",
            fix="weft.recompute(model, ctx, blocks=Block)  # in place of Block.attention",
        )
