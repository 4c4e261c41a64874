"""Streams that yield other samples than on another rank, or than before: found out, and named."""

import pytest
import torch.distributed as dist

from weft.data.order.compare_order import compare_order
from weft.errors import ContextError
from weft.peers.board import Board
from weft.peers.world import World


def _worlds(*ranks):
    store = dist.HashStore()
    return [World(ranks=ranks, rank=place, store=Board(store, limit_s=5)) for place in range(len(ranks))]


def test_ranks_that_read_in_other_orders_are_named():
    first, other, like = _worlds(4, 5, 7)
    for world in (first, like, like, first):  # nobody waits, and to come again is no difference
        compare_order(world, "3/0/0", "aa", "the order differs", "shuffle=True")
    with pytest.raises(ContextError) as raised:
        compare_order(other, "3/0/0", "bb", "the order differs", "shuffle=True")
    text = str(raised.value)
    assert text.startswith("the order differs\n") and text.endswith("shuffle=True")
    assert "rank 4: aa, rank 5: bb" in text
    compare_order(other, "3/0/1", "bb", "the order differs", "shuffle=True")  # another place


def test_places_of_long_ago_are_removed():
    first, other = _worlds(0, 1)
    for iteration in range(4):
        for world in (first, other):
            old = f"{iteration - 2}/0"
            compare_order(world, f"{iteration}/0", f"{iteration}", "the order differs", "shuffle=True", old=old)
    assert [first.store.has(f"order/{iteration}/0") for iteration in range(4)] == [False, False, True, True]
    compare_order(other, "0/0", "late", "the order differs", "shuffle=True")  # two iterations behind: nothing to see
    compare_order(World(ranks=(0,), rank=0), "0/0", "alone", "the order differs", "shuffle=True")
