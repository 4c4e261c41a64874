"""`with_precision`: which dtype where, for modules.

Casts, autocast and the fp16 scale are the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn

from weft.checks import check_module
from weft.context import DistContext
from weft.context.placement import check_place, place_module
from weft.contract import Part, Phase, check_methods, offered, transform
from weft.contract.marks import known_modules
from weft.contract.name_table import parts_by_name
from weft.engines import Spmd
from weft.engines.options import CastOptions
from weft.engines.torch.amp.autocast import PreciseModule
from weft.engines.torch.amp.fp8_linear import is_convertible
from weft.engines.torch.amp.stored_weights import StoredWeights
from weft.errors import listed, value_error
from weft.precision import LOW, PolicyName, Precision, PrecisionOffer, named_policy
from weft.sharding.meta import is_meta

M = TypeVar("M", bound=nn.Module)


@transform(phase=Phase.PREPARE, changes=Part.PARAMETERS | Part.FORWARD, collective=True)
def with_precision(
    module: M,
    ctx: DistContext,
    policy: PolicyName | Precision | Mapping[str, PolicyName | Precision],
    *,
    methods: Sequence[str] = (),
) -> tuple[M, DistContext]:
    """Compute a module in a chosen precision.

    Casts parameters as the policy says, runs the calls of the module under torch's autocast, and casts outputs. With
    "fp16" gradients are scaled inside the module only: outside it, losses and gradients are always in true units, so
    clipping and logging need no unscaling, and modules with different scales can be chained. The optimizer then has to
    skip steps whose gradients overflowed: `skip_nonfinite`.

    Policies: "bf16", "fp16": float32 parameters, 16-bit computation, float32 outputs; "fp8": as "fp32", but linear
    layers whose dimensions are both multiples of 16 multiply in 8 bits (`fp8_layers` and `explain` list them); "fp32",
    "fp64", "bf16-true", "fp16-true": everything in that dtype; or a `Precision`. A submodule may have its own policy,
    set before or after that of the whole module; or all of them come in one table, by name.

    Source: Micikevicius et al., "Mixed Precision Training", 2018; `torch.autocast`.

    Changes: `module` in place: dtypes of trained parameters and buffers as the policy says, and
    hooks; it is moved to `ctx.device`. Names, class and keys stay.
    Collectives: none.

    Args:
        module: Any module.
        ctx: The current context.
        policy: See above. Or a table of them, `{"*norm*": "fp32", "*": "bf16"}`: the first pattern that fits a part
            decides about it and what is inside, "*" about the module itself; see `weft.contract.name_table`. Parts that
            no pattern fits stay as they are.
        methods: Methods of the module besides forward to treat alike.

    Returns:
        `module` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: It was applied to `module` before.
        OrderError: After `replicate` or another strategy.
        ValueError: Unknown policy, or one that the device or the module cannot do: trained fp16
            parameters or two loss scales on one parameter, a list of modules without forward,
            parameters without a shape that would have to be cast. A pattern of a table fits no part.
        TypeError: `module` is not a module, or `policy` no policy.
        ContextError: The ranks ask for different policies.

    Example:
        >>> import weft
        >>> model, ctx = weft.with_precision(nn.Linear(2, 2), weft.local(), "bf16")
        >>> model(torch.ones(1, 2)).dtype, model.weight.dtype
        (torch.float32, torch.float32)
    """
    instead = 'model, ctx = weft.with_precision(model, ctx, "bf16")'
    if isinstance(module, torch.optim.Optimizer):
        instead = "optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)"
    check_module("with_precision", module, fix=instead)
    if not isinstance(policy, Mapping):
        return _on_module(module, ctx, named_policy(policy), tuple(methods))
    found = parts_by_name("with_precision", module, policy)
    table = {name: (part, named_policy(value)) for name, (part, value) in found.items()}
    check_methods("with_precision", module, methods)
    scaled: list[nn.Module] = []
    for part, precision in table.values():  # all are checked before anything is changed
        _check(part, ctx, precision, tuple(methods) if part is module else (), scaled)
        scaled += [part] if precision.scaling else []
    if not is_meta(module):
        place_module("with_precision", module, ctx)
    for part, precision in reversed(table.values()):  # inner parts first: what holds them leaves those alone
        if part is not module:
            _, ctx = with_precision(part, ctx, precision)
    return _on_module(module, ctx, table[""][1], tuple(methods)) if "" in table else (module, ctx)


def _check(
    module: nn.Module,
    ctx: DistContext,
    precision: Precision,
    methods: tuple[str, ...],
    scaled: Sequence[nn.Module] = (),
) -> None:
    check_methods("with_precision", module, methods)
    _check_device(precision, ctx)
    _check_callable(module, precision, methods)
    _check_castable(module, precision)
    _check_scalable(module, precision)
    _check_one_scale(module, precision, ctx, scaled)
    _check_products(module, precision, ctx)


def _on_module(module: M, ctx: DistContext, precision: Precision, methods: tuple[str, ...]) -> tuple[M, DistContext]:
    _check(module, ctx, precision, methods)
    on_meta = is_meta(module)
    if not on_meta:  # else it is put in place when it is made real
        check_place("with_precision", module, ctx)
    ctx.agree("with_precision", {"policy": repr(precision), "methods": list(methods)})
    if not on_meta:
        place_module("with_precision", module, ctx)
    _cast_parameters(module, precision)
    stored = None
    if precision.storage is not None and precision.compute is not None:
        stored = StoredWeights(_own_parts(module), precision.storage, precision.compute)
    options = _cast_options(module, precision, methods)
    idle = options == CastOptions(methods=methods)
    precise = None if idle else PreciseModule(module, ctx.device, options)
    kept = [precise.scale] if precise is not None and precise.scale is not None else []  # for checkpoints
    products = set(options.products)
    names = [name or "itself" for name, part in module.named_modules() if part in products]
    chosen = f"8-bit products of {listed(names)}" if names else ""
    return module, ctx.offering(PrecisionOffer(precision, precise, stored, chosen), *kept)


def _check_device(precision: Precision, ctx: DistContext) -> None:
    kind = ctx.device.type
    double = torch.float64 in (precision.param, precision.compute, precision.buffer, precision.output)
    low = precision.compute in LOW and precision.param is not precision.compute
    if (kind == "mps" and double) or (low and not torch.amp.autocast_mode.is_autocast_available(kind)):
        raise value_error(
            f"with_precision: {kind} does not support this policy",
            found="float64 on mps" if double else f"torch has no autocast on {kind}",
            expected="a policy the device supports",
            fix='model, ctx = weft.with_precision(model, ctx, "fp32")',
        )
    if isinstance(ctx.engine, Spmd):
        ctx.engine.check_dtype("with_precision", precision.compute)
        ctx.engine.check_dtype("with_precision", precision.param)


def _check_scalable(module: nn.Module, precision: Precision) -> None:
    """A scale needs gradients wider than fp16: a trained fp16 parameter has fp16 gradients."""
    dtype = precision.param
    names = [n for n, p in module.named_parameters() if p.requires_grad and (dtype or p.dtype) is torch.float16]
    if names and precision.scaling is not None:
        raise value_error(
            "with_precision: float16 parameters cannot be trained with a loss scale",
            found=listed(names),
            expected="float32 parameters, computed in float16",
            fix='model, ctx = weft.with_precision(model, ctx, "fp16")',
        )


def _check_callable(module: nn.Module, precision: Precision, methods: tuple[str, ...]) -> None:
    """A list of modules is never called itself: casts and autocast would have no effect."""
    has_forward = type(module).forward is not nn.Module.forward or "forward" in vars(module)
    if not (has_forward or methods or precision.compute is precision.output is None):
        raise value_error(
            f"with_precision: {type(module).__name__} has no forward, so nothing can be computed in a precision",
            found=type(module).__name__,
            expected="a module that is called, or the methods that are",
            fix="for part in modules: part, ctx = weft.with_precision(part, ctx, policy)",
        )


def _check_castable(module: nn.Module, precision: Precision) -> None:
    """Lazy parameters and buffers have no values yet; later they would appear in the old dtype."""
    lazy = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
    empty = {id(t) for t, dtype in _to_cast(module, precision) if isinstance(t, lazy) and t.dtype is not dtype}
    names = [name for name, t in (*module.named_parameters(), *module.named_buffers()) if id(t) in empty]
    if names:
        raise value_error(
            f"with_precision: parameters of {type(module).__name__} have no shape yet and cannot be cast",
            found=listed(names),
            expected="a module that has been called once (lazy modules get their shapes then)",
            fix="model(example_batch)  # before with_precision",
        )


def _check_products(module: nn.Module, precision: Precision, ctx: DistContext) -> None:
    is_xla = isinstance(ctx.engine, Spmd)
    if precision.matmul is not None and (is_xla or not _products(module)):
        sides = [f"{one.in_features} -> {one.out_features}" for one in _own_parts(module) if type(one) is nn.Linear]
        raise value_error(
            f"with_precision: no layer of {type(module).__name__} can multiply in {precision.matmul}",
            found="a device on which xla computes" if is_xla else f"linear layers: {listed(sides) or 'none'}",
            expected="a torch.nn.Linear whose in_features and out_features are multiples of 16",
            fix='model, ctx = weft.with_precision(model, ctx, "bf16")',
        )


def _check_one_scale(module: nn.Module, precision: Precision, ctx: DistContext, scaled: Sequence[nn.Module]) -> None:
    """Two scales on one gradient would multiply: it would overflow."""
    if precision.scaling is None:
        return
    known = (*module.modules(), *known_modules(ctx))
    done = [other for other in known if any(offer.precision.scaling for offer in offered(other, PrecisionOffer))]
    taken = {id(p): type(other).__name__ for other in (*scaled, *done) for p in other.parameters()}
    names = [f"{name} (of {taken[id(p)]})" for name, p in module.named_parameters() if id(p) in taken]
    if names:
        raise value_error(
            f"with_precision: parameters of {type(module).__name__} already have a loss scale",
            found=listed(names),
            expected="each parameter in one fp16 module: the outermost",
            fix='model, ctx = weft.with_precision(model, ctx, "fp16")  # once, for what holds them all',
        )


def _own_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all modules in it, without parts that have a precision of their own."""
    yield module
    for child in module.children():
        if not offered(child, PrecisionOffer):
            yield from _own_parts(child)


