"""A plan of tensor parallelism for a model that brings none, by the shapes of its layers and the code of attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise

from torch import nn

from weft.sharding.layers.forward_source import fixes_heads
from weft.sharding.layers.linear_layers import HEADS, column_style, has_heads, inputs_of, is_linear, outputs_of


def proposed_plan(module: nn.Module) -> dict[str, str]:
    """Patterns of names with a style each; none if there are no layers of which one takes what others give."""
    found: dict[str, str] = {}
    for prefix, part in module.named_modules():
        styles = _side_by_side(part)
        if any(piece.isdigit() for piece in prefix.split(".")):  # a block, or in one
            styles |= _one_after_another(part)
        found |= {pattern_of(module, f"{prefix}.{n}" if prefix else n): style for n, style in styles.items()}
    embeddings = {name: one for name, one in module.named_modules() if isinstance(one, nn.Embedding)}
    for name, one in [(name, one) for name, one in module.named_modules() if isinstance(one, nn.Linear)]:
        pattern = pattern_of(module, name) if name else name
        tables = [each.weight for each in embeddings.values() if each.num_embeddings == outputs_of(one)]
        if tables and pattern not in found:
            chosen = next((weight for weight in tables if weight is one.weight), tables[-1])
            found |= {own: "vocab" for own, each in embeddings.items() if each.weight is chosen}
            found[pattern] = "gather"
    return dict(sorted(found.items()))


def has_attention(module: nn.Module, plan: Mapping[str, str]) -> bool:
    """Whether a proposal knows the attention of a model: as one layer with several projections, or as three layers.

    The code of the latter may not have the number of heads in it, of which each rank has some.
    """
    beside = Counter(pattern.rpartition(".")[0] for pattern, style in plan.items() if style == "column")
    several = {parent for parent, count in beside.items() if count >= 3}
    parts = [part for name, part in module.named_modules() if name and pattern_of(module, name) in several]
    found = [part for part in parts if has_heads(part)]
    return any(style.startswith("column:") for style in plan.values()) or (
        bool(found) and not any(fixes_heads(part, HEADS) for part in found)
    )


def pattern_of(module: nn.Module, name: str) -> str:
    """A name with `*` for the number of a block."""
    pieces = name.split(".")
    outer = [module.get_submodule(".".join(pieces[: at + 1])) for at in range(len(pieces))]
    blocks = [piece.isdigit() and any(True for _ in part.children()) for piece, part in zip(pieces, outer, strict=True)]
    return ".".join("*" if is_block else piece for piece, is_block in zip(pieces, blocks, strict=True))


def _side_by_side(part: nn.Module) -> dict[str, str]:
    """The styles of linear layers in one part, of which the last one takes what the others give.

    Four of one size, not in a Sequential, are queries, keys, values and output of an attention: a chain would begin
    with the first two. Three in a part with heads have their output elsewhere.
    """
    children = list(part.named_children())
    stacks = [place for place, (_, one) in enumerate(children) if isinstance(one, nn.ModuleList)]
    # What stands before a list of blocks, and what after it, is no pair.
    layers = [(name, one) for name, one in children[max(stacks, default=-1) + 1 :] if is_linear(one)]
    sizes = {(inputs_of(one), outputs_of(one)) for _, one in layers}
    is_alike = len(sizes) == 1 and not isinstance(part, nn.Sequential)
    is_attention = is_alike and (len(layers) == 4 or (len(layers) == 3 and has_heads(part)))
    for place, (name, one) in list(enumerate(layers))[3 if is_attention else 0 :]:
        before = [other for other, first in layers[:place] if inputs_of(first) == outputs_of(one)]
        styles = {other: style for other in before if (style := column_style(part, other, one)) is not None}
        if any(outputs_of(part.get_submodule(other)) == inputs_of(one) for other in styles):
            styles |= dict.fromkeys(before, "column")
        if styles:
            return {**styles, name: "row"}
    return {}


def _one_after_another(part: nn.Module) -> dict[str, str]:
    """The styles of the layers of one part and of the only one in the part after it, as in BERT."""
    found: dict[str, str] = {}
    for (name, first), (after, second) in pairwise(part.named_children()):
        columns, rows = ({n: one for n, one in each.named_children() if is_linear(one)} for each in (first, second))
        own = sum(1 for _ in first.parameters()) - sum(1 for one in columns.values() for _ in one.parameters())
        if isinstance(part, (nn.ModuleList, nn.Sequential)) or not columns or own or len(rows) != 1:
            continue
        ((row, takes),) = rows.items()
        fits = [(inputs_of(one), outputs_of(one)) == (outputs_of(takes), inputs_of(takes)) for one in columns.values()]
        if all(fits) and not _side_by_side(first):
            found |= {f"{name}.{column}": "column" for column in columns} | {f"{after}.{row}": "row"}
    return found
