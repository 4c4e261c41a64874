"""`examples/parallel_lm.py` prints the same losses on every mesh, and resumes on another one."""

import argparse
import contextlib
import io
import runpy
from pathlib import Path

import pytest

from tests.variants import variant_cases
from weft.testing import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "parallel_lm.py"


def _run(ctx, **options):
    given = {"steps": 3, "batch": 8, "experts": 0, "sequence": False, "out": None, "resume": False, **options}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLE), run_name="example")["main"](argparse.Namespace(**given), ctx)
    return printed.getvalue().splitlines()


def _losses(ranks, mesh, **options):
    first, *others = run_ranks(_run, ranks, mesh=mesh, **options)
    assert not any(others), "printed on the main rank only"
    return first


QUICK = {"tensor2-sequence", "data2-expert2"}  # the other meshes: `pytest -m slow`


def _case(ranks, experts=0, *, sequence=False, **mesh):
    name = "-".join(f"{axis}{size}" for axis, size in mesh.items()) + ("-sequence" if sequence else "")
    marks = [] if name in QUICK else [pytest.mark.slow]
    return pytest.param(ranks, mesh, {"experts": experts, "sequence": sequence}, marks=marks, id=name)


@pytest.fixture(scope="module")
def alone():
    return {experts: _losses(1, None, experts=experts) for experts in (0, 4)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "mesh", "options"),
    [
        _case(2, tensor=2, sequence=True),
        _case(2, context=2),
        _case(4, shard=2, tensor=2, sequence=True),
        _case(4, data=2, expert=2, experts=4),
        _case(4, pipeline=2, shard=2),
        _case(4, pipeline=2, expert=2, experts=4),
        _case(4, expert=2, tensor=2, experts=4),
        _case(4, expert=2, context=2, experts=4),
        _case(16, pipeline=2, shard=2, context=2, tensor=2),
    ],
)
def test_every_mesh_gives_the_same_losses(alone, ranks, mesh, options):
    assert _losses(ranks, mesh, **options) == alone[options["experts"]]


@pytest.mark.parametrize(
    ("before", "after"),
    variant_cases(({"tensor": 2}, {"pipeline": 2}), ({"pipeline": 2}, {"context": 2})),
)
def test_a_run_is_resumed_on_another_mesh(alone, before, after, tmp_path):
    first = _losses(2, before, steps=2, out=tmp_path)
    assert first + _losses(2, after, out=tmp_path, resume=True) == alone[0]