def _to_cast(module: nn.Module, precision: Precision) -> list[tuple[torch.Tensor, torch.dtype]]:
    """Tensors that the policy stores in some dtype, and that dtype; a tensor may come twice."""
    found: list[tuple[torch.Tensor, torch.dtype]] = []
    # Autocast casts what it needs; in a wider dtype a frozen layer of another one could not compute.
    also_frozen = precision.param is precision.compute and precision.compute not in LOW and precision.storage is None
    for part in _own_parts(module):
        own = list(part.parameters(recurse=False))
        trained = [p for p in own if p.requires_grad or (also_frozen and p.dtype.itemsize > 1)]
        if precision.param is not None:
            found += [(p, precision.param) for p in trained if p.is_floating_point()]
        if precision.buffer is not None and (trained or not own):
            found += [(b, precision.buffer) for b in part.buffers(recurse=False) if b.is_floating_point()]
    return found


def _cast_parameters(module: nn.Module, precision: Precision) -> None:
    # In place: optimizers, tied weights and buffers shared between layers keep the same tensors.
    for tensor, dtype in _to_cast(module, precision):
        if tensor.dtype is not dtype:
            tensor.data = tensor.data.to(dtype)
            if tensor.grad is not None:
                tensor.grad = tensor.grad.to(dtype)


