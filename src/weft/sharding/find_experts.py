"""The experts of a model: stacked in parameters, or modules in a list; and which of them cannot be told apart."""

from __future__ import annotations

import inspect
from typing import NamedTuple, NoReturn

from torch import nn

from weft import torch_internals
from weft.contract.select_modules import Selection, select
from weft.engines.torch.reducing.trained import is_reduced
from weft.errors import AlreadyApplied, listed, value_error
from weft.sharding.shard_checks import check_not_hooked
from weft.tensors.dtensor import is_sharded

# What transformers calls the arguments after the tokens.
_INDICES = ("top_k_index", "router_indices")
_WEIGHTS = ("top_k_weights", "routing_weights")


class Experts(NamedTuple):
    """The experts of a model, by qualified name.

    Attributes:
        packed: Modules with all experts of a layer in stacked parameters.
        lists: Lists with a module per expert.
    """

    packed: dict[str, nn.Module]
    lists: dict[str, nn.ModuleList]

    def names(self) -> list[str]:
        """All of them."""
        return [*self.packed, *self.lists]


def find_experts(what: str, module: nn.Module, chosen: Selection, ranks: int) -> Experts:
    """Find the experts of a model, and check that they can be divided among ranks.

    Changes: nothing. Collectives: none.

    Args:
        what: Name of the transform, for errors.
        module: The model.
        chosen: "auto", or which parts.
        ranks: Among how many they are to be divided.

    Raises:
        AlreadyApplied: Their parameters are cut or replicated already.
        ValueError: There are none, or they cannot be divided.
    """
    parts = _auto(module) if chosen == "auto" else select(what, module, chosen)
    lists = {name: part for name, part in parts.items() if isinstance(part, nn.ModuleList)}
    packed = {name: part for name, part in parts.items() if is_packed(part)}
    unknown = [name for name in parts if name not in lists and name not in packed]
    if unknown:
        _raise_unknown(what, unknown[0], parts[unknown[0]])
    if not parts:
        raise value_error(
            f"{what}: there are no experts in this {type(module).__name__}",
            found=f"classes: {listed(dict.fromkeys(type(part).__name__ for part in module.modules()))}",
            expected="modules with stacked parameters [experts, ...] and forward(hidden_states, top_k_index, "
            "top_k_weights), as in transformers; or a torch.nn.ModuleList with 'expert' in its name",
            fix=f'weft.{what}(..., experts="{inner[-1]}")  # if these are they'
            if (inner := _innermost_lists(module))
            else f"leave {what} out: there is nothing to divide",
        )
    for name, part in packed.items():
        _check_divisible(what, name, _stacked(part), ranks)
    for name, part in lists.items():
        _check_divisible(what, name, len(part), ranks)
        _check_equal(what, name, part)
    _check_own(what, module, Experts(packed, lists))
    return Experts(packed, lists)


def is_packed(part: nn.Module) -> bool:
    """Whether a module holds stacked experts, and its forward computes any rows with any of them."""
    names = list(inspect.signature(type(part).forward).parameters)[1:]
    known = len(names) == 3 and names[1] in _INDICES and names[2] in _WEIGHTS
    return known and 0 < _stacked(part) == getattr(part, "num_experts", None)


def _stacked(part: nn.Module) -> int:
    """How many experts are stacked in all parameters of a module itself; 0 if they do not say the same."""
    sizes = {p.shape[0] if p.dim() > 1 else 0 for p in torch_internals.PARAMETERS.of(part).values() if p is not None}
    return sizes.pop() if len(sizes) == 1 else 0


def _auto(module: nn.Module) -> dict[str, nn.Module]:
    def fits(name: str, part: nn.Module) -> bool:
        own = name.rpartition(".")[2]
        return is_packed(part) or (isinstance(part, nn.ModuleList) and "expert" in own and len(part) > 1)

    return {name: part for name, part in module.named_modules() if name and fits(name, part)}


def _innermost_lists(module: nn.Module) -> list[str]:
    """Patterns of the lists of several modules in which there is no other list."""
    lists = {name: part for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part) > 1}
    inner = [name for name in lists if not any(other.startswith(f"{name}.") for other in lists)]
    pieces = [name.split(".") for name in inner]
    return [".".join(["*" if piece.isdigit() else piece for piece in outer] + [own]) for *outer, own in pieces]


