"""`grad_samples`: the gradient of each sample of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from weft import torch_internals
from weft.checks import check_count, check_module
from weft.context import DistContext
from weft.contract import KeepsParameters, applied_to, offered
from weft.errors import ContractError, listed, value_error
from weft.precision import PrecisionOffer
from weft.tensors.dtensor import is_sharded
from weft.tensors.nested import map_tensors, tensors
from weft.tensors.remote_parameter import is_elsewhere


def grad_samples(
    module: nn.Module,
    ctx: DistContext,
    loss: Callable[..., torch.Tensor],
    *batch: Any,
    chunk_size: int | None = None,
) -> dict[str, torch.Tensor]:
    """Compute the gradient of each sample of this rank's batch, for clipping sample by sample (DP-SGD) and statistics.

    `loss(module, *sample)` is evaluated for batches of one sample each, all of them at once, by `torch.func.vmap`. A
    tied weight has one gradient, the sum over its uses; frozen parameters have none, as in backward. `.grad` is
    neither read nor changed: reduce what you make of the gradients over the ranks, as in the recipe for DP-SGD.

    Source: Abadi et al., "Deep Learning with Differential Privacy", CCS 2016; `torch.func`.

    Changes: nothing. Collectives: none, so ranks may have any number of samples, or none.

    Args:
        module: Whole on this rank: alone, or with `replicate` or `zero_partition` in stage 1, in any precision that
            does not scale the loss.
        ctx: The current context.
        loss: A function of the module and of a batch of one sample, as of a batch of any size; returns a single
            number. What of it is a mean over samples is then the value of one sample.
        batch: What `loss` gets besides the module: tensors [samples, ...], or nested values of them.
        chunk_size: Samples at a time, for less memory of activations; the gradients of all are returned. Default: all.

    Returns:
        Gradients [samples, ...] by the name of the parameter, the dots for its shape, in its dtype.

    Raises:
        ContractError: Parameters are sharded, or on other ranks; or the loss is scaled (fp16); or with `recompute`; or
            a batch norm or a dropout is in training mode: samples depend on each other, or masks on their number.
        ValueError: The tensors of the batch have other numbers of samples, or there are none; or `chunk_size` < 1.
        TypeError: `module` is not a module.

    Example:
        >>> import weft
        >>> model = nn.Linear(2, 1, bias=False)
        >>> x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        >>> weft.grads.grad_samples(model, weft.local(), lambda model, x: model(x).sum(), x)["weight"].tolist()
        [[[1.0, 2.0]], [[3.0, 4.0]]]
    """
    fix = "weft.grads.grad_samples(model, ctx, loss, x, y, chunk_size=64)"
    check_module("grad_samples", module, fix=fix)
    if chunk_size is not None:
        check_count("grad_samples", "chunk_size", chunk_size, fix=fix)
    sizes = {len(tensor) if tensor.dim() else -1 for tensor in tensors(batch)}
    if len(sizes) != 1 or -1 in sizes:
        raise value_error(
            "grad_samples: the batch has no number of samples",
            found=listed(str(list(tensor.shape)) for tensor in tensors(batch)) or "no tensors",
            expected="tensors [samples, ...] with as many samples in each",
            fix=fix,
        )
    _check_alone(module)
    trained = {f"module.{name}": p.detach() for name, p in module.named_parameters() if p.requires_grad}
    if not sizes.pop():
        return {name.removeprefix("module."): p.new_zeros((0, *p.shape)) for name, p in trained.items()}
    holder = _LossOf(module, loss)

    def loss_of_one(values: dict[str, torch.Tensor], sample: Any) -> Any:
        return functional_call(holder, values, map_tensors(lambda one: one[None], sample))

    each = vmap(grad(loss_of_one), in_dims=(None, 0), randomness="error", chunk_size=chunk_size)
    try:
        found: dict[str, torch.Tensor] = each(trained, batch)
    except RuntimeError as error:
        if "randomness" not in str(error):
            raise
        _refuse("a random operation in forward, such as F.dropout or dropout in attention")
    return {name.removeprefix("module."): gradient.detach() for name, gradient in found.items()}


class _LossOf(nn.Module):
    """A loss as a module, around the module it is of."""

    def __init__(self, module: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.module = module
        self._loss = loss

    def forward(self, *sample: Any) -> torch.Tensor:
        return self._loss(self.module, *sample)


def _check_alone(module: nn.Module) -> None:
    """Raise unless the gradient of a sample can be computed on this rank, and depends on this sample alone."""
    found = [f"{name} (sharded)" for name, p in module.named_parameters() if is_sharded(p) or is_elsewhere(p)]
    found += ["fp16" for offer in offered(module, PrecisionOffer) if offer.precision.scaling is not None]
    for name, part in module.named_modules():
        draws = torch_internals.dropout.holds(part) and float(getattr(part, "p", 0)) > 0
        if part.training and (draws or torch_internals.batch_norm.holds(part)):
            found.append(f"{name}: {type(part).__name__} in training mode")
        found += [record.name for record in applied_to(part) if record.name == "recompute"]
        found += ["DeepSpeed" for _ in offered(part, KeepsParameters)]
    if found:
        _refuse(listed(found))


def _refuse(found: str) -> NoReturn:
    raise ContractError(
        "grad_samples: the gradient of a sample does not follow from the sample and the parameters of this rank alone",
        found=found,
        expected="whole parameters, without a loss scale or recompute, and layers that neither mix samples nor draw",
        fix="model.eval()  # for dropout and batch norms; nn.GroupNorm, and weft.replicate alone, work in any mode",
    )
