"""`.ci/gpu` starts every test marked `gpu` and every part of the benchmark, and runs in miniature without a device."""

import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader

import pytest

from tests.processes import until

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / ".ci" / "gpu"


def _script():
    loader = SourceFileLoader("ci_gpu", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("ci_gpu", loader))
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


def test_every_gpu_test_and_every_part_of_the_benchmark_is_started():
    parts = _script().PARTS
    started = [path for part in parts.values() for path in part.tests]
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^(pytestmark|@).*mark\.gpu\b", path.read_text(), re.MULTILINE)
    }
    assert marked == set(started) and len(started) == len(marked)
    in_folder = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert in_folder <= marked
    table = re.search(
        r"^PARTS: .*?\{\n(.*?)^\}", (ROOT / "benchmarks" / "gpu.py").read_text(), re.DOTALL | re.MULTILINE
    )
    measured = re.findall(r'^    "(\w+)":', table[1], re.MULTILINE)
    assert measured and set(measured) == {name for name, part in parts.items() if not part.tests}


def test_the_parts_fit_into_nine_minutes():
    script = _script()
    assert script.TOTAL_S < 540
    assert sum(part.limit_s for part in script.PARTS.values()) <= 1.05 * script.TOTAL_S  # few parts take all they may


def test_a_part_that_hangs_or_fails_costs_only_itself():
    script = _script()
    mine = f"97.{os.getpid()}"  # another run of this test may be under way
    hang = [sys.executable, "-c", f"import subprocess, time; subprocess.Popen(['sleep', '{mine}']); time.sleep(97)"]
    said, running = [], set()
    assert script.limited(hang, dict(os.environ), said.append, 1.5, running) is None
    assert said == ["ended after its limit of 2 s"] and not running
    lines = pathlib.Path("/proc").glob
    assert until(lambda: not any(f"sleep\0{mine}".encode() in _bytes(path) for path in lines("[0-9]*/cmdline")), 60)
    fails = [sys.executable, "-c", "print('one'); raise SystemExit(3)"]
    assert script.limited(fails, dict(os.environ), said.append, 60, running) == 3 and said[1:] == ["one"]


def _bytes(path):
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_the_page_shows_ratios_and_what_failed():
    found = {
        "date": "2026-01-01",
        "dry": False,
        "parts": {
            "device": {"ok": True, "code": 0, "rows": [{"device": "X", "cuda": "13", "versions": {"torch": "2"}}]},
            "laws": {
                "ok": False, "code": 1, "seconds": 2, "counts": {"failed": 1}, "failed": ["test_a"], "skipped": [],
            },
            "step": {"ok": False, "code": None, "rows": [{"case": "a", "ratio": 1.0, "mfu": None}], "notes": ["b"] * 2},
        },
    }  # fmt: skip
    page = _script().page(found)
    assert "2026-01-01, X, CUDA 13; torch 2." in page and "## laws (not finished: exit code 1)" in page
    assert "- failed: test_a" in page and "| case | ratio |\n|---|---|\n| a | 1.0 |" in page
    assert page.count("- b") == 1 and "it had no time left" in page


def test_a_part_that_is_ended_says_which_tests_had_ended():
    ended = "[gw0] [ 33%] PASSED test_a.py::test[a b] \n[gw10] [ 66%] FAILED test_a.py::test_b \n"
    found = _script().outcomes(ended + "\nended after its limit of 9 s\n")
    assert found["counts"] == {"passed": 1, "failed": 1} and found["passed"] == ["test_a.py::test[a b]"]
    assert found["failed"] == ["test_a.py::test_b"] and not found["skipped"]
    alone = "test_a.py::test[a b] PASSED    [ 50%]\ntest_a.py::test_b SKIPPED (why) [100%]\ntest_a.py::test_c "
    found = _script().outcomes(alone)
    assert found["passed"] == ["test_a.py::test[a b]"] and found["skipped"] == ["test_a.py::test_b"]
    found = _script().outcomes(ended + "FAILED test_a.py::test_b - why\n=== 1 failed, 1 passed in 2.00s ===\n")
    assert found["counts"] == {"passed": 1, "failed": 1} and found["failed"] == ["test_a.py::test_b - why"]


@pytest.mark.slow
def test_who_ends_the_script_keeps_what_it_had(tmp_path):
    environment = {**os.environ, "OUT": str(tmp_path)}
    command = [sys.executable, str(SCRIPT), "--dry", "--only", "device", "--only", "step", "--only", "memory"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        line = next(line for line in run.stdout if '"contestant"' in line)
        run.terminate()
        rest = run.communicate(timeout=300)[0]
    kept = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert kept["step"]["rows"][0] == json.loads(line[line.index("{") :])
    assert run.returncode == 1 and "step" in rest and "| contestant |" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_dry_run_passes(tmp_path):
    environment = {**os.environ, "OUT": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry"], env=environment, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "gpu.log").read_text()[-8000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert set(found["parts"]) == set(_script().PARTS) and all(part["ok"] for part in found["parts"].values())
    for part in ("step", "reducers", "compiled"):
        assert {row["contestant"] for row in found["parts"][part]["rows"]} == {"torch", "control", "weft"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.log", "gpu.md"]
