"""The page about a run shows the rehearsal that lies in its folder."""

import json
import re

from weft.cli import main
from weft.monitoring.report import read, render
from weft.rehearsal import Memory, Message, Moment, Rehearsal

MIB = 2**20
REST = Memory(parameters=MIB, optimizer=2 * MIB)
PEAK = Memory(parameters=MIB, optimizer=2 * MIB, activations=5 * MIB, where="train.py:41")


def _write(folder):
    result = Rehearsal(
        program="train.py",
        rank=0,
        world_size=1024,
        mesh=(("replica", 128), ("shard", 8)),
        device="cuda",
        steps=1,
        at_rest=REST,
        peak=PEAK,
        timeline=(Moment("build", Memory(parameters=MIB), Memory(parameters=MIB)), Moment("step 1", REST, PEAK)),
        messages=(
            Message("all_gather", "shard", 8, 4, 8 * MIB, 7 * MIB),
            Message("all_reduce", "replica", 128, 1, MIB, 2 * MIB),
        ),
        exchange=(Message("broadcast", "replica", 128, 1, MIB, MIB),),
        assumed=("<finite>",),
    )
    folder.mkdir(exist_ok=True)
    (folder / "rehearsal.json").write_text(result.to_json())


def _charts(page):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1])


def test_memory_by_kind_and_messages_by_axis_are_drawn(tmp_path):
    _write(tmp_path)
    page = render([read(tmp_path)])
    memory, sent = _charts(page)
    assert memory["rows"] == ["build, peak", "build, at its end", "step 1, peak", "step 1, at its end"]
    assert {line["name"]: line["x"] for line in memory["lines"]} == {
        "parameters": [1, 1, 1, 1],
        "optimizer": [0, 0, 2, 2],
        "activations": [0, 0, 5, 0],
    }
    assert (memory["unit"], sent["unit"]) == ("MiB", "MiB")
    assert sent["rows"] == ["shard (8)", "replica (128)"]
    assert {line["name"]: line["x"] for line in sent["lines"]} == {"all_gather": [7, 0], "all_reduce": [0, 2]}
    for fact in (
        "0 of 1,024 (replica=128, shard=8)",
        "8 MiB, at train.py:41",
        "&lt;finite&gt;",
        "all_reduce",
        "broadcast (exchange)",
    ):
        assert fact in page, fact


def test_a_folder_with_nothing_but_a_rehearsal_is_shown(tmp_path, capsys):
    _write(tmp_path)
    assert main(["report", str(tmp_path)]) == 0
    assert "0 series, 0 profiles, 1 rehearsals" in capsys.readouterr().out


def test_other_files_are_no_rehearsals_and_half_of_one_is_a_problem(tmp_path):
    (tmp_path / "config.json").write_text('{"format": "something"}')
    assert (read(tmp_path).rehearsals, read(tmp_path).problems) == ([], [])
    _write(tmp_path)
    whole = (tmp_path / "rehearsal.json").read_text()
    (tmp_path / "rehearsal.json").write_text(whole[: len(whole) // 2])
    assert read(tmp_path).rehearsals == []
    assert "rehearsal.json" in read(tmp_path).problems[0]
