"""The stages of a pipeline: which layers come one after the other, and how they are shared out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import nn

from weft.checks import check_count, check_module
from weft.contract.select_modules import select
from weft.errors import ContractError, listed, type_error, value_error
from weft.tensors.nested import tensors

Cost: TypeAlias = Callable[[str, nn.Module], float] | Mapping[str, Any] | torch.Tensor | Sequence[Any]


@dataclass(frozen=True)
class PipelinePlan:
    """The stages of a module; prints as a table.

    Attributes:
        stages: For each stage the names of its layers, in the order in which forward calls them.
        num_bytes: Bytes of parameters of each stage; those of tied weights in each stage that uses them.
        costs: Of each stage, if the layers were given any.
    """

    stages: tuple[tuple[str, ...], ...]
    num_bytes: tuple[int, ...]
    costs: tuple[float, ...] = ()

    def __str__(self) -> str:
        rows = [("stage", "bytes", "cost", "layers")]
        for number, (names, size) in enumerate(zip(self.stages, self.num_bytes, strict=True)):
            cost = f"{self.costs[number]:,.6g}" if self.costs else ""
            layers = f"{names[0]}{f' ... {names[-1]}' if len(names) > 1 else ''} ({len(names)})"
            rows.append((str(number), f"{size:,}", cost, layers))
        return "\n".join(
            f"{number:>5}  {size:>14}  {f'{cost:>12}  ' if self.costs else ''}{layers}"
            for number, size, cost, layers in rows
        )


def plan_pipeline(module: nn.Module, n: int, *, cost: Cost | None = None) -> PipelinePlan:
    """Share out the layers of a module over the stages of a pipeline, for `pipeline(stages=...)`, or to be printed.

    The layers come one after the other as `base_model_pp_plan` of transformers says, else in the order in which they
    are registered: the children of the module, of its `nn.ModuleList` and `nn.Sequential`, and of what holds these.
    Neighbors share a stage, so that the largest stage has as few bytes of parameters as possible, or costs as little as
    possible. That forward calls them in this order is checked when it runs.

    Changes: nothing. Collectives: none.

    Args:
        module: With its parameters anywhere, also on meta.
        n: Number of stages: the ranks of the axis, times 2 for the schedules with two stages per rank.
        cost: What a layer costs. A function of its name and itself; a mapping of patterns of names, as in
            `fully_shard(units=...)`, to numbers, of which the last that fits counts, and 0 where none does; or a batch,
            as forward takes it (a tensor, a tuple of arguments, or a mapping by name): then each layer costs its
            floating-point operations in a forward pass, which are counted with `torch.utils.flop_counter` and not
            computed. Default: the bytes of its parameters.

    Returns:
        The names of the layers of each stage, their bytes, and their costs if they were given. A parameter of `module`
        itself is in the first stage.

    Raises:
        ContractError: There are fewer blocks than stages.
        TypeError: Not a module, or a cost of another kind.
        ValueError: `n` is not a number of stages, a cost is negative or no number, a pattern fits nothing, or the
            operations cannot be counted.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
        >>> print(plan_pipeline(model, 2))
        stage           bytes  layers
            0              48  0 (1)
            1             100  1 ... 3 (3)
        >>> plan_pipeline(model, 2, cost=torch.ones(1, 2)).costs
        (16.0, 40.0)
    """
    check_module("plan_pipeline", module, fix="plan = weft.plan_pipeline(model, 4)")
    check_count("plan_pipeline", "n", n, fix="weft.plan_pipeline(model, 4)")
    layers, blocks = _chain(module)
    if blocks < n:
        raise ContractError(
            f"pipeline: {type(module).__name__} has fewer blocks than there are stages",
            found=f"{blocks} block(s) for {n} stages; layers: {listed(layers)}",
            expected="at least one block per stage",
            fix="fewer ranks along the axis, a schedule with one stage per rank, or stages=[...]",
        )
    costs = _costs(module, layers, cost)
    ends = [0, *_balanced(costs, n), len(layers)]
    stages = [layers[start:end] for start, end in pairwise(ends)]
    loose = [name for name, _ in module.named_parameters() if not any(_within(name, layer) for layer in layers)]
    plan = plan_of(module, [[*loose, *stages[0]], *stages[1:]], n)
    if cost is None:
        return plan
    return replace(plan, costs=tuple(float(sum(costs[start:end])) for start, end in pairwise(ends)))


def plan_of(module: nn.Module, stages: Sequence[Sequence[Any]] | PipelinePlan, n: int) -> PipelinePlan:
    """The plan for stages that were given: names of layers, the layers themselves, or names of parameters.

    Raises:
        TypeError: Something in it is neither a name nor a layer.
        ValueError: The number of stages is not `n`, a name is unknown, a parameter is in no stage, or a layer in
            several.
    """
    given = stages.stages if isinstance(stages, PipelinePlan) else stages
    names = {id(part): name for name, part in module.named_modules()}
    known = {*names.values(), *(name for name, _ in module.named_parameters(remove_duplicate=False))} - {""}
    fix = f"weft.pipeline(model, ctx, stages=weft.plan_pipeline(model, {n}))"
    found = [[_name(one, names, known, fix) for one in stage] for stage in given]
    if len(found) != n or not all(found):
        raise value_error(
            "pipeline: the number of stages does not fit",
            found=f"{len(found)} stage(s) with {', '.join(str(len(stage)) for stage in found)} layer(s)",
            expected=f"{n} stages with at least one layer each",
            fix=fix,
        )
    places = {  # the entries of stages that hold each parameter
        name: [(number, layer) for number, layers in enumerate(found) for layer in layers if _within(name, layer)]
        for name, _ in module.named_parameters(remove_duplicate=False)
    }
    lost = [name for name, entries in places.items() if not entries]
    twice = [f"{name} in {len(entries)}" for name, entries in places.items() if not _is_once(name, entries)]
    if lost or twice:
        raise value_error(
            "pipeline: each layer belongs to one stage",
            found=f"in no stage: {listed(lost) or 'none'}; in several: {listed(twice) or 'none'}",
            expected="stages that hold all layers with parameters, each once",
            fix=fix,
        )
    plan = PipelinePlan(tuple(map(tuple, found)), ())
    held: list[dict[int, int]] = [{} for _ in range(n)]  # bytes by id: of a tied one in each stage that uses it
    for name, parameter in module.named_parameters(remove_duplicate=False):
        for number in stages_of(plan, name):
            held[number][id(parameter)] = parameter.nbytes
    return replace(plan, num_bytes=tuple(sum(each.values()) for each in held))


def stages_of(plan: PipelinePlan, name: str) -> list[int]:
    """The stages that a parameter, buffer or layer belongs to under this name; several for a parameter named there."""
    return [number for number, layers in enumerate(plan.stages) if any(_within(name, layer) for layer in layers)]


# -- the chain ---------------------------------------------------------------------------------------


def _chain(module: nn.Module) -> tuple[list[str], int]:
    """The layers in the order in which they are called, and how many of them are blocks."""
    planned = getattr(getattr(module, "config", None), "base_model_pp_plan", None)  # of transformers
    layers = list(_expanded(module, "", planned if isinstance(planned, Mapping) else {}))
    lists = [name for name, part in module.named_modules() if isinstance(part, (nn.ModuleList, nn.Sequential))]
    blocks = [layer for layer in layers if any(layer.rpartition(".")[0] == name for name in lists)]
    return layers, len(blocks) or len(layers)


def _expanded(module: nn.Module, prefix: str, planned: Mapping[str, Any]) -> Iterator[str]:
    children = dict(module.named_children())
    if planned and set(planned) <= set(children):
        children = {name: children[name] for name in [*planned, *(n for n in children if n not in planned)]}
    for name, child in children.items():
        if not any(True for _ in child.parameters()) and not isinstance(module, nn.Sequential):
            continue  # without parameters it runs on every stage
        if isinstance(child, (nn.ModuleList, nn.Sequential)) or _holds_blocks(child, module):
            yield from _expanded(child, f"{prefix}{name}.", planned)
        else:
            yield prefix + name


def _holds_blocks(child: nn.Module, module: nn.Module) -> bool:
    """Whether most of a child of a module is in lists of blocks, besides its embeddings."""
    if isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False  # the child is a block itself
    lists = [part for part in child.modules() if isinstance(part, (nn.ModuleList, nn.Sequential)) and len(part) > 1]
    embeddings = sum(_num_bytes(part) for part in child.modules() if isinstance(part, nn.Embedding))
    return any(2 * _num_bytes(part) > _num_bytes(child) - embeddings for part in lists)


def _num_bytes(part: nn.Module) -> int:
    return sum(p.nbytes for p in part.parameters())


def _costs(module: nn.Module, layers: Sequence[str], cost: Any) -> Sequence[float]:
    """What each layer costs, see `plan_pipeline`."""
    parts = {name: module.get_submodule(name) for name in layers}
    if cost is None:
        return [_num_bytes(part) for part in parts.values()]
    if isinstance(cost, Mapping) and not any(True for _ in tensors(cost)):
        found: dict[str, Any] = dict.fromkeys(layers, 0.0)
        for pattern, value in cost.items():
            chosen = {id(part) for part in select("plan_pipeline", module, pattern).values()}
            found |= {name: value for name, part in parts.items() if id(part) in chosen}
    elif isinstance(cost, (torch.Tensor, tuple, list, Mapping)):
        from weft.engines.torch.compute.layer_flops import flops_of  # noqa: PLC0415  (fake tensors: seconds of imports)

        return flops_of(module, layers, cost)
    elif callable(cost):
        found = {name: cost(name, part) for name, part in parts.items()}
    else:
        raise type_error(
            "plan_pipeline: cost tells nothing of layers",
            found=type(cost).__name__,
            expected="a function of name and layer, a mapping of patterns to numbers, or a batch",
            fix='weft.plan_pipeline(model, 4, cost={"layers.*": 1.0, "lm_head": 2.5})',
        )
    wrong = [
        f"{name}: {value!r}"
        for name, value in found.items()
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf
    ]
    if wrong:
        raise value_error(
            "plan_pipeline: costs are numbers that are not negative",
            found=listed(wrong),
            expected="a number for each layer, such as milliseconds",
            fix="weft.plan_pipeline(model, 4, cost=lambda name, layer: sum(p.numel() for p in layer.parameters()))",
        )
    return [float(found[name]) for name in layers]


def _balanced(sizes: Sequence[float], n: int) -> list[int]:
    """Where to cut a row into n parts, so that the largest is as small as can be."""
    ends = range(len(sizes) + 1)
    best: list[tuple[float, list[int]]] = [(sum(sizes[:end]), []) for end in ends]  # of the row up to each end
    for parts in range(1, n):
        found = [
            [(max(best[cut][0], sum(sizes[cut:end])), [*best[cut][1], cut]) for cut in ends[parts:end]] for end in ends
        ]
        best = [min(each, key=itemgetter(0), default=(math.inf, [])) for each in found]
    return best[-1][1]


# -- what was given ----------------------------------------------------------------------------------


def _name(one: Any, names: Mapping[int, str], known: set[str], fix: str) -> str:
    if isinstance(one, nn.Module) and id(one) in names:
        return names[id(one)]
    if not isinstance(one, (str, nn.Module)):
        raise type_error(
            "pipeline: stages holds something else than layers",
            found=type(one).__name__,
            expected="for each stage a list of names of layers, or of layers",
            fix=fix,
        )
    if one not in known:
        raise value_error(
            "pipeline: a stage holds a layer that the module has not",
            found=repr(one) if isinstance(one, str) else type(one).__name__,
            expected=f"names such as {listed(sorted(known))}",
            fix=fix,
        )
    return str(one)


def _within(name: str, layer: str) -> bool:
    return name == layer or name.startswith(f"{layer}.")


def _is_once(name: str, entries: Sequence[tuple[int, str]]) -> bool:
    """Whether one layer holds a parameter at most, besides other stages that name the parameter itself."""
    numbers = [number for number, _ in entries]
    return len(set(numbers)) == len(numbers) and sum(layer != name for _, layer in entries) <= 1
