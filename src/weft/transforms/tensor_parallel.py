"""`tensor_parallel`: layers cut over ranks that compute one model together, by a plan.

The plan is read in `weft.sharding.layers`, and what cannot be exact is refused there; the engine lays torch's parallel
styles on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from weft.context import DistContext
from weft.contract import Phase, Undoable, transform
from weft.sharding import WeightSource, cut_layers, optimizers_in

M = TypeVar("M", bound=nn.Module)


class _OnlyUndone(NamedTuple):
    """Layers that are cut, and no gradients to add up."""

    cut: Undoable

    def undo(self) -> None:
        self.cut.undo()


class _Sliced(NamedTuple):
    """Offered with `sequence=True`; see `weft.contract.SlicesInside`."""

    slice_axes: tuple[str, ...]


@transform(phase=Phase.SPLIT, collective=True)
def tensor_parallel(
    module: M,
    ctx: DistContext,
    *,
    plan: Mapping[str, Any] | str = "auto",
    axis: str = "tensor",
    sequence: bool = False,
    rebind: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    weights: WeightSource = None,
) -> tuple[M, DistContext]:
    """Cut layers over ranks that see the same batch and compute one model together.

    For models whose single layers are too large, or too slow, for one device. A linear layer of style
    "column" has some of its outputs on each rank, and one of style "row" takes them and adds up what the
    ranks have. What no pattern names stays whole on every rank. Combines with `replicate`, `fully_shard` or
    `zero_partition` over the data axes. With one rank along `axis` nothing is done.

    Source: Shoeybi et al., "Megatron-LM", 2019; Korthikanti et al., "Reducing Activation Recomputation", 2022
    (`sequence`); `torch.distributed.tensor.parallel.parallelize_module`.

    Changes: `module` in place: the parameters of the plan's parts become DTensors (so an optimizer made before has
    to be given as `rebind`), and its parts get hooks; classes, names and keys stay. It gets the values of the first
    rank along `axis`. The optimizers in `rebind`, in place.
    Collectives: here, one broadcast of parameters and buffers. In forward, one all-reduce per "row" and "vocab", one
    all-gather per "gather"; in backward, one all-reduce per argument of columns. An argument that goes into several
    columns of one attention or MLP counts once, where the source of its forward shows that it goes nowhere else.
    With `sequence=True` these are, in the blocks, all-gathers and reduce-scatters of the same size, and two
    all-gathers at their ends. With parts of style "replicate" or, then, "sequence", one all-reduce of all their
    gradients at the end of the last backward pass of a window. With several projections in a column layer, or heads
    that ranks share, one all-to-all of its outputs in forward, and one in backward. Once, in the first backward pass,
    one all-gather of a number per whole parameter: their gradients are to be equal on all ranks.

    Args:
        module: On the CPU, on `ctx.device`, or on meta: then it is made real part by part, so that no rank ever
            holds the whole model.
        ctx: The current context.
        plan: Patterns of names (as in `fully_shard(units=...)`) and a style each: "column", "row" (linear layers);
            "column:3" for a layer that holds three projections of one width side by side, "column:512,128,128" for
            widths of their own: each rank has its share of every one;
            "gather", as "column", but with all outputs on every rank (a head); "vocab" (an embedding, cut by rows;
            or a head, whose logits stay divided, as a DTensor, see `weft.collectives.vocab_cross_entropy`);
            "replicate": stays whole between a column and a row, as a norm of heads; "sequence": stays whole, and treats
            each position by itself, as a norm or a mixture of experts; "whole": every rank computes it as it is, and
            of whole sequences; or a `ParallelStyle` of torch, which has to suit
            the parts around it. "auto": that of the model; see `tensor_plan`, which prints it.
        axis: Mesh axis whose ranks share the layers; no data axis.
        sequence: Cut the sequence (dimension 1) between the layers of the blocks as well: activations there take
            1/n of the memory. Everything in the blocks that has parameters needs a style.
        rebind: Optimizers that hold parameters of `module`: groups and state are carried over.
        weights: For a module on meta, as for `fully_shard`.

    Returns:
        `module` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: A part of the plan is cut already.
        OrderError: An optimizer holds its parameters and is not in `rebind`; or a transform that comes later was
            applied.
        ContextError: There is no such axis, batches differ along it, heads or features are not divisible by its ranks,
            or the ranks pass different models or options.
        ContractError: With `sequence=True`, a part has no style. In a call, `ProbeFailed`: inputs differ between the
            ranks, or a part computes something else on its share, as with dropout that is not keyed, a view with a
            fixed number of heads, or an output that is taken apart in another way; in a backward pass, a gradient comes
            to what each rank has for itself, as to weights of its heads. In the first backward pass: gradients of whole
            parameters differ.
        TypeError: `module` is not a module, the plan is no mapping, or a part is of a kind that its style cannot cut.
        ValueError: A pattern matches nothing, a style is unknown, a parameter has two; the model has no plan.
        PeerError: Another rank failed.

    Example:
        >>> import weft
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        >>> model, ctx = weft.tensor_parallel(model, weft.local(), plan={"0": "column", "2": "row"})
        >>> [record.name for record in ctx.applied]
        ['tensor_parallel']
    """
    optimizers = optimizers_in("tensor_parallel", rebind)
    cut = cut_layers(module, ctx, plan=plan, axis=axis, sequence=sequence, rebind=optimizers, weights=weights)
    if cut is None:
        return module, ctx
    sliced = [_Sliced((axis,))] if sequence else []
    return module, ctx.offering(cut if cut.adds_up else _OnlyUndone(cut), *sliced, *cut.probes)
