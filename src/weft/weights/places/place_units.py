"""Which parts of a module lie in one place, and which of them may be streamed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from weft.contract.select_modules import Selection, has_forward, select, select_apart
from weft.engines.torch.streaming.slots import slot_bytes
from weft.sharding.meta import own_tensors
from weft.sharding.units import blocks_of
from weft.weights.places.module_sizes import bytes_of

_WHAT = "plan_placement"


class PlaceUnit(NamedTuple):
    """Parts that lie in one place: one part, or several that share parameters.

    Attributes:
        names: Of the parts, all that each has, without what lies in other units; "" is the module itself.
        parameters: Bytes, tied ones once.
        buffers: Bytes; they stay where the unit computes.
        slot: Bytes that the largest of the parts takes while it is streamed.
        fixed: It is never streamed.
    """

    names: tuple[str, ...]
    parameters: int
    buffers: int
    slot: int
    fixed: bool

    @property
    def size(self) -> int:
        """Bytes where it lies whole."""
        return self.parameters + self.buffers


def place_units(module: nn.Module, chosen: Selection | None, keep: Selection) -> list[PlaceUnit]:
    """The units of a module in the order of `named_modules()`; first, under "", all that lies in no other.

    Args:
        module: On any device.
        chosen: Parts that are not split; None: the classes that a model of transformers names, or repeated blocks.
        keep: Parts that are not streamed.

    Raises:
        ValueError: A choice chooses nothing, parts within each other, or what is never called.
        TypeError: Something given chooses no parts.
    """
    blocks = _own_blocks(module) if chosen is None else list(select_apart(_WHAT, module, chosen).values())
    parts = dict(_parts(module, {id(part) for part in blocks}))
    kept = select(_WHAT, module, keep).values() if _is_given(keep) else ()
    stays = {id(part) for outer in kept for part in outer.modules()}
    held = {id(tensor) for part in parts.values() for tensor in (*part.parameters(), *part.buffers())}
    rest = list(_beside(module, parts.values()))
    alone = [t for t in rest if id(t) not in held]
    parameters = bytes_of(t for t in alone if isinstance(t, nn.Parameter))
    units = [PlaceUnit(("",), parameters, bytes_of(alone) - parameters, 0, fixed=True)]
    outside = {id(t) for t in rest}
    for names in _tied(parts):
        together = [parts[name] for name in names]
        own = [p for part in together for p in part.parameters()]
        fixed = any(id(p) in outside for p in own)  # the module itself reads it
        fixed = fixed or any(id(part) in stays for one in together for part in one.modules())
        buffers = bytes_of(b for part in together for b in part.buffers())
        slot = max(sum(slot_bytes(p.nbytes) for p in part.parameters()) for part in together)
        units.append(PlaceUnit(names, bytes_of(own), buffers, slot, fixed))
    return units


def _is_given(keep: Any) -> bool:
    return not (isinstance(keep, Iterable) and not isinstance(keep, (str, nn.Module)) and not list(keep))


def classes_within(module: nn.Module, unit: PlaceUnit) -> list[str]:
    """Classes by which the parts of a unit could be units themselves.

    Args:
        module: The whole.
        unit: Of `place_units` of it.

    Returns:
        Names of classes whose modules are called, hold parameters and lie next to each other.
    """

    def called(part: nn.Module) -> Iterator[nn.Module]:
        for child in part.children():
            if _is_list(child):
                yield from called(child)
            elif any(True for _ in child.parameters()):
                yield child

    parts = [part for name in unit.names for part in called(module.get_submodule(name))]
    within = {type(inner).__name__ for part in parts for inner in part.modules() if inner is not part}
    return sorted({type(part).__name__ for part in parts} - within)


def _is_list(part: nn.Module) -> bool:
    return isinstance(part, nn.Sequential) or not has_forward(part)


def _own_blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks that a model of transformers does not want to be split, or those that are repeated."""
    named = {
        name
        for part in module.modules()
        for name in (getattr(part, "_no_split_modules", None) or ())
        if isinstance(name, str)
    }
    blocks: list[nn.Module] = []

    def visit(part: nn.Module) -> None:
        for child in part.children():
            if type(child).__name__ in named:
                blocks.append(child)
            else:
                visit(child)

    visit(module)
    read = {id(part.out_proj) for part in module.modules() if isinstance(part, nn.MultiheadAttention)}  # never called
    return blocks or [part for part in blocks_of(module) if id(part) not in read]


def _parts(module: nn.Module, chosen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """What can lie apart: chosen parts, and beside them the outermost parts that are called and hold parameters."""
    names: dict[int, list[str]] = {}
    for name, part in module.named_modules(remove_duplicate=False):
        names.setdefault(id(part), []).append(name)
    seen: set[int] = set()

    def visit(part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for child in part.children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            if id(child) not in chosen and (_is_list(child) or any(id(one) in chosen for one in child.modules())):
                yield from visit(child)
            elif any(True for _ in child.parameters()):
                yield from ((name, child) for name in names[id(child)])

    return visit(module)


def _beside(module: nn.Module, parts: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Parameters and buffers that lie in none of the parts, or in one and outside as well."""
    inside = {id(one) for part in parts for one in part.modules()}
    for part in module.modules():
        if id(part) not in inside:
            yield from (tensor for _, tensor in own_tensors(part))


def _tied(parts: dict[str, nn.Module]) -> list[tuple[str, ...]]:
    """The names of parts, those that share a parameter together."""
    groups: list[tuple[list[str], set[int]]] = []
    for name, part in parts.items():
        own = {id(p) for p in part.parameters()}
        shared = [group for group in groups if group[1] & own]
        together = [one for names, _ in shared for one in names]
        at = groups.index(shared[0]) if shared else len(groups)
        groups = [group for group in groups if group not in shared]
        groups.insert(at, ([*together, name], own.union(*(held for _, held in shared))))
    return [tuple(names) for names, _ in groups]
