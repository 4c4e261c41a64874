"""Plans of tensor parallelism: which part of a module is cut in which way.

[Note: styles] In the words of a plan:

    "column"     a Linear whose outputs are divided among the ranks
    "column:3"   one that holds three projections of one width side by side, each of which is divided
    "column:64,16,16"  one that holds projections of these widths
    "row"        a Linear whose inputs are; what the ranks compute is added up
    "gather"     as "column", and every rank gets all outputs: the head of a language model
    "vocab"      an Embedding, whose rows are divided; a head, whose logits stay divided, as a DTensor
    "sequence"   a part that stays whole and treats each position by itself; with `sequence=True`, those of this rank
    "replicate"  a part that stays whole between "column" and "row", where it sees this rank's heads alone
    "whole"      a part that every rank computes as it is; with `sequence=True`, of the whole sequence

Gradients of "sequence" and "replicate" are added up over the ranks wherever each has seen a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from weft import torch_internals
from weft.checks import check_module
from weft.contract.select_modules import fits_pattern, is_within
from weft.errors import listed, value_error
from weft.sharding.layers.adapter_layers import styles_inside
from weft.sharding.layers.linear_layers import column_style
from weft.sharding.layers.proposed_plan import has_attention, pattern_of, proposed_plan

STYLES = ("column", "row", "sequence", "vocab", "replicate", "gather", "whole")
KEPT_WHOLE = ("sequence", "replicate", "whole")

# The words of transformers, in ours; what is missing here is left out.
_WORDS = MappingProxyType(
    {
        "colwise": "column",
        "rowwise": "row",
        "colwise_gather_output": "gather",
        "colwise_rep": "gather",
        "embedding_rowwise": "vocab",
        "vocab": "vocab",
        "replicated_with_grad_allreduce": "replicate",
        "sequence_parallel": "sequence",
    }
)


class TensorPlan(Mapping[str, str]):
    """Patterns of names, and the style of each; see [Note: styles]. Prints as a table.

    Attributes:
        left_out: What the plan of the model names and weft leaves whole on every rank, with its word there.
    """

    def __init__(self, styles: Mapping[str, str], left_out: Mapping[str, str]) -> None:
        self._styles = dict(styles)
        self.left_out = dict(left_out)

    def __getitem__(self, pattern: str) -> str:
        return self._styles[pattern]

    def __iter__(self) -> Iterator[str]:
        return iter(self._styles)

    def __len__(self) -> int:
        return len(self._styles)

    def __repr__(self) -> str:
        width = max(map(len, (*self._styles, *self.left_out)), default=0)
        lines = [f"{pattern:{width}}  {style}" for pattern, style in self._styles.items()]
        lines += [f"{pattern:{width}}  left out: {word}" for pattern, word in self.left_out.items()]
        return "\n".join(lines)


def tensor_plan(module: nn.Module) -> TensorPlan:
    """Read the plan of tensor parallelism that a model brings along, as models of transformers do.

    Of a model without one whose attention is found (GPT-2, BERT, ViT, T5), it is read from the shapes of the layers and
    the code of their `forward`. For looking at, and for changing:
    `{**weft.tensor_plan(model), "lm_head": "vocab"}` is a plan for `weft.tensor_parallel`. A part that nothing names
    stays whole on every rank.

    Changes: nothing. Collectives: none.

    Args:
        module: With `_tp_plan`, or around a part that has one.

    Returns:
        Patterns of names with a style each: "column" and "row" for linear layers whose outputs and inputs are
        divided, "column:3" and "column:64,16,16" for those with several projections side by side, by their number or
        their widths, "gather" for a head whose outputs are divided and gathered, "vocab" for an embedding,
        or for a head whose outputs stay divided, "replicate" for parts that stay whole between the two, "sequence"
        for parts that stay whole and may run on a part of the sequence, "whole" for other parts of blocks. Its
        `left_out` has what cannot be translated, which stays whole.

    Raises:
        TypeError: Not a module.
        ValueError: The model has no plan. The text proposes one, from the shapes of its layers.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model._tp_plan = {"0": "colwise", "2": "rowwise"}
        >>> tensor_plan(model)
        0  column
        2  row
    """
    check_module("tensor_plan", module, fix="weft.tensor_plan(model)")
    styles: dict[str, str] = {}
    left_out: dict[str, str] = {}
    own = _own_plan(module)
    fused = _fused_in(module, own)
    for pattern, word in own.items():
        parts = parts_of(module, pattern)
        style = fused.get(pattern, _WORDS.get(word))
        inside = [styles_inside(pattern, part, style) for part in parts.values()] if style is not None else []
        if style is not None and any(inside):
            styles |= {name: style for one in inside for name, style in one.items()}
            styles |= {name: style for name, one in zip(parts, inside, strict=True) if not one}
        elif style is not None and any(_has_layer(part) for part in parts.values()):
            styles[pattern] = style
        elif parts or any(fits_pattern(name, pattern) for name, _ in module.named_parameters()):
            left_out[pattern] = word
    proposed = {} if own else proposed_plan(module)
    if has_attention(module, proposed):
        styles = proposed
    if not styles:
        words = f"; what it names cannot be translated: {listed(left_out)}" if left_out else ""
        raise value_error(
            f"tensor_plan: {type(module).__name__} has no plan for tensor parallelism",
            found=f"no `_tp_plan` in it or in a part of it{words}",
            expected="a plan of your own: which linear layers are sharded, and where their outputs are gathered",
            fix=plan_line(module, own=False),
        )
    styles |= _embedding_of(module, styles)
    styles |= _others_in_blocks(module, styles)
    return TensorPlan(styles, left_out)


def parts_of(module: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The parts whose names fit a pattern, also those with several names, under the first."""
    return {name: part for name, part in module.named_modules() if name and fits_pattern(name, pattern)}


