"""`weft rehearse` of a script as it is."""

import json
import re
import time

import pytest

import weft.cli
from weft.cli import main

SCRIPT = """
import sys
import torch
import weft
from torch import nn

with weft.start(device="cpu") as ctx:
    torch.manual_seed(0)
    width, heads = int(sys.argv[1]), ctx.world_size if "divide" in sys.argv else 1
    if width % heads:
        raise ValueError(f"{width} cannot be divided by {heads}")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)))
    data = torch.utils.data.TensorDataset(torch.zeros(4096, dtype=torch.int64))
    loader, ctx = weft.shard_data(torch.utils.data.DataLoader(data, 16, shuffle=True), ctx)
    model, ctx = weft.fully_shard(model, ctx, units=[nn.Sequential])
    optimizer = torch.optim.AdamW(model.parameters())
    for (number,) in loader:
        loss = (model(torch.ones(len(number), 64, width)) ** 2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "read" in sys.argv:
            print("loss", loss.item())
print("never")
"""  # noqa: E501


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


@pytest.mark.slow
def test_a_script_is_rehearsed_as_it_is(script, tmp_path, capsys):
    out = tmp_path / "rehearsal.json"
    command = [
        "rehearse",
        "--ranks",
        "64",
        "--mesh",
        "replica=8,shard=8",
        "--limit",
        "1GiB",
        "--json",
        str(out),
        script,
        "32",
    ]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "rank 0 of 64 (replica=8, shard=8), cpu, 2 steps" in text
    assert "never" not in text
    found = json.loads(out.read_text())
    assert [moment["label"] for moment in found["timeline"]] == ["build", "step 1", "step 2"]
    weights = 4 * (8 * 32 * 32 + 5 * 32) * 4
    assert found["at_rest"]["parameters"] == weights // 8
    assert found["at_rest"]["gradients"] == 0


@pytest.mark.slow
def test_more_than_the_limit_names_the_smallest_change_that_fits(script, capsys):
    command = ["rehearse", "--ranks", "64", "--mesh", "replica=8,shard=8", "--limit"]
    assert main([*command, "4MB", script, "32"]) == 1
    text = capsys.readouterr().out
    assert "over the limit: a step needs" in text
    assert "rehearsed: weft.recompute(model, ctx, blocks=...) before the strategy" in text
    assert main(["rehearse", "--ranks", "64", "--limit", "1KB", script, "32"]) == 1
    assert "no change that was rehearsed fits" in capsys.readouterr().out


@pytest.mark.slow
def test_a_search_shows_what_fits_and_what_fails(script, tmp_path, capsys):
    out = tmp_path / "runs" / "found.json"
    out.parent.mkdir()
    command = ["rehearse", "--ranks", "2", "--search", "replica,shard", "--vary", "width=32,33", "--limit", "5.5MiB"]
    assert main([*command, "--json", str(out), script, "{width}", "divide"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] + line.split()[-1:] for line in lines[1:3]] == [
        ["*", "replica=1,", "shard=2,", "yes"],
        ["*", "replica=2,", "shard=1,", "no"],
    ]
    assert lines[-2].startswith("  replica=2, shard=1, width=33: ValueError")
    assert lines[-1] == "  replica=1, shard=2, width=33: ValueError: 33 cannot be divided by 2"
    assert [dict(each["mesh"]) for each in json.loads(out.read_text())] == [
        {"replica": 2, "shard": 1},
        {"replica": 1, "shard": 2},
    ]
    assert main(["report", str(out.parent)]) == 0
    assert "2 rehearsals" in capsys.readouterr().out


@pytest.mark.slow
def test_a_search_in_which_nothing_fits_or_all_fails_ends_with_a_code(script, capsys):
    assert main(["rehearse", "--ranks", "2", "--vary", "w=8", "--limit", "1KB", script, "{w}"]) == 1
    assert "nothing stays within 1KB" in capsys.readouterr().out
    assert main(["rehearse", "--ranks", "2", "--vary", "w=9", script, "{w}", "divide"]) == 2


@pytest.mark.slow
def test_an_error_of_so_many_ranks_is_that_of_a_real_run(script, capsys):
    assert main(["rehearse", "--ranks", "16", script, "40", "divide"]) == 2
    assert (
        "ValueError: 40 cannot be divided by 16; weft: in the rehearsal of rank 0 of 16, at" in capsys.readouterr().err
    )
    assert main(["rehearse", "--ranks", "8", script, "40", "divide"]) == 0


@pytest.mark.parametrize("lasts_s", [0.0, 0.7])
def test_what_takes_long_says_what_is_rehearsed(monkeypatch, capsys, lasts_s):
    def rehearse(*_, rank, **__):
        time.sleep(lasts_s)
        raise ValueError(f"{rank} is enough")

    monkeypatch.setattr(weft.cli.rehearse, "rehearse_script", rehearse)
    monkeypatch.setattr(weft.cli.rehearse, "_TELL_S", 0.3 if lasts_s else weft.cli.rehearse._TELL_S)
    assert main(["rehearse", "--ranks", "8", "--rank", "3", "train.py"]) == 2
    *lines, last = capsys.readouterr().err.splitlines()
    assert bool(lines) == bool(lasts_s) and last == "weft rehearse: ValueError: 3 is enough"
    assert all(re.fullmatch(r"weft rehearse: rank 3 of 8, after \d s", line) for line in lines)


@pytest.mark.slow
def test_a_number_that_the_script_reads_is_assumed(script, capsys):
    line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if "loss.item" in text)
    read = f"  train.py:{line}: a number that is read is"
    assert main(["rehearse", "--ranks", "2", script, "32", "read"]) == 0
    assert f"{read} 0.01 or 100, with the same result\n" in capsys.readouterr().out
    assert main(["rehearse", "--ranks", "2", "--assume", f"train.py:{line}=2", script, "32", "read"]) == 0
    assert f"{read} 2.0\n" in capsys.readouterr().out


@pytest.mark.parametrize("limit", ["80 apples", "GB"])
def test_a_limit_that_is_no_size_is_refused(script, capsys, limit):
    assert main(["rehearse", "--ranks", "2", "--limit", limit, script, "32"]) == 2
    assert "is not a size" in capsys.readouterr().err


def test_a_script_without_a_step_is_refused(tmp_path, capsys):
    (tmp_path / "empty.py").write_text("import weft\n")
    assert main(["rehearse", "--ranks", "2", str(tmp_path / "empty.py")]) == 2
    assert "makes no step" in capsys.readouterr().err
