"""Cutting layers by a plan: checks, agreement of the ranks, then the engine; and what hung on the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from weft.checks import check_module, check_not_lazy, check_torch
from weft.context import DistContext
from weft.contract import agree_on_parameters, check_quantized_weights, layouts, offered
from weft.engines import Spmd
from weft.engines.options import FusedPart, TensorOptions
from weft.engines.torch.keyed_dropout.keyed import KeyedDropout
from weft.errors import ContextError
from weft.peers.ledger import Ledger
from weft.sharding.layers.linear_layers import is_transposed
from weft.sharding.layers.tensor_checks import (
    Styles,
    attributes_of,
    check_hooks,
    check_sequence,
    check_sizes,
    check_ties,
    gathered_once,
    head_tables,
    styles_of,
)
from weft.sharding.layers.tensor_plan import blocks_around, tensor_plan
from weft.sharding.layouts_over_axes import broadcast_state
from weft.sharding.meta import WeightSource, is_meta, on_meta_anywhere, with_values
from weft.sharding.shard_checks import check_optimizers, check_weights, groups_of
from weft.sharding.shard_module import exchange_parameters

if TYPE_CHECKING:  # slow to import
    from weft.engines.torch.parallel.tensor_module import TensorParallelModule

_WHAT = "tensor_parallel"


def cut_layers(
    module: nn.Module,
    ctx: DistContext,
    *,
    plan: Mapping[str, Any] | str,
    axis: str,
    sequence: bool,
    rebind: Sequence[torch.optim.Optimizer],
    weights: WeightSource,
) -> TensorParallelModule | None:
    """Check everything, agree with the other ranks, then cut the layers of `module`.

    Changes: `module` and the optimizers, as `tensor_parallel` says. Collectives: as it says.

    Args:
        module: To be cut.
        ctx: The current context.
        plan: As for `tensor_parallel`.
        axis: Of the mesh.
        sequence: Whether the sequence is sharded between the layers.
        rebind: Optimizers over the module's parameters.
        weights: State for a module on meta.

    Returns:
        What the engine offers to later transforms; None with one rank along the axis.

    Raises:
        ContextError: The axis cannot be used.
        ValueError: The plan cannot.
    """
    check_module(_WHAT, module)
    check_not_lazy(_WHAT, module)
    _check_axis(ctx, axis)
    packed = "weights in blocks that do not follow rows or columns"
    check_quantized_weights(_WHAT, module, {"4 bits": packed, "8 bits": packed, "torchao": packed})
    ranks = 1 if ctx.world_size == 1 else ctx.axis_size(axis)
    styles, widths = styles_of(module, tensor_plan(module) if plan == "auto" else plan)
    check_ties(module, styles)
    later, on_meta = weights == "later", is_meta(module)
    check_weights(_WHAT, type(module).__name__, weights, on_meta=on_meta)
    check_optimizers(_WHAT, module, rebind)
    fused: dict[str, tuple[FusedPart, ...]] = {}
    if ranks > 1:
        fused = check_sizes(module, styles, widths, axis, ranks)
        check_hooks(module, styles)
        if any(style == "vocab" and isinstance(module.get_submodule(n), nn.Embedding) for n, style in styles.items()):
            check_torch(f'{_WHAT}: "vocab"', "2.13", "DTensor loses the mask of an embedding that is cut by rows")
    options = _options(module, styles, fused, ranks, sequence=sequence)
    if ctx.world_size > 1:
        facts = options.facts() | {
            "axis": axis,
            "plan": {name: str(style) for name, style in styles.items()},
            "fused": widths,
            "later": later,
            "rebind": groups_of(module, rebind),
        }
        agree_on_parameters(_WHAT, module, ctx, facts)
        on_meta = on_meta_anywhere(_WHAT, on_meta, ctx.require_collective(_WHAT))
    line = ctx.on(ctx.axes[0][0] if ctx.world_size == 1 else axis)
    old = dict(module.named_parameters())
    source = with_values(_WHAT, module, ctx, line, weights, on_meta=on_meta)
    cut: TensorParallelModule | None = None
    if ranks > 1:
        assert line.group is not None
        assert ctx.mesh is not None
        if source is None:
            broadcast_state(module, layouts(module, ctx), ctx, [axis])
        told = [dropout.divide for dropout in offered(module, KeyedDropout)]
        options = replace(options, make_real=None if source is None else source.make_real, told=told)
        from weft.engines.torch.parallel.tensor_module import TensorParallelModule  # noqa: PLC0415  (slow to import)

        cut = TensorParallelModule(module, ctx.mesh[axis], line.group, options, Ledger(line.world, _WHAT))
    exchange_parameters(module, old, rebind)
    return cut


def _check_axis(ctx: DistContext, axis: str) -> None:
    if isinstance(ctx.engine, Spmd):
        raise ContextError(
            f"{_WHAT}: not supported by this engine",
            found=f"engine {ctx.engine.name!r}",
            expected="the torch engine",
            fix="model, ctx = weft.fully_shard(model, ctx)",
        )
    if ctx.world_size == 1:
        return
    ctx.axis_size(axis)
    if axis in ctx.data_axes:
        raise ContextError(
            f"{_WHAT}: batches differ along {axis!r}",
            found=f"data axes {', '.join(map(repr, ctx.data_axes))}",
            expected="an axis whose ranks see the same batch, and compute one model together",
            fix='ctx = weft.start(mesh={"data": -1, "tensor": 2})',
        )


def _options(
    module: nn.Module, styles: Styles, fused: Mapping[str, tuple[FusedPart, ...]], ranks: int, *, sequence: bool
) -> TensorOptions:
    """What of the names in a plan the engine has to know."""
    words = ("replicate", "sequence") if sequence else ("replicate",)
    summed = tuple(f"{name}." for name, style in styles.items() if isinstance(style, str) and style in words)
    blocks: list[str] = []
    if sequence:
        lists = blocks_around(module, [name for name, style in styles.items() if style in ("column", "row")])
        check_sequence(module, styles, lists)
        (blocks,) = lists.values()
    inside = frozenset(name for block in blocks for name, _ in module.get_submodule(block).named_modules(prefix=block))
    return TensorOptions(
        styles=styles,
        gathers=gathered_once(module, styles, set(blocks)),
        blocks=tuple(blocks),
        inside=inside,
        fused=fused,
        attributes=attributes_of(module, styles, fused, ranks),
        head_tables=bool(head_tables(module, styles)),
        transposed=frozenset(name for name in styles if is_transposed(module.get_submodule(name))),
        summed=tuple(name for name, _ in module.named_parameters() if name.startswith(summed)),
    )
