"""What a model is called with, where each rank holds a part of a sequence: checked before anything is computed.

Inputs have to be parts that `weft.data.split_sequence` has cut in the same way, with their places in the sequence. What
the model computes from them is measured by a probe.

[Note: masks] A mask says which places see which others: of documents, windows, padding. It is one of whole sequences,
[..., length, length], or of the places of this rank, [..., part, length]; attention takes what it needs of either. A
model of transformers makes masks inside, from the length, the attention mask and the positions that it is called with.
Its code runs with other functions for this: they gather what they are given from all ranks, and make the mask of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from weft import torch_internals
from weft.engines.torch.hooks.method_hooks import Attached, attach, with_names
from weft.engines.torch.parallel.sequence_code import methods_that_make_masks
from weft.engines.torch.parallel.sequence_exchange import Method, SequenceRanks, gather_places, rows_of_rank
from weft.errors import ContractError, listed
from weft.tensors.nested import leaves, map_tensors, tensors
from weft.tensors.sequence_order import SequencePart, part_of, places

_FIX = (
    "model(**weft.data.split_sequence(batch, ctx)), "
    "or weft.data.split_sequence((x, y, torch.arange(x.shape[1])[None]), ctx)"
)


class SplitInputs(Attached):
    """Checks of the calls of a model and of the parts of it that depend on places.

    Attributes:
        off: Whether it is called as in one process.
    """

    def __init__(self, module: nn.Module, ranks: SequenceRanks, method: Method) -> None:
        super().__init__()
        self.off = False
        self._ranks = ranks
        self._method = method
        self._part = SequencePart(ranks.order, ranks.number, ranks.rank)
        making = [(part, methods_that_make_masks(part)) for part in module.modules()]
        attach(module, self._removable, before=self._check_parts, first=True)
        for part, methods in making:
            for name, makers in methods.items():
                attach(part, self._removable, around=partial(self._with_whole_masks, makers), methods=[name])

    def _check_parts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise unless the inputs are parts that were cut for this rank, and as attention takes them."""
        if self.off or torch.compiler.is_compiling():
            return
        wanted = self._part
        given = list(tensors((args, kwargs)))
        found = [part for x in given if (part := part_of(x)) is not None]
        wrong = [part for part in found if part[:3] != wanted[:3]]
        if wrong:
            raise ContractError(
                f"context_parallel: {type(module).__name__} got parts of sequences that were cut in another way",
                found=f"order {wrong[0].order!r}, part {wrong[0].rank} of {wrong[0].ranks}",
                expected=f"order {wanted.order!r}, part {wanted.rank} of {wanted.ranks}, as context_parallel was told",
                fix=f'weft.data.split_sequence(batch, ctx, order="{wanted.order}")',
            )
        if not found and not self._has_places(args, kwargs):
            raise ContractError(
                f"context_parallel: {type(module).__name__} was called with inputs that were not split",
                found=f"tensors {listed(list(x.shape) for x in given)}, none from split_sequence",
                expected=f"the part of this rank, {wanted.rank} of {wanted.ranks}; after a move to another device, "
                "with its positions",
                fix=_FIX,
            )
        sizes = {size for x in given if part_of(x) is not None for size in x.shape}
        others = [x for x in given if part_of(x) is None and x.ndim and x.shape[-1] in sizes]
        if any(map(self._counts_anew, others)):
            raise ContractError(
                f"context_parallel: {type(module).__name__} got positions that count from 0 on this rank",
                found=f"0, 1, 2, ... for part {wanted.rank} of {wanted.ranks}",
                expected="the positions of this rank's tokens in the whole sequence, from split_sequence",
                fix=_FIX,
            )

    def _has_places(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the positions of this rank are among some arguments."""
        numbers = [x for x in tensors((args, kwargs)) if x.dtype in (torch.int64, torch.int32) and x.ndim]
        if any((part := part_of(x)) is not None and part.positions for x in numbers):
            return True
        return any(self._are_places(x) for x in numbers)

    def _counts_anew(self, values: torch.Tensor) -> bool:
        """Whether these are the positions of a sequence that is as long as a part."""
        if values.is_floating_point() or values.dtype == torch.bool or not values.ndim or values.shape[-1] < 2:
            return False
        return not self._are_places(values) and bool((values == torch.arange(values.shape[-1]).to(values)).all())

    def _are_places(self, values: torch.Tensor) -> bool:
        wanted = places(values.shape[-1] * self._part.ranks, self._part, values.device)
        return wanted.numel() == values.shape[-1] and bool((values == wanted).all())

    # -- models of transformers

    @torch_internals.untraced  # a compiler starts again in the layers
    def _with_whole_masks(self, makers: Mapping[str, Callable[..., Any]], call: Any, args: Any, kwargs: Any) -> Any:
        """Run a method that makes masks, such that each is that of the whole sequence; see [Note: masks]."""
        if self.off:
            return call(*args, **kwargs)
        return with_names(call, {name: partial(self._whole_mask, make) for name, make in makers.items()})(
            *args, **kwargs
        )

    def _whole_mask(self, make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function of transformers makes of whole sequences; of it, the rows that this rank needs.

        Collectives: one all-gather of each tensor [rows, part].

        Raises:
            ContractError: It makes no tensors, for another kind of attention.
        """
        ranks = self._ranks
        whole_args, whole_kwargs = map_tensors(partial(_whole_of, ranks), (args, kwargs))

        def needed(mask: torch.Tensor) -> torch.Tensor:
            is_square = mask.ndim > 2 and mask.shape[-2] == mask.shape[-1]
            return rows_of_rank(ranks, mask) if is_square and self._method == "gather" else mask

        masks = make(*whole_args, **whole_kwargs)
        others = [type(leaf).__name__ for _, leaf in leaves(masks) if not isinstance(leaf, (torch.Tensor, type(None)))]
        if others:
            raise ContractError(
                "context_parallel: a model makes masks that are no tensors",
                found=f"{listed(others)}, as for flex_attention",
                expected="tensors, or none, as for F.scaled_dot_product_attention",
                fix='model.set_attn_implementation("sdpa")',
            )
        return map_tensors(needed, masks)


def _whole_of(ranks: SequenceRanks, tensor: torch.Tensor) -> torch.Tensor:
    """What a mask is made of for whole sequences: of hidden states, shape and dtype are enough."""
    if tensor.ndim not in (2, 3):
        return tensor
    if tensor.is_floating_point() and tensor.ndim == 3:
        rows, part, *rest = tensor.shape
        return tensor.new_empty(()).expand(rows, part * ranks.number, *rest)
    return gather_places(ranks, tensor)
