"""Batches: how they are read, split over the ranks, put together and grouped into windows.

order/                 the order in which an epoch reads its samples
split/                 which rank reads which samples: the machinery of `shard_data`
windows/               groups of micro-batches, one for each optimizer step: the machinery of `accumulate_grads`
lock_step.py           ranks that have no sample left in the last step
loader_copy.py         a loader with other settings
datasets_internals.py  what is private of the `datasets` library
worker_signals.py      workers end with their rank, not before it
equal_cost.py          samples divided so that all ranks have equal costs
collate.py             batches of samples of different lengths
pack_collate.py        batches without padding: samples one after the other
mixture.py             one dataset of several, with weights
split_sequence.py      this rank's part of every sequence of a batch
batch_size.py          global batch sizes, and the largest that fits

Tested by: tests/data, tests/transforms/test_shard_data.py, tests/transforms/test_accumulate_grads.py
"""

from weft.data.batch_size import BatchMath, batch_math, find_batch_size, split_between
from weft.data.collate import length_batches, pad_collate, padding_share
from weft.data.mixture import Mixture, mix
from weft.data.pack_collate import pack_collate
from weft.data.split.read_plan import DataPlan
from weft.data.split.sharded_loader import ShardedLoader
from weft.data.split.stream_samples import SeekableStream
from weft.data.split_sequence import split_sequence
from weft.data.windows.loader import Windows
from weft.data.windows.window import Window

__all__ = [
    "BatchMath",
    "DataPlan",
    "Mixture",
    "SeekableStream",
    "ShardedLoader",
    "Window",
    "Windows",
    "batch_math",
    "find_batch_size",
    "length_batches",
    "mix",
    "pack_collate",
    "pad_collate",
    "padding_share",
    "split_between",
    "split_sequence",
]
