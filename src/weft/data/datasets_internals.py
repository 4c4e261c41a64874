"""What weft uses of the `datasets` library without a public name; see `weft.private_names`."""

from __future__ import annotations

import importlib.metadata

from weft.private_names import Attribute, Library, Private

_DATASETS = Library("datasets", lambda: importlib.metadata.version("datasets"), ("5.2.0",))
stream = Private(_DATASETS, "datasets", "IterableDataset", "shard_data")
STREAM_SPLIT = Attribute(_DATASETS, "datasets:IterableDataset", "_distributed", "shard_data: who splits a stream")
STREAM_SOURCE = Attribute(_DATASETS, "datasets:IterableDataset", "_ex_iterable", "shard_data: streams with a state")