def _cast_options(module: nn.Module, precision: Precision, methods: tuple[str, ...]) -> CastOptions:
    own = [p for part in _own_parts(module) for p in part.parameters(recurse=False)]
    compute = precision.compute
    mixed = compute in LOW and any(p.is_floating_point() and p.dtype is not compute for p in own)
    return CastOptions(
        autocast=compute if mixed else None,
        inputs=compute if compute is not None and not mixed else None,
        outputs=precision.output,
        scale=precision.scaling,
        methods=methods,
        products=_products(module) if precision.matmul is not None else (),
    )


def _products(module: nn.Module) -> tuple[nn.Module, ...]:
    """The layers that multiply in 8 bits."""
    return tuple(part for part in _own_parts(module) if is_convertible(part))


def fp8_layers(module: nn.Module) -> list[str]:
    """Tell which layers multiply in 8 bits, by name.

    Changes: nothing. Collectives: none.

    Args:
        module: Any module.

    Returns:
        Names of parts of `module`; "" is the module itself.

    Example:
        >>> import weft
        >>> fp8_layers(weft.with_precision(nn.Linear(16, 16), weft.local(), "fp8")[0])
        ['']
    """
    offers = [offer for part in module.modules() for offer in offered(part, PrecisionOffer)]
    chosen = {id(layer) for offer in offers for layer in getattr(offer.precise, "products", ())}
    return [name for name, part in module.named_modules() if id(part) in chosen]


def loss_scale(module: nn.Module) -> float:
    """Return the fp16 scale of a module; 1 in other precisions.

    Changes: nothing. Collectives: none. On a GPU this waits for the device.

    Args:
        module: Any module.

    Returns:
        The scale, a power of two.

    Example:
        >>> import weft
        >>> weft.loss_scale(weft.with_precision(nn.Linear(2, 2), weft.local(), "fp16")[0])
        65536.0
    """
    scales = [offer.precise.scale for offer in offered(module, PrecisionOffer) if offer.precise is not None]
    return float(scales[-1].value) if scales and scales[-1] is not None else 1.0
