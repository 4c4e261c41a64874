"""`balance_loss` and `balance_bias_`: experts that get equally many tokens, of the batch of all ranks.

Both are about how many tokens of the whole batch choose each expert. The loss is a product of two means over these
tokens: the mean of the ranks' losses is another number, so counts and scores are summed over the ranks first.
Plain functions and no transforms: nothing is recorded.
"""

from __future__ import annotations

from typing import TypeVar

import torch

from weft.collectives import reduce
from weft.context import DistContext
from weft.contract import part_axes, slice_axes
from weft.errors import ContractError, listed, type_error, value_error
from weft.tensors.dtensor import is_sharded
from weft.tensors.nested import tensors

T = TypeVar("T")


def balance_loss(
    probs: torch.Tensor,
    chosen: torch.Tensor,
    ctx: DistContext,
    *,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the load balancing loss of a router, over the tokens of all ranks: experts * sum(f * P).

    f is the share of tokens that choose an expert, P the mean of its probability. The loss is k, the choices per token,
    if all experts are chosen alike. It is the same number on all ranks, and its gradient is that of one process with
    the whole batch: add it to the loss of each rank as it is, also to one that is multiplied by `window.share`. In
    windows of `weft.accumulate_grads` it is that of one micro-batch, on all ranks.

    Source: Fedus et al., "Switch Transformers", JMLR 2022, equations 4 to 6; `load_balancing_loss_func` of
    transformers; over the batch of all ranks: Qiu et al., "Demons in the Detail", 2025 (arXiv 2501.11873).

    Changes: nothing. Collectives: an all-reduce of counts and one of probabilities, over the data axes and those over
    which `weft.context_parallel` splits sequences; the second again in backward. After
    `weft.tensor_parallel(sequence=True)` also over its axis, for the routers in its blocks.

    Args:
        probs: [..., experts], floating-point: of each token, how probable each expert is, such as
            `logits.softmax(-1)`. Summed in float32 or float64. Layers in a leading dimension count as more tokens, as
            in transformers; for the sum of a loss per layer, call it for each.
        chosen: [..., k], integers: the experts that each token is sent to. No gradients.
        ctx: The context after all transforms.
        mask: [...] or broadcast to it: which tokens count, as an attention mask; default: all.

    Returns:
        The loss, 0-d, in the dtype of the sums; 0 if no token counts.

    Raises:
        TypeError: `probs` is not floating-point, or `chosen` not of integers.
        ValueError: Shapes do not fit.
        ContractError: In an elastic job, over whose replicas counts cannot be added up.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> probs = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
        >>> weft.balance_loss(probs, probs.topk(1).indices, weft.local())
        tensor(1.5000)
    """
    _check_choices(probs, chosen)
    _check_replicas("balance_loss", ctx)
    wide = probs.float() if probs.dtype.itemsize < 4 else probs
    counts_too = torch.ones_like(chosen[..., 0], dtype=torch.int64)
    if mask is not None:
        counts_too = counts_too * (mask != 0).to(chosen.device)
        wide = torch.where(counts_too.unsqueeze(-1) != 0, wide, 0)
    per_choice = counts_too.unsqueeze(-1).expand_as(chosen)
    experts = probs.shape[-1]
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    counts = counts.scatter_add(0, chosen.flatten().long(), per_choice.flatten())
    counts, tokens = reduce((counts, counts_too.sum()), _token_ranks(ctx))
    own = wide.flatten(0, -2).sum(0)
    # Ranks with slices of one activation have one loss together, and each has the gradient of its slice already.
    sliced = ctx.on(slice_axes(ctx))
    total = own + (reduce(own.detach(), sliced) - own.detach()) if sliced.world_size > 1 else own
    total = reduce(total, ctx.on(_loss_axes(ctx)), grad=True)
    tokens = tokens.clamp(min=1).to(total.dtype)
    return experts * ((counts / tokens).to(total.dtype) * (total / tokens)).sum()


@torch.no_grad()
def balance_bias_(bias: T, counts: T, ctx: DistContext, *, rate: float = 1e-3) -> T:
    """Move the biases by which a router chooses its experts: up for those with few tokens, down for those with many.

    For routers that choose by `(scores + bias).topk(k)` and weigh by `scores` alone: experts are balanced without a
    loss. Call it once after each `optimizer.step()`, with how often each expert was chosen since the last call, over
    all micro-batches: each bias moves by `rate`, or not at all where the count is the mean. Counts are added up over
    the ranks, so biases stay equal on all of them, and those of one process. As a buffer of the module, a bias is in
    its checkpoints.

    Source: Wang et al., "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", 2024 (arXiv 2408.15664);
    DeepSeek-V3.

    Changes: `bias`, in place. Collectives: one all-reduce of the counts, over the data axes and those over which
    `weft.context_parallel` and `weft.tensor_parallel(sequence=True)` split sequences.

    Args:
        bias: [experts], float32 or float64; or a nested value of them, such as a list with one per layer.
        counts: [experts] of integers, of this rank's tokens; nested as `bias`.
        ctx: The context after all transforms.
        rate: How far a bias moves.

    Returns:
        The counts over all ranks, for logs.

    Raises:
        TypeError: A bias has less than 32 bits or is sharded, or counts are no integers.
        ValueError: `bias` and `counts` do not fit.
        ContractError: In an elastic job, over whose replicas counts cannot be added up.
        PeerError: A peer failed or died.

    Example:
        >>> import weft
        >>> bias, chosen = torch.zeros(3), torch.tensor([[0, 1], [0, 1], [0, 2]])
        >>> weft.balance_bias_(bias, chosen.flatten().bincount(minlength=3), weft.local())
        tensor([3, 2, 1])
        >>> bias
        tensor([-0.0010,  0.0000,  0.0010])
    """
    biases, own = list(tensors(bias)), list(tensors(counts))
    _check_biases(biases, own)
    _check_replicas("balance_bias_", ctx)
    total = reduce(counts, _token_ranks(ctx))
    for each, count in zip(biases, tensors(total), strict=True):
        surplus = count * len(count) - count.sum()  # times the number of experts: exact in integers
        each.sub_(surplus.sign().to(each), alpha=rate)
    return total


def _loss_axes(ctx: DistContext) -> tuple[str, ...]:
    """The axes whose ranks have losses of their own: of other samples, or of other parts of them."""
    return (*ctx.data_axes, *part_axes(ctx))


def _token_ranks(ctx: DistContext) -> DistContext:
    """The ranks whose routers have other tokens of one batch."""
    return ctx.on((*_loss_axes(ctx), *slice_axes(ctx)))


def _check_replicas(what: str, ctx: DistContext) -> None:
    if ctx.replicas is not None:
        raise ContractError(
            f"{what}: counts cannot be added up over the replicas of an elastic job",
            found=f"{ctx.num_replicas} replicas, any of which may be lost at any time",
            expected="ranks that are there from the first step to the last",
            fix="ctx = weft.start()  # without elastic=, and weft launch without --min-replicas",
        )


def _check_choices(probs: torch.Tensor, chosen: torch.Tensor) -> None:
    if not probs.is_floating_point() or chosen.is_floating_point() or chosen.is_complex():
        raise type_error(
            "balance_loss: the arguments are not probabilities and numbers of experts",
            found=f"{probs.dtype}, {chosen.dtype}",
            expected="floating-point numbers [..., experts], and integers [..., k]",
            fix="weft.balance_loss(probs, probs.topk(k).indices, ctx)",
        )
    if probs.dim() < 2 or probs.shape[:-1] != chosen.shape[:-1]:
        raise value_error(
            "balance_loss: probabilities and choices are of other tokens",
            found=f"{tuple(probs.shape)}, {tuple(chosen.shape)}",
            expected="[..., experts] and [..., k]; of one choice, [..., 1]",
            fix="weft.balance_loss(probs, probs.topk(k).indices, ctx)",
        )


def _check_biases(biases: list[torch.Tensor], counts: list[torch.Tensor]) -> None:
    wrong = [t for t in biases if is_sharded(t) or not t.is_floating_point() or t.dtype.itemsize < 4]
    wrong += [t for t in counts if t.is_floating_point() or t.is_complex()]
    if wrong:
        raise type_error(
            "balance_bias_: these are not biases and counts",
            found=listed(f"{type(t).__name__} {t.dtype}" for t in wrong),
            expected="plain tensors of float32 or float64, to which a small rate can be added, and counts of integers",
            fix='router.register_buffer("bias", torch.zeros(experts))  # and counts of bincount(minlength=experts)',
        )
    shapes = [[tuple(t.shape) for t in each] for each in (biases, counts)]
    if shapes[0] != shapes[1] or any(len(shape) != 1 for shape in shapes[0]):
        raise value_error(
            "balance_bias_: counts and biases do not fit",
            found=f"biases {listed(map(str, shapes[0]))}; counts {listed(map(str, shapes[1]))}",
            expected="[experts] of each layer, in both",
            fix="weft.balance_bias_(bias, chosen.flatten().bincount(minlength=len(bias)), ctx)",
        )
