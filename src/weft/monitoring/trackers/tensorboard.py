"""`tensorboard`: event files."""

from __future__ import annotations

import weakref
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weft.checks import import_extra
from weft.monitoring.trackers.files import check_purge_step
from weft.monitoring.values import Figure, Histogram, HParams, Image, Table, numbers_of
from weft.peers.pretended import rehearses


def tensorboard(folder: str | Path, *, purge_step: int | None = None, flush_s: int = 10) -> EventFile:
    """A tracker that writes event files of TensorBoard: scalars, texts, pictures, histograms, hyperparameters.

    Tables become texts in Markdown. Figures are those of matplotlib.

    The file is opened at the first step, so ranks that write nothing make none. It is complete when the tracker
    is closed or dropped, and at the end of the program, also after an error; meanwhile it is written every `flush_s`
    seconds, which is what a killed program loses. With `flush_s=0` it loses nothing: each call returns when its
    values are in the file.

    Args:
        folder: Of the run.
        purge_step: The first step that a resumed run logs: events from this step on, of the run before, are hidden.
        flush_s: Seconds between two times that events are written; 0: at each call.

    Returns:
        The tracker.

    Raises:
        MissingExtra: The package tensorboard is not installed.
        ValueError: `purge_step` is no step.

    Source: `torch.utils.tensorboard.SummaryWriter`.

    Example:
        >>> tracker = tensorboard("runs/example")
        >>> tracker.close()  # nothing was written: there is no file
    """
    check_purge_step("tensorboard", purge_step)
    return EventFile(Path(folder), purge_step, flush_s)


class EventFile:
    """A tracker that writes event files; made by `tensorboard`."""

    def __init__(self, folder: Path, purge_step: int | None, flush_s: int) -> None:
        problem, expected = "tensorboard: the package tensorboard is not installed", "the package tensorboard"
        events = import_extra("torch.utils.tensorboard.writer", problem, expected=expected, extra="tracking")
        self._make = partial(events.SummaryWriter, folder, purge_step=purge_step, flush_secs=flush_s or 10)
        self._at_once = flush_s == 0
        self._writer: Any = None
        self._end: Any = None

    def __call__(self, values: dict[str, Any], /, *, step: int) -> None:
        """Write values of a step; in a rehearsal, nothing."""
        if rehearses():
            return
        if self._writer is None:
            self._writer = self._make()
            self._end = weakref.finalize(self, self._writer.close)  # also at the end of the program
        writer = self._writer
        numbers = numbers_of(values)
        for name, value in values.items():
            if name in numbers:
                writer.add_scalar(name, numbers[name], step)
            elif isinstance(value, str):
                writer.add_text(name, value, step)
            elif isinstance(value, Image):
                pixels = value.pixels.detach()
                writer.add_images(name, pixels if pixels.ndim == 4 else pixels[None], step)
            elif isinstance(value, (Histogram, torch.Tensor)):
                writer.add_histogram(name, value.values if isinstance(value, Histogram) else value.detach(), step)
            elif isinstance(value, Table):
                writer.add_text(name, _markdown(value), step)
            elif isinstance(value, Figure) and hasattr(value.figure, "savefig"):
                writer.add_figure(name, value.figure, step, close=False)
            elif isinstance(value, HParams):
                writer.add_hparams(dict(value.values), dict(value.metrics), run_name=".", global_step=step)
        if self._at_once:
            writer.flush()

    def close(self) -> None:
        """Write everything, and close the file."""
        if self._end is not None:
            self._end()


def _markdown(table: Table) -> str:
    lines = [list(table.columns), ["---"] * len(table.columns), *table.rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
