"""Elements of `weft.grad_chain`: functions that make one. What is returned is called with gradients and a context."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from weft.checks import check_count
from weft.context import DistContext
from weft.contract import offered
from weft.contract.marks import known_modules
from weft.engines.torch.amp.loss_scale import LossScale
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.steps.skip import SkippingStep
from weft.errors import ContractError, listed
from weft.grads.limits import check_limit, gradients_of
from weft.grads.named_grads import Element, NamedGrads
from weft.keyed_random.elements import normal_block
from weft.precision import PrecisionOffer
from weft.rng import mix
from weft.tensors.dtensor import local


def clip_norm(max_norm: float, *, norm_type: float = 2.0) -> Element:
    """Make an element of a chain that scales all gradients so that their norm is at most `max_norm`.

    The norm is that of all parameters of the optimizer, over all ranks, as `weft.clip_grads` computes it.

    Source: Pascanu et al., "On the difficulty of training recurrent neural networks", 2013;
    `torch.nn.utils.clip_grad_norm_`.

    Args:
        max_norm: > 0. Gradients are scaled by min(1, max_norm / (norm + 1e-6)).
        norm_type: p of the p-norm, > 0; also `math.inf`.

    Returns:
        The element. It changes gradients in place; if anything is sharded, with an all-reduce of a few numbers.

    Raises:
        TypeError: An argument is no number.
        ValueError: It is not > 0.

    Example:
        >>> import weft
        >>> model, ctx = weft.replicate(torch.nn.Linear(2, 1, bias=False), weft.local())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer, ctx = weft.grad_chain(optimizer, ctx, weft.grads.clip_norm(1.0))
    """
    check_limit("clip_norm", "max_norm", max_norm, call="weft.grads.clip_norm(")
    check_limit(
        "clip_norm", "norm_type", norm_type, call="weft.grads.clip_norm(max_norm=1.0, norm_type=", default="2.0"
    )

    def clip(grads: NamedGrads, ctx: DistContext) -> NamedGrads:
        held = gradients_of(list(grads.parameters.values()), ctx)
        held.scale_to(float(max_norm), held.norm(float(norm_type)))
        return grads

    return _named(clip, f"clip_norm({max_norm}, norm_type={norm_type})")


def clip_value(max_value: float) -> Element:
    """Make an element of a chain that brings every element of the gradients into [-max_value, max_value].

    Source: `torch.nn.utils.clip_grad_value_`.

    Args:
        max_value: > 0.

    Returns:
        The element. It changes gradients in place and sends nothing.

    Raises:
        TypeError: It is no number.
        ValueError: It is not > 0.

    Example:
        >>> clip_value(0.5).__qualname__
        'clip_value(0.5)'
    """
    check_limit("clip_value", "max_value", max_value, call="weft.grads.clip_value(")

    def clip(grads: NamedGrads, ctx: DistContext) -> NamedGrads:
        gradients_of(list(grads.parameters.values()), ctx).clamp(float(max_value))
        return grads

    return _named(clip, f"clip_value({max_value})")


def centralize() -> Element:
    """Make an element of a chain that subtracts from each row of a gradient the mean of the row.

    A row is all elements with one index in the first dimension: the weights of one output of a linear layer or a
    convolution. Of a row that lies in parts on several ranks, the mean is that of the whole row. Gradients with fewer
    than two dimensions stay as they are.

    Source: Yong et al., "Gradient Centralization: A New Optimization Technique for Deep Neural Networks", ECCV 2020.

    Returns:
        The element. It changes gradients in place; where rows are in parts, with an all-reduce of a number per row.

    Example:
        >>> from weft.grads import NamedGrads
        >>> import weft
        >>> weight = torch.nn.Parameter(torch.zeros(2, 2))
        >>> weight.grad = torch.tensor([[1.0, 3.0], [4.0, 4.0]])
        >>> centralize()(NamedGrads({"weight": weight}), weft.local())["weight"].tolist()
        [[-1.0, 1.0], [0.0, 0.0]]
    """

    def subtract_means(grads: NamedGrads, ctx: DistContext) -> NamedGrads:
        values = {name: _stored(grads, name) for name, gradient in grads.items() if gradient.dim() > 1}
        totals = grads.sums({name: _row_sums(part) for name, part in values.items()}, rows=True)
        for name, part in values.items():
            means = totals[name] / max(math.prod(grads[name].shape[1:]), 1)
            part.sub_(means.to(part.dtype).view(-1, *[1] * (part.dim() - 1)))
        return grads

    return _named(subtract_means, "centralize()")


def add_noise(std: float | Callable[[int], float], *, seed: int | None = None) -> Element:
    """Make an element of a chain that adds normal noise to every element of every gradient.

    The noise of an element follows from the seed, the step, the name of its parameter and its place in the whole
    tensor (Philox), not from a random state: it is the same on any number of ranks, however parameters are sharded, in
    a resumed run, and on copies of a parameter. Two such elements in one chain draw different noise. Chains of several
    optimizers over parameters of the same names need different seeds.

    Source: Neelakantan et al., "Adding Gradient Noise Improves Learning for Very Deep Networks", 2015; Abadi et al.,
    "Deep Learning with Differential Privacy", CCS 2016.

    Args:
        std: The standard deviation, > 0; or a function that returns it for a step, from 0.
        seed: 0 <= seed < 2**63; default: `ctx.seed`. Keep it secret where the noise protects privacy, and with it what
            `weft.explain` prints.

    Returns:
        The element. It changes gradients in place and sends nothing. A core of a CPU draws 10 million numbers a second.

    Raises:
        TypeError: `std` is neither a number nor a function.
        ValueError: `std` is not > 0, or `seed` is out of range.

    Example:
        >>> import weft
        >>> add_noise(lambda step: (0.01 / (1 + step) ** 0.55) ** 0.5, seed=3).__qualname__
        'add_noise(a function, seed=3)'
    """
    if not callable(std):
        check_limit("add_noise", "std", std, call="weft.grads.add_noise(", more=", or a function of the step")
    if seed is not None:
        check_count("add_noise", "seed", seed, least=0, below=2**63, fix="weft.grads.add_noise(0.01, seed=0)")

    def add(grads: NamedGrads, ctx: DistContext) -> NamedGrads:
        _check_dense(grads)
        deviation = std(grads.step) if callable(std) else std
        for name in grads:
            held = grads.held(name)
            key = mix(ctx.seed if seed is None else seed, grads.step, grads.place, name, "noise")
            noise = normal_block(held.block, held.shape, key, held.local.device)
            if held.local.is_complex():
                noise = torch.complex(noise, normal_block(held.block, held.shape, key + 1, held.local.device))
            held.local.add_((noise * deviation).to(held.local.dtype))
        return grads

    return _named(add, f"add_noise({'a function' if callable(std) else std}, seed={seed})")


def skip_nonfinite() -> Element:
    """Make an element of a chain that ends the step if a gradient is not finite on some rank, on all ranks alike.

    All gradients become None, so that `optimizer.step()` does nothing, and later elements are not called. With fp16 it
    takes the place of `weft.skip_nonfinite`, and the loss scale backs off; it works in every other precision as well.

    Source: Micikevicius et al., "Mixed Precision Training", 2018; `torch.amp.GradScaler`.

    Returns:
        The element. It waits for the device; on several ranks, with an all-reduce of a few numbers.

    Example:
        >>> import weft
        >>> model, ctx = weft.replicate(torch.nn.Linear(2, 1), weft.local())
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer, ctx = weft.grad_chain(optimizer, ctx, weft.grads.skip_nonfinite())
        >>> model(torch.tensor([[1.0, torch.inf]])).sum().backward()
        >>> optimizer.step()
        >>> weft.was_skipped(optimizer)
        True
    """
    return skip_step


def skip_step(grads: NamedGrads, ctx: DistContext) -> Mapping[str, torch.Tensor]:
    """The element that `weft.grads.skip_nonfinite` returns, for which a chain has a `SkippingStep` of its optimizer.

    Called by itself it returns all gradients, or none if one is not finite on some rank.
    """
    everyone = ctx.require_collective("skip_nonfinite").group if ctx.world_size > 1 else None
    held = gradients_of(list(grads.parameters.values()), ctx)
    return grads if held.checked_norm(math.inf, everyone).is_finite else {}


def scales_of(optimizer: torch.optim.Optimizer, ctx: DistContext) -> list[LossScale] | None:
    """The scales of all fp16 modules that a context knows; None if no module with a precision is the optimizer's."""
    pairs = [(module, offer) for module in known_modules(ctx) for offer in offered(module, PrecisionOffer)]
    wanted = set(map(id, parameters_of(optimizer)))
    if not any(wanted & {id(p) for p in module.parameters()} for module, _ in pairs):
        return None
    found = [offer.precise.scale for _, offer in pairs if offer.precise is not None]
    return [scale for scale in found if scale is not None]


