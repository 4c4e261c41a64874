"""Every transform keeps every law."""

import pytest

from tests.known_transforms import TRANSFORMS, objects_of, rules_of
from tests.variants import variant_cases, variants
from weft.testing import laws

from .table import (
    ACCUMULATE,
    AVERAGE,
    BF16,
    COMPILED,
    DEEPSPEED,
    EXPERTS,
    FP16_MODULE,
    LOCAL,
    NORMS,
    ONE_OF_EACH,
    OTHERS,
    PAIRS,
    RECOMPUTE,
    SHARD,
    TABLE,
    TENSOR,
    custom_transform,
    needs_torch,
)

ROWS = [
    *(row for row in TABLE if row is not COMPILED),
    *variants(COMPILED),
    *(pytest.param(row, marks=pytest.mark.deepspeed) for row in DEEPSPEED),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("law", laws.LAWS.values(), ids=laws.LAWS)
def test_law(law, row):
    if law is not laws.one_rank_changes_nothing:
        needs_torch(row)
    law(row)


# On two ranks it is one of the laws.
STRATEGIES = ("replicate", "fully_shard", "zero_partition[2]", "tensor_parallel", "expert_parallel", "shard_data")
QUICK = [row for row in TABLE if row.name in STRATEGIES]
assert len(QUICK) == len(STRATEGIES)


@pytest.mark.parametrize(
    ("row", "ranks"),
    [
        *((row, 4) for row in QUICK),
        *variant_cases(*((row, 4) for row in TABLE if row not in QUICK)),  # one rank: a law
        *(pytest.param(row, ranks, marks=pytest.mark.deepspeed) for row in DEEPSPEED for ranks in (1, 4)),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_ranks_equal_reference(row, ranks):
    if ranks > 1:
        needs_torch(row)
    laws.ranks_equal_reference(row, ranks)


# What strategies refuse, whatever the order: gradients averaged over the axis whose ranks step for themselves.
_OVER_ONE_AXIS = {("local_steps", name) for name in ("fully_shard", "replicate", "zero_partition")}
# ... and what DeepSpeed cannot do that torch can.
_NOT_WITH_DEEPSPEED = {
    *(("with_precision[fp16]", row.name) for row in DEEPSPEED),
    ("zero_partition[deepspeed]", "average_weights"),
    ("zero_partition[deepspeed]", "compile"),
}


def _name(row):
    return row.name.partition("[")[0]


def _refused(one, two):
    """Whether the rules let the second not come after the first, where both change one object."""
    first, second = (TRANSFORMS.get(name, custom_transform.sum_gradients) for name in (one, two))
    if not {*objects_of(first)} & {*objects_of(second)}:
        return False
    before, after = rules_of(first), rules_of(second)
    return after.cannot_meet(before) or after.must_precede(before) or (one, two) in _OVER_ONE_AXIS


# Two options of one transform are law 3.
DIFFERENT = [(one, two) for one, two in PAIRS if _name(one) != _name(two)]


def _is_other(pair):
    """Pairs with the later transforms, and most of those with another option of one, belong to the slow suite."""
    if any(row is other for row in pair for other in (*OTHERS, EXPERTS, LOCAL, TENSOR)):
        return True
    options = [row for row in pair if not any(row is one for one in ONE_OF_EACH)]
    return len(options) == 1


WITH_DEEPSPEED = [
    pair
    for row in DEEPSPEED[:2]
    for other in (SHARD, BF16, FP16_MODULE, ACCUMULATE, NORMS, RECOMPUTE, COMPILED, AVERAGE)
    for pair in ((row, other), (other, row))
]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        *(pytest.param(*pair, marks=[pytest.mark.variant] if _is_other(pair) else []) for pair in DIFFERENT),
        *(pytest.param(*pair, marks=pytest.mark.deepspeed) for pair in WITH_DEEPSPEED),
    ],
    ids=lambda row: row.name,
)
def test_pair_agrees_or_names_the_right_order(one, two):
    outcome = laws.pairs_agree(one, two)
    if (one.name, two.name) in _NOT_WITH_DEEPSPEED:
        assert outcome == "refused"
        return
    assert outcome == ("refused" if _refused(_name(one), _name(two)) else "agrees")
