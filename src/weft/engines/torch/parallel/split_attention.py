"""Attention over sequences of which each rank holds a part.

`F.scaled_dot_product_attention` is caught while an attention module computes, by a mode that is entered around its
forward: so a block that `recompute` runs again meets it as well, and a compiler traces through it.

[Note: causal] A mask that a model makes of the length that it sees, [..., part, part], says what is wrong of all ranks
but one. It is read as what is meant by it, causal or full attention, or refused. For other masks see [Note: masks].
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812  (as everywhere)
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from weft.engines.torch.hooks.method_hooks import Attached, attach
from weft.engines.torch.keyed_dropout.functions import (
    AttentionPart,
    Masks,
    attention,
    attention_caught,
    keyed_masks,
    with_functions,
)
from weft.engines.torch.parallel.sequence_exchange import (
    Method,
    SequenceRanks,
    gather_sequences,
    heads_to_parts,
    parts_to_heads,
    rows_of_rank,
)
from weft.engines.torch.probes.compare import is_of_parts
from weft.errors import ContextError, ContractError
from weft.tensors.nested import tensors
from weft.tensors.sequence_order import chunks


class SplitAttention(Attached):
    """Attention modules that compute over the sequences of all ranks.

    Attributes:
        inside: Whether one of them computes at this moment.
        off: Whether they attend to what they are given, as in one process.
        ranks: That hold the parts; None once their process group is gone.
        method: How they exchange them.
    """

    def __init__(self, modules: Mapping[str, nn.Module], ranks: SequenceRanks, method: Method) -> None:
        super().__init__()
        self.inside = self.off = False
        self.ranks: SequenceRanks | None = ranks
        self.method: Method = method
        for name, module in modules.items():
            attach(module, self._removable, around=_Around(self, name), methods=["forward"])
            if isinstance(module, nn.MultiheadAttention):
                # With a hook on it, the layers of torch call it in eval mode, too, instead of a kernel of their own.
                attach(module, self._removable, before=_nothing)

    def release(self) -> None:
        """Let the process group go; forward raises from now on."""
        self.ranks = None


def _nothing(module: nn.Module, args: object, kwargs: object) -> None:
    """A hook that changes nothing."""


class _Around:
    """What is done around the forward of one attention module.

    A compiler shares what it compiled among instances as long as it reads nothing that differs: the name is for errors.
    """

    def __init__(self, attention: SplitAttention, name: str) -> None:
        self.attention = attention
        self.name = name

    def __call__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward.

        Raises:
            ContractError: It does not compute with `F.scaled_dot_product_attention`, or not in a way that can be split.
            ContextError: The context was closed.
        """
        attention = self.attention
        if attention.off:
            return call(*args, **kwargs)
        if attention.ranks is None:
            raise ContextError(
                "context_parallel: attention cannot exchange anything, its process group is gone",
                found=f"a call of attention module {self.name!r} after the context was closed",
                expected="calls inside of `with weft.start(...) as ctx:`, or the plain module",
                fix="model, ctx = weft.undo(model, ctx)",
            )
        if attention.inside:  # an attention module inside another: its calls are caught once
            return call(*args, **kwargs)
        caught = _AttentionMode(self, attention.ranks)
        attention.inside = True
        try:
            # What is compiled has no masks: `keyed_dropout` leaves the parts that may drop out of it.
            with contextlib.nullcontext() if torch.compiler.is_compiling() else attention_caught(), caught:
                output = call(*args, **kwargs)
        except RuntimeError as error:
            # A mask of whole sequences does not fit what is computed from parts by hand.
            if caught.calls == 0 and is_of_parts(error) and any(given.ndim == 4 for given in tensors((args, kwargs))):
                raise self._not_caught() from error
            raise
        finally:
            attention.inside = False
        if caught.calls == 0:
            raise self._not_caught()
        return output

    def _not_caught(self) -> ContractError:
        """The error for attention that nobody saw."""
        return ContractError(
            f"context_parallel: attention module {self.name!r} computed without F.scaled_dot_product_attention",
            found="no call of it in this forward; with need_weights=True, say, or by a kernel of its own",
            expected="every attention through F.scaled_dot_product_attention, or it sees this rank's part only",
            fix='attn_implementation="sdpa", or need_weights=False for nn.MultiheadAttention',
        )


