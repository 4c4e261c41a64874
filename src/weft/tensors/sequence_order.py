"""Which places of a sequence each rank holds, the note on a tensor that says so, and what parts need besides.

[Note: zig-zag] A causal attention computes more for later places than for earlier ones. In zig-zag order a sequence is
cut into two chunks per rank, and rank k holds the k-th from either end, so that all ranks compute equally much.

[Note: parts are noted] What attention computes depends on which places a rank holds, and nothing in the values says it.
A tensor that was cut carries a `SequencePart` as an attribute. It is lost where a new tensor is made of it, as by a
move to another device that is not weft's; the positions of the tokens are compared by value then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch

Order = Literal["zigzag", "contiguous"]
IGNORED = -100  # the label that counts nowhere, of torch and transformers
_NOTE, _ADDED = "_weft_sequence_part", "_weft_added_to_batch"


class SequencePart(NamedTuple):
    """The part of a sequence that one rank holds.

    Attributes:
        order: How sequences are cut.
        ranks: Into how many parts.
        rank: Which one this is.
        positions: Whether the values of the tensor are the places themselves.
    """

    order: Order
    ranks: int
    rank: int
    positions: bool = False


def chunks(length: int, ranks: int, rank: int, order: Order) -> list[range]:
    """The runs of neighbouring places that a rank holds, ascending; see [Note: zig-zag].

    Example:
        >>> chunks(8, 2, 0, "zigzag"), chunks(8, 2, 0, "contiguous")
        ([range(0, 2), range(6, 8)], [range(0, 4)])
    """
    if order == "contiguous" or ranks == 1:
        size = length // ranks
        return [range(rank * size, (rank + 1) * size)]
    size = length // (2 * ranks)
    last = 2 * ranks - 1 - rank
    return [range(rank * size, (rank + 1) * size), range(last * size, (last + 1) * size)]


def places(length: int, part: SequencePart, device: torch.device | None = None) -> torch.Tensor:
    """The places that a rank holds, int64 [length / ranks].

    Example:
        >>> places(8, SequencePart("zigzag", 2, 0)).tolist()
        [0, 1, 6, 7]
    """
    runs = chunks(length, part.ranks, part.rank, part.order)
    return torch.cat([torch.arange(run.start, run.stop, device=device) for run in runs])


def sequence_order(parts: torch.Tensor, order: Order) -> torch.Tensor:
    """Join parts in rank order, [..., ranks, places of a rank, width], to whole sequences, [..., length, width]."""
    if order == "zigzag" and parts.shape[-3] > 1:
        two = parts.unflatten(-2, (2, parts.shape[-2] // 2))
        parts = torch.cat([two[..., 0, :, :], two[..., 1, :, :].flip(-3)], -3)
    whole: torch.Tensor = parts.flatten(-3, -2)
    return whole


def rank_order(sequences: torch.Tensor, ranks: int, order: Order) -> torch.Tensor:
    """The other way: [..., length, width] to [..., ranks, places of a rank, width]."""
    if order == "contiguous" or ranks == 1:
        parts: torch.Tensor = sequences.unflatten(-2, (ranks, sequences.shape[-2] // ranks))
        return parts
    pieces = sequences.unflatten(-2, (2 * ranks, sequences.shape[-2] // (2 * ranks)))
    first, second = pieces[..., :ranks, :, :], pieces[..., ranks:, :, :].flip(-3)
    return torch.stack([first, second], -3).flatten(-3, -2)


def note_part(tensor: torch.Tensor, part: SequencePart) -> torch.Tensor:
    """Note on a tensor which part of a sequence it is; see [Note: parts are noted]."""
    setattr(tensor, _NOTE, part)
    return tensor


def part_of(tensor: torch.Tensor) -> SequencePart | None:
    """What was noted on a tensor, if anything was."""
    found: SequencePart | None = getattr(tensor, _NOTE, None)
    return found


def added_arguments(
    batch: Mapping[str, Any], shape: tuple[int, int], device: torch.device | None, ranks: int, *, dim: int, shifts: bool
) -> dict[str, torch.Tensor]:
    """What a model needs to be given beside a part of a batch, and one process computes by itself; still whole.

    Args:
        batch: By the names of arguments; what is in it is not added.
        shape: Rows, and the length of sequences.
        device: Where positions are needed.
        ranks: How many parts there are.
        dim: Of sequences.
        shifts: Whether the model shifts labels.
    """
    more: dict[str, torch.Tensor] = {}
    if "position_ids" not in batch:
        at = torch.arange(shape[1], device=device)
        more["position_ids"] = at if dim == 0 else at.expand(shape)
    labels = batch.get("labels")
    if isinstance(labels, torch.Tensor) and labels.ndim == dim + 1:
        targets = batch.get("shift_labels", labels)
        if shifts and "shift_labels" not in batch:
            last = torch.full_like(labels.narrow(dim, 0, 1), IGNORED)
            more["shift_labels"] = targets = torch.cat([labels.narrow(dim, 1, shape[1] - 1), last], dim)
        if "num_items_in_batch" not in batch:
            # Each rank divides by its share of the number, so that the mean over the ranks is the mean over labels.
            count = (targets != IGNORED).sum().clamp(min=1)
            dtype = torch.float32 if count.device.type == "mps" else torch.float64
            more["num_items_in_batch"] = count.to(dtype) / ranks
    for tensor in more.values():
        setattr(tensor, _ADDED, True)
    return more


def is_added(value: object) -> bool:
    """Whether it is one of `added_arguments`."""
    return hasattr(value, _ADDED)


def with_note_of(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Take over what weft has noted on a tensor to a copy of it."""
    if new is not old:
        vars(new).update({name: note for name, note in vars(old).items() if name.startswith("_weft_")})
    return new
