"""With a torch in which a private name is another one, training is right, or one error names torch's version."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_name_that_is_gone_changes_numbers():
    script = [sys.executable, "-W", "ignore", "-m", "tests.repository.renamed_names"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(script, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ends = [json.loads(line) for line in done.stdout.splitlines()]
    assert [end for end in ends if end[2] not in ("right", "told")] == []
    assert len({name for name, *_ in ends}) >= 40
    assert {end for _, _, end, _ in ends} == {"right", "told"}
