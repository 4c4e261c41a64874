"""`clip_grads`: one norm over all gradients, wherever they lie, and gradients clipped to it.

What is given and what happens when a gradient is not finite is decided here; norms and changes of
gradients are the engine's. A plain function and no transform: nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NoReturn

import torch
from torch import nn

from weft.checks import check_choice
from weft.context import DistContext
from weft.contract.transform import check_context
from weft.engines.torch.compute.grad_norm import with_nonfinite_gradient
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.parts.left_gathered import drop_gathered
from weft.engines.torch.steps.in_backward import check_has_gradients
from weft.errors import listed, message, type_error, value_error
from weft.grads.limits import check_limit, gradients_of
from weft.peers.agreement import exchange

_HasGradients = nn.Module | torch.optim.Optimizer | torch.Tensor
_Part = tuple[str, _HasGradients]


def clip_grads(
    modules: _HasGradients | Iterable[Any] | Mapping[str, Any],
    ctx: DistContext,
    *,
    max_norm: float | None = None,
    max_value: float | None = None,
    norm_type: float = 2.0,
    nonfinite: Literal["raise", "skip", "zero"] | None = None,
) -> torch.Tensor:
    """Clip the gradients of everything that is trained together, and return their norm.

    Call it between backward and `optimizer.step()`. It computes what `torch.nn.utils.clip_grad_norm_` and
    `clip_grad_value_` compute in one process, also where those raise or return a DTensor: with sharded, replicated and
    plain parameters together, several models, several meshes, sparse gradients. It works on each rank's shards without
    gathering them. With neither `max_norm` nor `max_value` it only returns the norm.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013;
    `torch.nn.utils.clip_grad_norm_`.

    Changes: gradients, in place. With `nonfinite="skip"` they may become None.
    Collectives: if anything is sharded, one all-reduce of a few numbers per set of ranks over which shards lie, and one
    of a single number along the stages of a pipeline; else none. With `nonfinite`, that message also informs all ranks
    if the shards are spread over all of them; otherwise one more all-reduce of one number is needed. "raise" adds a
    meeting through the store before it raises.

    Args:
        modules: A module, an optimizer, a parameter, or any iterable or mapping of them. A
            parameter that comes twice counts once; those without a gradient do not count.
        ctx: The current context.
        max_norm: Gradients are scaled by min(1, max_norm / (norm + 1e-6)); > 0.
        max_value: Every element is brought into [-max_value, max_value]; > 0. Not with `max_norm`.
        norm_type: p of the p-norm, > 0; also `math.inf`.
        nonfinite: What to do when a gradient is not finite on some rank; the same on all of them.
            None: nothing, as torch. "raise": name the parameters and ranks, and change nothing.
            "skip": set all gradients to None, so that `optimizer.step()` does nothing. "zero": make
            all gradients 0; the optimizer steps (momentum, weight decay). Waits for the device.

    Returns:
        The norm before clipping: a plain 0-d tensor, the same on all ranks, float32 also for 16-bit
        gradients (torch would round it). 0 without gradients; not finite if one of them is not.

    Raises:
        FloatingPointError: On all ranks, with `nonfinite="raise"`.
        TypeError: `modules` holds something else, or an option is no number.
        ValueError: An option is out of range, an iterator is empty, a DTensor gradient is not
            reduced over its ranks, or `max_value` is to limit complex gradients.
        ContextError: With `nonfinite` on several ranks: the context is closed.
        PeerError: With "raise": another rank failed.

    Example:
        >>> import weft
        >>> model, ctx = nn.Linear(1, 1), weft.local()
        >>> (3 * model.weight + 4 * model.bias).backward()
        >>> weft.clip_grads(model, ctx, max_norm=1.0)
        tensor(5.)
        >>> model.weight.grad, model.bias.grad
        (tensor([[0.6000]]), tensor([0.8000]))
    """
    check_context("clip_grads", ctx, fix="weft.clip_grads(model, ctx, max_norm=1.0)")
    _check_options(max_norm, max_value, norm_type, nonfinite)
    parts = list(_parts(modules, ""))
    for _, part in parts:
        if isinstance(part, nn.Module):
            drop_gathered(part)  # a forward pass after backward leaves copies without gradients
    parameters = _parameters(parts)
    check_has_gradients("clip_grads", parameters)
    if max_value is not None:
        _check_real(parts)
    gradients = gradients_of(parameters, ctx)
    if nonfinite is None:
        norm: torch.Tensor = gradients.norm(float(norm_type))
    else:
        world = ctx.require_collective("clip_grads")
        norm, is_finite = gradients.checked_norm(float(norm_type), world.group if ctx.world_size > 1 else None)
        if not is_finite:
            if nonfinite == "raise":
                _raise_not_finite(parts, norm, ctx)
            elif nonfinite == "zero":
                gradients.zero()
            else:
                for parameter in parameters:
                    parameter.grad = None
            return norm
    if max_norm is not None:
        gradients.scale_to(float(max_norm), norm)
    elif max_value is not None:
        gradients.clamp(float(max_value))
    return norm


# -- what was given ----------------------------------------------------------------------------------


def _parts(given: object, name: str) -> Iterator[_Part]:
    """Flatten what was given; each part with its name, "" if it was given none."""
    if isinstance(given, (nn.Module, torch.optim.Optimizer, torch.Tensor)):
        _check_leaf(given, name)
        yield name, given
    elif isinstance(given, Mapping):
        for key, item in given.items():
            yield from _parts(item, _join(name, key))
    elif isinstance(given, Iterable) and not isinstance(given, (str, bytes)):
        count = -1
        for count, item in enumerate(given):
            yield from _parts(item, _join(name, count))
        if count < 0 and isinstance(given, Iterator):
            raise value_error(
                "clip_grads: an iterator gave nothing",
                found=f"{name or 'modules'}: an empty {type(given).__name__}; was it used before?",
                expected="modules, optimizers or parameters",
                fix="weft.clip_grads(model, ctx, max_norm=1.0)",
            )
    else:
        raise type_error(
            f"clip_grads: {name or 'modules'} has no gradients",
            found=type(given).__name__,
            expected="a module, an optimizer, a parameter, or an iterable or mapping of them",
            fix="weft.clip_grads(model, ctx, max_norm=1.0)",
        )


def _check_leaf(given: object, name: str) -> None:
    if isinstance(given, torch.Tensor) and not given.is_leaf:
        raise type_error(
            f"clip_grads: {name or 'modules'} is no parameter",
            found=f"a tensor of shape {tuple(given.shape)} that was computed by {type(given.grad_fn).__name__}",
            expected="parameters, whose .grad is clipped",
            fix="weft.clip_grads(model.parameters(), ctx, max_norm=1.0)",
        )


def _join(*names: object) -> str:
    return ".".join(str(name) for name in names if name != "")


def _parameters(parts: list[_Part]) -> list[torch.Tensor]:
    if len(parts) == 1:
        return _own_parameters(parts[0][1])
    return list(dict.fromkeys(p for _, part in parts for p in _own_parameters(part)))


def _own_parameters(part: _HasGradients) -> list[torch.Tensor]:
    if isinstance(part, nn.Module):
        return list(part.parameters())
    if isinstance(part, torch.optim.Optimizer):
        return parameters_of(part)
    return [part]


def _named(parts: list[_Part]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, part in parts:
        if isinstance(part, nn.Module):
            yield from ((_join(name, own), p) for own, p in part.named_parameters())
        elif isinstance(part, torch.optim.Optimizer):
            for index, entry in enumerate(part.param_groups):
                yield from ((_join(name, f"group {index}[{i}]"), p) for i, p in enumerate(entry["params"]))
        else:
            yield name or "the parameter", part


# -- what can be wrong -------------------------------------------------------------------------------


def _raise_not_finite(parts: list[_Part], norm: torch.Tensor, ctx: DistContext) -> NoReturn:
    """Tell on all ranks which gradients are not finite, and where."""
    names = {id(p): name for name, p in reversed(list(_named(parts)))}  # the first name of each
    bad = with_nonfinite_gradient(_parameters(parts))
    texts = exchange(ctx.require_collective("clip_grads"), "clip_grads", listed(names[id(p)] for p in bad))
    found = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
    raise FloatingPointError(
        message(
            "clip_grads: gradients are not finite" if found else f"clip_grads: the norm overflows {norm.dtype}",
            found="; ".join(found) or f"a norm of {norm.item()} of finite gradients",
            expected="finite gradients on all ranks",
            fix='weft.clip_grads(model, ctx, max_norm=1.0, nonfinite="skip")  # or a smaller learning rate',
        )
    )


def _check_real(parts: list[_Part]) -> None:
    wrong = [name for name, p in _named(parts) if p.is_complex()]
    if wrong:
        raise value_error(
            "clip_grads: max_value cannot limit complex gradients, which have no order",
            found=listed(wrong),
            expected="real parameters with max_value; max_norm is for complex ones, too",
            fix="weft.clip_grads(model, ctx, max_norm=1.0)",
        )


def _check_options(max_norm: object, max_value: object, norm_type: object, nonfinite: object) -> None:
    call = "weft.clip_grads(model, ctx, "
    for name, limit in (("max_norm", max_norm), ("max_value", max_value)):
        if limit is not None:
            check_limit("clip_grads", name, limit, call=f"{call}{name}=", more=" or None, for no clipping")
    check_limit("clip_grads", "norm_type", norm_type, call=f"{call}max_norm=1.0, norm_type=", default="2.0")
    if max_norm is not None and max_value is not None:
        raise value_error(
            "clip_grads: max_norm and max_value exclude each other",
            found=f"max_norm={max_norm!r}, max_value={max_value!r}",
            expected="one of them; the order of both would matter",
            fix="weft.clip_grads(model, ctx, max_norm=1.0)",
        )
    fix = 'weft.clip_grads(model, ctx, max_norm=1.0, nonfinite="skip")'
    check_choice("clip_grads", "nonfinite", nonfinite, ("raise", "skip", "zero", None), fix=fix)
