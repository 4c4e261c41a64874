"""torch's functions with dropout in them, computed with masks that come from elsewhere.

They are caught by a mode, which is entered around the forward of modules: in `nn.Dropout`, in a forward that calls
`F.dropout`, and in attention. Attention with dropout is computed as torch's own reference does it: its kernels draw by
themselves.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional as F  # noqa: N812  (as everywhere)
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from weft.engines.torch.hooks.method_hooks import with_names


class AttentionPart(NamedTuple):
    """Which weights of attention a rank computes, where several ranks compute them.

    Attributes:
        head: The first one of its heads.
        heads: How many there are, of those that several ranks share out again; 0: as many as it computes.
        queries: Their places in the sequence; empty: from the first one on.
        continues: They belong to the attention of the call before.
    """

    head: int = 0
    heads: int = 0
    queries: Sequence[range] = ()
    continues: bool = False


class Masks(Protocol):
    """Gives masks."""

    def __call__(
        self, x: torch.Tensor, shape: tuple[int, ...], p: float, *, attention: AttentionPart | None = None
    ) -> torch.Tensor | None:
        """Whether each element is kept.

        Args:
            x: What is dropped from.
            shape: Of the mask.
            p: The probability of dropping.
            attention: It is for weights of attention, [rows, heads, queries, keys].

        Returns:
            bool, of this shape; None: nothing is dropped.
        """


_ALPHA = -1.7580993408473766  # what SELU approaches for small values: Klambauer et al., 2017


_masks: ContextVar[Masks | None] = ContextVar("masks", default=None)
_is_caught: ContextVar[bool] = ContextVar("is_caught", default=False)


def keyed_masks() -> Masks | None:
    """What gives masks to dropout at this moment; None: torch draws them."""
    return _masks.get()


@contextlib.contextmanager
def attention_caught() -> Iterator[None]:
    """Around the calls of a module whose attention somebody else computes, with `attention`."""
    token = _is_caught.set(True)
    try:
        yield
    finally:
        _is_caught.reset(token)


class DropoutMode(TorchFunctionMode):
    """Computes dropout with the masks that a function gives."""

    def __init__(self, masks: Masks) -> None:
        super().__init__()
        self._masks = masks

    @override
    def __enter__(self) -> Any:
        self._token = _masks.set(self._masks)
        return super().__enter__()  # type: ignore[no-untyped-call]

    @override
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _masks.reset(self._token)

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = None if _is_caught.get() and func in _ATTENTIONS else _REPLACEMENTS.get(func)
        if replacement is not None:
            return replacement(self._masks, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _scaled(
    masks: Masks,
    x: torch.Tensor,
    shape: tuple[int, ...],
    p: float,
    *,
    train: bool = True,
    inplace: bool = False,
    attention: AttentionPart | None = None,
) -> torch.Tensor:
    """Elements dropped, the others scaled so that the mean stays; `shape` is that of the mask."""
    kept = masks(x, shape, p, attention=attention) if train and p else None
    if kept is None:
        return x
    factor = kept.to(x.dtype) if p == 1.0 else kept.to(x.dtype).div_(1.0 - p)
    return x.mul_(factor) if inplace else x * factor


def _of_torch(function: Callable[..., torch.Tensor], *, inplace: bool = False) -> Callable[..., torch.Tensor]:
    """A function of `torch` itself, from that of `torch.nn.functional`."""

    def replacement(masks: Masks, input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
        return function(masks, input, p, train, inplace)

    return replacement


def _alpha(
    masks: Masks, x: torch.Tensor, shape: tuple[int, ...], p: float, *, train: bool, inplace: bool
) -> torch.Tensor:
    """Dropped elements become the value that SELU saturates at; mean and variance stay.

    Source: Klambauer et al., "Self-Normalizing Neural Networks", 2017.
    """
    mask = masks(x, shape, p) if train and p else None
    if mask is None:
        return x
    if p == 1.0:
        return x.zero_() if inplace else x * 0.0
    kept = mask.to(x.dtype)
    scale = 1.0 / math.sqrt((1.0 - p) * (1.0 + p * _ALPHA**2))
    shift = (1.0 - kept) * (scale * _ALPHA) - scale * _ALPHA * p
    return x.mul_(kept * scale).add_(shift) if inplace else x * (kept * scale) + shift


def _of_functional(compute: Callable[..., Any], shape_of: Callable[[torch.Tensor], Any], *, training: bool) -> Any:
    """A function of `torch.nn.functional`, with this default of `training`."""

    def replacement(
        masks: Masks, input: torch.Tensor, p: float = 0.5, training: bool = training, inplace: bool = False
    ) -> torch.Tensor:
        return compute(masks, input, shape_of(input), p, train=training, inplace=inplace)  # type: ignore[no-any-return]

    return replacement


def _of_elements(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def _of_channels(x: torch.Tensor) -> tuple[int, ...]:
    """Whole channels are dropped."""
    return (*x.shape[:2], *(1 for _ in x.shape[2:]))


def _bernoulli(masks: Masks, input: torch.Tensor, p: Any = 0.5, *, generator: Any = None) -> torch.Tensor:
    """`x.new_empty(rows, 1, 1).bernoulli_(keep)`: whole branches are dropped, by a forward of its own (timm)."""
    if generator is not None or not isinstance(p, float):
        return input.bernoulli_(p, generator=generator)
    kept = masks(input, tuple(input.shape), 1.0 - p)
    return input.fill_(1.0) if kept is None else input.copy_(kept)


def attention(
    masks: Masks | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    part: AttentionPart | None = None,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention`, step by step where it drops weights: perhaps a part of them.

    Without dropout, no masks are needed.

    Source: the reference implementation in its documentation.
    """
    if dropout_p == 0.0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    assert masks is not None
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = torch.softmax(scores, -1)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # as torch: a query that sees nothing gets zeros
        weights = weights.masked_fill(~attn_mask.any(-1, keepdim=True), 0.0)
    return _scaled(masks, weights, tuple(weights.shape), dropout_p, attention=part or AttentionPart()) @ value


