"""The table of transforms and laws, on the device; ranks share it."""

from dataclasses import replace
from functools import partial

import pytest

from tests.gpu.device import COMPILER, DEVICE, DRY, REPLICATED, SHARDED, needs
from tests.laws.table import (
    ACCUMULATE,
    BF16,
    COMPILED,
    FP16,
    FULLY,
    HYBRID,
    REPLICATE,
    SHARD,
    STAGES,
    TABLE,
    TENSOR,
    ZERO1,
    ZERO2,
    ZERO3,
    compile_it,
    needs_torch,
)
from weft.testing import laws

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # torch warns of devices in its own ways

# What the compiler fuses has other last bits.
INDUCTOR = replace(
    COMPILED, name=f"compiled[{COMPILER}]", apply=partial(compile_it, backend=COMPILER), one_rank_tolerance=1e-9,
    tolerance=1e-9, device=DEVICE,
)  # fmt: skip
ROWS = [replace(row, device=DEVICE) for row in ([FP16, FULLY] if DRY else TABLE)]
LAWS = ["names_stay", "ranks_equal_reference"] if DRY else list(laws.LAWS)
PAIRS = [
    (SHARD, REPLICATE), (BF16, REPLICATE), (BF16, FULLY), (FULLY, ACCUMULATE), (ZERO2, ACCUMULATE), (REPLICATE, BF16),
]  # fmt: skip


# What they send while they train: DTensor gathers outputs, torch's schedules send what leaves a stage.
WHILE_TRAINING = {TENSOR.name: "functional all_gather", STAGES.name: "send"}


def _needs(row, law="ranks_equal_reference"):
    if law != "one_rank_changes_nothing":
        needs_torch(row)
    names = {row.name, *(one.name for one in row.needs)}
    needs(*(SHARDED if names & {one.name for one in (FULLY, HYBRID, ZERO1, ZERO2, ZERO3)} else REPLICATED))
    if row.name in WHILE_TRAINING and law in ("ranks_equal_reference", "leaves_no_trace"):
        needs(WHILE_TRAINING[row.name])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("law", LAWS)
def test_law(law, row):
    _needs(row, law)
    laws.LAWS[law](row)


@pytest.mark.skipif(DRY, reason="takes a compiler")
@pytest.mark.parametrize("law", ["one_rank_changes_nothing", "ranks_equal_reference"])
def test_what_the_compiler_makes_keeps_the_laws(law):
    needs(*REPLICATED)
    laws.LAWS[law](INDUCTOR)


@pytest.mark.parametrize("row", ROWS[:1] if DRY else ROWS, ids=lambda row: row.name)
def test_four_ranks_equal_one_process(row):
    _needs(row)
    laws.ranks_equal_reference(row, 4)


@pytest.mark.parametrize(("one", "two"), PAIRS[2:3] if DRY else PAIRS, ids=lambda row: row.name)
def test_pairs(one, two):
    _needs(one)
    _needs(two)
    outcome = laws.pairs_agree(replace(one, device=DEVICE), replace(two, device=DEVICE))
    assert outcome == ("refused" if (one, two) == (REPLICATE, BF16) else "agrees")