def _raise_unknown(what: str, name: str, part: nn.Module) -> NoReturn:
    raise value_error(
        f"{what}: how {name or 'the module itself'!r} computes its experts is not known",
        found=f"{type(part).__name__}.forward{inspect.signature(type(part).forward)}, "
        f"{listed(f'{own} {tuple(p.shape)}' for own, p in part.named_parameters()) or 'no parameters'}",
        expected="a torch.nn.ModuleList; or forward(self, hidden_states, top_k_index, top_k_weights) with "
        "`num_experts`, and parameters [num_experts, ...] of the module itself",
        fix=f'weft.{what}(..., experts="auto")',
    )


def _check_divisible(what: str, name: str, experts: int, ranks: int) -> None:
    if experts % ranks:
        fewer = max(number for number in range(1, ranks) if experts % number == 0)
        raise value_error(
            f"{what}: the experts of {name!r} cannot be divided among the ranks",
            found=f"{experts} experts, {ranks} ranks along the axis",
            expected="the same number of experts on each rank",
            fix=f'ctx = weft.start(mesh={{"data": -1, "expert": {fewer}}})',
        )


def _check_equal(what: str, name: str, experts: nn.ModuleList) -> None:
    """Raise if experts of one list are not of one kind."""
    kinds = [
        (type(expert), [(own, tuple(p.shape), p.dtype, p.requires_grad) for own, p in expert.named_parameters()])
        for expert in experts
    ]
    others = [number for number, kind in enumerate(kinds) if kind != kinds[0]]
    if others:

        def said(number: int) -> str:
            expert, parameters = kinds[number]
            shapes = listed(f"{own} {shape} {dtype}" for own, shape, dtype, _ in parameters)
            return f"{number}: {expert.__name__}, {shapes}"

        raise value_error(
            f"{what}: the experts of {name!r} are not alike",
            found=f"{said(0)}; {said(others[0])}",
            expected="experts of one class, with parameters of the same names, shapes and dtypes, trained alike",
            fix=f"weft.{what}(..., experts=...) without {name!r}",
        )
    buffers = [f"{name}.{own}" for own, _ in experts.named_buffers()]
    if buffers:
        raise value_error(
            f"{what}: experts have buffers, which only one rank would keep",
            found=listed(buffers),
            expected="experts of parameters alone",
            fix=f"weft.{what}(..., experts=...) without {name!r}",
        )


def _check_own(what: str, module: nn.Module, experts: Experts) -> None:
    """Raise if the parameters of experts are used elsewhere, or are no longer plain."""
    cut: set[int] = set()  # ids of their parameters
    uses: dict[int, list[str]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        uses.setdefault(id(p), []).append(name)
    for name, part in experts.packed.items():
        cut |= {id(p) for p in part.parameters(recurse=False)}
        stacked = [own for own, b in part.named_buffers(recurse=False) if b.dim() and len(b) == _stacked(part)]
        if stacked:
            raise value_error(
                f"{what}: {name!r} has buffers that belong to single experts",
                found=listed(stacked),
                expected="experts of parameters alone",
                fix=f"weft.{what}(..., experts=...) without {name!r}",
            )
    cut |= {id(p) for part in experts.lists.values() for p in part.parameters()}
    tied = [" = ".join(names) for one, names in uses.items() if one in cut and len(names) > 1]
    if tied:
        raise value_error(
            f"{what}: parameters of experts are used in several places",
            found=listed(tied),
            expected="parameters that belong to one expert each",
            fix="untie them, or leave these experts out of experts=...",
        )
    named = {name: p for name, p in module.named_parameters() if id(p) in cut}
    taken = [name for name, p in named.items() if is_sharded(p) or is_reduced(p)]
    if taken:
        raise AlreadyApplied(
            f"{what}: parameters of experts are already sharded or replicated",
            found=listed(taken),
            expected="plain parameters",
            fix=f"weft.{what}(model, ctx) before the other transforms",
        )
    check_not_hooked(what, "experts", named, fix=f"weft.{what}(model, ctx) first, then the hooks")
