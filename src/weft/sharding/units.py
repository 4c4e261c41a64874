"""Units: which parts of a module are gathered and freed together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from weft import torch_internals
from weft.contract import offered
from weft.contract.name_table import is_table, parts_by_name
from weft.contract.select_modules import Selection, called_inside, has_forward, select
from weft.errors import ContractError, listed, value_error
from weft.precision import LOW, PrecisionOffer
from weft.sharding.layouts_over_axes import Dims

Units: TypeAlias = tuple[tuple[nn.Module, ...], ...]  # those that share parameters together
UnitChoice: TypeAlias = Selection | Mapping[str, bool | int | None]

_LARGE = 2**20  # parameters of a layer that is worth a unit, and messages, of its own
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CAST_BY_AUTOCAST = frozenset(layer.forward for layer in _LAYERS)


class UnitPlan(NamedTuple):
    """Which parameters of a module are gathered and freed together.

    Attributes:
        units: The parts, inner ones first; the module's own unit, which is the last one, is not listed.
        names: Theirs.
        unit_of: The number of the unit of each parameter that is sharded, by name; `len(units)`: the module's own.
        ignored: Names of the parameters that stay whole.
        reshard: `reshard_after_forward` of units for which it was said, by number.
    """

    units: Units
    names: list[list[str]]
    unit_of: Mapping[str, int]
    ignored: tuple[str, ...]
    reshard: Mapping[int, bool | int]


def plan_units(
    what: str, module: nn.Module, chosen: UnitChoice | None, ignored: Selection | None, others: Mapping[str, Dims]
) -> UnitPlan:
    """Choose the units of a module.

    Args:
        what: Name of the transform, for errors.
        module: Whose.
        chosen: The units that the user has chosen, or a table of what `reshard_after_forward` is in each.
        ignored: Parts that stay whole.
        others: The axes of the parameters that are sharded over other ones than most, by name; () if over none.

    Raises:
        ValueError: A choice chooses nothing, or a part without forward.
        ContractError: Parameters of one part are to be sharded over different axes.
    """
    whole = _ignored_in(what, module, ignored, [name for name, own in others.items() if not own])
    reshard: dict[nn.Module, bool | int] = {}
    if is_table(chosen):
        parts = {part: value for part, value in parts_by_name(what, module, chosen).values() if value is not None}
        chosen, reshard = list(parts), dict(parts)
    units = _units_of(what, module, chosen, _parts_apart(what, module, others, whole))
    number = {id(part): place for place, unit in enumerate((*units, (module,))) for part in unit}
    owner = _owner_units(module, [part for unit in units for part in unit])
    found: dict[int, int] = {}  # units of parameters, by id
    names = {}
    for name, part in module.named_modules():
        names[id(part)] = name
        for p in part.parameters(recurse=False):
            found.setdefault(id(p), number[owner[id(part)]])
    return UnitPlan(
        units,
        [[names[id(part)] for part in unit] for unit in units],
        {name: found[id(p)] for name, p in module.named_parameters() if name not in whole},
        whole,
        {number[id(part)]: value for part, value in reshard.items() if id(part) in number},
    )


def _units_of(what: str, module: nn.Module, chosen: Selection | None, own: Sequence[nn.Module]) -> Units:
    """The units, inner ones first; modules that share parameters are one unit.

    The projection of torch's attention is none, because it is never called: the attention reads its weights.

    Args:
        what: Name of the transform, for errors.
        module: Whose.
        chosen: What the user has chosen.
        own: Parts that are units in any case.

    Raises:
        ValueError: A choice chooses nothing, or a part without forward.
    """
    if chosen is None:
        parts = blocks_of(module)
    else:
        found = select(what, module, chosen)
        parts = [part for part in found.values() if part is not module]
        uncalled = [name for name, part in found.items() if not has_forward(part)]
        if uncalled:
            raise value_error(
                f"{what}: units are never called",
                found=listed(f"{name!r} ({type(found[name]).__name__})" for name in uncalled),
                expected="parts that have a forward, around which they are gathered and freed",
                fix=f'weft.{what}(..., units="{called_inside(uncalled[0], found[uncalled[0]])}")',
            )
    parts += [part for part in own if part is not module and not any(part is one for one in parts)]
    read = {id(part.out_proj) for part in module.modules() if isinstance(part, nn.MultiheadAttention)}
    parts = [part for part in parts if id(part) not in read and any(True for _ in part.parameters())]
    order = {id(part): place for place, part in enumerate(module.modules())}
    while True:
        owner = _owner_units(module, parts)
        root = id(module)
        holders: defaultdict[int, set[int]] = defaultdict(set)  # the units that hold each parameter, by id
        for part in module.modules():
            for p in part.parameters(recurse=False):
                holders[id(p)].add(owner[id(part)])
        shared = [owners for owners in holders.values() if len(owners) > 1]
        # What is shared with the module's own unit, or between nested ones, goes one unit up.
        by_id = {id(part): part for part in parts}
        lost = {one for owners in shared if root in owners for one in owners if one != root}
        for owners in shared:
            units = [by_id[one] for one in owners if one != root]
            lost |= {id(one) for one in units if any(_is_inside(one, outer) for outer in units if outer is not one)}
        if not lost:
            return _joined(parts, shared, order)
        parts = [part for part in parts if id(part) not in lost]


def _parts_apart(
    what: str, module: nn.Module, kinds: Mapping[str, object], besides: Collection[str]
) -> list[nn.Module]:
    """The outermost parts all of whose parameters are of one kind besides None, so that each can be a unit.

    Args:
        what: Name of the transform, for errors.
        module: Whose.
        kinds: What distinguishes parameters, by name; None, or left out: nothing does.
        besides: Names of parameters that do not count.

    Raises:
        ContractError: Parameters of two kinds lie in one part.
    """
    found: list[nn.Module] = []

    def visit(part: nn.Module, prefix: str) -> None:
        own = {name: kinds.get(name) for name, _ in part.named_parameters(prefix) if name not in besides}
        if not any(own.values()):
            return
        if len(set(own.values())) == 1 and (has_forward(part) or part is module):
            found.append(part)
            return
        mixed = [name for name, _ in part.named_parameters(prefix, recurse=False) if name in own]
        if any(own[name] for name in mixed):
            raise ContractError(
                f"{what}: parameters of one part are to be sharded over different ranks",
                found=listed(f"{name} over {own[name] or 'the axes of the strategy'}" for name in mixed),
                expected="a part of its own for parameters whose gradients are summed over other axes",
                fix="put the experts into a module of their own",
            )
        for name, child in part.named_children():
            visit(child, f"{prefix}.{name}" if prefix else name)

    visit(module, "")
    return found


def _is_inside(part: nn.Module, outer: nn.Module) -> bool:
    return any(one is part for one in outer.modules())


def _joined(parts: list[nn.Module], shared: list[set[int]], order: Mapping[int, int]) -> Units:
    groups: list[set[int]] = [{id(part)} for part in parts]
    for together in shared:
        touched = [group for group in groups if group & together]
        groups = [group for group in groups if not group & together]
        groups.append(set().union(*touched))
    by_id = {id(part): part for part in parts}
    left = [tuple(by_id[one] for one in sorted(group, key=lambda one: order[one])) for group in groups]
    left.sort(key=lambda group: order[id(group[0])], reverse=True)
    # Inner units have to be cut before the ones around them.
    done: list[tuple[nn.Module, ...]] = []
    while left:
        ready = [one for one in left if not any(_holds(one, other) for other in left if other is not one)]
        done += ready or left
        left = [one for one in left if ready and one not in ready]
    return tuple(done)


def _holds(group: tuple[nn.Module, ...], other: tuple[nn.Module, ...]) -> bool:
    return any(_is_inside(part, outer) for outer in group for part in other)


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks in lists of the module, and the large layers that are in no block."""
    blocks: list[nn.Module] = []

    def visit(part: nn.Module) -> None:
        children = list(part.children())
        if isinstance(part, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            chosen = [child for child in children if any(True for _ in child.children()) and has_forward(child)]
            if len(chosen) > 1:
                blocks.extend(chosen)
                children = [child for child in children if not any(child is one for one in chosen)]
        for child in children:
            visit(child)
        own = sum(p.numel() for p in torch_internals.PARAMETERS.of(part).values() if p is not None)
        if part is not module and not list(part.children()) and own >= _LARGE:
            blocks.append(part)

    visit(module)
    return blocks


def _owner_units(module: nn.Module, parts: Sequence[nn.Module]) -> dict[int, int]:
    """The innermost unit around each module, by id."""
    chosen = {id(part) for part in parts}
    owner: dict[int, int] = {}

    def visit(part: nn.Module, unit: int) -> None:
        unit = id(part) if id(part) in chosen else unit
        if id(part) not in owner:
            owner[id(part)] = unit
            for child in part.children():
                visit(child, unit)

    visit(module, id(module))
    return owner


def _ignored_in(what: str, module: nn.Module, chosen: Selection | None, more: Collection[str]) -> tuple[str, ...]:
    """Names of the parameters that FSDP2 leaves alone: those asked for, some more, and what it cannot cut.

    That are single numbers, parameters without elements, and before torch 2.13 also integers.
    """
    integers = torch.__version__ < "2.13"  # stay whole
    parts = () if chosen is None else select(f"{what}: ignored", module, chosen).values()
    whole = {id(p) for part in parts for p in part.parameters()}
    return tuple(
        name
        for name, p in module.named_parameters()
        if id(p) in whole or name in more or not p.dim() or not p.numel() or (integers and _is_integer(p))
    )


def _is_integer(parameter: nn.Parameter) -> bool:
    return not (parameter.is_floating_point() or parameter.is_complex())


def gather_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """The dtypes in which parameters are gathered that autocast would cast anyway, by name; see `Precision.gather`.

    Those of linear layers and convolutions that nothing else holds, such as an embedding.
    """
    low: dict[int, torch.dtype] = {}
    held_otherwise: set[int] = set()
    parts: list[tuple[nn.Module, torch.dtype | None]] = [(module, None)]
    for part, outer in parts:
        offers = offered(part, PrecisionOffer)
        dtype = offers[-1].precision.gather if offers else outer
        parts += [(child, dtype) for child in part.children()]
        is_cast = type(part).forward in _CAST_BY_AUTOCAST and "forward" not in vars(part)
        for parameter in part.parameters(recurse=False):
            if dtype is not None and is_cast and parameter.dtype not in LOW and parameter.is_floating_point():
                low[id(parameter)] = dtype
            else:
                held_otherwise.add(id(parameter))
    return {name: low[id(p)] for name, p in module.named_parameters() if id(p) in low and id(p) not in held_otherwise}
