"""Every page runs, is reachable and true to the code; the strict build with Sphinx is a part of `.ci/check`.

A block marked ```python runs, in the order of the page, in one namespace and one process. A block marked ```text right
after it is what it prints, exactly. There is no exclusion list.
"""

import contextlib
import io
import re
import subprocess
import tomllib
import types
from pathlib import Path

import pytest

import weft
from weft.version import TESTED_PYTHON, TESTED_TORCH

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *DOCS.glob("api/*.md")])
API = [page for page in PAGES if page.parent.name == "api"]
_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _text(page):
    return page.read_text(encoding="utf-8")


def _blocks(page):
    """Language, code and first line of every fenced block, and whether nothing but a blank line is before it."""
    text, end = _text(page), 0
    for found in _FENCE.finditer(text):
        yield found[1], found[2], text[: found.start()].count("\n") + 1, not text[end : found.start()].strip()
        end = found.end()


def _runs(page):
    """The python blocks with what they print, as the page says."""
    runs = []
    for language, code, line, follows in _blocks(page):
        if language == "python":
            runs.append([code, line, ""])
        elif language == "text" and follows and runs:
            runs[-1][2] = code
    return runs


# -- pages run ---------------------------------------------------------------------------------------


# These start many processes or many pretended ranks, or train in many ways.
LONG = {"existing_code", "large_models", "launching", "parallelism", "post_training", "recipes", "rehearsal"}
RUNNING = [pytest.param(page, marks=[pytest.mark.slow] if page.stem in LONG else []) for page in PAGES if _runs(page)]


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs_and_prints_what_the_page_says(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    names = types.ModuleType("page").__dict__
    for code, line, expected in _runs(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Blank lines before it, so that a traceback shows the line of the page.
            exec(compile("\n" * line + code, str(page), "exec"), names)
        assert printed.getvalue() == expected, f"{page.name}:{line}"


def test_there_are_pages_that_run():
    assert sum(len(_runs(page)) for page in PAGES) > 40


def test_the_runner_sees_wrong_output(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```text\nno\n```\n\nbetween\n\n```text\nnot output\n```\n")
    assert _runs(page) == [["x = 1\n", 1, "no\n"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_fences_are_of_known_kinds(page):
    known = re.compile(r"python|text|sh|toml|diff|\{eval-rst\}|\{toctree\}|\{(?:literal)?include\} \S+")
    assert [language for language, *_ in _blocks(page) if not known.fullmatch(language)] == []


# -- pages can be reached, and reach what they name --------------------------------------------------


def _listed(index):
    return [
        line
        for language, code, *_ in _blocks(index)
        if language == "{toctree}"
        for line in code.splitlines()
        if line and not line.startswith(":")
    ]


@pytest.mark.parametrize(("folder", "others"), [(DOCS, ["api/index"]), (DOCS / "api", [])], ids=["docs", "api"])
def test_every_page_is_in_the_table_of_contents(folder, others):
    index = folder / "index.md"
    pages = {page.stem: page.name for page in [*folder.glob("*.md"), *folder.glob("*.ipynb")]}
    names = [name for name in _listed(index) if "<" not in name]
    assert sorted([*names, "index"]) == sorted([*pages, *others])
    for name in names:
        assert f"[]({pages.get(name, name + '.md')})" in _text(index), f"the map of index.md lacks {name}"


def test_links_of_the_sidebar_are_those_of_the_project():
    urls = tomllib.loads(_text(ROOT / "pyproject.toml"))["project"]["urls"]
    links = dict(re.findall(r"^(.*) <(.*)>$", "\n".join(_listed(DOCS / "index.md")), re.MULTILINE))
    assert links == {"Source code": urls["Repository"], "Issues": urls["Issues"]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_included_files_exist(page):
    text = _text(page)
    links = re.findall(r"\]\(([^)#:]+\.md)(?:#[\w-]+)?\)", text)
    included = re.findall(r"^```\{literalinclude\} (\S+)$|^:diff: (\S+)$", text, re.MULTILINE)
    missing = [name for name in [*links, *(one or two for one, two in included)] if not (page.parent / name).is_file()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_named_files_of_the_repository_exist(page):
    named = re.findall(r"`((?:tests|examples|src|docs|benchmarks|\.ci)/[\w./]*)`", _text(page))
    added = re.findall(r"^### `(\S+)`$", _text(page), re.MULTILINE)  # by the example of contributing.md
    assert [name for name in named if not (ROOT / name).exists() and name not in added] == []


def test_included_lines_begin_where_the_code_begins():
    """`:lines: 6-` leaves the header out."""
    for page in PAGES:
        for name, first in re.findall(r"\{literalinclude\} (\S+)\n(?::language: python\n)?:lines: (\d+)-", _text(page)):
            lines = (DOCS / name).read_text(encoding="utf-8").splitlines()
            assert lines[int(first) - 1].startswith(("import ", "from ")), f"{page.name}: {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_lines_are_short(page):
    long = [number for number, line in enumerate(_text(page).splitlines(), start=1) if len(line) > 120]
    tables = [number for number, line in enumerate(_text(page).splitlines(), start=1) if line.startswith("|")]
    assert sorted(set(long) - set(tables)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_is_as_wide_as_the_page(page):
    """A block that follows another one is what that prints or writes: its lines are as long as they are."""
    code = [block for block in _blocks(page) if not (block[3] and block[0] in ("text", "sh"))]
    wide = [
        first + number
        for _, lines, first, _ in code
        for number, line in enumerate(lines.splitlines(), start=1)
        if len(line) > 88
    ]
    assert wide == []


def test_included_code_is_as_wide_as_the_page():
    """Files that pages show may have ten columns more than their own code, which is all that a block holds."""
    text = "\n".join(map(_text, PAGES))
    names = {*re.findall(r"^```\{literalinclude\} (\S+)$|^:diff: (\S+)$", text, re.MULTILINE)}
    files = {DOCS / (one or two) for one, two in names}
    assert len(files) > 5
    assert [file.name for file in files if max(map(len, _text(file).splitlines())) > 98] == []


# -- README, the scripts of .ci and the workflow agree -------------------------------------------------


def test_readme_shows_the_command_of_the_tests():
    command = _text(ROOT / ".ci" / "tests").splitlines()[-1]
    assert command.endswith("pytest") and f"```sh\n{command}\n```" in _text(ROOT / "README.md")


def test_the_workflow_runs_every_part():
    parts = re.search(r"set -- (.*)", _text(ROOT / ".ci" / "run"))[1].split()
    matrix = re.search(r"part: \[(.*)\]", _text(ROOT / ".github" / "workflows" / "ci.yml"))[1].split(", ")
    assert matrix == parts


def _and(names):
    return f"{', '.join(names[:-1])} and {names[-1]}"


def test_the_tested_versions_are_the_same_everywhere():
    sentence = f"Tested with Python {_and(TESTED_PYTHON)}, and with torch {_and(TESTED_TORCH)}."
    pages = [page for page in [ROOT / "README.md", *PAGES] if "Tested with Python" in _text(page)]
    assert [page.name for page in pages if sentence in " ".join(_text(page).split())] == ["README.md", "launching.md"]
    assert [page.name for page in pages] == ["README.md", "launching.md"]
    project = tomllib.loads(_text(ROOT / "pyproject.toml"))["project"]
    pythons = [text.rpartition(" ")[2] for text in project["classifiers"] if ":: 3." in text]
    assert (*pythons,) == TESTED_PYTHON and project["requires-python"] == f">={TESTED_PYTHON[0]}"
    oldest, newest = TESTED_TORCH[0], TESTED_TORCH[-1]
    assert f"torch>={oldest.rpartition('.')[0]}" in project["dependencies"]
    assert f"torch=={oldest}" in project["optional-dependencies"]["xla"]
    assert f"torch=={oldest} " in _text(ROOT / ".ci" / "xla")
    pinned = re.search(r"^torch==(.*)$", _text(ROOT / "constraints.txt"), re.MULTILINE)[1]
    assert {*TESTED_TORCH} == {oldest, pinned, newest}
    assert [*TESTED_TORCH] == sorted(TESTED_TORCH, key=lambda version: [int(part) for part in version.split(".")])


def test_the_workflows_run_on_the_tested_versions():
    ci, weekly = (_text(ROOT / ".github" / "workflows" / name) for name in ("ci.yml", "weekly.yml"))
    assert {*re.findall(r'"(3\.\d+)"', ci)} == {*TESTED_PYTHON}
    assert {*re.findall(r'"(3\.\d+)"', weekly)} < {*TESTED_PYTHON}
    assert "schedule:" in weekly and "workflow_dispatch:" in weekly and "part: [newest, variants]" in weekly
    reads = re.search(r"^torch=.*", _text(ROOT / ".ci" / "newest"), re.MULTILINE)[0]
    said = subprocess.run(["bash", "-c", f"{reads}; echo $torch"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert said.stdout == f"{TESTED_TORCH[-1]}\n"


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_front_pages_exist(name):
    links = re.findall(r"\]\(([\w./]+)\)", _text(ROOT / name))
    assert [link for link in links if not (ROOT / link).exists()] == []
    assert [
        line for line in _text(ROOT / name).splitlines() if len(line) > 120 and not line.startswith(("|", "python3"))
    ] == []


# -- pages and code agree ----------------------------------------------------------------------------


def _guides():
    others = ("changes", "contributing", "features")
    return "\n".join(_text(page) for page in PAGES if page not in API and page.stem not in others)


def _entries(page):
    return re.findall(r"^\.\. auto(?!module)\w+:: (weft\.\S+)$", _text(page), re.MULTILINE)


def test_the_api_page_of_the_facade_lists_its_names():
    """By the packages that they come from, from which `conf.py` makes the entries."""
    listed = re.findall(r"^\.\. names:: (.+)$", _text(DOCS / "api" / "weft.md"), re.MULTILINE)
    homes = {getattr(weft, name).__module__.split(".")[1] for name in weft.__all__ if name != "errors"}
    assert sorted(" ".join(listed).split()) == sorted(homes)


# Their `__all__` is for users alone; that of other packages is also for weft itself.
@pytest.mark.parametrize(
    "package",
    ["checkpoint", "collectives", "data", "elastic", "errors", "interop", "monitoring", "rehearsal", "weights"],
)
def test_the_api_page_of_a_package_lists_its_names(package):
    module = getattr(weft, package)
    listed = {name.rpartition(".")[2] for name in _entries(DOCS / "api" / f"{package}.md")}
    assert sorted({*module.__all__} - listed - {*weft.__all__, "numbers_of"}) == []


def test_the_api_page_of_testing_lists_its_names_and_its_laws():
    listed = [name.removeprefix("weft.testing.") for name in _entries(DOCS / "api" / "testing.md")]
    assert sorted([*listed, "laws"]) == weft.testing.__all__
    assert ".. automodule:: weft.testing.laws\n" in _text(DOCS / "api" / "testing.md")


def test_a_name_has_one_entry_on_the_page_of_its_package():
    entries = [(name, page.stem) for page in API for name in _entries(page)]
    assert len({name for name, _ in entries}) == len(entries) > 100
    for name, page in entries:
        assert page == name.split(".")[1].replace("sharding", "transforms"), name


@pytest.mark.parametrize("name", [n for n in weft.__all__ if isinstance(getattr(weft, n), types.FunctionType)])
def test_every_public_function_is_in_a_guide(name):
    assert re.search(rf"\bweft\.{name}\b", _guides()), f"no page but the API tells of {name}"


def test_names_of_weft_on_the_pages_exist():
    for page in PAGES:
        if page.stem == "contributing":
            continue  # adds a transform, in a copy of the tree
        for name in set(re.findall(r"\bweft\.((?:[a-z]+\.)*\w+)\(", _text(page))):
            value = weft
            for part in name.split("."):
                value = getattr(value, part, None)
            assert callable(value), f"{page.name}: weft.{name}"


def test_the_packages_and_layers_on_the_page_are_those_of_the_code():
    packages = {path.stem for path in (ROOT / "src" / "weft").glob("[a-z]*") if path.suffix == ".py" or path.is_dir()}
    tree, layers = [code for language, code, *_ in _blocks(DOCS / "architecture.md") if language == "text"]
    assert sorted(name for name in packages if not re.search(rf"^  {name}(/|\.py) ", tree, re.MULTILINE)) == []
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    assert layers.splitlines() == [layer.replace("weft.", "") for layer in contract["layers"]]


def test_settings_on_the_page_are_those_of_the_code():
    from weft.context.settings import SETTINGS

    rows = re.findall(r"^\| `(\w+)` \| `(WEFT_\w+)` \|", _text(DOCS / "context.md"), re.MULTILINE)
    assert rows == [(name, setting.variable) for name, setting in SETTINGS.items()]


def test_policies_on_the_page_are_those_of_the_code():
    from weft.precision import NAMED

    table = _text(DOCS / "precision.md").partition("\n\n```")[0]
    assert re.findall(r'^\| `"([\w-]+)"` \|', table, re.MULTILINE) == list(NAMED)


def test_features_are_tested_where_the_table_says():
    table = tomllib.loads(_text(ROOT / "tests" / "repository" / "features.toml"))
    assert not set(table["tests"]) & set(table["planned"])
    for name, files in table["tests"].items():
        assert files and [file for file in files if not (ROOT / file).exists()] == [], name


def test_no_page_names_features_by_id():
    ids = tomllib.loads(_text(ROOT / "tests" / "repository" / "features.toml"))
    known = {*ids["tests"], *ids["planned"]}
    assert [
        (page.name, found) for page in PAGES for found in known & set(re.findall(r"\b[A-Z]{3}\d+\b", _text(page)))
    ] == []


def test_rows_of_the_features_have_a_cell_for_each_library():
    rows = [line for line in _text(DOCS / "features.md").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    marks = re.compile(r"(✓|\u2013|partly)( \(.*\))?|")
    assert [row for row in cells if len(row) != 6] == []
    bad = [row for row in cells if row[0] != "feature" and not all(marks.fullmatch(cell) for cell in row[2:])]
    assert bad == []


def test_the_changes_begin_with_this_version():
    first = "Unreleased" if ".dev" in weft.__version__ else weft.__version__
    assert re.search(r"^## (\S+)", _text(ROOT / "CHANGELOG.md"), re.MULTILINE)[1] == first
    assert f"\nversion: {weft.__version__}\n" in _text(ROOT / "CITATION.cff")
