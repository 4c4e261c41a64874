"""The distribution is torchweft, the package and the command are weft; and it is alone in its environment."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.fix_lines.told import printed

ROOT = Path(__file__).parents[2]
TEXTS = [
    path
    for folder in ("src", "docs", "examples", "tests", "benchmarks", ".ci", ".github")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in (".py", ".md", ".yml", ".ipynb", ".toml", "") and path.is_file() and "_build" not in path.parts
] + [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml")]


def test_what_is_installed_is_torchweft():
    """`pip install weft` would install another project."""
    other = re.compile(r"(?<!torch)weft\[[a-z{]|pip install (?:-\S+ )*'?weft\b")
    found = {path: other.findall(path.read_text(errors="replace")) for path in TEXTS if path != Path(__file__)}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_the_package_needs_four_others():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[^\w-]", line)[0] for line in project["dependencies"]]
    assert (project["name"], names) == ("torchweft", ["torch", "numpy", "safetensors", "typing-extensions"])


def test_the_wheel_ships_all_that_is_in_src():
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    sources = {path for path in (ROOT / "src").iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert {ROOT / name for name in built["only-include"]} == sources


def test_files_of_another_project_are_named_when_it_is_imported(tmp_path):
    shutil.copytree(ROOT / "src" / "weft", tmp_path / "weft", ignore=shutil.ignore_patterns("__pycache__"))
    other = tmp_path / "weft-1.4.dist-info"
    other.mkdir()
    program = [sys.executable, "-c", "import weft; print(weft.__version__)"]

    def run():
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(program, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)

    done = run()
    it = printed("version.py", "a package of this name", done.stderr)
    assert done.returncode and "weft-1.4 in" in done.stderr
    uninstall, _, install = it.fix.partition(" && ")
    assert uninstall.split() == ["pip", "uninstall", "-y", "weft", "torchweft"] and install == "pip install torchweft"
    other.rmdir()
    assert run().returncode == 0
