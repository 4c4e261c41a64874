"""The table of models and meshes in the docs says what is measured: exact, or which error is raised."""

import functools

import pytest

pytest.importorskip("transformers")

from tests.interop.model_matrix import MESHES, MODELS, documented, measure, reason, reference
from tests.variants import diagonal


def test_the_table_has_all_models_and_meshes():
    assert {name: list(row) for name, row in documented().items()} == {name: list(MESHES) for name in MODELS}


def test_most_cells_are_exact():
    cells = [why for row in documented().values() for why in row.values()]
    assert cells.count("exact") >= 70


@pytest.mark.parametrize(("name", "mesh"), diagonal(list(MODELS), list(MESHES)))
def test_a_cell_of_the_table_is_what_is_measured(name, mesh):
    assert reason(measure(name, mesh, _reference(name))) == documented()[name][mesh]


@functools.cache
def _reference(name):
    return reference(name)