class _AttentionMode(TorchFunctionMode):
    """Computes attention over all ranks in place of torch's function.

    Attributes:
        calls: How many calls it has caught.
    """

    def __init__(self, at: _Around, ranks: SequenceRanks) -> None:
        super().__init__()
        self.calls = 0
        self._at = at
        self._ranks = ranks

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return with_functions({"scaled_dot_product_attention": self._attend})(*args, **kwargs)
        if func is torch.Tensor.unflatten:  # a compiler does not look into it inside a mode
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        self.calls += 1
        del enable_gqa  # the numbers of heads say it
        at = self._at
        _check_shapes(at, self._ranks.number, query, key)
        masks = None if torch.compiler.is_compiling() else keyed_masks()
        if dropout_p and masks is None:
            raise ContractError(
                f"context_parallel: attention module {at.name!r} drops weights with probability {dropout_p}",
                found=f"dropout {dropout_p} inside of attention",
                expected="no dropout there, or masks that do not depend on who computes them",
                fix="model, loader, ctx = weft.keyed_dropout(model, loader, ctx)  # before context_parallel; "
                "or attention_dropout=0.0 in the config, or dropout=0.0 for nn.MultiheadAttention",
            )
        mask, is_lower = (None, False) if attn_mask is None else _mask_needed(at, self._ranks, attn_mask, query)
        query, key, value = _cast_together(query, key, value)
        call = _AttentionCall(self._ranks, mask, is_causal or is_lower, scale, dropout_p, masks)
        return (_attend_in_heads if at.attention.method == "heads" else _attend_whole)(call, query, key, value)


class _AttentionCall(NamedTuple):
    """One call of attention, besides its tensors."""

    ranks: SequenceRanks
    mask: torch.Tensor | None
    causal: bool
    scale: float | None
    dropout: float
    masks: Masks | None

    def compute(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, part: AttentionPart) -> torch.Tensor:
        """Some heads or queries, `part` of all of them."""
        grouped = query.shape[1] != key.shape[1]
        return attention(self.masks, query, key, value, self.mask, self.dropout, self.causal, self.scale, grouped, part)


