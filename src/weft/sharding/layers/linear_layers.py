"""Linear layers and the projections in them: how wide they are, what a plan says of them, and how a plan guesses it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from weft.engines.options import FusedPart
from weft.sharding.layers.forward_source import splits_output

# Names under which attentions keep the width of a head.
HEAD_SIZES = frozenset({"head_dim", "head_size", "dim_head", "d_head", "attention_head_size", "hd"})
# The number of heads, of keys and of queries.
KEY_HEADS = frozenset({"num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads"})
HEADS = KEY_HEADS | {
    *("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead", "nheads", "n_local_heads"),
}
# And the number of heads of queries for each of keys.
_GROUPS = ("num_key_value_groups", "n_rep", "num_queries_per_kv")


def is_transposed(part: nn.Module) -> bool:
    """Whether it is the linear layer of transformers whose weight is [inputs, outputs]."""
    loaded: Any = sys.modules.get("transformers.pytorch_utils")
    return loaded is not None and isinstance(part, loaded.Conv1D)


def is_linear(part: nn.Module) -> bool:
    """Whether a part can be a column or a row."""
    return isinstance(part, nn.Linear) or is_transposed(part)


def inputs_of(part: Any) -> int:
    """How many features a linear layer takes."""
    return int(part.weight.shape[0 if is_transposed(part) else -1])


def outputs_of(part: Any) -> int:
    """How many features a linear layer, or an embedding's table, has."""
    return int(part.weight.shape[-1 if is_transposed(part) else 0])


def head_size(parent: nn.Module) -> int | None:
    """The width of a head, as an attention has it in an attribute."""
    own = vars(parent)
    return next((own[name] for name in HEAD_SIZES if name in own and is_count(own[name])), None)


def has_heads(parent: nn.Module) -> bool:
    """Whether a part is an attention: it has a number or a width of heads."""
    return any(is_count(value) for name, value in vars(parent).items() if name in HEADS | HEAD_SIZES)


def is_count(value: object) -> bool:
    """Whether a value is a number of something."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# -- what a plan says ------------------------------------------------------------------------------


def word_of(style: Any) -> Any:
    """A style without the sizes of parts: "column:3" is a "column"."""
    return "column" if parts_in(style) else style


def parts_in(style: Any) -> list[int]:
    """The numbers after the colon in "column:3" and "column:64,16,16"; none in other styles, and in wrong ones."""
    word, _, text = style.partition(":") if isinstance(style, str) else ("", "", "")
    numbers = text.split(",")
    is_right = word == "column" and all(one.isdecimal() and int(one) for one in numbers) and numbers != ["1"]
    return [int(one) for one in numbers] if is_right else []


def fused_widths(style: Any, part: nn.Module) -> list[int]:
    """How wide each projection is; none where there is one. They do not add up to the layer if the plan is wrong."""
    parts = parts_in(style)
    return [outputs_of(part) // parts[0]] * parts[0] if len(parts) == 1 else parts


def fused_parts(widths: Collection[int], ranks: int, head: int | None) -> tuple[FusedPart, ...]:
    """What each rank gets of each projection: an equal share, or a head that several ranks have."""
    heads = [ranks if head is None or width % head else width // head for width in widths]
    return tuple(
        FusedPart(width, count if count < ranks and ranks % count == 0 else ranks)
        for width, count in zip(widths, heads, strict=True)
    )


def shared_heads(parent: nn.Module, columns: Mapping[str, nn.Module], ranks: int) -> dict[str, tuple[FusedPart, ...]]:
    """The columns of an attention, for keys and values, that have fewer heads than there are ranks, which share them.

    Those are narrower than the queries. The weights are cut all the same; see `FusedPart`.
    """
    head = head_size(parent)
    widest = max(map(outputs_of, columns.values()), default=0)
    found = {name: fused_parts([outputs_of(part)], ranks, head) for name, part in columns.items()}
    return {
        name: parts for name, parts in found.items() if outputs_of(columns[name]) < widest and is_shared(parts, ranks)
    }


def is_shared(parts: Collection[FusedPart], ranks: int) -> bool:
    """Whether several ranks have the same heads of one of them."""
    return any(part.pieces < ranks for part in parts)


def local_attributes(parent: nn.Module, parts: Collection[FusedPart], ranks: int) -> dict[str, int]:
    """What attributes of an attention are on a rank that shares heads of keys: how many queries there are to each.

    Args:
        parent: The attention.
        parts: Queries, keys and values.
        ranks: Which divide the queries.
    """
    if not is_shared(parts, ranks):
        return {}
    queries, keys = (choose(part.width for part in parts) for choose in (max, min))
    (shared,) = {part.pieces for part in parts if part.width == keys}
    whole = queries // keys
    own = vars(parent)
    return {name: whole * shared // ranks for name in _GROUPS if own.get(name) == whole}


# -- a guess ---------------------------------------------------------------------------------------


def column_style(parent: nn.Module, name: str, row: nn.Module) -> str | None:
    """The style of a layer whose outputs a row layer takes, in one part of them or in several; None: it takes others.

    An attention has queries, as wide as the row, and keys and values of one width; other parts have projections of
    equal width.
    """
    width, taken = outputs_of(parent.get_submodule(name)), inputs_of(row)
    if width == taken:
        return "column"
    count, rest = divmod(width, taken)
    if not splits_output(parent, name, count):
        return None
    if head_size(parent) is not None and width > taken and width != 3 * taken and (width - taken) % 2 == 0:
        each = (width - taken) // 2
        return f"column:{taken},{each},{each}"
    return f"column:{count}" if count > 1 and not rest else None
