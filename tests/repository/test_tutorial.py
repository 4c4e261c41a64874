"""docs/tutorial.ipynb runs in a kernel as a user has it, and prints what is stored in it."""

import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "docs" / "tutorial.ipynb"
NUMBER = re.compile(r"\d+\.\d+")


def _printed(notebook):
    """What each cell of code printed or returned."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return ["".join(output.get("text") or output["data"]["text/plain"] for output in cell.outputs) for cell in cells]


@pytest.fixture
def stored():
    return pytest.importorskip("nbformat").read(NOTEBOOK, as_version=4)


def test_the_tutorial_stores_the_same_losses_for_any_number_of_ranks(stored):
    plain, one_process, ranks, resumed, tested, rehearsed = _printed(stored)
    losses = NUMBER.findall(plain)
    assert [float(text) for text in losses] == [float(text) for text in NUMBER.findall(one_process)]
    assert [line.split(" ", 1) for line in ranks.splitlines()] == [[n, one_process] for n in "124"]
    first, others = (line.partition(": ")[2] for line in resumed.splitlines())
    assert f"{first[:-1]}, {others[1:]}" == one_process
    assert tested == "True\n" and len(rehearsed.splitlines()) == 2


def test_the_tutorial_names_no_place_of_the_machine_it_was_run_on(stored):
    assert not re.search(r"/(home|root|tmp|work|usr|Users)/", NOTEBOOK.read_text(encoding="utf-8"))
    assert not any(output.get("name") == "stderr" for cell in stored.cells for output in cell.get("outputs", []))


def test_links_of_the_tutorial_exist(stored):
    links = re.findall(r"\]\(([^)]+)\)", "".join(c.source for c in stored.cells if c.cell_type == "markdown"))
    assert links and [link for link in links if not (NOTEBOOK.parent / link).exists()] == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_tutorial_prints_what_it_stores(stored, tmp_path):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    expected = _printed(stored)
    nbclient.NotebookClient(stored, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for found, kept in zip(_printed(stored), expected, strict=True):
        assert NUMBER.sub("#", found) == NUMBER.sub("#", kept)
        # Another processor may round the last digit otherwise.
        assert [*map(float, NUMBER.findall(found))] == pytest.approx([*map(float, NUMBER.findall(kept))], abs=5e-3)