def _attend_in_heads(call: _AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Give each rank whole sequences of some heads, and back.

    Source: Jacobs et al., "DeepSpeed Ulysses", 2023.
    """
    n = call.ranks.number
    repeat = n // math.gcd(n, key.shape[1])
    if repeat > 1:  # fewer heads of keys than ranks: each travels to several
        key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    query, key, value = parts_to_heads(call.ranks, query, key, value)
    heads = query.shape[1]
    part = AttentionPart(call.ranks.rank * heads, n * heads)
    return heads_to_parts(call.ranks, call.compute(query, key, value, part))


def _attend_whole(call: _AttentionCall, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Let the places of this rank attend to the keys and values of all of them.

    Source: Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.3.2.
    """
    ranks = call.ranks
    key, value = gather_sequences(ranks, key, value)
    length = key.shape[-2]
    mine = chunks(length, ranks.number, ranks.rank, ranks.order)
    if not call.causal or call.mask is not None:
        return call.compute(query, key, value, AttentionPart(queries=mine))
    outputs, done = [], 0
    for run in mine:
        mask = None
        if run.start:
            at = torch.arange(run.start, run.stop, device=query.device)
            mask = at[:, None] >= torch.arange(run.stop, device=query.device)
        seen = key[..., : run.stop, :], value[..., : run.stop, :]
        part = AttentionPart(queries=[run], continues=done > 0)
        some = query[..., done : done + len(run), :]
        run_call = _AttentionCall(ranks, mask, mask is None, call.scale, call.dropout, call.masks)
        outputs.append(run_call.compute(some, *seen, part))
        done += len(run)
    return torch.cat(outputs, -2)


def _check_shapes(at: _Around, ranks: int, query: torch.Tensor, key: torch.Tensor) -> None:
    if query.ndim != 4 or key.shape[-2] != query.shape[-2]:
        raise ContractError(
            f"context_parallel: attention module {at.name!r} attends to something else than its own sequence",
            found=f"queries {list(query.shape)}, keys {list(key.shape)}",
            expected="self-attention [batch, heads, places, width]: a query for each key; no cache of earlier keys",
            fix="model(..., use_cache=False) with whole sequences, or the model without context_parallel",
        )
    heads = query.shape[1]
    if at.attention.method == "heads" and heads % ranks:
        raise ContractError(
            f"context_parallel: {heads} heads of {at.name!r} cannot be shared by {ranks} ranks",
            found=f"{heads} heads of queries on this rank, {ranks} ranks along the axis",
            expected='heads that divide by the ranks, or method="gather", which leaves them together',
            fix='weft.context_parallel(model, ctx, method="gather")',
        )


def _mask_needed(
    at: _Around, ranks: SequenceRanks, mask: torch.Tensor, query: torch.Tensor
) -> tuple[torch.Tensor | None, bool]:
    """What this rank needs of a mask, and whether it means causal attention instead; see [Note: masks].

    Collectives: one all-gather of a mask [..., 1, part] of this rank's keys, or by "heads" one [..., part, length].

    Raises:
        ContractError: It is one of this rank's places alone, and neither causal nor full.
    """
    heads, part = query.shape[1], query.shape[-2]
    mask = mask[(None,) * (4 - mask.ndim)]
    rows, columns = mask.shape[-2:]
    if columns == part and rows == 1 < part:
        (mask,) = (keys.mT for keys in gather_sequences(ranks, mask.mT))
    elif columns != part * ranks.number or rows not in (1, part, columns):
        return None, _is_causal(at, mask, part, ranks.number)
    elif at.attention.method == "gather" and rows == columns:
        mask = rows_of_rank(ranks, mask)
    elif at.attention.method == "heads" and rows == part:
        (mask,) = gather_sequences(ranks, mask)
    if at.attention.method == "heads" and mask.shape[1] == heads > 1:
        mask = mask.narrow(1, ranks.rank * (heads // ranks.number), heads // ranks.number)
    return mask, False


def _is_causal(at: _Around, mask: torch.Tensor, part: int, ranks: int) -> bool:
    """Whether a mask of this rank's places means causal attention, and not full; see [Note: causal].

    Raises:
        ContractError: It means something else.
    """
    # A compiler cannot read values.
    if mask.shape == (1, 1, part, part) and not torch.compiler.is_compiling():
        lets = mask if mask.dtype == torch.bool else mask == 0
        hides = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min
        lower = torch.ones(part, part, dtype=torch.bool, device=mask.device).tril()
        if bool((lets == lower).all()) and bool((hides == ~lower).all()):
            return True
        if bool(lets.all()):
            return False
    length = part * ranks
    raise ContractError(
        f"context_parallel: a mask of attention module {at.name!r} cannot be split",
        found=f"a mask {list(mask.shape)} of {mask.dtype} for {part} of {length} places",
        expected=f"causal or full attention, or a mask of whole sequences, [..., {length}, {length}]: those that a "
        "model makes of parts know nothing of other places",
        fix='part = weft.data.split_sequence(batch, ctx, whole="segment_ids")  # what masks are made of, or "mask"; '
        "or is_causal=True without a mask",
    )


def _cast_together(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Cast as autocast would a moment later: fewer bytes travel, and all in one dtype."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind) and tensors[0].dtype != torch.float64:
        return [x.to(torch.get_autocast_dtype(kind)) for x in tensors]
    return list(tensors)
