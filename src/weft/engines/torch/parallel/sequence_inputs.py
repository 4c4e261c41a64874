"""What a model is called with, where each rank holds a part of a sequence: checked before anything is computed.

Inputs have to be parts that `weft.data.split_sequence` has cut in the same way, with their places in the sequence. A
model of transformers makes no mask of a part. What the model computes from them is measured by a probe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from weft.engines.torch.hooks.method_hooks import Removable, attach
from weft.engines.torch.parallel.sequence_code import forward_parameters, modules_that_make_masks
from weft.errors import ContractError, listed
from weft.tensors.nested import tensors
from weft.tensors.sequence_order import SequencePart, part_of, places

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_FIX = (
    "model(**weft.data.split_sequence(batch, ctx)), "
    "or weft.data.split_sequence((x, y, torch.arange(x.shape[1])[None]), ctx)"
)


class SplitInputs:
    """Checks of the calls of a model and of the parts of it that depend on places.

    Attributes:
        off: Whether it is called as in one process.
    """

    def __init__(self, module: nn.Module, part: SequencePart) -> None:
        self._removable = Removable()
        self.off = False
        self._part = part
        self._names: dict[int, list[str]] = {}
        hooks: list[tuple[nn.Module, Any]] = [(module, self._check_parts)]
        hooks += [(each, self._without_mask) for each in modules_that_make_masks(module).values()]
        for each, hook in hooks:
            self._names[id(each)] = forward_parameters(each)
            attach(each, self._removable, before=self._unless_off(hook), first=hook == self._check_parts)

    def _unless_off(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *call: None if self.off else hook(*call)

    def undo(self) -> None:
        """Let the model be called with anything again."""
        self._removable.remove()

    def _check_parts(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise unless the inputs are parts that were cut for this rank, and as attention takes them."""
        if torch.compiler.is_compiling():
            return
        wanted = self._part
        found = [part for x in tensors((args, kwargs)) if (part := part_of(x)) is not None]
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
                found=f"tensors {listed(list(x.shape) for x in tensors((args, kwargs)))}, none from split_sequence",
                expected=f"the part of this rank, {wanted.rank} of {wanted.ranks}; after a move to another device, "
                "with its positions",
                fix=_FIX,
            )
        if any(part_of(x) is None and self._counts_anew(x) for x in tensors((args, kwargs))):
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

    def _without_mask(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Let the model make no mask: it would be one of this part, and take a jump for the end of a sequence."""
        self._check_window(module, args, kwargs)
        names = self._names[id(module)]
        given = dict(zip(names, args, strict=False)) | kwargs
        mask = given.get("attention_mask")
        if mask is not None:
            if torch.compiler.is_compiling():
                return None  # what becomes of it is looked at where attention meets it
            if mask.ndim == 2 and bool(mask.all()):
                return None
            raise ContractError(
                f"context_parallel: attention_mask of {type(module).__name__} cannot be split",
                found=f"a mask {list(mask.shape)} of {mask.dtype} that hides some places",
                expected="sequences of one length: where they are padded at the right, labels of -100 and no mask",
                fix='tokenizer.padding_side = "right"; batch.pop("attention_mask")  # none attends to a later place',
            )
        if "attention_mask" not in names or names.index("attention_mask") < len(args):
            return None
        first = next(tensors((args, kwargs)))
        # Ones let the model see that it needs no mask. A compiler cannot see it; this one stands for "causal" there.
        shape = (1, 1, 1, 1) if torch.compiler.is_compiling() else first.shape[:2]
        return args, {**kwargs, "attention_mask": torch.ones(shape, dtype=torch.bool, device=first.device)}

    def _check_window(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise if some layers attend to a window that is shorter than the sequences."""
        config = getattr(module, "config", None)
        kinds = getattr(config, "layer_types", None) or ["sliding_attention", "chunked_attention"]
        length = next(tensors((args, kwargs))).shape[1] * self._part.ranks
        for name, kind in (("sliding_window", "sliding_attention"), ("attention_chunk_size", "chunked_attention")):
            size = getattr(config, name, None)
            if size is not None and kind in kinds and length > size:
                raise ContractError(
                    f"context_parallel: {type(module).__name__} attends to a window of {size} places",
                    found=f"{name} = {size}, sequences of {length} places",
                    expected=f"full causal attention, or sequences of at most {size} places",
                    fix=f"model.config.{name} = {length}",
                )