def skipping_step(optimizer: torch.optim.Optimizer, ctx: DistContext) -> SkippingStep:
    """What skips the steps of an optimizer, on all ranks alike, and moves the scales; not hooked yet."""
    group = ctx.require_collective("skip_nonfinite").group if ctx.world_size > 1 else None
    return SkippingStep(optimizer, scales_of(optimizer, ctx) or (), group, ctx.device)


def _named(function: Element, name: str) -> Element:
    """A function with a name that says how it was made: in errors, `explain`, and what ranks agree on."""
    function.__qualname__ = name
    return function


def _row_sums(part: torch.Tensor) -> torch.Tensor:
    return part.sum(tuple(range(1, part.dim())), dtype=torch.promote_types(part.dtype, torch.float32))


def _stored(grads: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """The values of a gradient that lie here: of a sparse one, the rows that are there; the others are 0."""
    part = local(grads[name])
    return part.values() if part.is_sparse else part


def _check_dense(grads: NamedGrads) -> None:
    sparse = [name for name, gradient in grads.items() if gradient.layout is not torch.strided]
    if sparse:
        raise ContractError(
            "add_noise: sparse gradients have no elements for most of the noise",
            found=listed(sparse),
            expected="dense gradients",
            fix="nn.Embedding(num, dim, sparse=False)",
        )
