"""The step that is skipped on gradients that are not finite, with the fp16 scales of modules that a context knows."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weft.context import DistContext
from weft.contract import offered
from weft.engines.torch.amp.loss_scale import LossScale
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.engines.torch.steps.skip import SkippingStep
from weft.grads.limits import gradients_of, known_modules
from weft.grads.named_grads import NamedGrads
from weft.precision import PrecisionOffer


class SkipNonfinite:
    """The element that `weft.grads.skip_nonfinite` makes."""

    __qualname__ = "skip_nonfinite()"

    def __call__(self, grads: NamedGrads, ctx: DistContext) -> Mapping[str, torch.Tensor]:
        """All gradients, or none if one of them is not finite on some rank; a collective, as `clip_grads` has it."""
        everyone = ctx.require_collective("skip_nonfinite").group if ctx.world_size > 1 else None
        held = gradients_of(list(grads.parameters.values()), ctx)
        return grads if held.checked_norm(torch.inf, everyone).is_finite else {}


def scales_of(optimizer: torch.optim.Optimizer, ctx: DistContext) -> list[LossScale] | None:
    """The scales of all fp16 modules that a context knows; None if no module with a precision is the optimizer's."""
    pairs = [(module, offer) for module in known_modules(ctx) for offer in offered(module, PrecisionOffer)]
    wanted = set(map(id, parameters_of(optimizer)))
    if not any(wanted & {id(p) for p in module.parameters()} for module, _ in pairs):
        return None
    found = [offer.precise.scale for _, offer in pairs if offer.precise is not None]
    return [scale for scale in found if scale is not None]


def skipping_step(optimizer: torch.optim.Optimizer, ctx: DistContext) -> SkippingStep | None:
    """What skips the steps of an optimizer for fp16 and moves the scales, not hooked yet; None if there is no fp16."""
    scales = scales_of(optimizer, ctx)
    if not scales:
        return None
    group = ctx.require_collective("skip_nonfinite").group if ctx.world_size > 1 else None
    return SkippingStep(optimizer, scales, group)
