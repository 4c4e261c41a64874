"""Sums over the parameters of modules by unit, from what each rank holds of them.

[Note: replicas] A unit is a part of a module, the same under every strategy: what lies below one index of a list, such
as `blocks.3`, or else the module that has the parameter. Of the ranks that hold the same block of a parameter the first
one counts it in the sum of its unit. Besides, each of them multiplies its own sum by a number, and these numbers add up
to zero: so does the second sum of the unit, unless replicas differ. Both are summed over all ranks by one message.

[Note: in turn] Sums of rows are made of every parameter each time, in one look at its memory. Sums of columns and
norms, which take longer than the sums of rows, are made for every eighth unit, in turn by step.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from weft import torch_internals
from weft.checkpoint.state.collect import parameter_keepers, plain_name
from weft.context import DistContext
from weft.contract import is_here, layouts
from weft.contract.layout import apart_axes, axes_of_dims
from weft.monitoring.run_ledger.exact_sums import Words, number_of, spread, weights
from weft.tensors.blocks import hold, whole
from weft.tensors.checksums import can_be_read
from weft.tensors.dtensor import is_sharded, resting_parameters

TURNS = 8


class UnitSums(NamedTuple):
    """What this rank adds to the sums of all units.

    Attributes:
        sums: int64 [3, units]: what it counts of the exact sums; what is zero over all ranks if replicas are equal;
            the sum of all that it holds.
        squares: float64 [units]: what it counts of the sums of squares, of the units whose turn it is.
    """

    sums: torch.Tensor
    squares: torch.Tensor


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
        self._keeps = any(parameter_keepers(module) for module in modules.values())
        self._parts: list[_Part] = []  # in the order of their rows: matrices, then vectors
        self._matrices: list[_Part] = []
        self._vectors: list[tuple[Words, list[_Part]]] = []  # those of one dtype together
        self._known: list[torch.Tensor] = []  # as modules have them
        self._resting: list[torch.Tensor] = []  # as they are between steps
        self._tensors: list[torch.Tensor] = []  # what holds their values
        self._columns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        names = [f"{key}/{unit_of(plain_name(own))}" for key, m in modules.items() for own, _ in m.named_parameters()]
        self.units = tuple(dict.fromkeys(names))
        self.cut: list[set[str]] = [set() for _ in self.units]

    @torch.no_grad()
    def __call__(self, step: int) -> UnitSums:
        """Sums of the parameters as they are. Collectives: none; with DeepSpeed's stage 3 those that gather a part."""
        blocks = [_local(tensor) for tensor in self._follow()]
        device, count, turn = self._ctx.device, len(self.units), step % TURNS
        sums = torch.zeros(3, count, dtype=torch.int64, device=device)
        squares = torch.zeros(count, dtype=torch.float64, device=device)
        rows, columns = [], []
        for part in self._matrices:
            words = part.words.of(blocks[part.number])
            rows.append(words.sum(1).to(device))
            if part.unit % TURNS == turn and part.factors[0]:
                columns.append(words.sum(0).to(device))
        for words_of_all, parts in self._vectors:
            joined = torch.cat([blocks[part.number].reshape(-1) for part in parts])
            rows.append(words_of_all.of(joined).sum(1).to(device))
        if rows:
            sums.index_add_(1, self._unit_of_rows, torch.cat(rows) * self._row_weights)
        if columns:
            units, factors = self._column_weights(turn)
            sums[0].index_add_(0, units, torch.cat(columns) * factors)
        counted = [part for part in self._parts if part.unit % TURNS == turn and part.factors[0]]
        counted = [part for part in counted if _has_norm(blocks[part.number])]
        if counted:
            norms = _norms([blocks[part.number] for part in counted])
            found = torch.stack([norm.to(device, torch.float64) for norm in norms])
            squares.index_add_(0, torch.tensor([part.unit for part in counted]).to(device), found.square())
        return UnitSums(sums, squares)

    def nothing(self) -> UnitSums:
        """The sums over no unit."""
        device = self._ctx.device
        none = torch.zeros(3, 0, dtype=torch.int64, device=device)
        return UnitSums(none, torch.zeros(0, dtype=torch.float64, device=device))

    def _follow(self) -> list[torch.Tensor]:
        """What holds the values of the parameters; finds out anew how they lie if there are others than before."""
        known = [parameter for module in self._modules.values() for parameter in module.parameters()]
        if len(known) == len(self._known) and all(map(operator.is_, known, self._known)) and not self._keeps:
            return self._tensors
        shards = {
            id(dict(part.named_parameters())[name]): shard
            for module in self._modules.values()
            for part, offer in parameter_keepers(module)
            for name, shard in offer.parameter_shards().items()
        }
        resting = [parameter for module in self._modules.values() for parameter in resting_parameters(module)]
        tensors = [shards.get(id(parameter), parameter) for parameter in resting]
        if len(resting) != len(self._resting) or not all(map(operator.is_, resting, self._resting)):
            self._prepare(tensors)
        self._known, self._resting, self._tensors = known, resting, tensors
        return tensors

    def _prepare(self, tensors: list[torch.Tensor]) -> None:
        """Find out how parameters lie, and make the weights."""
        held = list(self._held(tensors))
        self._matrices = [part for part in held if not part.words.is_vector]
        self._vectors, self._parts = [], list(self._matrices)
        alike: dict[tuple[torch.dtype, torch.device], list[_Part]] = {}
        for part in held:
            if part.words.is_vector:
                block = _local(tensors[part.number])
                alike.setdefault((block.dtype, block.device), []).append(part)
        for (dtype, _), parts in alike.items():
            length = (sum(len(part.words.rows) for part in parts),)
            self._vectors.append((Words(length, dtype, whole(length)), parts))
            self._parts += parts
        device = self._ctx.device
        sizes = torch.tensor([len(part.words.rows) for part in self._parts], dtype=torch.int64)
        units = torch.tensor([part.unit for part in self._parts], dtype=torch.int64)
        self._unit_of_rows = units.repeat_interleave(sizes).to(device)
        each = [
            torch.from_numpy(weights(part.words.rows, part.salt)) * torch.tensor(part.factors)[:, None]
            for part in self._parts
        ]
        self._row_weights = torch.cat(each, 1).to(device) if each else torch.zeros(3, 0, dtype=torch.int64)
        self._columns.clear()

    def _held(self, tensors: list[torch.Tensor]) -> Iterator[_Part]:
        ctx, numbers = self._ctx, {name: number for number, name in enumerate(self.units)}
        sizes, here, every = dict(ctx.axes), ctx.coordinates, enumerate(tensors)
        for key, module in self._modules.items():
            apart = set(apart_axes(module))
            for name, layout in layouts(module, ctx).items():
                (number, tensor), own = next(every), plain_name(name)
                unit = numbers[f"{key}/{unit_of(own)}"]
                cut = set(layout.cut) | apart | {axis for axis, _ in layout.owner}
                if is_sharded(tensor):
                    dims = zip(tensor.placements, axes_of_dims(tensor.device_mesh, ctx), strict=True)
                    cut |= {axis for placement, axes in dims if not placement.is_replicate() for axis in axes}
                self.cut[unit] |= cut
                if not is_here(layout.owner, ctx) or not can_be_read(_local(tensor)):
                    continue
                copies = _place({axis: size for axis, size in sizes.items() if axis not in cut}, here)
                alone = _place({axis: sizes[axis] for axis in apart}, here)[0]
                held = hold(name, tensor)
                words = Words(held.shape, tensor.dtype, held.block)
                salt = number_of(f"{key}/{own} {alone}")
                yield _Part(number, unit, words, salt, (int(copies[0] == 0), _one_of_zero(*copies), 1))

    def _column_weights(self, turn: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Units and weights of the columns that are summed in a turn."""
        if turn not in self._columns:
            parts = [part for part in self._matrices if part.unit % TURNS == turn and part.factors[0]]
            units = [torch.full((len(part.words.columns),), part.unit) for part in parts]
            numbers = [torch.from_numpy(weights(part.words.columns, part.salt ^ -1 % 2**64)) for part in parts]
            self._columns[turn] = torch.cat(units).to(self._ctx.device), torch.cat(numbers).to(self._ctx.device)
        return self._columns[turn]


def unit_of(name: str) -> str:
    """The unit of a parameter, by its name.

    Example:
        >>> unit_of("model.layers.3.mlp.up.weight"), unit_of("model.embed.weight"), unit_of("scale")
        ('model.layers.3', 'model.embed', 'scale')
    """
    parts = name.split(".")
    index = next((at for at, part in enumerate(parts[:-1]) if part.isdecimal()), None)
    return ".".join(parts[: index + 1] if index is not None else parts[:-1] or parts)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """As `weft.tensors.dtensor.local`, at no cost where no gradients are recorded."""
    sharded: Any = tensor
    part: torch.Tensor = sharded.to_local() if is_sharded(tensor) else tensor
    return part


def _place(axes: Mapping[str, int], at: Mapping[str, int]) -> tuple[int, int]:
    """Number of this rank among those along some axes, and how many there are."""
    place, count = 0, 1
    for axis, size in axes.items():
        place, count = place * size + at.get(axis, 0), count * size
    return place, count


def _one_of_zero(place: int, count: int) -> int:
    """One of `count` numbers that add up to zero modulo 2**64, as an int64; see [Note: replicas]."""
    numbers = spread(range(1, count)).astype(object) if count > 1 else []
    found = (-sum(numbers) if place == 0 else int(numbers[place - 1])) % 2**64
    return found - 2**64 * (found >= 2**63)


def _has_norm(block: torch.Tensor) -> bool:
    return block.dtype.is_complex or (block.dtype.is_floating_point and block.dtype.itemsize > 1)


def _norms(blocks: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Norms, in float32 at least."""
    for device, alike in itertools.groupby(blocks, lambda block: (block.device, block.dtype)):
        wide = torch.float32 if device[1].itemsize < torch.float32.itemsize else None
        yield from torch_internals.foreach_norm(list(alike), 2, wide)
