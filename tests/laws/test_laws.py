"""Every transform keeps every law."""

import itertools

import pytest

from weft.testing import laws

from .table import PAIRS, TABLE


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("law", laws.LAWS.values(), ids=laws.LAWS)
def test_law(law, row):
    law(row)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
@pytest.mark.parametrize("ranks", [1, 4])
def test_ranks_equal_reference(row, ranks):
    laws.ranks_equal_reference(row, ranks)


REFUSED = {
    ("replicate", "with_precision"),
    ("accumulate_grads", "replicate"),
    ("accumulate_grads", "shard_data"),
    ("replicate", "sync_batch_norm"),
    ("replicate", "sum_gradients"),
    ("sum_gradients", "replicate"),
    ("sum_gradients", "with_precision"),
    ("accumulate_grads", "sum_gradients"),
}


@pytest.mark.parametrize(("one", "two"), list(itertools.permutations(PAIRS, 2)), ids=lambda row: row.name)
def test_pair_agrees_or_names_the_right_order(one, two):
    names = tuple(row.name.partition("[")[0] for row in (one, two))
    if names[0] == names[1]:
        pytest.skip("two options of one transform: law 3")
    outcome = laws.pairs_agree(one, two)
    assert outcome == ("refused" if names in REFUSED else "agrees")
