"""Collectives over nested values, and meetings of ranks, always on an explicit context.

Values are nested as in `weft.nested`. Nothing is pickled: what is not a tensor travels as JSON, see encoding.py.
With one rank every function returns at once what its formula gives for one rank. With
`debug=True` the ranks compare operation, structure, shapes and dtypes before they communicate.

Collective (all ranks of the context call them): reduce, gather, reduce_scatter, all_to_all, pad_across, broadcast,
scatter, gather_objects, sync_rng, any_rank, barrier, together, main_first; of metrics.py gather_metrics,
weighted_mean, denominator. Local: on_rank, print_once.
"""

from weft.collectives.meetings import any_rank, barrier, main_first, on_rank, print_once, together
from weft.collectives.objects import broadcast, gather_objects, scatter
from weft.collectives.random_states import sync_rng
from weft.collectives.rows import all_to_all, reduce_scatter
from weft.collectives.tensors import gather, pad_across, reduce

__all__ = [
    "all_to_all",
    "any_rank",
    "barrier",
    "broadcast",
    "gather",
    "gather_objects",
    "main_first",
    "on_rank",
    "pad_across",
    "print_once",
    "reduce",
    "reduce_scatter",
    "scatter",
    "sync_rng",
    "together",
]
