"""README decides whether somebody reads on: its programs run as printed, and its figures are those of the pages."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import weft

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BIN = Path(sys.executable).parent  # of python and of weft


def _block(language, text=README):
    return re.search(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[1]


def _start(command, folder):
    """A command as in a terminal, in a folder in which `examples` is that of the repository."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("WEFT_")}
    env |= {"PATH": f"{BIN}{os.pathsep}{env['PATH']}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(["bash", "-c", command], cwd=folder, stdout=subprocess.PIPE, text=True, env=env)


def _printed(*commands, folder):
    """What commands print that run at the same time."""
    processes = [_start(command, folder) for command in commands]
    printed = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(commands), printed
    return printed


# -- programs ----------------------------------------------------------------------------------------


def _side(sign):
    """The program of one side of the diff: the lines with this sign, and those with none."""
    return "\n".join(line[1:] for line in _block("diff").splitlines() if line[:1] in ("", " ", sign)) + "\n"


@pytest.mark.slow
def test_both_sides_of_the_diff_run_and_print_the_same_losses(tmp_path):
    (tmp_path / "plain.py").write_text(_side("-"))
    (tmp_path / "train.py").write_text(_side("+"))
    assert "weft" not in _side("-")
    plain, *ours = _printed(
        "python plain.py", "python train.py", "weft launch -n 2 train.py", "weft launch -n 4 train.py", folder=tmp_path
    )
    losses = [float(loss) for loss in re.findall(r"^epoch \d  loss ([\d.]+)$", plain, re.MULTILINE)]
    assert len(losses) == len(plain.splitlines()) == 4 and losses[-1] < losses[0] - 0.2
    assert ours == [plain] * 3


@pytest.mark.slow
def test_the_terminal_shows_what_its_commands_print(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    steps = re.findall(r"^\$ (.*)\n((?:[^$].*\n)*)", _block("console"), re.MULTILINE)
    found = [_printed(command, folder=tmp_path)[0] for command, _ in steps]
    shown = [printed for _, printed in steps]
    assert len({text for text in found if text}) == 1 and len(found) == 4, found
    assert [bool(text) for text in found] == [bool(text) for text in shown]
    # Another processor may round the fourth digit otherwise.
    one, other = (float(next(filter(None, texts)).split()[-1]) for texts in (found, shown))
    assert one == pytest.approx(other, abs=2e-4) and len(set(filter(None, shown))) == 1


def test_the_error_is_the_one_that_is_raised():
    model, ctx = weft.replicate(torch.nn.Linear(2, 1), weft.local())
    with pytest.raises(weft.errors.OrderError, match="comes too late") as raised:
        weft.with_precision(model, ctx, "bf16")
    shown = _block("text")
    assert shown == f"OrderError: {raised.value}\n"


def test_every_function_in_the_table_exists():
    names = [name for row in re.findall(r"^\| (`.*?) \|", README, re.MULTILINE) for name in re.findall(r"`(.+?)`", row)]
    for name in (name.removeprefix("weft.") for name in names if " " not in name):
        value = weft
        for part in name.split("."):
            value = getattr(value, part)
    assert len(names) > 40


# -- figures and facts are those of the pages --------------------------------------------------------


def _rows(text):
    """The cells of every row of every table, by the first one, without emphasis and the dots of a row that goes on."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    return {cells[0].removeprefix("... ").removeprefix("and "): cells[1:] for cells in rows}


def test_the_comparison_is_that_of_the_features():
    features = _rows((ROOT / "docs" / "features.md").read_text(encoding="utf-8"))
    table = README.partition("| | DDP by hand | Accelerate | Fabric | weft |\n|---|---|---|---|---|\n")[2]
    rows = _rows(table.partition("\n\n")[0])
    assert len(rows) >= 8
    for feature, (_, accelerate, fabric, ours) in rows.items():
        _, of_weft, of_accelerate, of_fabric, _ = features[feature]
        assert (ours, accelerate, fabric) == (of_weft, of_accelerate, of_fabric), feature
    assert any(cells[-1] != "✓" for cells in rows.values()), "it says where weft has less"


def test_the_overheads_are_those_of_the_benchmarks():
    pages = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    table = README.partition("| | Accelerate | Fabric | weft | control |\n|---|---|---|---|---|\n")[2]
    rows = _rows(table.partition("\n\n")[0])
    assert next(iter(rows)).startswith("transformer") and len(rows) == 3
    for name, cells in rows.items():
        assert [line for line in pages if {*cells} <= {*re.findall(r"\d\.\d{3}", line)}] != [], name


def test_the_status_names_this_version():
    assert f"\nStatus: beta, version {'.'.join(weft.__version__.split('.')[:2])}." in README


def test_sections_that_are_linked_exist():
    for page, section in re.findall(r"\]\((docs/\w+\.md)#([\w-]+)\)", README):
        headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert section in [heading.lower().replace(" ", "-") for heading in headings]


def test_a_run_is_left_to_resume_by_the_first_command():
    """The second one asks for more steps than the first one has made."""
    script = (ROOT / "examples" / "train_lm.py").read_text(encoding="utf-8")
    steps = int(re.search(r'"--steps", type=int, default=(\d+)', script)[1])
    assert int(re.search(r"train_lm\.py --resume --steps (\d+)\n", README)[1]) > steps


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_the_picture_is_made_by_its_command(tmp_path):
    small = "--steps 4 --width 32 --depth 1 --context 32 --log-every 1"
    _printed(f"{ROOT}/docs/report_picture.sh {tmp_path}/report.png {small}", folder=tmp_path)
    sizes = [(path / "report.png").read_bytes()[16:24] for path in (tmp_path, ROOT / "docs" / "_static")]
    assert sizes[0] == sizes[1] and (tmp_path / "report.png").stat().st_size > 20_000  # of the same size, not empty
