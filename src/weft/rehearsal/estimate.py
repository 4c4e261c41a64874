"""How much memory training needs, from the shapes of parameters alone: closed forms, no program."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from weft.checks import check_choice, check_count
from weft.rehearsal.memory import Memory
from weft.rehearsal.table import columns, size_text

WIDTHS = MappingProxyType({"fp32": 4.0, "bf16-true": 2.0, "int8": 1.0, "int4": 0.5})  # bytes of an element of a weight
TRAINABLE = ("fp32", "bf16-true")
OPTIMIZERS = MappingProxyType({"sgd": 0, "momentum": 1, "adamw": 2, "adamw-8bit": 2})  # values of state per element
# What of state, gradients and parameters is divided among the ranks.
STRATEGIES = MappingProxyType({"replicate": "", "zero1": "o", "zero2": "og", "zero3": "ogp"})
_MIN_8BIT, _BLOCK_8BIT = 4096, 256  # of torchao and bitsandbytes: smaller tensors keep the state of AdamW
_SHOWN = 8


@dataclass(frozen=True)
class ModelBlock:
    """A part of a model: up to the first number in the names of its parameters, "layers.0", or one module.

    Attributes:
        name: Of the part; "layers.*" if there are several of one size.
        count: How many.
        parameters: Elements of each.
    """

    name: str
    count: int
    parameters: int


@dataclass(frozen=True)
class Estimate:
    """Sizes of a model, and the memory of training it. `print` shows the tables.

    Attributes:
        name: Of the model.
        shapes: Of each parameter, by name; what is tied is there once.
        stored: Bytes of the parameters as they are.
        buffers: Bytes of the buffers as they are.
    """

    name: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    stored: int
    buffers: int

    @property
    def parameters(self) -> int:
        """How many elements the parameters have."""
        return sum(math.prod(shape) for _, shape in self.shapes)

    @property
    def blocks(self) -> tuple[ModelBlock, ...]:
        """The parts of the model in their order; equal ones that only differ by a number together."""
        sizes: Counter[str] = Counter()
        for name, shape in self.shapes:
            sizes[_block(name)] += math.prod(shape)
        groups = Counter((re.sub(r"(^|\.)\d+$", r"\1*", name), size) for name, size in sizes.items())
        return tuple(ModelBlock(name, count, size) for (name, size), count in groups.items())

    def weights(self, dtype: str = "fp32") -> int:
        """Bytes of the parameters in a dtype; int8 and int4 without the scales that a quantized format adds."""
        return math.ceil(self.parameters * WIDTHS[_known("dtype", dtype, WIDTHS)])

    def largest(self, dtype: str = "fp32") -> int:
        """Bytes of the largest part: what must be whole on a device at some time."""
        return math.ceil(max((each.parameters for each in self.blocks), default=0) * WIDTHS[dtype])

    def training(
        self, optimizer: str = "adamw", dtype: str = "fp32", *, strategy: str = "replicate", ranks: int = 1
    ) -> Memory:
        """What a rank holds when the optimizer steps: parameters, gradients and state, no activations.

        The closed forms of the ZeRO paper, to the byte: a tensor is cut along its first dimension, and the rank with
        the most rows counts. `weft.with_precision(model, ctx, "bf16")` trains in float32 ("fp32") and holds a 16-bit
        copy of the weights in use; "bf16-true" keeps weights, gradients and state in 16 bits. The count of steps that
        torch's Adam keeps on the CPU, 4 bytes per parameter, is left out.

        Source: Rajbhandari et al., "ZeRO", SC 2020; Dettmers et al., "8-bit Optimizers via Block-wise
        Quantization", ICLR 2022 (256 values and a scale per block, as in torchao and bitsandbytes).

        Args:
            optimizer: "sgd", "momentum", "adamw" (and Adam), "adamw-8bit".
            dtype: "fp32" or "bf16-true".
            strategy: What is divided among the ranks: nothing ("replicate"), the optimizer's state ("zero1"), also
                gradients ("zero2"), also parameters ("zero3", `fully_shard`).
            ranks: Among which it is divided.

        Raises:
            ValueError: One of them is not known.

        Example:
            >>> estimate(nn.Linear(1024, 1024, bias=False)).training(ranks=8, strategy="zero1").total / 2**20
            9.0
        """
        _known("optimizer", optimizer, OPTIMIZERS)
        divided = STRATEGIES[_known("strategy", strategy, STRATEGIES)]
        width = int(WIDTHS[_known("dtype", dtype, TRAINABLE)])
        check_count("Estimate.training", "ranks", ranks, fix="ranks=8")

        def elements(kind: str) -> list[int]:
            return [_rows(shape, ranks if kind in divided else 1) for _, shape in self.shapes]

        return Memory(
            parameters=width * sum(elements("p")),
            gradients=width * sum(elements("g")),
            optimizer=sum(_state(optimizer, number, width) for number in elements("o")),
            buffers=self.buffers,
        )

    def __str__(self) -> str:
        return f"{self._sizes()}\n\n{self._by_dtype()}"

    def _sizes(self) -> str:
        head = f"{self.name}: {self.parameters:,} parameters, {size_text(self.stored)} as they are"
        head += f", and {size_text(self.buffers)} of buffers" if self.buffers else ""
        parts = sorted(self.blocks, key=lambda each: -each.parameters * each.count)
        rows = [("parts", "count", "parameters each", "fp32, all")]
        rows += [
            (f"  {each.name}", str(each.count), f"{each.parameters:,}", size_text(4 * each.parameters * each.count))
            for each in parts[:_SHOWN]
        ]
        more = f"\n  and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
        return f"{head}\n\n{columns(rows)}{more}"

    def _by_dtype(self) -> str:
        names = [f"train, {name}" for name in OPTIMIZERS]
        rows = [("dtype", "weights", "largest part", *names)]
        for dtype in WIDTHS:
            trained = [
                size_text(self.training(name, dtype).total) if dtype in TRAINABLE else "-" for name in OPTIMIZERS
            ]
            rows.append((f"  {dtype}", size_text(self.weights(dtype)), size_text(self.largest(dtype)), *trained))
        return columns(rows)

    def by_ranks(self, ranks: tuple[int, ...], *, optimizer: str = "adamw", dtype: str = "fp32") -> str:
        """A table of what each of so many ranks holds, by strategy."""
        rows: list[tuple[str, ...]] = [(f"{optimizer}, {dtype}, per rank of", *STRATEGIES)]
        for number in ranks:
            found = [self.training(optimizer, dtype, strategy=each, ranks=number).total for each in STRATEGIES]
            rows.append((f"  {number}", *map(size_text, found)))
        return columns(rows)


def estimate(model: nn.Module | Mapping[str, torch.Tensor], *, name: str | None = None) -> Estimate:
    """Measure a model: its sizes, and the memory that training it takes. Only shapes are read, so meta will do.

    Args:
        model: A module, or its parameters by name.
        name: What to call it; default: its class.

    Example:
        >>> with torch.device("meta"):
        ...     model = nn.Linear(4096, 4096)
        >>> found = estimate(model)
        >>> found.parameters, found.training("sgd").total
        (16781312, 134250496)
    """
    tensors: dict[str, torch.Tensor]
    if isinstance(model, nn.Module):
        tensors = {**dict(model.named_parameters())}
        buffers = sum(each.numel() * each.element_size() for each in model.buffers())
    else:
        tensors, buffers = dict(model), 0
    shapes = tuple((key, tuple(each.shape)) for key, each in tensors.items())
    stored = sum(each.numel() * each.element_size() for each in tensors.values())
    return Estimate(name or type(model).__name__, shapes, stored, buffers)


def _block(name: str) -> str:
    """The part of the model that a parameter belongs to."""
    numbered = re.match(r"(.*?(?:^|\.)\d+)\.", name)
    return numbered[1] if numbered else name.rpartition(".")[0] or "(itself)"


def _rows(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of the most that a rank has of a tensor cut along its first dimension; a single number is not cut."""
    return math.ceil(shape[0] / ranks) * math.prod(shape[1:]) if shape else 1


def _state(optimizer: str, number: int, width: int) -> int:
    values = OPTIMIZERS[optimizer]
    if optimizer == "adamw-8bit" and number >= _MIN_8BIT:
        return values * (number + 4 * math.ceil(number / _BLOCK_8BIT))
    return values * number * width


def _known(what: str, value: str, all_of: Collection[str]) -> str:
    check_choice("Estimate", what, value, all_of, fix=f'{what}="{next(iter(all_of))}"')
    return value
