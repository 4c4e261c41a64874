"""The programs of docs/existing_code.md under the trainers of other libraries, on one rank and two."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "existing_code.md").read_text(encoding="utf-8")
PROGRAMS: dict[str, str] = dict(re.findall(r"^```text\n# (\w+)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
WRITE = """
import json, os
with open(f"losses-{os.environ.get('RANK', 0)}-{os.environ.get('LOCAL_RANK', 0)}.json", "w") as file:
    json.dump(losses, file)
"""


def _losses(library, ranks, folder):
    """What a program leaves in a folder of its own: the losses of each rank."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs {library}")
    folder.mkdir(exist_ok=True)
    program = f"ranks = {ranks}\n{PROGRAMS[library]}"
    (folder / "program.py").write_text(program if library == "ray" else program + WRITE)
    launch = ["-m", "weft", "launch", "-n", str(ranks)] if library == "transformers" else []
    env = {key: value for key, value in os.environ.items() if not key.startswith("WEFT_")}
    command = [sys.executable, *launch, "program.py"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if library == "ray":
        return [[json.loads(line)["loss"] for line in (folder / "run" / "log.jsonl").read_text().splitlines()]]
    left = sorted(folder.glob("losses-*.json"))
    return [(json.loads(path.read_text()), path.unlink())[0] for path in left]


def test_the_page_has_a_program_for_each_trainer():
    assert list(PROGRAMS) == ["transformers", "lightning", "ray"]


@pytest.mark.slow
@pytest.mark.parametrize("library", PROGRAMS)
def test_losses_are_the_same_on_one_rank_and_on_two(library, tmp_path):
    (one,) = _losses(library, 1, tmp_path / "one")
    two = _losses(library, 2, tmp_path / "two")
    assert len(two) == (1 if library == "ray" else 2) and len(one) >= 3 and one[-1] < one[0]
    for losses in two:
        assert losses == pytest.approx(one, rel=1e-4, abs=1e-6)  # float32, a few steps


@pytest.mark.slow
@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_a_trainer_resumes_in_the_middle_of_an_epoch_on_another_number_of_ranks(library, tmp_path):
    whole, _ = _losses(library, 2, tmp_path / "run")
    if library == "transformers":  # as if killed before its last checkpoints; Lightning's only one is that of step 9
        shutil.rmtree(tmp_path / "run" / "trainer" / "checkpoint-6")
        shutil.rmtree(tmp_path / "run" / "run" / "step-00000006")
    (resumed,) = _losses(library, 1, tmp_path / "run")
    assert len(resumed) == (6 if library == "transformers" else 3)  # Trainer keeps the losses of before
    assert resumed == pytest.approx(whole[-len(resumed) :], rel=1e-4, abs=1e-6)
