"""Event files of TensorBoard, read by TensorBoard itself."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__all__ = ["read_events"]


def read_events(folder: Path) -> tuple[dict[str, dict[int, float]], dict[str, list[tuple[int, str]]]]:
    """Scalars by name and step, and texts with their steps; events that a later run purged are left out.

    Raises:
        ImportError: The package tensorboard is not installed.
    """
    library: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    accumulator = library.EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    tags = accumulator.Tags()
    scalars = {tag: {int(e.step): float(e.value) for e in accumulator.Scalars(tag)} for tag in tags["scalars"]}
    texts = {}
    for tag in tags["tensors"]:
        name, _, kind = tag.rpartition("/")
        if kind == "text_summary":
            texts[name] = [
                (int(event.step), b"".join(event.tensor_proto.string_val).decode(errors="replace"))
                for event in accumulator.Tensors(tag)
            ]
    return scalars, texts
