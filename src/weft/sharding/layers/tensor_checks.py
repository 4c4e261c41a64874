"""What tensor parallelism cannot compute exactly: refused before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from torch import nn

from weft import torch_internals
from weft.contract.select_modules import fits_pattern, is_within
from weft.engines.options import FusedPart
from weft.errors import AlreadyApplied, ContextError, ContractError, listed, type_error, value_error
from weft.sharding.layers.forward_source import only_feeds
from weft.sharding.layers.linear_layers import (
    HEAD_SIZES,
    HEADS,
    KEY_HEADS,
    fused_parts,
    fused_widths,
    head_size,
    inputs_of,
    is_count,
    is_linear,
    is_shared,
    local_attributes,
    outputs_of,
    shared_heads,
    word_of,
)
from weft.sharding.layers.proposed_plan import pattern_of
from weft.sharding.layers.tensor_plan import KEPT_WHOLE, STYLES, parts_of, plan_line
from weft.sharding.shard_checks import check_not_hooked
from weft.tensors.dtensor import is_sharded

Styles = dict[str, Any]  # name of a part to its style: a word, or a ParallelStyle of torch
Fused = dict[str, list[int]]  # name of a layer with several projections to their widths
_WHAT = "tensor_parallel"
_KINDS: Mapping[str, str] = MappingProxyType(
    {"column": "Linear", "row": "Linear", "gather": "Linear", "vocab": "Embedding or Linear"}
)


def styles_of(module: nn.Module, plan: Mapping[str, Any] | str) -> tuple[Styles, Fused]:
    """The style of each part that a plan names, in the order of the module, and the projections in its columns.

    Raises:
        AlreadyApplied: A part is cut already.
        TypeError: The plan is none, or a part is of a kind that its style cannot cut.
        ValueError: An unknown style, a pattern that matches nothing, two styles for one part, or projections whose
            widths are not those of the layer.
    """
    if not isinstance(plan, Mapping) or not plan:
        raise type_error(
            f"{_WHAT}: plan = {plan!r} cannot be used",
            found=type(plan).__name__,
            expected='"auto", or patterns of names with a style each',
            fix=plan_line(module),
        )
    chosen: dict[str, list[tuple[str, Any]]] = {}
    attentions = [part for part in module.modules() if isinstance(part, nn.MultiheadAttention)]
    for pattern, style in plan.items():
        _check_style(pattern, style)
        matched = parts_of(module, pattern)
        if not matched:
            _raise_no_match(module, pattern)
        for name, part in matched.items():
            _check_kind(name, part, word_of(style), attentions)
            _check_widths(name, part, style)
            chosen.setdefault(name, []).append((pattern, style))
    _check_one_style(module, chosen)
    wanted = [name for name, found in chosen.items() if found[0][1] not in KEPT_WHOLE]
    cut = [name for name in wanted for p in module.get_submodule(name).parameters() if is_sharded(p)]
    if cut:
        raise AlreadyApplied(
            f"{_WHAT}: parts of the plan are already sharded",
            found=listed(dict.fromkeys(cut)),
            expected="plain parameters in the parts that the plan names",
            fix="leave them out of the plan, or load the model without a plan of its own",
        )
    found = {name: chosen[name][0][1] for name, _ in module.named_modules() if name in chosen}
    fused = {name: fused_widths(style, module.get_submodule(name)) for name, style in found.items()}
    return {name: word_of(style) for name, style in found.items()}, {name: one for name, one in fused.items() if one}


def _check_style(pattern: str, style: Any) -> None:
    from torch.distributed.tensor.parallel import ParallelStyle  # noqa: PLC0415  (half a second of imports in torch)

    if word_of(style) not in STYLES if isinstance(style, str) else not isinstance(style, ParallelStyle):
        raise value_error(
            f"{_WHAT}: the style of {pattern!r} is unknown",
            found=repr(style),
            expected=f"{', '.join(map(repr, STYLES))}, 'column:3' for three projections, or a ParallelStyle of torch",
            fix=f'plan={{..., "{pattern}": "{get_close_matches(str(style), STYLES, 1, 0)[0]}"}}',
        )


def _raise_no_match(module: nn.Module, pattern: str) -> None:
    parameters = [name for name, _ in module.named_parameters() if fits_pattern(name, pattern)]
    raise value_error(
        f"{_WHAT}: the pattern {pattern!r} matches no part of {type(module).__name__}",
        found=f"it names parameters: {listed(parameters)}"
        if parameters
        else f"parts: {listed(name for name, _ in module.named_modules() if name)}",
        expected="each pattern to match a part, whose parameters are then sharded",
        fix=f"{parameters[0].rpartition('.')[0]!r}"
        if parameters
        else "print([name for name, _ in model.named_modules()])",
    )


def _check_kind(name: str, part: nn.Module, style: Any, attentions: Iterable[nn.MultiheadAttention]) -> None:
    wanted = _KINDS.get(style) if isinstance(style, str) else None
    if wanted is None:
        return
    if any(part is one.out_proj for one in attentions):
        raise type_error(
            f"{_WHAT}: {name} is never called",
            found="the projection of torch's MultiheadAttention, which reads its weights",
            expected="layers that are called, around which the messages are",
            fix="an attention of four linear layers and scaled_dot_product_attention",
        )
    special = {key: getattr(part, key, None) for key in ("max_norm", "scale_grad_by_freq", "sparse")}
    asked = [f"{key}={value}" for key, value in special.items() if value is not None and value is not False]
    is_kind = isinstance(part, (nn.Linear, nn.Embedding)) if style == "vocab" else is_linear(part)
    if is_kind and not asked:
        return
    raise type_error(
        f"{_WHAT}: {name} cannot be cut as {style!r}",
        found=f"{type(part).__name__}{f' with {listed(asked)}' if asked else ''}",
        expected=f"{wanted}{' without these options, which need the whole table' if asked else ''}",
        fix=f"leave {name!r} out of the plan: it stays whole on every rank"
        + (", or sparse=False, and Adam in place of SparseAdam" if special["sparse"] else "")
        if asked or not isinstance(part, nn.Embedding)
        else f'"{name}": "vocab"',
    )


def _check_widths(name: str, part: nn.Module, style: Any) -> None:
    widths = fused_widths(style, part)
    if widths and sum(widths) != outputs_of(part):
        raise value_error(
            f"{_WHAT}: the projections of {name} do not add up to its outputs",
            found=f"{style!r}: {' + '.join(map(str, widths))} of {outputs_of(part)} outputs",
            expected="the number of projections of equal width, or the width of each",
            fix='"column:3" for queries, keys and values; "column:512,128,128" for fewer heads of the latter',
        )


def _check_one_style(module: nn.Module, chosen: Mapping[str, list[tuple[str, Any]]]) -> None:
    twice = {name: found for name, found in chosen.items() if any(style != found[0][1] for _, style in found)}
    lines = [f"{name}: {' and '.join(f'{s!r} by {p!r}' for p, s in found)}" for name, found in twice.items()]
    lines += [
        f"{name} ({found[0][1]!r}) lies in {outer} ({chosen[outer][0][1]!r})"
        for name, found in chosen.items()
        for outer in chosen
        if name.startswith(f"{outer}.")
    ]
    if lines:
        raise value_error(
            f"{_WHAT}: parameters of {type(module).__name__} have two styles",
            found=listed(lines),
            expected="one style per parameter",
            fix="patterns that do not overlap",
        )


def check_ties(module: nn.Module, styles: Styles) -> None:
    """Raise if a parameter that several parts share would be cut in two ways.

    Raises:
        ValueError: The text names the parts and their styles.
    """
    dims = {"column": 0, "gather": 0, "vocab": 0, "row": 1}  # of a transposed layer, its partner has the same style
    users: dict[int, dict[str, Any]] = {}
    for name, part in module.named_modules():
        for own, p in torch_internals.PARAMETERS.of(part).items():
            if p is not None:
                style = next((s for n, s in styles.items() if is_within(name, n)), None)
                users.setdefault(id(p), {})[f"{name}.{own}" if name else own] = style
    for names in users.values():
        inner = [name.rpartition(".")[0] for name, style in names.items() if style is not None]
        # A part around the layer may have another name for it, as for the bias of BERT's head: it is cut with it.
        shared = {n: s for n, s in names.items() if s is not None or not _is_around(n.rpartition(".")[0], inner)}
        ways = {str(dims.get(style) if isinstance(style, str) else style) for style in shared.values()}
        if len(ways) > 1:
            said = [f"{name}: {'whole' if style is None else repr(style)}" for name, style in shared.items()]
            plan = [f'"{name.rpartition(".")[0]}": "{_tied_style(module, name)}"' for name in shared]
            raise value_error(
                f"{_WHAT}: a tied parameter has different styles",
                found=", ".join(said),
                expected='one way of cutting it, or none: "vocab" for an embedding goes with "gather" or "vocab" '
                "for the head",
                fix=f"plan={{..., {', '.join(plan)}}}",
            )


def _is_around(name: str, parts: Collection[str]) -> bool:
    return any(one.startswith(f"{name}.") for one in parts)


def _tied_style(module: nn.Module, name: str) -> str:
    return "vocab" if isinstance(module.get_submodule(name.rpartition(".")[0]), nn.Embedding) else "gather"


def check_hooks(module: nn.Module, styles: Styles) -> None:
    """Raise if parameters that are to be cut have hooks."""
    cut = tuple(f"{name}." for name, style in styles.items() if style not in KEPT_WHOLE)
    named = {name: p for name, p in module.named_parameters() if name.startswith(cut)}
    check_not_hooked(_WHAT, "layers that are cut", named, fix=f"weft.{_WHAT}(model, ctx) first, then the hooks")


# -- sizes -----------------------------------------------------------------------------------------


def check_sizes(module: nn.Module, styles: Styles, widths: Fused, axis: str, ranks: int) -> dict[str, Any]:
    """What each rank gets of columns that are no equal parts: of several projections, or of heads that ranks share.

    Heads, or the features between "column" and "row", have to be divisible by the ranks, and fewer heads of keys than
    ranks have to divide them. Vocabularies ("vocab", "gather", and a "column" after which no "row" comes) need not be.

    Raises:
        ContextError: The text has the numbers.
    """
    for name, style in styles.items():
        part: Any = module.get_submodule(name)
        if not isinstance(style, str) or style not in ("vocab", "gather", "column"):
            continue
        outputs = outputs_of(part)
        rows_of_each = -(-outputs // ranks)  # but for the last, which get what is left
        served = -(-outputs // rows_of_each)
        if served < ranks:
            raise ContextError(
                f"{_WHAT}: {name} has too few rows for the ranks along {axis!r}",
                found=f"{outputs} rows, {ranks} ranks: {rows_of_each} for each of {served}, and then none",
                expected="a row or more per rank",
                fix="leave it out of the plan: it stays whole on every rank",
            )
    fused: dict[str, tuple[FusedPart, ...]] = {}
    for name, sizes in widths.items():
        parent = module.get_submodule(name.rpartition(".")[0])
        fused[name] = fused_parts(sizes, ranks, head_size(parent))
        for place, part in enumerate(fused[name]):
            _check_divides(f"projection {place} of {name}", part.width, axis, part.pieces, "features")
    for parent, columns, rows in _pairs(module, styles):
        fused |= shared_heads(parent, columns, ranks)
        shared = any(is_shared(fused[name], ranks) for name in columns if name in fused)
        plain = {name: part for name, part in columns.items() if name not in fused}
        for name, count in _head_counts(parent, plain.values()).items():
            if not (shared and name in KEY_HEADS and ranks % count == 0):
                _check_divides(f"{name} of {_named(module, parent)}", count, axis, ranks, "heads")
        for name, part in {**rows, **(plain if rows else {})}.items():
            width = inputs_of(part) if name in rows else outputs_of(part)
            _check_divides(f"{'in' if name in rows else 'out'}_features of {name}", width, axis, ranks, "features")
    return fused


def attributes_of(
    module: nn.Module, styles: Styles, fused: Mapping[str, tuple[FusedPart, ...]], ranks: int
) -> dict[str, dict[str, int]]:
    """By the name of a part, its attributes that have other values where ranks share heads."""
    found: dict[str, dict[str, int]] = {}
    for parent, columns, _ in _pairs(module, styles):
        whole = {name: (FusedPart(outputs_of(part), ranks),) for name, part in columns.items()}
        parts = [part for name in columns for part in fused.get(name, whole[name])]
        found[_named(module, parent)] = local_attributes(parent, parts, ranks)
    return {name: values for name, values in found.items() if values}


def head_tables(module: nn.Module, styles: Styles) -> list[nn.Parameter]:
    """The tables of attentions with a column per head: biases of positions, which are added to its scores."""
    found = []
    for parent, columns, _ in _pairs(module, styles):
        counts = set(_head_counts(parent, columns.values()).values())
        cut = {id(p) for part in columns.values() for p in part.parameters()}
        found += [p for p in parent.parameters() if id(p) not in cut and p.dim() == 2 and p.shape[-1] in counts]
    return found


def _check_divides(what: str, count: int, axis: str, ranks: int, unit: str) -> None:
    if count % ranks:
        divisors = [n for n in range(2, ranks) if count % n == ranks % n == 0]
        raise ContextError(
            f"{_WHAT}: {what} is not divisible by the {ranks} ranks along {axis!r}",
            found=f"{count} {unit}, {ranks} ranks",
            expected=f"the same number of {unit} on every rank",
            fix=f'ctx = weft.start(mesh={{"data": -1, "{axis}": {divisors[-1]}}})'
            if divisors
            else "leave it out of the plan",
        )


def _pairs(module: nn.Module, styles: Styles) -> Iterator[tuple[nn.Module, dict[str, nn.Module], dict[str, nn.Module]]]:
    """The modules that hold layers of the plan themselves, with those of style "column" and "row" by name."""
    for parent in module.modules():
        children = {id(child) for child in parent.children()}
        named = {name: part for name in styles if id(part := module.get_submodule(name)) in children}
        columns = {name: part for name, part in named.items() if styles[name] == "column"}
        rows = {name: part for name, part in named.items() if styles[name] == "row"}
        if columns or rows:
            yield parent, columns, rows


def _head_counts(parent: nn.Module, columns: Collection[Any]) -> dict[str, int]:
    config = getattr(parent, "config", None)
    places = (vars(parent), vars(config) if hasattr(config, "__dict__") else {})
    found = {name: value for place in places for name, value in place.items() if name in HEADS and is_count(value)}
    sizes = [value for name, value in vars(parent).items() if name in HEAD_SIZES and is_count(value)]
    if not sizes:  # an MLP may share the config of the attention
        found = {name: value for name, value in found.items() if name in vars(parent)}
    for size in sizes:
        counts = [outputs_of(part) // size for part in columns if outputs_of(part) % size == 0]
        found |= {f"out_features / {size}": min(counts)} if counts else {}
    return found


def _named(module: nn.Module, part: nn.Module) -> str:
    return next((name for name, one in module.named_modules() if one is part), "") or type(module).__name__


# -- messages --------------------------------------------------------------------------------------


def gathered_once(module: nn.Module, styles: Styles, blocks: Collection[str]) -> tuple[str, ...]:
    """The parts, such as an attention, whose argument goes into several columns and nowhere else."""
    found = []
    for name, parent in module.named_modules():
        columns = [one for one, style in styles.items() if style == "column" and one.rpartition(".")[0] == name]
        is_whole = name and name not in blocks and name not in styles and columns
        if is_whole and only_feeds(parent, [one.rpartition(".")[2] for one in columns]):
            found.append(name)
    return tuple(found)


# -- sequence --------------------------------------------------------------------------------------


def check_sequence(module: nn.Module, styles: Styles, lists: Mapping[str, list[str]]) -> None:
    """Raise if the plan does not say what is done with a part of the blocks.

    Raises:
        ContractError: The text names it.
        ValueError: There is no list of blocks, or there are several.
    """
    if len(lists) != 1:
        raise value_error(
            f"{_WHAT}: sequence=True needs one list of blocks",
            found=f"lists with parts of the plan in them: {listed(lists) or 'none'}",
            expected="one ModuleList or Sequential, whose first block is given the sequence and whose last returns it",
            fix=f"weft.{_WHAT}(..., sequence=False)",
        )
    config: Any = getattr(module, "config", None)
    asked = [key for key in ("output_hidden_states", "output_router_logits") if getattr(config, key, False) is True]
    left = _uncovered(module, styles, lists)
    more = dict.fromkeys(f'"{pattern_of(module, name.rpartition(".")[0])}": "sequence"' for name in left)
    if asked or left:
        raise ContractError(
            f"{_WHAT}: sequence=True, and parts of {type(module).__name__} may need the whole sequence",
            found=listed([*(f"config.{key}" for key in asked), *left]),
            expected='a style for every part of the blocks that has parameters: "sequence" if it treats each position '
            "by itself",
            fix=f"plan={{..., {', '.join(more)}}}" if left else "sequence=False",
        )


def _uncovered(module: nn.Module, styles: Styles, lists: Mapping[str, list[str]]) -> list[str]:
    """The parameters in the blocks that have no style, but for tables with a number per head."""
    tables = {id(p) for p in head_tables(module, styles)}
    inside = tuple(f"{name}." for name in styles)
    return [
        name
        for blocks in lists.values()
        for block in blocks
        for name, p in module.get_submodule(block).named_parameters(prefix=block)
        if not name.startswith(inside) and id(p) not in tables
    ]
