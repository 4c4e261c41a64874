"""The table of transforms and laws on the device, which ranks share: by its own backend, and through the host."""

from dataclasses import replace

import pytest

import weft
from tests.gpu.device import COMPILER, DEVICE, DRY, REPLICATED, SHARDED, backend, needs
from tests.laws.table import (
    ACCUMULATE,
    BF16,
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
    needs_torch,
    row_of,
)
from weft.testing import laws

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # torch warns of devices in its own ways

# What the compiler fuses has other last bits.
INDUCTOR = row_of(
    weft.compile, name=f"compiled[{COMPILER}]", options={"backend": COMPILER}, wrong={"backend": "nothing"},
    one_rank_tolerance=1e-9, tolerance=1e-9,
)  # fmt: skip
ROWS = [FP16, FULLY] if DRY else list(TABLE)
# The most telling first: a run on a device may be cut short.
LAWS = ["ranks_equal_reference", "names_stay"] if DRY else sorted(laws.LAWS, key="ranks_equal_reference".__ne__)
PAIRS = [
    (SHARD, REPLICATE), (BF16, REPLICATE), (BF16, FULLY), (FULLY, ACCUMULATE), (ZERO2, ACCUMULATE), (REPLICATE, BF16),
]  # fmt: skip


# What they send while they train: DTensor gathers outputs, torch's schedules send what leaves a stage.
WHILE_TRAINING = {TENSOR.name: "functional all_gather", STAGES.name: "send"}


def _needs(row, law="ranks_equal_reference", by=None):
    if law != "one_rank_changes_nothing":
        needs_torch(row)
    names = {row.name, *(one.name for one in row.needs)}
    sharded = names & {one.name for one in (FULLY, HYBRID, ZERO1, ZERO2, ZERO3)}
    needs(*(SHARDED if sharded else REPLICATED), by=by)
    if row.name in WHILE_TRAINING and law in ("ranks_equal_reference", "leaves_no_trace"):
        needs(WHILE_TRAINING[row.name], by=by)


def _here(row):
    return replace(row, device=DEVICE, backend=backend())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("law", LAWS)
def test_law(law, row):
    _needs(row, law)
    laws.LAWS[law](_here(row))


@pytest.mark.skipif(DRY, reason="takes a compiler")
@pytest.mark.parametrize("law", ["one_rank_changes_nothing", "ranks_equal_reference"])
def test_what_the_compiler_makes_keeps_the_laws(law):
    needs(*REPLICATED)
    laws.LAWS[law](_here(INDUCTOR))


@pytest.mark.parametrize("row", ROWS[:1] if DRY else ROWS, ids=lambda row: row.name)
def test_four_ranks_equal_one_process(row):
    _needs(row)
    laws.ranks_equal_reference(_here(row), 4)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_through_the_memory_of_the_host(row):
    if backend() == "gloo" or not DEVICE.startswith("cuda"):
        pytest.skip("that is how all tests send here, or gloo does not know the device")
    _needs(row, by="gloo")
    laws.ranks_equal_reference(replace(row, device=DEVICE))


@pytest.mark.parametrize(("one", "two"), PAIRS[2:3] if DRY else PAIRS, ids=lambda row: row.name)
def test_pairs(one, two):
    _needs(one)
    _needs(two)
    outcome = laws.pairs_agree(_here(one), _here(two))
    assert outcome == ("refused" if (one, two) == (REPLICATE, BF16) else "agrees")
