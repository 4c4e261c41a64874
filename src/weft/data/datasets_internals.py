"""What weft uses of the `datasets` library without a public name; see `weft.private_names`."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from weft.private_names import Attribute, Private, SupportedLibrary

_DATASETS = SupportedLibrary("datasets", lambda: importlib.metadata.version("datasets"), ("5.2.0",))
stream = Private(_DATASETS, "datasets", "IterableDataset", "shard_data")
STREAM_SPLIT = Attribute(_DATASETS, "datasets:IterableDataset", "_distributed", "shard_data: who splits a stream")
STREAM_SOURCE = Attribute(_DATASETS, "datasets:IterableDataset", "_ex_iterable", "shard_data: streams with a state")


def split_of(dataset: Any) -> Any:
    """How `split_dataset_by_node` has split a stream, or one of a mixture; None: it has not."""
    return STREAM_SPLIT.of(dataset) if stream.holds(dataset) else getattr(dataset, "weft_split", None)
