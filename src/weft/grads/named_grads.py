"""Gradients by the names of their parameters, as they lie on this rank, and what ranks add up of their parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import override

from weft.context import DistContext
from weft.engines.torch.hooks.every_optimizer import parameters_of
from weft.errors import OrderError, listed
from weft.tensors.blocks import Held, divided_as, hold
from weft.tensors.dtensor import is_sharded, resting_parameters
from weft.tensors.messages import add_up, grouped


class NamedGrads(Mapping[str, torch.Tensor]):
    """The gradients of an optimizer's parameters before a step, by the names that a module gives the parameters.

    The mapping cannot be changed, its tensors can, in place. A gradient lies as its parameter does: whole, or as a
    DTensor of which this rank holds a part. A rank that has no part at all, as one of another stage of a pipeline, does
    not have the name. `held(name)` says which part it is, `sums` adds up over the parts.

    Attributes:
        step: How many steps the optimizer has made before this one, also in runs before a checkpoint.
        place: Which element of the chain is called, from 0.
        parameters: All parameters of the optimizer by name, with a gradient or without.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor], step: int = 0, place: int = 0) -> None:
        """Take the gradients of parameters as they are now.

        Args:
            parameters: By name.
            step: Number of the step, from 0.
            place: Number of the element.
        """
        self.parameters = parameters
        self.step = step
        self.place = place
        found = {name: _as_its_parameter(p) for name, p in parameters.items()}
        self._grads = {name: gradient for name, gradient in found.items() if gradient is not None}

    @override
    def __getitem__(self, name: str) -> torch.Tensor:
        return self._grads[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._grads)

    @override
    def __len__(self) -> int:
        return len(self._grads)

    def held(self, name: str) -> Held:
        """What of a gradient lies here: `.local` in the same memory, `.block.offsets` and `.block.shape` in the whole.

        Args:
            name: Of a parameter with a gradient that is not sparse.
        """
        return hold(name, self[name])

    def sums(self, parts: Mapping[str, torch.Tensor], *, rows: bool = False) -> dict[str, torch.Tensor]:
        """Add up what the ranks have computed of their parts. Collectives: an all-reduce for each set of ranks.

        All ranks give the same names, as far as they have them. Where a tensor is whole, nothing is sent.

        Args:
            parts: Numbers of any shape, the same on all ranks, by name: of this rank's part alone.
            rows: They are one number for each row that this rank has, which others may have as well.

        Returns:
            The sums, by name; the same on all ranks that hold the tensor (or the row).

        Example:
            >>> model = nn.Linear(2, 1, bias=False)
            >>> model(torch.ones(1, 2)).sum().backward()
            >>> grads = NamedGrads(dict(model.named_parameters()))
            >>> grads.sums({name: grads.held(name).local.square().sum() for name in grads})
            {'weight': tensor(2.)}
        """
        cut = [(name, group) for name in parts for group in _cut_over(self.parameters[name], rows=rows)]
        totals = {**parts, **{name: parts[name].clone() for name, _ in cut}}
        for same in grouped(cut, lambda one: tuple(dist.get_process_group_ranks(one[1]))).values():
            add_up((totals[name] for name, _ in same), same[0][1])
        return totals


Element: TypeAlias = Callable[[NamedGrads, DistContext], Mapping[str, torch.Tensor | None]]


def _cut_over(parameter: torch.Tensor, *, rows: bool) -> Iterator[dist.ProcessGroup]:
    """The groups of ranks over which a tensor is cut; of its rows, those that hold parts of one."""
    if not is_sharded(parameter):
        return
    for axis, placement in enumerate(parameter.placements):
        cut: Any = placement
        if not cut.is_replicate() and parameter.device_mesh.size(axis) > 1 and not (rows and cut.dim == 0):
            yield parameter.device_mesh.get_group(axis)


@torch.no_grad()
def _as_its_parameter(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter, divided as the parameter is: one that was assigned may be whole, or a sum to be."""
    gradient = parameter.grad
    if gradient is not None and gradient.layout is torch.sparse_coo and not gradient.is_coalesced():
        parameter.grad = gradient = gradient.coalesce()  # its values are in the same memory from then on
    if gradient is not None:
        parameter.grad = gradient = divided_as(gradient, parameter)
    return gradient


class ParameterNames:
    """The names of the parameters of one optimizer, found anew when it has others."""

    def __init__(self, what: str, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> None:
        """Find them.

        Args:
            what: Name of the transform, for errors.
            optimizer: Over parameters of the modules; or one that was given named parameters.
            modules: Those that are known. Of one inside another, the names are those in the outer one; if several that
                have nothing in common hold parameters, these begin with the number of the module.

        Raises:
            OrderError: A parameter has no name.
        """
        self._what, self._modules = what, list(map(weakref.ref, modules))
        self._named: dict[str, torch.Tensor] = {}
        self.of(optimizer)

    def of(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """The parameters that it has now, by name.

        Raises:
            OrderError: One has no name.
        """
        wanted = parameters_of(optimizer)
        ids = list(map(id, wanted))
        if ids == list(map(id, self._named.values())):
            return self._named
        known = [module for module in (ref() for ref in self._modules) if module is not None]
        inner = {id(part) for one in known for part in one.modules() if part is not one}
        named = [_names_in(one) for one in known if id(one) not in inner]
        named = [names for names in named if not names.keys().isdisjoint(ids)]
        found: dict[int, str] = {}
        for entry in optimizer.param_groups:  # torch keeps names, if it was given some
            found.update({id(p): name for p, name in zip(entry["params"], entry.get("param_names", ()), strict=False)})
        for number, names in reversed(list(enumerate(named))):
            found.update({one: name if len(named) == 1 else f"{number}.{name}" for one, name in names.items()})
        strange = [f"a parameter of shape {tuple(p.shape)}" for p in wanted if id(p) not in found]
        if strange:
            raise OrderError(
                f"{self._what}: parameters of the optimizer have no names",
                found=f"{listed(strange)}, of no module that a transform in ctx.applied was applied to",
                expected=f"transforms of the module first, then the optimizer, then {self._what}; or named parameters",
                fix=f"optimizer = torch.optim.{type(optimizer).__name__}(model.named_parameters())",
            )
        self._named = {found[id(p)]: p for p in wanted}
        return self._named


def _names_in(module: nn.Module) -> dict[int, str]:
    names = [name for name, _ in module.named_parameters()]
    return {id(p): name for name, p in zip(names, resting_parameters(module), strict=True)}


def same_kind(value: object, other: torch.Tensor) -> bool:
    """Whether a value is a tensor of the shape and dtype of another one, and lies as that does."""
    return (
        isinstance(value, torch.Tensor)
        and (value.shape, value.dtype, value.layout) == (other.shape, other.dtype, other.layout)
        and getattr(value, "placements", None) == getattr(other, "placements", None)
    )
