"""Sums over the parameters of modules by unit, from what each rank holds of them.

[Note: replicas] A unit is a part of a module, the same under every strategy: what lies below one index of a list, such
as `blocks.3`, or else the module that has the parameter. Of the ranks that hold the same block of a parameter the first
one counts it in the sum of its unit. Besides, the others' sums are added up and the first one's is subtracted as often,
which gives zero unless they differ. Both are summed over all ranks by one message.

[Note: in turn] Sums of rows are made of every parameter each time, in one look at its memory. Norms, and sums of
columns, take longer: they are made for every eighth and every sixteenth unit. Whose turn it is follows from the step
alone, since ledgers of other steps are compared. All come once in sixteen steps; where each begins is random, so that
of every eighth step they all come too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from weft import torch_internals
from weft.checkpoint.state.collect import kept_shards, parameter_keepers, plain_name
from weft.context import DistContext
from weft.contract import is_here, layouts
from weft.contract.layout import apart_axes, axes_of_dims
from weft.monitoring.run_ledger.exact_sums import Words, weights
from weft.rng import mix
from weft.tensors.blocks import hold
from weft.tensors.checksums import can_be_read
from weft.tensors.dtensor import is_sharded, resting_parameters

_TURNS = 16  # of the sums of columns
_NORMED = 8  # every such unit has its turn with its norm


class _Part(NamedTuple):
    """What this rank holds of one parameter.

    Attributes:
        number: Of the parameter among all.
        unit: Number of its unit.
        words: How it is read.
        salt: For its weights.
        factors: Of its sum in the three sums of its unit.
    """

    number: int
    unit: int
    words: Words
    salt: int
    factors: tuple[int, int, int]


class ParameterSums:
    """Sums over the parameters of modules, from what this rank holds.

    Attributes:
        units: Their names, `<name of the module>/<unit>`, the same on all ranks.
        cut: For each unit the axes of the context along which ranks hold different parts of it.
    """

    def __init__(self, modules: Mapping[str, nn.Module], ctx: DistContext) -> None:
        self._modules, self._ctx = modules, ctx
        self._keeps = any(parameter_keepers(module) or apart_axes(module) for module in modules.values())
        self._parts: list[_Part] = []
        self._known: list[torch.Tensor] = []
        self._columns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        names = [f"{key}/{unit_of(plain_name(own))}" for key, m in modules.items() for own, _ in m.named_parameters()]
        self.units = tuple(dict.fromkeys(names))
        self.cut: list[set[str]] = [set() for _ in self.units]

    @torch.no_grad()
    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sums of the parameters as they are. Collectives: none; with DeepSpeed's stage 3 those that gather a part.

        Returns:
            int64 [3, units]: what this rank counts of the exact sums; what is zero over all ranks if replicas are
            equal; the sum of all that it holds. And float64 [units]: what it counts of the sums of squares.
        """
        tensors, device, turn = self._follow(), self._ctx.device, _turn(step)
        sums = torch.zeros(3, len(self.units), dtype=torch.int64, device=device)
        squares = torch.zeros(len(self.units), dtype=torch.float64, device=device)
        normed, rows, columns, units, blocks = self.normed(step), [], [], [], []
        for part in self._parts:
            block = _local(tensors[part.number])
            words = part.words.of(block)
            rows.append(words.sum(1).to(device))
            if part.unit % _TURNS == turn and part.factors[0]:
                columns.append(words.sum(0).to(device))
            if part.unit in normed and part.factors[0] and block.is_floating_point() and block.element_size() > 1:
                units.append(part.unit)
                blocks.append(block)
        if rows:
            sums.index_add_(1, self._unit_of_rows, torch.cat(rows) * self._row_weights)
        if columns:
            sums[0].index_add_(0, self._columns[turn][0], torch.cat(columns) * self._columns[turn][1])
        if blocks:
            norms = [norm.to(device, torch.float64) for norm in torch_internals.foreach_norm(blocks, 2)]
            squares.index_add_(0, torch.tensor(units).to(device), torch.stack(norms).square())
        return sums, squares

    def normed(self, step: int) -> range:
        """The units that have norms in this step."""
        return range(_turn(step) % _NORMED, len(self.units), _NORMED)

    def _follow(self) -> list[torch.Tensor]:
        """What holds the values of the parameters; finds out anew how they lie if there are others than before."""
        known: list[torch.Tensor] = [
            parameter for module in self._modules.values() for parameter in resting_parameters(module)
        ]
        kept = {key: t for m in self._modules.values() for key, t in kept_shards(m).items()} if self._keeps else {}
        tensors = [kept.get(id(parameter), parameter) for parameter in known]
        if len(known) != len(self._known) or not all(map(operator.is_, known, self._known)):
            self._known, self._parts, device = known, list(self._held(tensors)), self._ctx.device
            units = np.repeat([part.unit for part in self._parts], [len(part.words.rows) for part in self._parts])
            self._unit_of_rows = torch.from_numpy(units).to(device)
            each = [weights(part.words.rows, part.salt) * np.array(part.factors)[:, None] for part in self._parts]
            self._row_weights = torch.from_numpy(np.concatenate(each or [np.zeros((3, 0))], 1)).to(device)
            for turn in range(_TURNS):
                parts = [part for part in self._parts if part.unit % _TURNS == turn and part.factors[0]]
                if parts:
                    numbers = np.concatenate([weights(part.words.columns, ~part.salt) for part in parts])
                    places = np.repeat([part.unit for part in parts], [len(part.words.columns) for part in parts])
                    self._columns[turn] = torch.from_numpy(places).to(device), torch.from_numpy(numbers).to(device)
        return tensors

    def _held(self, tensors: list[torch.Tensor]) -> Iterator[_Part]:
        ctx, every = self._ctx, enumerate(tensors)
        for key, module in self._modules.items():
            for name, layout in layouts(module, ctx).items():
                (number, tensor), own = next(every), plain_name(name)
                unit = self.units.index(f"{key}/{unit_of(own)}")
                cut = {*layout.cut, *(axis for axis, _ in layout.owner)}
                if is_sharded(tensor):
                    dims = zip(tensor.placements, axes_of_dims(tensor.device_mesh, ctx), strict=True)
                    cut |= {axis for placement, axes in dims if not placement.is_replicate() for axis in axes}
                self.cut[unit] |= cut
                if not is_here(layout.owner, ctx) or not can_be_read(_local(tensor)) or tensor.is_complex():
                    continue
                place, copies = 0, 1
                for axis, size in ctx.axes:
                    if axis not in cut:
                        place, copies = place * size + ctx.coordinates[axis], copies * size
                held, factors = hold(name, tensor), (0, 1, 1) if place else (1, 1 - copies, 1)
                words = Words(held.shape, tensor.dtype, held.block)
                yield _Part(number, unit, words, mix(f"{key}/{own}"), factors)


def unit_of(name: str) -> str:
    """The unit of a parameter, by its name.

    Example:
        >>> unit_of("model.layers.3.mlp.up.weight"), unit_of("model.embed.weight"), unit_of("scale")
        ('model.layers.3', 'model.embed', 'scale')
    """
    parts = name.split(".")
    index = next((at for at, part in enumerate(parts[:-1]) if part.isdecimal()), None)
    return ".".join(parts[: index + 1] if index is not None else parts[:-1] or parts)


def _turn(step: int) -> int:
    """Which turn it is; see [Note: in turn]."""
    return (step + mix(step // _TURNS)) % _TURNS


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """As `weft.tensors.dtensor.local`, at no cost where no gradients are recorded."""
    sharded: Any = tensor
    part: torch.Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return part