def blocks_around(module: nn.Module, names: list[str]) -> dict[str, list[str]]:
    """The lists of blocks around these parts, outermost lists alone, and the names of the blocks in each."""
    found: dict[str, list[str]] = {}
    for prefix, part in module.named_modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)) and not any(is_within(prefix, outer) for outer in found):
            blocks = [f"{prefix}.{name}" if prefix else name for name, _ in part.named_children()]
            if prefix and any(is_within(name, block) and name != block for name in names for block in blocks):
                found[prefix] = blocks
    return found


def _has_layer(part: nn.Module) -> bool:
    """Whether a style can be applied to a part: the packed experts of some models are parameters of no layer."""
    own = torch_internals.PARAMETERS.of(part)
    return bool(own) and not any(p is not None and p.dim() > 2 for p in own.values())


def _own_plan(module: nn.Module) -> dict[str, str]:
    """The plans that the module, or else the outermost parts of it, bring along, with names as in `module`."""
    found: dict[str, dict[str, str]] = {}
    for prefix, part in module.named_modules():
        # Of a wrapper that asks what it wraps, such as PEFT's, the plan is that of a part.
        own = "_tp_plan" in part.__dict__ or hasattr(type(part), "_tp_plan")
        plan: Any = getattr(part, "_tp_plan", None) if own else None
        if plan and not any(is_within(prefix, outer) for outer in found):
            found[prefix] = {f"{prefix}.{pattern}" if prefix else pattern: str(word) for pattern, word in plan.items()}
    return {pattern: word for plan in found.values() for pattern, word in plan.items()}


def _fused_in(module: nn.Module, own: Mapping[str, str]) -> dict[str, str]:
    """The styles of layers with several projections: transformers gathers what such a layer gives, and cuts it again.

    A layer like this is the only one of its parent before the row that cuts.
    """
    found: dict[str, str] = {}
    rows = {pattern for pattern, word in own.items() if word == "rowwise_split_input"}
    gathered = [pattern for pattern, word in own.items() if word == "colwise_gather_output"]
    for row in rows:
        beside = [one for one in gathered if one.rpartition(".")[0] == row.rpartition(".")[0]]
        names = parts_of(module, row)
        if len(beside) != 1 or not names:
            continue
        prefix = next(iter(names)).rpartition(".")[0]
        style = column_style(module.get_submodule(prefix), beside[0].rpartition(".")[2], next(iter(names.values())))
        if style is not None and style != "column":
            found |= {beside[0]: style, row: "row"}
    return found


def _embedding_of(module: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """An embedding tied to a head of the plan is cut with it."""
    gathered = [pattern for pattern, style in styles.items() if style == "gather"]
    heads = [part for pattern in gathered for part in parts_of(module, pattern).values()]
    tied = {id(getattr(part, "weight", None)) for part in heads}
    planned = [pattern for pattern, style in styles.items() if style == "vocab"]
    return {
        name: "vocab"
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding)
        and id(part.weight) in tied
        and not any(fits_pattern(name, pattern) for pattern in planned)
    }


def _others_in_blocks(module: nn.Module, styles: Mapping[str, str]) -> dict[str, str]:
    """What else is in the blocks of a model: norms and mixtures of experts treat each position by itself.

    In a part with columns, a norm may be between these and the row. What a block calls besides gets whole sequences.
    """
    chosen = {name: style for pattern, style in styles.items() for name in parts_of(module, pattern)}
    cut = list(chosen)
    columns = {name.rpartition(".")[0] for name, style in chosen.items() if style.startswith("column")}
    found: dict[str, str] = {}

    def look(name: str) -> None:
        for own, part in module.get_submodule(name).named_children():
            full = f"{name}.{own}"
            if any(is_within(one, full) for one in cut):
                if full not in columns:
                    look(full)
            elif type(part).__name__.endswith("Norm") or _is_mixture(part):
                found[pattern_of(module, full)] = "sequence"
            elif name in blocks and any(True for _ in part.parameters()):
                found[pattern_of(module, full)] = "whole"

    blocks = [block for each in blocks_around(module, cut).values() for block in each]
    for block in blocks:
        look(block)
    return found


def _is_mixture(part: nn.Module) -> bool:
    return any("Experts" in type(one).__name__ or "Router" in type(one).__name__ for one in part.modules())


# -- a proposal ------------------------------------------------------------------------------------


def plan_line(module: nn.Module, *, own: bool = True) -> str:
    """The call for a module: with its own plan unless that is no good, with a proposal, or of another transform."""
    if own and _own_plan(module):
        return 'model, ctx = weft.tensor_parallel(model, ctx, plan="auto")'
    proposal = proposed_plan(module)
    if not proposal:
        return "model, ctx = weft.fully_shard(model, ctx)  # which takes any module"
    return f"model, ctx = weft.tensor_parallel(model, ctx, plan={proposal})  # a guess from shapes alone: check it"
