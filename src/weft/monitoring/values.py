"""What a tracker is, and what it is given."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

__all__ = ["Artifact", "Figure", "HParams", "Histogram", "Image", "Table", "Tracker", "numbers_of", "seal_of"]


class Tracker(Protocol):
    """Anything that takes values: `wandb.log`, `mlflow.log_metrics`, a function of your own."""

    def __call__(self, values: dict[str, Any], /, *, step: int) -> object:
        """Write values of a step."""


class Image(NamedTuple):
    """A picture, for trackers that have pictures.

    Attributes:
        pixels: Shape (C, H, W), or (N, C, H, W) for several; uint8, or floats from 0 to 1.
    """

    pixels: torch.Tensor


class Histogram(NamedTuple):
    """How numbers are distributed, for trackers that have histograms.

    Attributes:
        values: Of any shape.
    """

    values: torch.Tensor


class Table(NamedTuple):
    """Rows under names, for trackers that have tables.

    Attributes:
        columns: Their names.
        rows: Each with a number or a text per column.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


class Figure(NamedTuple):
    """A plot, for trackers that have figures.

    Attributes:
        figure: Of matplotlib or plotly, as far as the library behind the tracker takes it.
    """

    figure: Any


class Artifact(NamedTuple):
    """A file or folder to keep with the run, for trackers that store files.

    Attributes:
        path: Of the file or folder, as it is when it is logged.
    """

    path: str | Path


class HParams(NamedTuple):
    """What a run was started with, for trackers that compare runs by it.

    Attributes:
        values: Numbers, texts and truths, by name.
        metrics: Numbers by which runs are compared.
    """

    values: Mapping[str, bool | str | float | int]
    metrics: Mapping[str, float] = {}


def numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among values, as floats; tensors with one element count, truths do not.

    Example:
        >>> numbers_of({"loss": torch.tensor(2.0), "n": 3, "text": "x"})
        {'loss': 2.0, 'n': 3.0}
    """
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex():
            found[name] = float(value.detach())
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            found[name] = float(value)
    return found


def seal_of(names: Iterable[str]) -> float:
    """A hash of names, exact in float64: a sum over the ranks shows whether all of them have the same names."""
    return float(int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:5]))
