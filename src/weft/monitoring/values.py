"""What a tracker is, and what it is given."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from weft.checks import as_number
from weft.errors import listed, type_error


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
    """The numbers among values, as floats: of Python, numpy and torch, and tensors and arrays with one element.

    A truth is 0 or 1.

    Example:
        >>> numbers_of({"loss": torch.tensor(2.0), "n": 3, "text": "x", "done": True})
        {'loss': 2.0, 'n': 3.0, 'done': 1.0}
    """
    numbers = {name: as_number(value) for name, value in values.items()}
    return {name: float(number) for name, number in numbers.items() if number is not None}


def plain(value: object) -> bool | int | float | str:
    """What JSON can hold of a setting, or of a field of a table: a number of Python, numpy or torch, else a text."""
    number = as_number(value)
    return str(value) if number is None else number


def numbers_to_average(what: str, values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among values of which `what` makes means.

    Raises:
        TypeError: A value is neither a number nor of a kind that is passed on as it is.
    """
    found = numbers_of(values)
    wrong = {name: value for name, value in values.items() if name not in found and not isinstance(value, _PASSED_ON)}
    if wrong:
        raise type_error(
            f"{what}: values that are neither numbers nor anything else that can be logged",
            found=listed(f"{name}: {_described(value)}" for name, value in wrong.items()),
            expected="numbers, tensors and arrays with one element, texts, and "
            f"{', '.join(kind.__name__ for kind in _PASSED_ON[1:])} of weft.monitoring",
            fix='weft.log({"loss": losses.mean(), "losses": weft.monitoring.Histogram(losses)}, step, ctx, trackers)',
        )
    return found


_PASSED_ON = (str, Image, Histogram, Table, Figure, Artifact, HParams)


def _described(value: object) -> str:
    shape: Any = getattr(value, "shape", None)
    what = f"{value!r:.60}" if shape is None else f"{list(shape)} of {getattr(value, 'dtype', 'objects')}"
    return f"{type(value).__name__} {what}"


def hash_of_names(names: Iterable[str]) -> float:
    """A hash of names, exact in float64: a sum over the ranks shows whether all of them have the same names."""
    return float(int.from_bytes(hashlib.sha256("\0".join(names).encode()).digest()[:5]))
