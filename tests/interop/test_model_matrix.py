"""The table of models and meshes in the docs says what is measured: exact, or which error is raised."""

import pytest

pytest.importorskip("transformers")

from tests.interop.model_matrix import MESHES, MODELS, documented, measure, reason, reference


def test_the_table_has_all_models_and_meshes():
    assert {name: list(row) for name, row in documented().items()} == {name: list(MESHES) for name in MODELS}


def test_most_cells_are_exact():
    cells = [why for row in documented().values() for why in row.values()]
    assert cells.count("exact") >= 70


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_row_of_the_table_is_what_is_measured(name):
    expected = reference(name)
    assert {mesh: reason(measure(name, mesh, expected)) for mesh in MESHES} == documented()[name]