def _multi_head_attention(masks: Masks, *args: Any, **kwargs: Any) -> Any:
    """`F.multi_head_attention_forward`; the weights that it returns are those before dropout, as torch's are."""
    given = _SIGNATURE.bind(*args, **kwargs).arguments

    def drop(weights: torch.Tensor, p: float) -> torch.Tensor:
        heads = weights.unflatten(0, (-1, given["num_heads"]))
        return _scaled(masks, heads, tuple(heads.shape), p, attention=AttentionPart()).flatten(0, 1)

    replaced: dict[str, Callable[..., Any]] = {
        "scaled_dot_product_attention": functools.partial(attention, masks),
        "dropout": drop,
    }
    return with_functions(replaced)(*args, **kwargs)


def _has_no_override(_: object) -> bool:
    return False


def with_functions(replaced: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The function behind `nn.MultiheadAttention` with others in place of some that it calls.

    A mode is not asked inside it.
    """
    # Nor is a mode around that one, such as torch's of a default device: it would call the function itself.
    names = {**replaced, "has_torch_function": _has_no_override}
    return with_names(F.multi_head_attention_forward, names)


_ATTENTIONS = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_SIGNATURE = inspect.signature(F.multi_head_attention_forward)
_dropout = _of_functional(_scaled, _of_elements, training=True)
_feature_dropout = _of_functional(_scaled, _of_channels, training=True)
_alpha_dropout = _of_functional(_alpha, _of_elements, training=False)
_feature_alpha_dropout = _of_functional(_alpha, _of_channels, training=False)
_REPLACEMENTS: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {
        F.dropout: _dropout,
        torch.dropout: _of_torch(_dropout),
        torch.dropout_: _of_torch(_dropout, inplace=True),
        torch.feature_dropout: _of_torch(_feature_dropout),
        torch.feature_dropout_: _of_torch(_feature_dropout, inplace=True),
        torch.alpha_dropout: _of_torch(_alpha_dropout),
        torch.alpha_dropout_: _of_torch(_alpha_dropout, inplace=True),
        torch.feature_alpha_dropout: _of_torch(_feature_alpha_dropout),
        torch.feature_alpha_dropout_: _of_torch(_feature_alpha_dropout, inplace=True),
        F.dropout1d: _feature_dropout,
        F.dropout2d: _feature_dropout,
        F.dropout3d: _feature_dropout,
        F.alpha_dropout: _alpha_dropout,
        F.feature_alpha_dropout: _feature_alpha_dropout,
        torch.Tensor.bernoulli_: _bernoulli,
        F.scaled_dot_product_attention: attention,
        F.multi_head_attention_forward: _multi_head_attention,
    }
)
