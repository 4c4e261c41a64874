"""`with_precision`: which dtype where, for modules; skipped steps, for optimizers.

The policy and its checks are here; casts, autocast and the fp16 scale are the engine's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any, Literal, TypeVar, cast, overload

import torch
from torch import nn

from weft.context import DistContext
from weft.contract import check_methods, offered, transform
from weft.engines.options import CastOptions, ScaleOptions
from weft.errors import ContractError, OrderError, listed, message
from weft.placing import check_place, place_module

__all__ = ["LossScaling", "Precision", "creation_dtype", "loss_scale", "skipped", "with_precision"]

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer)  # noqa: E741
PolicyName = Literal["fp32", "fp64", "bf16", "fp16", "bf16-true", "fp16-true"]
_LOW = (torch.bfloat16, torch.float16)


def _is_float(dtype: object) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize >= 2


def _is_power_of_two(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return value > 0 and math.isfinite(value) and math.frexp(value)[0] == 0.5


@dataclass(frozen=True, kw_only=True)
class LossScaling:
    """How the fp16 scale moves. Powers of two only, so that scaling and unscaling are exact.

    Source: Micikevicius et al., "Mixed Precision Training", 2018; `torch.amp.GradScaler`.

    Attributes:
        init: First scale.
        growth: Factor after `growth_every` good steps in a row.
        backoff: Factor after a step with a non-finite gradient.
        growth_every: Good steps until the scale grows.
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    growth_every: int = 2000

    def __post_init__(self) -> None:
        factors = {"init": self.init, "growth": self.growth, "backoff": self.backoff}
        wrong = [f"{name}={value!r}" for name, value in factors.items() if not _is_power_of_two(value)]
        if not wrong:
            wrong += [f"growth={self.growth}"] if self.growth < 1 else []
            wrong += [f"backoff={self.backoff}"] if self.backoff >= 1 else []
        if type(self.growth_every) is not int or self.growth_every < 1:
            wrong += [f"growth_every={self.growth_every!r}"]
        if wrong:
            raise ValueError(
                message(
                    f"LossScaling: {listed(wrong)} cannot be used",
                    found=listed(wrong),
                    expected="powers of two; growth >= 1, backoff < 1; growth_every a whole number >= 1",
                    fix="LossScaling(init=2.0**16, growth=2.0, backoff=0.5, growth_every=2000)",
                )
            )


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Which dtype is used where. None always means: leave it as it is.

    Attributes:
        param: Parameters that are trained are stored in it; frozen ones are left alone.
        compute: Inside the module. If parameters are stored in another dtype, torch's autocast
            picks the operations that are safe in it; otherwise inputs are cast to it, and an
            autocast around the module does not reach inside.
        reduce: In which gradients travel between ranks.
        buffer: Floating-point buffers are stored in it; those of a layer whose own parameters are
            all frozen are left alone, like these.
        output: Floating-point outputs are cast to it.
        scaling: For fp16: scale gradients inside of the module.
    """

    param: torch.dtype | None = None
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    buffer: torch.dtype | None = None
    output: torch.dtype | None = None
    scaling: LossScaling | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.scaling, (LossScaling, NoneType)):
            raise TypeError(
                message(
                    "Precision: scaling is no LossScaling",
                    found=repr(self.scaling),
                    expected="a weft.LossScaling or None",
                    fix="Precision(compute=torch.float16, scaling=weft.LossScaling())",
                )
            )
        fields = {"param": self.param, "compute": self.compute, "reduce": self.reduce}
        fields |= {"buffer": self.buffer, "output": self.output}
        wrong = [f"{name}={dtype}" for name, dtype in fields.items() if dtype is not None and not _is_float(dtype)]
        if wrong:
            raise ValueError(
                message(
                    f"Precision: {listed(wrong)} cannot be used",
                    found=listed(wrong),
                    expected="floating-point dtypes of 16 bits or more",
                    fix="Precision(param=torch.float32, compute=torch.bfloat16)",
                )
            )
        if self.scaling is not None and self.compute is not torch.float16:
            raise ValueError(
                message(
                    "Precision: a loss scale has no effect here",
                    found=f"compute={self.compute}",
                    expected="compute=torch.float16 with scaling, or no scaling",
                    fix="Precision(param=torch.float32, compute=torch.float16, scaling=LossScaling())",
                )
            )


_FP32 = Precision(param=torch.float32, compute=torch.float32, buffer=torch.float32)
_NAMED: dict[PolicyName, Precision] = {
    "fp32": _FP32,
    "fp64": Precision(param=torch.float64, compute=torch.float64, buffer=torch.float64),
    "bf16": replace(_FP32, compute=torch.bfloat16, output=torch.float32),
    "fp16": replace(_FP32, compute=torch.float16, output=torch.float32, scaling=LossScaling()),
    "bf16-true": Precision(param=torch.bfloat16, compute=torch.bfloat16, buffer=torch.bfloat16),
    "fp16-true": Precision(param=torch.float16, compute=torch.float16, buffer=torch.float16),
}


@overload
def with_precision(
    obj: M, ctx: DistContext, policy: PolicyName | Precision, *, methods: Sequence[str] = ()
) -> tuple[M, DistContext]: ...
@overload
def with_precision(obj: O, ctx: DistContext) -> tuple[O, DistContext]: ...
@transform(
    before={"recompute", "replicate", "fully_shard", "zero_partition", "compiled", "fuse_step"},
    collective=True,
)
def with_precision(
    obj: Any, ctx: DistContext, policy: PolicyName | Precision | None = None, *, methods: Sequence[str] = ()
) -> tuple[Any, DistContext]:
    """Compute a module in a chosen precision, or let an optimizer skip bad fp16 steps.

    For a module: casts parameters as the policy says, runs its calls under torch's autocast, casts
    outputs. With "fp16" gradients are scaled inside the module only: outside of it, losses and
    gradients are always in true units, so clipping and logging need no unscaling, and modules with
    different scales can be chained.

    For an optimizer (after the module, with the context that knows it): a step with a non-finite
    gradient on any rank is skipped on all ranks, and the scale backs off; see `skipped`. Needed
    with "fp16"; without it the second backward raises. With other policies it does nothing.

    Policies: "bf16", "fp16": float32 parameters, 16-bit computation, float32 outputs; "fp32",
    "fp64", "bf16-true", "fp16-true": everything in that dtype; or a `Precision`. A part of a module
    may have a policy of its own, given before or after that of the whole.

    Source: Micikevicius et al., "Mixed Precision Training", 2018; `torch.autocast`.

    Changes: `obj` in place: dtypes of trained parameters and buffers as the policy says, and
    hooks; the module is moved to `ctx.device`. Names, class and keys stay.
    Collectives: none here; for an optimizer with fp16 modules on several ranks, one all-reduce
    of a few numbers per step.

    Args:
        obj: A module, or an optimizer over parameters of modules this was applied to.
        ctx: Where we run.
        policy: For a module; see above.
        methods: Methods of the module besides forward to treat alike.

    Returns:
        `obj` itself, and `ctx` with this transform in `applied`.

    Raises:
        AlreadyApplied: It was applied to `obj` before.
        OrderError: After `replicate` or another strategy; or an optimizer before its modules.
        ValueError: Unknown policy, or one that the device or the module cannot do: trained fp16
            parameters or two loss scales on one parameter, a list of modules without forward,
            parameters without a shape that would have to be cast.
        TypeError: `obj` is neither a module nor an optimizer, or `policy` no policy.
        ContextError: The ranks ask for different policies.

    Example:
        >>> import weft
        >>> model, ctx = weft.with_precision(nn.Linear(2, 2), weft.local(), "bf16")
        >>> model(torch.ones(1, 2)).dtype, model.weight.dtype
        (torch.float32, torch.float32)
    """
    if isinstance(obj, torch.optim.Optimizer):
        return _on_optimizer(obj, ctx, policy)
    if not isinstance(obj, nn.Module):
        raise TypeError(
            message(
                "with_precision: this is neither a module nor an optimizer",
                found=type(obj).__name__,
                expected="a torch.nn.Module or a torch.optim.Optimizer",
                fix='model, ctx = weft.with_precision(model, ctx, "bf16")',
            )
        )
    return _on_module(obj, ctx, _policy(policy), tuple(methods))


# -- modules -----------------------------------------------------------------------------------------


class _Offer:
    """What later transforms may ask of a module with a precision."""

    def __init__(self, precision: Precision, precise: Any) -> None:
        self.precision = precision
        self.reduce_dtype = precision.reduce
        self.precise = precise

    def undo(self) -> None:
        """Take casts and autocast off; parameters keep their dtype."""
        if self.precise is not None:
            self.precise.undo()


def _on_module(
    module: nn.Module, ctx: DistContext, precision: Precision, methods: tuple[str, ...]
) -> tuple[nn.Module, DistContext]:
    check_methods("with_precision", module, methods)
    _check_device(precision, ctx)
    _check_callable(module, precision, methods)
    _check_castable(module, precision)
    _check_scalable(module, precision)
    _check_one_scale(module, precision, ctx)
    on_meta = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
    if not on_meta:  # else whoever makes it real puts it in place
        check_place("with_precision", module, ctx)
    ctx.agree("with_precision", {"policy": repr(precision), "methods": list(methods)})
    if not on_meta:
        place_module("with_precision", module, ctx)
    _cast_parameters(module, precision)
    options = _cast_options(module, precision, methods)
    idle = options == CastOptions(methods=methods)
    precise = None if idle else ctx.engine.precise(module, ctx.device, options)
    kept = [precise.scale] if precise is not None and precise.scale is not None else []  # for checkpoints
    return module, ctx.offering(_Offer(precision, precise), *kept)


def _policy(policy: PolicyName | Precision | None) -> Precision:
    if isinstance(policy, Precision):
        return policy
    if isinstance(policy, str) and policy in _NAMED:
        return _NAMED[policy]
    raise ValueError(
        message(
            f"with_precision: policy = {policy!r} is unknown",
            found=repr(policy),
            expected=", ".join(repr(name) for name in _NAMED) + ", or a weft.Precision",
            fix='model, ctx = weft.with_precision(model, ctx, "bf16")',
        )
    )


def _check_device(precision: Precision, ctx: DistContext) -> None:
    kind = ctx.device.type
    double = torch.float64 in (precision.param, precision.compute, precision.buffer, precision.output)
    low = precision.compute in _LOW and precision.param is not precision.compute
    if (kind == "mps" and double) or (low and not torch.amp.autocast_mode.is_autocast_available(kind)):
        raise ValueError(
            message(
                f"with_precision: {kind} cannot do this policy",
                found="float64 on mps" if double else f"torch has no autocast on {kind}",
                expected="a policy the device supports",
                fix='model, ctx = weft.with_precision(model, ctx, "fp32")',
            )
        )
    reasons = [ctx.engine.refusal(dtype) for dtype in (precision.compute, precision.param)]
    for reason in filter(None, reasons):
        raise ValueError(
            message(
                f"with_precision: {kind} cannot do this policy",
                found=reason,
                expected='"bf16", whose range is that of float32 and needs no scale',
                fix='model, ctx = weft.with_precision(model, ctx, "bf16")',
            )
        )


def _check_scalable(module: nn.Module, precision: Precision) -> None:
    """A scale needs gradients wider than fp16: a trained fp16 parameter has fp16 gradients."""
    if precision.scaling is None or (precision.param is not None and precision.param is not torch.float16):
        return
    names = [
        name
        for name, p in module.named_parameters()
        if p.requires_grad and torch.float16 in (precision.param, p.dtype if precision.param is None else None)
    ]
    if names:
        raise ValueError(
            message(
                "with_precision: float16 parameters cannot be trained with a loss scale",
                found=listed(names),
                expected="float32 parameters, computed in float16",
                fix='model, ctx = weft.with_precision(model, ctx, "fp16")',
            )
        )


def _check_callable(module: nn.Module, precision: Precision, methods: tuple[str, ...]) -> None:
    """A list of modules is never called itself: casts and autocast would have no effect."""
    has_forward = type(module).forward is not nn.Module.forward or "forward" in vars(module)
    if not (has_forward or methods or precision.compute is precision.output is None):
        raise ValueError(
            message(
                f"with_precision: {type(module).__name__} has no forward, so nothing can be computed in a precision",
                found=type(module).__name__,
                expected="a module that is called, or the methods that are",
                fix="for part in modules: part, ctx = weft.with_precision(part, ctx, policy)",
            )
        )


def _check_castable(module: nn.Module, precision: Precision) -> None:
    """Lazy parameters and buffers have no values yet; later they would appear in the old dtype."""
    lazy = (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)
    empty = {id(t) for t, dtype in _to_cast(module, precision) if isinstance(t, lazy) and t.dtype is not dtype}
    names = [name for name, t in (*module.named_parameters(), *module.named_buffers()) if id(t) in empty]
    if names:
        raise ValueError(
            message(
                f"with_precision: parameters of {type(module).__name__} have no shape yet and cannot be cast",
                found=listed(names),
                expected="a module that has been called once (lazy modules get their shapes then)",
                fix="model(example_batch)  # before with_precision",
            )
        )


def _check_one_scale(module: nn.Module, precision: Precision, ctx: DistContext) -> None:
    """Two scales on one gradient would multiply: it would overflow."""
    if precision.scaling is None:
        return
    others = [ref() for record in ctx.applied if record.name == "with_precision" for ref in record.refs]
    scaled = [
        other
        for other in (*module.modules(), *others)
        if isinstance(other, nn.Module) and any(offer.precision.scaling for offer in offered(other, _Offer))
    ]
    taken = {id(p): type(other).__name__ for other in scaled for p in other.parameters()}
    names = [f"{name} (of {taken[id(p)]})" for name, p in module.named_parameters() if id(p) in taken]
    if names:
        raise ValueError(
            message(
                f"with_precision: parameters of {type(module).__name__} have a loss scale already",
                found=listed(names),
                expected="each parameter in one fp16 module: the outermost",
                fix='model, ctx = weft.with_precision(model, ctx, "fp16")  # once, for what holds them all',
            )
        )


def _own_parts(module: nn.Module) -> Iterator[nn.Module]:
    """The module and all modules in it, without parts that have a precision of their own."""
    yield module
    for child in module.children():
        if not offered(child, _Offer):
            yield from _own_parts(child)


def _to_cast(module: nn.Module, precision: Precision) -> list[tuple[torch.Tensor, torch.dtype]]:
    """Tensors that the policy stores in some dtype, and that dtype; a tensor may come twice."""
    found: list[tuple[torch.Tensor, torch.dtype]] = []
    for part in _own_parts(module):
        own = list(part.parameters(recurse=False))
        trained = [p for p in own if p.requires_grad]
        if precision.param is not None:
            found += [(p, precision.param) for p in trained if p.is_floating_point()]
        if precision.buffer is not None and (trained or not own):
            found += [(b, precision.buffer) for b in part.buffers(recurse=False) if b.is_floating_point()]
    return found


def _cast_parameters(module: nn.Module, precision: Precision) -> None:
    # In place: optimizers, tied weights and buffers shared between layers go on with the same tensors.
    for tensor, dtype in _to_cast(module, precision):
        if tensor.dtype is not dtype:
            tensor.data = tensor.data.to(dtype)
            if tensor.grad is not None:
                tensor.grad = tensor.grad.to(dtype)


def _cast_options(module: nn.Module, precision: Precision, methods: tuple[str, ...]) -> CastOptions:
    own = [p for part in _own_parts(module) for p in part.parameters(recurse=False)]
    compute = precision.compute
    mixed = compute in _LOW and any(p.is_floating_point() and p.dtype is not compute for p in own)
    scaling = precision.scaling
    return CastOptions(
        autocast=compute if mixed else None,
        inputs=compute if compute is not None and not mixed else None,
        outputs=precision.output,
        scale=None if scaling is None else ScaleOptions(**vars(scaling)),
        methods=methods,
    )


# -- optimizers --------------------------------------------------------------------------------------


class _SkipOffer:
    def __init__(self, skipping: Any) -> None:
        self.skipping = skipping

    def undo(self) -> None:
        """Let the optimizer step whatever the gradients are."""
        if self.skipping is not None:
            self.skipping.undo()

    def release(self) -> None:
        if self.skipping is not None:
            self.skipping.release()


def _on_optimizer(
    optimizer: torch.optim.Optimizer, ctx: DistContext, policy: object
) -> tuple[torch.optim.Optimizer, DistContext]:
    if policy is not None:
        raise ValueError(
            message(
                "with_precision: an optimizer takes no policy",
                found=repr(policy),
                expected="the policy of the modules whose parameters it holds",
                fix="optimizer, ctx = weft.with_precision(optimizer, ctx)",
            )
        )
    modules = [ref() for record in ctx.applied if record.name == "with_precision" for ref in record.refs]
    pairs = [(module, offer) for module in modules for offer in offered(module, _Offer)]
    wanted = {id(p) for entry in optimizer.param_groups for p in entry["params"]}
    if not any(wanted & {id(p) for p in cast("nn.Module", module).parameters()} for module, _ in pairs):
        raise OrderError(
            message(
                "with_precision: the context knows no module with a precision that holds these parameters",
                found=f"transforms so far: {listed(record.name for record in ctx.applied) or 'none'}",
                expected="with_precision on the module, then the optimizer, then with_precision on the optimizer",
                fix='model, ctx = weft.with_precision(model, ctx, "fp16")',
            )
        )
    scales = [
        offer.precise.scale for _, offer in pairs if offer.precise is not None and offer.precise.scale is not None
    ]
    if scales and isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            message(
                "with_precision: LBFGS evaluates the loss inside of step, which cannot be skipped",
                found="LBFGS with an fp16 module",
                expected="an optimizer that is stepped after backward",
                fix='model, ctx = weft.with_precision(model, ctx, "bf16")',
            )
        )
    ctx.agree("with_precision", {"optimizer": type(optimizer).__name__, "fp16 modules": len(scales)})
    if not scales:
        return optimizer, ctx.offering(_SkipOffer(None))
    group = ctx.require_collective("with_precision").group if ctx.world_size > 1 else None
    return optimizer, ctx.offering(_SkipOffer(ctx.engine.skip_steps(optimizer, scales, group)))


def skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether the last step of an optimizer was skipped because of a non-finite gradient.

    Changes: nothing. Collectives: none; the answer is the same on all ranks.

    Args:
        optimizer: One that `with_precision` was applied to.

    Returns:
        True after a skipped step, False after a good one and before the first.

    Raises:
        ContractError: `with_precision` was not applied to it.

    Example:
        >>> import weft
        >>> model, ctx = weft.with_precision(nn.Linear(2, 2), weft.local(), "fp16")
        >>> optimizer, ctx = weft.with_precision(torch.optim.SGD(model.parameters()), ctx)
        >>> weft.skipped(optimizer)
        False
    """
    offers = offered(optimizer, _SkipOffer)
    if not offers:
        raise ContractError(
            message(
                "skipped: this optimizer steps whatever the gradients are",
                found=type(optimizer).__name__,
                expected="an optimizer that with_precision was applied to",
                fix="optimizer, ctx = weft.with_precision(optimizer, ctx)",
            )
        )
    return bool(offers[-1].skipping is not None and offers[-1].skipping.skipped)


def loss_scale(module: nn.Module) -> float:
    """Tell the fp16 scale of a module; 1 in other precisions.

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
    scales = [offer.precise.scale for offer in offered(module, _Offer) if offer.precise is not None]
    return float(scales[-1].value) if scales and scales[-1] is not None else 1.0


@contextlib.contextmanager
def creation_dtype(policy: PolicyName | Precision) -> Iterator[None]:
    """Create parameters in the dtype in which the policy stores them.

    Changes: torch's default dtype inside of the body; restored afterwards, also on an error.
    Collectives: none.

    Args:
        policy: As for `with_precision`.

    Raises:
        ValueError: Unknown policy.

    Example:
        >>> with creation_dtype("bf16-true"):
        ...     model = nn.Linear(2, 2)
        >>> model.weight.dtype
        torch.bfloat16
    """
    before = torch.get_default_dtype()
    dtype = _policy(policy).param
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(before)
