"""Every transform trains on the simulated device as plain torch does on the CPU."""

import os
from dataclasses import replace

import pytest
import torch

from tests.laws.table import (
    ACCUMULATE,
    AVERAGE,
    BF16,
    CONTEXT,
    EXPERTS,
    FLAT,
    FP16_MODULE,
    FULLY,
    HYBRID,
    NORMS,
    RECOMPUTE,
    REPLICATE,
    SHARD,
    STAGES,
    TABLE,
    TENSOR,
    ZERO1,
    ZERO2,
    ZERO3,
    needs_torch,
)
from tests.simulated_device.ranks import needs_compiler, on_ranks
from tests.variants import variant_cases, variants
from weft.testing import largest_difference, laws

pytestmark = [needs_compiler, pytest.mark.timeout(400)]  # of which building the device may take the most


def _check(rows, ranks, mesh=None):
    """`rows` on ranks with a device each, against plain torch on the CPU."""
    for row in rows:
        needs_torch(row)
    rows = laws._complete(rows)
    dtype = torch.float32 if any(row.dtype is torch.float32 for row in rows) else torch.float64
    job = replace(next((row.job for row in rows if row.job), laws.Job)(), dtype=dtype)
    expected = laws.reference(job, laws._steps_of(rows))
    tolerance = max([1e-6, *(row.tolerance for row in rows)])  # more in 16 bits only: see the table
    options = {} if mesh is None else {"mesh": mesh}
    for rank, found in enumerate(on_ranks(laws.train, ranks, rows, job, **options)):
        difference = largest_difference(expected, found)
        assert difference <= tolerance, f"rank {rank} of {ranks} differs by {difference}"


QUICK = (FULLY, ZERO1, ZERO2, ZERO3, TENSOR, EXPERTS, *(row for row in TABLE if row.name in ("replicate", "place")))


@pytest.mark.parametrize(
    "row", [*QUICK, *variants(*(row for row in TABLE if row not in QUICK))], ids=lambda row: row.name
)
def test_two_devices_train_as_the_cpu(row):
    _check([*row.needs, row], 2, row.mesh)


@pytest.mark.parametrize(
    ("rows", "mesh"),
    [
        pytest.param([HYBRID], HYBRID.mesh, marks=pytest.mark.slow),
        ([STAGES], STAGES.mesh),
        ([TENSOR, REPLICATE], {"data": 2, "tensor": 2}),
        pytest.param([EXPERTS, REPLICATE], {"data": 2, "expert": 2}, marks=pytest.mark.slow),
        *variant_cases(
            ([CONTEXT, REPLICATE], CONTEXT.mesh),
            ([FULLY, SHARD], {"data": 2, "shard": 2}),
        ),
    ],
    ids=lambda value: "x".join(value) if isinstance(value, dict) else "+".join(row.name for row in value),
)
def test_meshes_of_four_devices_train_as_the_cpu(rows, mesh):
    _check(rows, 4, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "rows"),
    [
        pytest.param(strategy, rows, id=f"{rows[0].name}-{strategy.name}")
        for i, strategy in enumerate((REPLICATE, FLAT, FULLY, ZERO1, ZERO2, ZERO3))
        for j, rows in enumerate(([BF16], [FP16_MODULE], [NORMS], [RECOMPUTE], [SHARD, ACCUMULATE], [AVERAGE]))
        if (i + j) % 3 == 0  # on the CPU every two meet
    ],
)
def test_strategies_with_other_transforms(strategy, rows):
    after = [row for row in rows if row in (ACCUMULATE, AVERAGE)]
    _check([*(row for row in rows if row not in after), strategy, *after], 2)


def _process_after(ctx, rows, job):
    laws.train(ctx, rows, job)
    return os.getpid()


@pytest.mark.slow
def test_a_second_job_of_the_same_processes_computes_with_its_own_groups():
    rows, mesh = [TENSOR, REPLICATE], {"data": 2, "tensor": 2}
    job = laws.Job(dtype=torch.float64)
    first, second = (on_ranks(_process_after, 4, rows, job, mesh=mesh) for _ in range(2))
    assert first == second  # else nothing is shown: torch's memories are those of a process and its threads
