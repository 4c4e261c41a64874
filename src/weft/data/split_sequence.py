"""`split_sequence`: the part of a batch's sequences that this rank computes with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import get_worker_info

from weft.checks import check_choice, check_count
from weft.context import DistContext
from weft.errors import ContextError, listed, type_error, value_error
from weft.tensors.nested import cuts_itself, leaves, map_leaves, with_items
from weft.tensors.sequence_order import Order, SequencePart, chunks, note_part, places, with_note_of

B = TypeVar("B")
_PAD = 'loader = DataLoader(..., collate_fn=weft.data.pad_collate(multiple_of={}, fill={{"labels": -100}}))'
_IGNORED = -100  # the label that counts nowhere, of torch and transformers


def split_sequence(
    batch: B,
    ctx: DistContext,
    *,
    dim: int = 1,
    axis: str = "context",
    order: Order = "zigzag",
    whole: str | Sequence[str] = (),
) -> B:
    """Take this rank's part of every sequence of a batch; for modules of `context_parallel`.

    Every tensor and array with dimension `dim` is cut there; what has fewer dimensions stays whole. A model
    has to be given the places of its tokens. A mapping gets them as "position_ids" [batch, part]. With other
    batches, split them along: `x, y, at = weft.data.split_sequence((x, y, torch.arange(x.shape[1])[None]), ctx)`.

    Labels keep the places of their tokens: targets that were shifted before, as `y` in `(x, y)`, are right in each
    part. A mapping with "labels" [batch, length] in the way of transformers, which shifts them inside the model,
    also gets "shift_labels", shifted before they are split, and "num_items_in_batch", such that the mean of
    `model(**part).loss` over the ranks is the loss of the whole batch. Where documents share a row, the last label of
    one is the first token of the next, as in one process: the collate function sets it to -100.

    Changes: nothing; `batch` is left alone. Collectives: none. Batches are the same on the ranks of the axis
    (`shard_data` sees to it). Call it in the loop, not in a worker of the loader: windows count whole batches.

    Args:
        batch: A tensor, or a nested value: tuples, lists, mappings, dataclasses.
        ctx: The current context. With one rank along `axis`, or without this axis on a single rank, nothing is cut.
        dim: The dimension of sequences, counted from 0.
        axis: The mesh axis over which they are split.
        order: As for `context_parallel`.
        whole: Keys of a mapping whose values stay whole: masks [..., length, length], or what your model makes them of,
            such as ids of documents. A model of transformers is given parts alone.

    Returns:
        The same structure, with tensors [..., length / ranks, ...].

    Raises:
        ValueError: Sequences of different lengths, or of one that does not divide by the ranks (by twice their
            number in zig-zag order); nothing of a name in `whole`.
        TypeError: Something in it cannot be cut.
        ContextError: There is no such axis; or called in a worker of a `DataLoader`.

    Example:
        >>> import weft
        >>> ctx = weft.testing.fake(rank=0, world_size=2, mesh={"context": 2})
        >>> part = weft.data.split_sequence({"input_ids": torch.arange(10, 18)[None]}, ctx)
        >>> part["input_ids"].tolist(), part["position_ids"].tolist()
        ([[10, 11, 16, 17]], [[0, 1, 6, 7]])

    Source of zig-zag order: Brandon et al., "Striped Attention", 2023; Grattafiori et al., "The Llama 3 Herd of
    Models", 2024.
    """
    _check_call(dim, order)
    stay = {whole} if isinstance(whole, str) else set(whole)
    _check_names(batch, stay)
    alone = ctx.world_size == 1 and axis not in dict(ctx.axes)
    ranks = 1 if alone else ctx.axis_size(axis)
    part = SequencePart(order, ranks, 0 if alone else ctx.coordinates[axis])
    sequences = {path: leaf for path, leaf in _sequences(batch, dim, ranks).items() if not stay & set(path[:1])}
    length = _length(sequences, dim)
    _check_divides(length, part)
    complete = _add_model_arguments(batch, sequences, length, dim, ranks)
    if ranks == 1:
        return complete

    def cut(path: tuple[str, ...], leaf: Any) -> Any:
        if not _is_sequence(leaf, dim) or stay & set(path[:1]):
            return leaf
        counts = path == ("position_ids",) and bool((leaf == torch.arange(length, device=leaf.device)).all())
        return _cut(leaf, dim, length, part._replace(positions=counts))

    return map_leaves(cut, complete, whole=cuts_itself)


def _check_call(dim: int, order: str) -> None:
    check_count("split_sequence", "dim", dim, least=0, fix="weft.data.split_sequence(batch, ctx, dim=1)")
    fix = 'weft.data.split_sequence(batch, ctx, order="zigzag")'
    check_choice("split_sequence", "order", order, ("zigzag", "contiguous"), fix=fix)
    worker = get_worker_info()
    if worker is not None:
        raise ContextError(
            "split_sequence: called in a worker of a DataLoader",
            found=f"worker {worker.id}",
            expected="whole batches from the loader: windows count them, and ranks share them",
            fix="for batch in loader:\n                part = weft.data.split_sequence(batch, ctx)",
        )


def _check_names(batch: object, stay: set[str]) -> None:
    unknown = stay - ({str(key) for key in batch} if isinstance(batch, Mapping) else set())
    if unknown:
        raise value_error(
            "split_sequence: what is to stay whole is not in the batch",
            found=f"whole = {sorted(stay)}, "
            + (f"keys {listed(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"),
            expected="keys of a mapping; what is in a tuple stays whole if it is not passed",
            fix="x, y, at = weft.data.split_sequence((x, y, at), ctx); model(x, at, ids)",
        )


def _is_sequence(leaf: object, dim: int) -> bool:
    return isinstance(leaf, (torch.Tensor, np.ndarray)) and leaf.ndim > dim


def _sequences(batch: object, dim: int, ranks: int) -> dict[tuple[str, ...], Any]:
    """What is cut, by its path."""
    found = {}
    for path, leaf in leaves(batch, whole=cuts_itself):
        nested = isinstance(leaf, torch.Tensor) and leaf.is_nested
        if cuts_itself(leaf) or nested or isinstance(leaf, torch.nn.utils.rnn.PackedSequence):
            raise type_error(
                f"split_sequence: {'.'.join(path) or 'the batch'} cannot be split along a sequence",
                found="a nested tensor" if nested else type(leaf).__name__,
                expected="tensors and arrays, in tuples, lists, mappings or dataclasses",
                fix="weft.data.split_sequence(batch.to_dict(), ctx)" if cuts_itself(leaf) else _PAD.format(2 * ranks),
            )
        if _is_sequence(leaf, dim):
            found[path] = leaf
    return found


def _length(sequences: Mapping[tuple[str, ...], Any], dim: int) -> int:
    lengths = {".".join(path) or "the batch": leaf.shape[dim] for path, leaf in sequences.items()}
    if len(set(lengths.values())) != 1:
        raise value_error(
            "split_sequence: the parts of the batch have sequences of different lengths",
            found=listed(f"{name}: {length}" for name, length in lengths.items()) or f"no tensor with dimension {dim}",
            expected=f"tensors with the sequence in dimension {dim}, and as many places in each; others, such as masks "
            "[batch, 1, length, length], by their keys in whole=",
            fix="weft.data.split_sequence((x[:, :-1], x[:, 1:]), ctx, dim=1)"
            if lengths
            else "weft.data.split_sequence(batch, ctx, dim=0)",
        )
    return int(next(iter(lengths.values())))


def _check_divides(length: int, part: SequencePart) -> None:
    pieces = part.ranks * (2 if part.order == "zigzag" and part.ranks > 1 else 1)
    if length % pieces:
        longer = -(-length // pieces) * pieces
        raise value_error(
            f"split_sequence: sequences of {length} places cannot be split over {part.ranks} ranks",
            found=f"{length} places; {pieces} chunks in {part.order} order",
            expected=f"a length divisible by {pieces}, such as {longer}, padded at the right with labels of -100",
            fix=_PAD.format(pieces),
        )


def _add_model_arguments(batch: B, sequences: Mapping[tuple[str, ...], Any], length: int, dim: int, ranks: int) -> B:
    """A mapping with what a model needs besides, still whole."""
    if not isinstance(batch, Mapping):
        return batch
    first = next((leaf for leaf in sequences.values() if isinstance(leaf, torch.Tensor)), None)
    more: dict[str, Any] = {}
    if "position_ids" not in batch:
        at = torch.arange(length, device=None if first is None else first.device)
        rows = next(iter(sequences.values())).shape[0]
        more["position_ids"] = at if dim == 0 else at.expand(rows, length)
    labels = batch.get("labels")
    if isinstance(labels, torch.Tensor) and labels.ndim == dim + 1:
        targets = batch.get("shift_labels")
        if targets is None:
            more["shift_labels"] = targets = _shifted(labels, dim, length)
        if "num_items_in_batch" not in batch:
            # Each rank divides by its share of the number, so that the mean over the ranks is the mean over labels.
            count = (targets != _IGNORED).sum().clamp(min=1)
            more["num_items_in_batch"] = (
                count.to(torch.float32 if count.device.type == "mps" else torch.float64) / ranks
            )
    return cast("B", with_items(batch, more))


def _shifted(labels: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """The label of the next place at each place; none at the last."""
    last = torch.full_like(labels.narrow(dim, 0, 1), _IGNORED)
    return torch.cat([labels.narrow(dim, 1, length - 1), last], dim)


def _cut(leaf: Any, dim: int, length: int, part: SequencePart) -> Any:
    runs = chunks(length, part.ranks, part.rank, part.order)
    if isinstance(leaf, np.ndarray):
        return leaf.take(places(length, part).numpy(), axis=dim)
    pieces = [leaf.narrow(dim, run.start, len(run)) for run in runs]
    return note_part(with_note_of(leaf, torch.cat(pieces, dim)), part)
