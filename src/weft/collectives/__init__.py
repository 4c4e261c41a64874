"""Collectives over nested values, and meetings of ranks, always on an explicit context.

Values are nested as in `weft.tensors.nested`. Nothing is pickled: what is not a tensor travels as JSON.
With one rank every function returns at once what its formula gives for one rank. With
`debug=True` the ranks compare operation, structure, shapes and dtypes before they communicate.

primitives.py     what every collective begins with, and the messages themselves
tensors.py        reduce, gather, pad_across
rows.py           reduce_scatter, all_to_all
exchange.py       the messages of the last two, and their gradients
objects.py        broadcast, scatter, gather_objects
encoding.py       values as JSON, for messages and for checkpoints
packed_gather.py  tensors of all ranks in one message
whole_tensors.py  tensors that lie in parts, whole on all ranks, many in a message
barriers.py       barrier, all_or_none, main_first, any_rank, on_rank
vocab_loss.py     vocab_cross_entropy
on_all_ranks.py   work that fails on one rank fails on all

Collective (all ranks of the context call them): reduce, gather, reduce_scatter, all_to_all, pad_across, broadcast,
scatter, gather_objects, any_rank, barrier, all_or_none, main_first, vocab_cross_entropy; of metrics.py gather_metrics,
weighted_mean, denominator. Local: on_rank.

Tested by: tests/collectives
"""

from weft.collectives.barriers import all_or_none, any_rank, barrier, main_first, on_rank
from weft.collectives.objects import broadcast, gather_objects, scatter
from weft.collectives.rows import all_to_all, reduce_scatter
from weft.collectives.tensors import gather, pad_across, reduce
from weft.collectives.vocab_loss import vocab_cross_entropy

__all__ = [
    "all_or_none",
    "all_to_all",
    "any_rank",
    "barrier",
    "broadcast",
    "gather",
    "gather_objects",
    "main_first",
    "on_rank",
    "pad_across",
    "reduce",
    "reduce_scatter",
    "scatter",
    "vocab_cross_entropy",
]
