"""Modules, options and optimizers that cannot be sharded: one clear error before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from weft import torch_internals
from weft.context import DistContext
from weft.contract import check_quantized_weights
from weft.engines.torch.hooks.every_optimizer import optimizers_besides, parameters_of
from weft.engines.torch.reducing.buckets import sparse_gradients
from weft.errors import OrderError, listed, type_error, value_error
from weft.sharding.layouts_over_axes import Dims, Layouts
from weft.sharding.meta import WeightSource
from weft.sharding.units import UnitPlan


def check_weights(what: str, class_name: str, weights: WeightSource, *, on_meta: bool) -> None:
    """Raise if these are no weights, or the module has its own.

    Raises:
        TypeError: `weights` is of another kind.
        ValueError: The module is not on meta.
    """
    are_here = callable(weights) or isinstance(weights, Mapping)
    if weights is not None and not on_meta:
        raise value_error(
            f"{what}: weights are for a module on meta",
            found=f"{class_name} with real parameters",
            expected="with weft.weights.on_meta(): model = ...",
            fix=f"model.load_state_dict(weights{'()' if callable(weights) else ''})"
            if are_here
            else "weft.load_weights(model, path, ctx)",
        )
    if not (weights is None or weights == "later" or are_here):
        raise type_error(
            f"{what}: weights = {weights!r} cannot be used",
            found=type(weights).__name__,
            expected='tensors by name, a function that reads them, or "later"; files are read by load_weights, of '
            "which each rank reads its own part",
            fix=f'model, ctx = weft.{what}(..., weights="later"); weft.load_weights(model, path, ctx)',
        )


def check_drawn(what: str, found: Layouts) -> None:
    """Raise if values are to be made for DTensors on meta.

    Raises:
        ValueError: There are some; the text names them.
    """
    cut = [name for name, one in found.items() if one.mesh]
    if cut:
        raise value_error(
            f"{what}: parameters on meta that are cut over other axes cannot be drawn, or sent from the first rank",
            found=listed(cut),
            expected='weights="later", and then load_weights, with which each rank reads only its own part',
            fix=f'model, ctx = weft.{what}(model, ctx, weights="later"); weft.load_weights(model, path, ctx)',
        )


def reshard_of(what: str, ctx: DistContext, axes: Dims, reshard: bool | int) -> bool | int:
    """`reshard_after_forward` as True, False, or a number of ranks that is neither one nor all."""
    if isinstance(reshard, bool):
        return reshard
    last = axes[-1] if axes else ()
    size = math.prod(map(ctx.axis_size, last))
    if not isinstance(reshard, int) or reshard < 1 or (size > 1 and size % reshard):
        raise value_error(
            f"{what}: reshard_after_forward = {reshard!r} cannot be used",
            found=f"{reshard!r}, with {size} rank(s) along {listed(map(repr, last))}",
            expected="True, False, or a number of ranks that divides those of the axis",
            fix=f"weft.{what}(..., reshard_after_forward=True)",
        )
    return reshard if 1 < reshard < size else reshard != 1


def check_parameters(what: str, module: nn.Module, plan: UnitPlan) -> None:
    """Raise if a parameter would not be the same once it is cut, or cannot be reduced with its unit."""
    check_quantized_weights(
        what, module, {"8 bits": "scales that bitsandbytes keeps at the parameter, which is exchanged"}
    )
    sparse = sparse_gradients(module)
    if sparse:
        raise value_error(
            f"{what}: sparse gradients of {type(module).__name__} cannot be sharded",
            found=f"{listed(sparse)}, of embeddings with sparse=True",
            expected="dense gradients: torch's FSDP2 knows no others",
            fix="weft.replicate(embedding, ctx) for each, and this for the rest of the model; or sparse=False in these "
            "embeddings, and torch.optim.Adam in place of SparseAdam",
        )
    named = {name: p for name, p in module.named_parameters() if name in plan.unit_of}
    fix = "remove the hooks, or weft.fully_shard(..., ignored=...) the modules that own them"
    check_not_hooked(what, type(module).__name__, named, fix=fix)
    kinds: dict[int, dict[torch.dtype, str]] = {}
    for name, p in named.items():
        if p.requires_grad:
            kinds.setdefault(plan.unit_of[name], {}).setdefault(p.dtype, name)
    mixed = [
        ", ".join(f"{name} {dtype}" for dtype, name in found.items()) for found in kinds.values() if len(found) > 1
    ]
    if mixed:
        raise value_error(
            f"{what}: parameters of one unit have different dtypes",
            found=listed(mixed),
            expected="one dtype for the trained parameters of a unit, which travel together",
            fix=f'model, ctx = weft.with_precision(model, ctx, "bf16")  # before {what}; or other units',
        )


def check_not_hooked(what: str, whose: str, named: Mapping[str, nn.Parameter], *, fix: str) -> None:
    """Raise if parameters have hooks for their gradients, where others will be in the place of these parameters."""
    kinds = (torch_internals.TENSOR_HOOKS, torch_internals.ACCUMULATE_HOOKS)
    hooked = [name for name, p in named.items() if any(kind.of(p) for kind in kinds)]
    if hooked:
        raise value_error(
            f"{what}: hooks on parameters of {whose} would be lost",
            found=listed(hooked),
            expected="no hooks: the parameters are exchanged for parts of them, on which torch would call none",
            fix=fix,
        )


def groups_of(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> list[object]:
    """What the ranks have to agree on about optimizers: kinds, and parameters per group, by name."""
    names = {id(p): name for name, p in module.named_parameters()}
    return [
        [type(one).__name__, *([names.get(id(p), "another") for p in entry["params"]] for entry in one.param_groups)]
        for one in optimizers
    ]


def optimizers_in(
    what: str, rebind: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
) -> tuple[torch.optim.Optimizer, ...]:
    """`rebind` as a tuple.

    Raises:
        TypeError: Something in it is not an optimizer.
    """
    optimizers = (rebind,) if isinstance(rebind, torch.optim.Optimizer) else tuple(rebind)
    wrong = [type(one).__name__ for one in optimizers if not isinstance(one, torch.optim.Optimizer)]
    if wrong:
        raise type_error(
            f"{what}: rebind holds something else than optimizers",
            found=listed(wrong),
            expected="torch.optim.Optimizer",
            fix=f"weft.{what}(..., rebind=[optimizer])",
        )
    return optimizers


def check_optimizers(what: str, module: nn.Module, rebind: Sequence[torch.optim.Optimizer]) -> None:
    """Check that no optimizer would continue with parameters that the module will not have.

    Raises:
        OrderError: A living optimizer holds parameters of `module` and is not in `rebind`.
        ValueError: One in `rebind` holds none of them.
    """
    held = {id(p) for p in module.parameters()}
    strangers = [one for one in rebind if not any(id(p) in held for p in parameters_of(one))]
    if strangers:
        raise value_error(
            f"{what}: {len(strangers)} optimizer(s) in rebind hold no parameter of {type(module).__name__}",
            found=listed(f"{type(one).__name__}, {len(one.param_groups)} group(s)" for one in strangers),
            expected="optimizers over its parameters as they are now; others would train nothing of it",
            fix=f"optimizer = torch.optim.AdamW(model.parameters())  # after weft.{what}(model, ctx)",
        )
    left = optimizers_besides(rebind, list(module.parameters()))
    if left:
        raise OrderError(
            f"{what}: {len(left)} optimizer(s) hold parameters of {type(module).__name__}, and would keep the old",
            found=listed(f"{type(one).__name__}, {len(one.param_groups)} group(s)" for one in left),
            expected=f"{what}, then the optimizer; or the optimizer given along",
            fix="del other_optimizer  # zero_partition takes one optimizer: make others over the parameters after it"
            if what == "zero_partition"
            else f"weft.{what}(..., rebind=optimizer)",
        )
