"""`examples/notebook.ipynb` runs from its first cell to its last, in a kernel as a user has it."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_notebook_trains_on_two_ranks_and_draws_a_curve(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # none is stored
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    assert "the same on both ranks: True\nas in one process: True\n" in printed
    (figure,) = [
        o["data"]["application/vnd.plotly.v1+json"] for o in outputs if "plotly" in str(o.get("data", {}).keys())
    ]
    assert [curve["name"] for curve in figure["data"]] == ["one process", "two ranks"]
