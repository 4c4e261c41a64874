"""Adding a transform touches at most six files: the example of docs/contributing.md, made in a copy of the tree."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
NAME = "keep_eval"
# Of tests/repository and tests/contract: what compares the places of a transform, besides what bears its name.
RULES = (
    "test_type_checkers_see or test_nothing_else_is or test_all_is_sorted or test_every_public_name or test_no_room "
    "or test_tests_of_transforms or test_the_transforms_are_found or test_the_api_page_of_the_facade "
    "or test_names_of_weft or test_any_two_that or test_transforms_of_the_package or (test_the_code_of_a and replicate)"
)


def _edits():
    """Path, language and code of each file that the page touches."""
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    section = page.partition("\n## Add a transform\n")[2].partition("\n## ")[0]
    block = re.compile(r"^### `(\S+)`$.*?^```(python|diff)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = block.findall(section)
    assert len(found) == len(re.findall(r"^### ", section, re.MULTILINE))
    return found


def _edit(file, language, code):
    """Write a new file, or put the lines of a diff into one that is there."""
    if language == "python":
        assert not file.exists()
        file.write_text(code, encoding="utf-8")
        return
    text = file.read_text(encoding="utf-8")
    for hunk in code.split("@@\n"):
        lines = [line or " " for line in hunk.splitlines()]
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kinds) for kinds in (" -", " +"))
        assert old in text, f"{file.name} has no\n{old}"
        text = text.replace(old, new, 1)
    file.write_text(text, encoding="utf-8")


def _copy(folder, edits):
    """The tree, with these edits in it."""
    for part in ("src", "tests", "docs", "examples"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("_build"))
    for path in ROOT.glob("*.*"):
        if path.is_file():
            shutil.copy2(path, folder)
    for path, language, code in edits:
        _edit(folder / path, language, code)


def _touched(folder):
    """The files of a copy that the tree does not have, or has otherwise."""
    files = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {
        file.as_posix()
        for file in files
        if not (ROOT / file).is_file() or (ROOT / file).read_bytes() != (folder / file).read_bytes()
    }


def _run(folder, *command):
    env = {**os.environ, "PYTHONPATH": str(folder / "src")}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def _check(folder, *files):
    """The tests of the copy that look at the new transform, and those that compare its places."""
    options = ["-q", "-n=0", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    return _run(folder, "pytest", *options, "-k", f"{NAME} or {RULES}", "tests/repository", "tests/contract", *files)


@pytest.mark.slow
def test_the_example_of_the_page_keeps_every_rule_in_at_most_six_files(tmp_path):
    edits = _edits()
    _copy(tmp_path, edits)
    touched = _touched(tmp_path)
    assert touched == {path for path, *_ in edits} and len(touched) <= 6
    code = [path for path in touched if path.endswith(".py")]
    for command in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
        done = _run(tmp_path, "ruff", *command, *code)
        assert done.returncode == 0, done.stdout + done.stderr
    done = _check(tmp_path, f"src/weft/transforms/{NAME}.py", f"tests/transforms/test_{NAME}.py", "tests/laws")
    assert done.returncode == 0, done.stdout + done.stderr
    # Its row in all laws and on four ranks, its own two tests, its example, and what tests/repository asks about it.
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= 30, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("left_out", [path for path, *_ in _edits() if path != "CHANGELOG.md"])
def test_none_of_these_files_can_be_left_out(tmp_path, left_out):
    _copy(tmp_path, [edit for edit in _edits() if edit[0] != left_out])
    done = _check(tmp_path)
    assert done.returncode != 0 and NAME in done.stdout, done.stdout
