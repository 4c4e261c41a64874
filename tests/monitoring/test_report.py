"""The page about a run: what is on it is what was logged, it is well-formed, and it loads nothing."""

import base64
import hashlib
import html
import html.parser
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import plotly.offline
import pytest
import torch

import weft
from weft import monitoring
from weft.cli import main
from weft.monitoring import HParams
from weft.monitoring.report import Run, read, render, write_report
from weft.monitoring.report.charts import chart, charts_of, with_unit


class _Page(html.parser.HTMLParser):
    """A page taken apart; raises where elements do not fit into each other."""

    VOID = frozenset({"meta", "link", "input"})

    def __init__(self, text):
        super().__init__()
        self.stack, self.text, self.elements, self.parts = [], "", [], {}
        self.feed(text)
        self.close()
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        self.parts.setdefault(self.stack[-1] if self.stack else "", []).append(data)

    def charts(self):
        """What the page draws, by title; one place on the page for each."""
        found = json.loads(next(text for text in self.parts["script"] if text.startswith("[")))
        places = [int(a["data-chart"]) for _, a in self.elements if a.get("class") == "plot"]
        assert places == list(range(len(found)))
        return {each["title"]: each for each in found}

    def series(self):
        return {line["name"]: _points(line) for each in self.charts().values() for line in each["lines"]}


def _points(line):
    return dict(zip(line["x"], line["y"], strict=True))


def _log_a_run(folder, steps, trackers, *, explain=True, first=1.0):
    ctx = weft.local()
    if explain:
        weft.log({"explain": weft.explain(ctx)}, steps.start - 1, ctx, trackers)
    for step in steps:
        memory = {f"memory_bytes/rank_{rank}": 2**30 * (1 + rank) for rank in range(2)}
        times = {"step_s": 0.5, "step_s/data": 0.1, "step_s/rest": 0.4}
        values = {"loss": first / step, "tokens_per_s": 1000.0 * step, "data_share": 0.2, "lr": 0.1, **times, **memory}
        weft.log(values, step, ctx, trackers)


def test_a_run_becomes_a_page(tmp_path):
    _log_a_run(tmp_path, range(1, 21), monitoring.jsonl(tmp_path / "log.jsonl"))
    weft.log(
        {"held_out_loss": 0.01, "h": HParams({"lr": 0.1})}, 20, weft.local(), monitoring.jsonl(tmp_path / "log.jsonl")
    )
    (tmp_path / "checkpoints" / "step-00000010").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-00000010" / "manifest.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = _Page(text)
    assert page.series()["loss"] == pytest.approx({step: 1.0 / step for step in range(1, 21)}, rel=1e-6)
    assert page.series()["held_out_loss"] == {20: 0.01}
    together = {title: [line["name"] for line in each["lines"]] for title, each in page.charts().items()}
    assert together == {
        "Loss": ["loss", "held_out_loss"], "Learning rate": ["lr"], "Tokens per second": ["tokens_per_s"],
        "Time spent waiting for data": ["data_share"], "Parts of a step": ["data", "rest"],
        "Memory": ["lowest rank", "highest rank"],
    }  # fmt: skip
    units = {title: each["unit"] for title, each in page.charts().items()}
    assert units["Memory"] == "GiB" and units["Parts of a step"] == "ms" and units["Tokens per second"] == "k/s"
    assert page.parts["h2"] == [
        "Training", "Throughput and parts of a step", "Memory", "Checkpoints, preemptions and failures", "Settings",
    ]  # fmt: skip
    cells = page.parts["td"]
    assert (
        "seed" in cells and "timeout_s" in cells and "checkpoint checkpoints/step-00000010" in cells and "lr" in cells
    )
    about = dict(zip(page.parts["dt"], page.parts["dd"], strict=True))
    assert about == {
        "ranks": "1 on cpu", "Step": "20", "Speed": "2 steps/s", "Loss": "0.05", "Held out loss": "0.01",
        "Tokens per second": "20 k/s", "Time spent waiting for data": "20 %", "Peak memory": "2 GiB, rank 1",
    }  # fmt: skip


def test_the_head_says_what_ran_where_and_how(tmp_path):
    ctx = weft.local()
    tracker = monitoring.jsonl(tmp_path / "log.jsonl")
    monitoring.log_start(0, ctx, tracker, steps=20_000, settings={"lr": 0.5, "out": Path("runs")})
    _log_a_run(tmp_path, range(1, 4), tracker, explain=False)
    (run,) = write_report(tmp_path)
    page = _Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    about = dict(zip(page.parts["dt"], page.parts["dd"], strict=True))
    assert about["ranks"] == "1" and about["device"] == "cpu" and about["hosts"] == f"1 ({socket.gethostname()})"
    assert f"torch {torch.__version__}" in about["versions"] and about["started"].endswith("Z")
    assert shlex.join(sys.argv) == about["command"] and about["Duration"].startswith("0:0")
    assert about["Step"] == "3 of 20,000" and about["Speed"] == "2 steps/s" and about["Time left"] == "2:46:38"
    assert run.settings == {"lr": 0.5, "out": "runs"} and "out" in page.parts["td"]
    assert "program" not in run.texts and len(run.programs) == 1


def _program(step, **changed):
    """What `log_start` writes at a step."""
    seen = []
    monitoring.log_start(step, weft.local(), lambda values, step: seen.append(json.loads(values["program"])))
    return {"step": step, "explain": "rank 0 of 1 on cpu", "program": json.dumps({**seen[0], **changed})}


def test_each_start_of_a_run_is_a_row_with_what_differs(tmp_path):
    started = ["2026-01-01 10:00:00Z", "2026-01-01 12:00:00Z"]
    starts = [
        _program(0, started=started[0], ranks=16, nodes=2, host="a", device="NVIDIA H100", command="train.py"),
        _program(42, started=started[1], ranks=8, nodes=1, host="b", device="NVIDIA H100", command="train.py --resume"),
    ]
    lines = [starts[0], {"step": 42, "loss": 2.0}, starts[1], {"step": 50, "loss": 1.0}]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    (run,) = write_report(tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = _Page(text)
    about = dict(zip(page.parts["dt"], page.parts["dd"], strict=True))
    assert about["device"] == "NVIDIA H100" and "Duration, with pauses" in about
    assert not about.keys() & {"ranks", "hosts", "command", "started"}  # these are not one start's and another's
    head = ["start", "started", "from step", "ranks", "hosts", "command"]
    assert page.parts["th"][:6] == head and [a["data-label"] for t, a in page.elements if "data-label" in a] == head * 2
    assert page.parts["td"][:12] == [
        "1", started[0], "0", "16", "2 (the first is a)", "train.py",
        "2", started[1], "42", "8", "1 (b)", "train.py --resume",
    ]  # fmt: skip
    compared = _Page(render([run, run]))
    assert compared.parts["td"].count("16 → 8") == 2 and compared.parts["td"].count("NVIDIA H100") == 2


@pytest.mark.parametrize("steps", [10**300, -3, 2, True, "x", 1.5, [], None])
def test_without_a_sound_number_of_steps_there_is_no_time_left(tmp_path, steps):
    lines = [_program(0, steps=steps), {"step": 3, "step_s": 0.5}, {"step": 4, "step_s": float("inf")}]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    page = _Page(render([read(tmp_path)]))
    about = dict(zip(page.parts["dt"], page.parts["dd"], strict=True))
    assert about["Step"] == "4" and about["Speed"] == "2 steps/s" and "Time left" not in about


def test_names_on_cards_and_charts_are_for_people(tmp_path):
    values = {"loss/train_mean": 2.0, "weft/step_s": 0.25, "weft/data_share": 0.5, "weft/norm": 3.0, "weft/scale": 2.0}
    run = Run(tmp_path, series={name: {1: value, 2: value} for name, value in values.items()})
    page = _Page(render([run]))
    assert dict(zip(page.parts["dt"], page.parts["dd"], strict=True)) == {
        "Step": "2", "Loss, train mean": "2", "Weft, time spent waiting for data": "50 %",
    }  # fmt: skip
    units = {title: (each["unit"], len(each["lines"])) for title, each in page.charts().items()}
    assert units == {
        "Loss": ("", 1), "Weft": ("", 2), "Weft, time of a step": ("ms", 1),
        "Weft, time spent waiting for data": ("%", 1),
    }  # fmt: skip


@pytest.mark.parametrize("number", [2, 64])
def test_ranks_whose_memory_lies_on_each_other_are_told_apart(tmp_path, number):
    series = {f"memory_bytes/rank_{rank}": {1: 2.0**30, 2: 2.0**30 + rank * 2**20} for rank in range(number)}
    series["memory_bytes/rank_1"][3] = 2.0**31
    page = _Page(render([Run(tmp_path, series=series)]))
    drawn = page.charts()["Memory"]
    lowest, highest = drawn["lines"]
    assert lowest["who"] == ["rank 0", "rank 0", "rank 1"] and highest["who"][1:] == [f"rank {number - 1}", "rank 1"]
    assert drawn["band"] and drawn["shows"] == [1.8] and not drawn["fromZero"]
    table = [page.parts["td"][at : at + 5] for at in range(0, len(page.parts["td"]), 5)]
    assert ["1", "2 GiB", "3", "2 GiB", "3"] in table and len(table) == min(number, 16)
    assert [int(row[0]) for row in table] == ([0, 1] if number == 2 else [1, *range(49, 64)])
    assert page.parts["h3"] == ["By rank" if number == 2 else "The 16 ranks with the highest peaks, of 64"]
    assert "2 GiB, rank 1" in page.parts["dd"]


def test_of_many_ranks_those_with_the_most_and_the_least_memory_have_their_numbers(tmp_path):
    values = {"memory_bytes/max": 9.0, "memory_bytes/min": 3.0, "memory_rank/max": 71.0000001, "memory_rank/min": 40.0}
    lines = [{"step": 1, **values}, {"step": 2, "memory_bytes/max": 9.0, "memory_rank/max": float("nan")}]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    series = read(tmp_path).series
    assert series == {"memory_bytes/rank_71": {1: 9.0}, "memory_bytes/rank_40": {1: 3.0}, "memory_bytes/max": {2: 9.0}}


def test_the_commit_of_the_script_is_known(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=x", "-c", "user.email=x", "-C", str(tmp_path)]
    (tmp_path / "train.py").write_text("pass")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True, timeout=300)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True, timeout=300).strip()
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "train.py"), "--lr", "1"])
    seen = []
    monitoring.log_start(0, weft.local(), lambda values, step: seen.append(json.loads(values["program"])))
    (tmp_path / "train.py").write_text("pass  # changed")
    monitoring.log_start(0, weft.local(), lambda values, step: seen.append(json.loads(values["program"])))
    assert [each["commit"] for each in seen] == [commit[:12], f"{commit[:12]}-dirty"]
    assert seen[0]["command"].endswith("train.py --lr 1")


def test_several_runs_are_compared(tmp_path, monkeypatch):
    folders = [tmp_path / "a", tmp_path / "b"]
    for lr, folder in zip((0.5, 0.1), folders, strict=True):
        tracker = monitoring.jsonl(folder / "log.jsonl")
        monitoring.log_start(0, weft.local(), tracker, settings={"lr": lr, "batch": 8})
        _log_a_run(folder, range(1, 6), tracker, explain=False, first=lr)
    monitoring.jsonl(folders[1] / "log.jsonl")({"only_in_b": 7.0}, step=5)
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a", "b"]) == 0
    page = _Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    charts = page.charts()
    lines = {title: [line["name"] for line in each["lines"]] for title, each in charts.items() if "rows" not in each}
    assert all(each == ["a", "b"] for each in lines.values())
    assert list(lines) == [
        "Loss", "Learning rate", "Only in b", "Tokens per second", "Time spent waiting for data",
        "Time of a step", "Memory (highest rank)",
    ]  # fmt: skip
    for line, lr in zip(charts["Loss"]["lines"], (0.5, 0.1), strict=True):
        assert _points(line) == pytest.approx({step: lr / step for step in range(1, 6)}, rel=1e-6)
    assert [line["x"] for line in charts["Only in b"]["lines"]] == [[], [5]]
    assert _points(charts["Memory (highest rank)"]["lines"][0]) == dict.fromkeys(range(1, 6), 2.0)
    parts = charts["Parts of a step, mean"]
    assert parts["rows"] == ["a", "b"] and [line["x"] for line in parts["lines"]] == [[100.0, 100.0], [400.0, 400.0]]
    cells = page.parts["td"]
    final = cells.index("Loss")
    assert cells[final : final + 3] == ["Loss", "0.1", "0.02"] and cells[-3:] == ["lr", "0.5", "0.1"]
    assert "batch" not in cells and page.parts["h2"][-1] == "Settings that differ"


def test_runs_of_one_name_are_told_apart(tmp_path):
    for folder in ("x/run", "y/run"):
        _log_a_run(tmp_path / folder, range(1, 3), monitoring.jsonl(tmp_path / folder / "log.jsonl"))
    out = tmp_path / "both.html"
    runs = write_report([tmp_path / "x/run", tmp_path / "y/run"], out=out)
    lines = _Page(out.read_text(encoding="utf-8")).charts()["Loss"]["lines"]
    assert [line["name"] for line in lines] == ["x/run", "y/run"] and len(runs) == 2


def test_the_page_loads_nothing_and_is_light_and_dark(tmp_path):
    _log_a_run(tmp_path, range(1, 4), monitoring.jsonl(tmp_path / "log.jsonl"))
    text = render([read(tmp_path)])
    page = _Page(text)
    own = text.replace(plotly.offline.get_plotlyjs(), "")
    assert len(own) < 40_000 < len(text) and "://" not in own and "@import" not in own and "url(" not in own
    links = {value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")}
    assert links == {"data:,"}
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for tag in ("style", "script"):
        (inner,) = re.findall(f'<{tag}(?: id="plotly.js-style-global")?>(.*?)</{tag}>', text, re.DOTALL)
        hashed = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{hashed}'" in policy
    assert not any("style" in attributes for _, attributes in page.elements)  # the policy forbids these
    assert "color-scheme: light dark" in text and "prefers-color-scheme: dark" in own
    colors = re.findall(r"--c\d: light-dark\((#\w+), (#\w+)\)", text)
    assert len({each for pair in colors for each in pair}) == 16


def test_a_spike_is_not_lost_when_points_are_many():
    points = dict.fromkeys(range(100000), 1.0) | {77_777: 50.0}
    (line,) = chart("loss", {"loss": points})["lines"]
    drawn = _points(line)
    assert len(drawn) < 2500 and drawn[77_777] == 50.0 and drawn[0] == drawn[99_999] == 1.0


@pytest.mark.slow
def test_the_page_stays_small_whatever_was_logged(tmp_path):
    steps = range(20_000)
    series = {f"metric_{index}": dict(zip(steps, map(float, steps), strict=True)) for index in range(100)}
    series |= {f"memory_bytes/rank_{rank}": dict.fromkeys(range(500), 2.0**30 + rank) for rank in range(1000)}
    charts = charts_of({"a": Run(tmp_path, series=series)})
    lines = [line for drawn in charts.values() for each in drawn for line in each["lines"]]
    assert sum(len(line["x"]) for line in lines) < 250_000
    (memory,) = charts["Memory"]
    assert [line["name"] for line in memory["lines"]] == ["lowest rank", "highest rank"]
    assert [line["y"][0] for line in memory["lines"]] == pytest.approx([1.0] * 2, rel=1e-5)


def test_areas_add_up_and_a_part_that_was_not_measured_took_no_time():
    times = {"step_s/data": {1: 1.0, 2: 1.0}, "step_s/save": {2: 2.0}, "step_s/rest": {1: 3.0, 2: 3.0}}
    drawn = chart("step_s/", times)
    assert drawn["stacked"] and drawn["unit"] == "s" and drawn["fromZero"]
    lines = {line["name"]: _points(line) for line in drawn["lines"]}
    assert lines == {"data": {1: 1.0, 2: 1.0}, "save": {1: 0.0, 2: 2.0}, "rest": {1: 3.0, 2: 3.0}}


def test_numbers_that_are_not_finite_are_marked(tmp_path):
    weft.log({"loss": 1.0}, 1, weft.local(), monitoring.jsonl(tmp_path / "log.jsonl"))
    weft.log({"loss": float("nan")}, 2, weft.local(), monitoring.jsonl(tmp_path / "log.jsonl"))
    weft.log({"loss": float("-inf"), "other": float("inf")}, 3, weft.local(), monitoring.jsonl(tmp_path / "log.jsonl"))
    text = render([read(tmp_path)])
    page = _Page(text)
    assert page.series() == {"loss": {1: 1.0, 2: None, 3: None}, "other": {3: None}}
    assert page.charts()["Loss"]["lines"][0]["lost"] == [[2, "nan"], [3, "-inf"]]
    told = [cell for cell in page.parts["td"] if "not finite" in cell]
    assert told == ["loss is not finite at 2 step(s): 2, 3", "other is not finite at 1 step(s): 3"]


def test_a_run_that_went_on_is_one_curve(tmp_path):
    tracker = monitoring.jsonl(tmp_path / "log.jsonl")
    _log_a_run(tmp_path, range(1, 11), tracker)
    _log_a_run(tmp_path, range(8, 16), tracker, first=2.0)  # from the checkpoint after step 7
    run = read(tmp_path)
    assert run.starts == [0, 7] and run.resumes == [7]
    assert run.series["loss"] == {step: (1.0 if step < 8 else 2.0) / step for step in range(1, 16)}
    text = render([run])
    page = _Page(text)
    assert (
        all(each["marks"] == [7] for each in page.charts().values()) and "resumed after this step" in page.parts["td"]
    )
    _log_a_run(tmp_path, range(1, 3), tracker)  # from the beginning, in the same folder
    run = read(tmp_path)
    assert run.starts == [0] and run.resumes == [] and sorted(run.series["loss"]) == [1, 2]


def test_steps_that_go_back_tell_of_a_restart_where_nobody_said_so(tmp_path):
    tracker = monitoring.csv(tmp_path / "log.csv")
    _log_a_run(tmp_path, range(1, 11), tracker, explain=False)
    _log_a_run(tmp_path, range(8, 16), tracker, explain=False, first=2.0)
    run = read(tmp_path)
    assert run.resumes == [7] and run.series["loss"][8] == 2.0 / 8 and len(run.series["loss"]) == 15


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tensorboard"])
def test_a_resumed_run_that_purged_what_it_repeats_is_one_curve(tmp_path, kind):
    place = tmp_path / {"jsonl": "log.jsonl", "csv": "log.csv", "tensorboard": "."}[kind]
    for steps, first, purge_step in ((range(1, 11), 1.0, None), (range(8, 10), 2.0, 8)):
        tracker = getattr(monitoring, kind)(place, purge_step=purge_step)
        _log_a_run(tmp_path, steps, tracker, first=first)
        if kind == "tensorboard":
            tracker.close()
    run = read(tmp_path)
    expected = {step: (1.0 if step < 8 else 2.0) / step for step in range(1, 10)}
    assert run.series["loss"] == pytest.approx(expected) and not run.problems
    assert kind == "tensorboard" or run.resumes == [7]


def test_lines_of_somebody_else_hide_none_of_a_run(tmp_path):
    table = tmp_path / "log.csv"
    tracker = monitoring.csv(table)
    tracker({"loss": 1.0}, step=1)
    with table.open("a") as file:
        file.write("# a remark\n\n")
    tracker({"loss": 0.5}, step=2)
    monitoring.jsonl(tmp_path / "log.jsonl")({"word": "a\u2028b\x85", "other": 3.0}, step=2)
    run = read(tmp_path)
    assert run.series == {"loss": {1: 1.0, 2: 0.5}, "other": {2: 3.0}} and not run.problems


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tensorboard"])
def test_every_kind_of_log_gives_the_same_page(tmp_path, kind):
    place = {"jsonl": "log.jsonl", "csv": "log.csv", "tensorboard": "."}[kind]
    tracker = getattr(monitoring, kind)(tmp_path / place)
    _log_a_run(tmp_path, range(1, 6), tracker, explain=kind != "csv")
    if kind == "tensorboard":
        tracker.close()
    run = read(tmp_path)
    assert run.series["loss"] == pytest.approx({step: 1.0 / step for step in range(1, 6)})  # float32 in event files
    assert run.series["memory_bytes/rank_1"] == dict.fromkeys(range(1, 6), 2.0**31)
    assert kind == "csv" or run.texts["explain"][-1][1].startswith("rank 0 of 1 on cpu")
    assert not run.problems


def test_a_number_that_several_trackers_wrote_is_shown_once(tmp_path):
    events = monitoring.tensorboard(tmp_path)
    trackers = [monitoring.jsonl(tmp_path / "log.jsonl"), monitoring.csv(tmp_path / "log.csv"), events]
    _log_a_run(tmp_path, range(1, 4), trackers, explain=False)
    events({"only_here": 3.0}, step=3)
    events.close()
    monitoring.jsonl(tmp_path / "eval" / "log.jsonl")({"loss": 9.0}, step=3)
    run = read(tmp_path)
    assert run.series["loss"] == {1: 1.0, 2: 1 / 2, 3: 1 / 3} and run.series["eval/loss"] == {3: 9.0}
    assert run.series["only_here"] == {3: 3.0} and len(run.series) == 11


BROWSER = next(filter(None, map(shutil.which, ["chromium-headless-shell", "chromium", "google-chrome"])), None)
PROBE = """
addEventListener("error", (event) => console.log("FAILED " + event.message));
addEventListener("load", () => setTimeout(() => {
  const [loss, memory] = ["Loss", "Memory"].map((title) => [...document.querySelectorAll("figure")]
    .find((each) => each.querySelector("figcaption").textContent === title).querySelector(".plot"));
  const ranges = () => [loss, memory].map((each) => each._fullLayout.xaxis.range);
  const seen = { plain: loss.data.length, whole: ranges(), memory: memory._fullLayout.yaxis.range };
  seen.ground = getComputedStyle(document.body).backgroundColor;
  Plotly.Fx.hover(loss, { xval: 11 }, "xy");
  seen.hover = loss.querySelector(".hoverlayer").textContent;
  const slider = document.getElementById("smoothing");
  slider.value = "0.5";
  slider.dispatchEvent(new Event("input"));
  seen.smoothed = loss.data.map((each) => each.y.slice(0, 3));
  document.getElementById("log").click();
  seen.scales = [loss, memory].map((each) => each._fullLayout.yaxis.type);
  Plotly.relayout(loss, { "xaxis.range[0]": 5, "xaxis.range[1]": 9 }).then(() => {
    seen.zoomed = memory._fullLayout.xaxis.range;
    loss.emit("plotly_doubleclick");
    seen.reset = ranges();
    document.getElementById("theme").click();
    seen.other = getComputedStyle(document.body).backgroundColor;
    seen.took = performance.now();
    document.title = JSON.stringify(seen);
  });
}, 500));
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_draws_the_page_under_its_policy_and_every_control_works(tmp_path, scheme):
    tracker = monitoring.jsonl(tmp_path / "log.jsonl")
    _log_a_run(tmp_path, range(1, 22), tracker)
    weft.log({"loss": float("nan"), "<b>bad</b><img src=x>": 1e-9, "step_s": 1.0}, 22, weft.local(), tracker)
    with weft.monitoring.profile(weft.local(), tmp_path / "profile", active=1) as profile:
        (torch.ones(64, 64) @ torch.ones(64, 64)).relu()
        profile.step()
    write_report(tmp_path)
    page = tmp_path / "report.html"
    hashed = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    text = page.read_text(encoding="utf-8").replace("script-src ", f"script-src 'sha256-{hashed}' ", 1)
    page.write_text(text.replace("</body></html>", f"<script>{PROBE}</script></body></html>"), encoding="utf-8")
    picture = tmp_path / "page.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    options += [f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", "--window-size=1280,3000"]
    done = [
        subprocess.run(
            [BROWSER, *options, what, page.as_uri()], check=True, capture_output=True, text=True, timeout=300
        )
        for what in ("--dump-dom", f"--screenshot={picture}")
    ]  # fmt: skip
    assert not any("CONSOLE" in each.stderr for each in done), done[0].stderr  # errors, and what the page blocks
    seen = json.loads(html.unescape(re.search(r"<title>(.*?)</title>", done[0].stdout)[1]))
    assert "step 11" in seen["hover"] and "0.090909" in seen["hover"]
    assert len(seen["smoothed"]) == seen["plain"] + 1  # the raw values stay behind
    assert seen["smoothed"][0] == pytest.approx([1, 1 / 2, 1 / 3], rel=1e-6)
    assert seen["smoothed"][1] == pytest.approx([1, (1 + 2 * 1 / 2) / 3, (1 + 2 * 1 / 2 + 4 * 1 / 3) / 7], rel=1e-6)
    assert seen["scales"] == ["log", "log"] and seen["zoomed"] == [5, 9]
    assert (
        seen["whole"] == seen["reset"] == [[1, 22]] * 2
    )  # all charts end with the last step, whatever is marked there
    assert 0.5 < seen["memory"][0] < 1 and seen["memory"][1] > 2
    assert seen["ground"] != seen["other"] and (seen["ground"] == "rgb(20, 23, 26)") == (scheme == "dark")
    assert "&lt;b&gt;bad" in done[0].stdout and "<b>bad" not in done[0].stdout
    assert len(picture.read_bytes()) > 20_000


def test_profiles_are_told_by_rank_and_time(tmp_path):
    with weft.monitoring.profile(weft.local(), tmp_path / "profile", active=2) as profile:
        for _ in range(3):
            (torch.ones(64, 64) @ torch.ones(64, 64)).relu()
            profile.step()
    (run,) = write_report(tmp_path)
    (trace,) = run.traces
    names = {name: calls for name, _, calls in trace.host}
    assert trace.rank == 0 and names["aten::mm"] == 2 and len(trace.steps) == 2
    whole = sum(trace.steps)
    assert 0 < sum(time for _, time, _ in trace.host) <= whole
    page = _Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "aten::mm" in page.parts["td"] and page.parts["h2"] == ["Profiles"]
    (drawn,) = page.charts().values()
    assert drawn["unit"] == "ms" and "aten::mm" in drawn["rows"]


def test_what_cannot_be_read_is_told_and_the_rest_is_shown(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\nnot json\n{"step": 2, "lo')
    (tmp_path / "rank0.step3.json").write_text("{")
    (tmp_path / "other.csv").write_text("name,size\na,1\n")
    run = read(tmp_path)
    assert run.series == {"loss": {1: 2.0}} and len(run.problems) == 2
    assert "log.jsonl: 2 lines are not JSON with a step and its values" in render([run])


_DEEP = "[" * 100_000
_LOST = {"time": 1.0, "new": [], "again": False, "seconds": None, "lost": []}
_REHEARSED = {"format": "weft rehearsal 1", "timeline": [], "peak": {}, "at_rest": {}, "messages": [], "mesh": []}
_EVENT = {"ph": "X", "dur": 1, "ts": 1, "cat": "cpu_op", "name": "a"}
HOSTILE = {
    "deep.jsonl": f'{{"step": 1, "a": {_DEEP}',
    "numbers.jsonl": f'{{"step": 2, "loss": 1{"0" * 400}}}\n{{"step": 1{"0" * 400}, "a": 1}}\n{{"step": 2, "a": NaN}}',
    "long.jsonl": f'{{"step": 2, "a": {"9" * 10_000}}}',
    "half.jsonl": '{"step": 2, "\\ud800": 1, "b": "\\udfff"}',
    "other.jsonl": '[1]\n3\nnull\n"x"\n{}\n{"step": {}}\n{"step": true}\n{"step": 1, "explain": 3, "program": "3"}',
    **{
        f"lost{number}.jsonl": json.dumps({"step": 3, "elastic": value})
        for number, value in enumerate(
            [
                {},
                {**_LOST, "lost": [{}]},
                {**_LOST, "new": 3},
                {**_LOST, "new": [1], "time": 1e300},
                {**_LOST, "lost": None},
            ]
        )
    },
    **{
        f"rehearsal{number}.json": json.dumps(value)
        for number, value in enumerate(
            [_REHEARSED, {"format": "weft rehearsal 1"}, [{"format": "weft rehearsal 1"}], {**_REHEARSED, "peak": 3}]
        )
    },
    "rehearsed.json": f'{{"format": "weft rehearsal 1", "a": {_DEEP}',
    **{
        f"rank{number}.json": json.dumps({"traceEvents": value})
        for number, value in enumerate(
            [
                3,
                [3],
                [{**_EVENT, "dur": "x"}],
                [{**_EVENT, "name": []}],
                [{**_EVENT, "cat": []}],
                [{"ph": "X", "dur": 1}],
            ]
        )
    },
    "rank9.json": f'{{"traceEvents": {_DEEP}',
    "nul.csv": "step,loss\n1,2\n\0,3\n",
    "long.csv": f"step,loss\n{'9' * 5000},2\n",
    "digit.csv": "step,loss\n\u00b2,2\n",
    "field.csv": f"step,loss\n1,{'a' * 200_000}\n",
    "events.out.tfevents.1": "\xff" * 1000,
}


def test_hostile_files_are_passed_over_by_name_and_the_rest_is_shown(tmp_path):
    (tmp_path / "run.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    for name, text in HOSTILE.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "latin.csv").write_bytes(b"step,loss\n1,\xff\n")
    (tmp_path / "zero.jsonl").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.csv")
    (run,) = write_report(tmp_path)
    assert run.series["loss"] == {1: 2.0} and not run.rehearsals
    named = {problem.partition(":")[0] for problem in run.problems}
    assert {"deep.jsonl", "numbers.jsonl", "long.jsonl", "half.jsonl", "other.jsonl", "lost0.jsonl", "rehearsal0.json",
            "rehearsed.json", "rank3.json", "rank9.json", "long.csv", "latin.csv"} <= named  # fmt: skip
    assert "half.jsonl" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_names_and_texts_cannot_break_the_page(tmp_path):
    bad = '</script><script>alert("x")</script>&<b>'
    weft.log({bad: 1.0, f"{bad}/loss": 2.0, "note": bad}, 1, weft.local(), monitoring.jsonl(tmp_path / "log.jsonl"))
    monitoring.log_start(0, weft.local(), monitoring.jsonl(tmp_path / "log.jsonl"), settings={bad: bad})
    weft.log(
        {bad: 1.0, "health": bad, "preempted": bad, "probes": bad},
        1,
        weft.local(),
        monitoring.jsonl(tmp_path / "log.jsonl"),
    )
    (tmp_path / "rank0.step1.json").write_text(
        json.dumps({"traceEvents": [{"ph": "X", "dur": 5, "ts": 0, "cat": "cpu_op", "name": bad}]})
    )
    for runs in ([read(tmp_path)], [read(tmp_path)] * 2):
        text = render(runs)
        page = _Page(text)
        assert "alert(" not in "".join(page.parts["script"][-1:]) and text.count("<script>") == 1
        assert bad in text.replace("\\u003c", "<").replace('\\"', '"') and bad in page.parts["td"]
        assert not any(tag == "b" for tag, _ in page.elements)


def test_without_plotly_the_error_says_what_to_install(tmp_path, monkeypatch, capsys):
    _log_a_run(tmp_path, range(1, 3), monitoring.jsonl(tmp_path / "log.jsonl"))
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(weft.errors.MissingExtra, match=r"pip install 'torchweft\[report\]'"):
        write_report(tmp_path)
    assert main(["report", str(tmp_path)]) == 1
    assert "pip install 'torchweft[report]'" in capsys.readouterr().err and not (tmp_path / "report.html").exists()


def test_the_command_says_when_there_is_nothing(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "nothing to show in" in told and not list(tmp_path.iterdir())
    line = re.search(r"weft\.log\(.*\)\)", told)[0]
    eval(line, {"weft": weft, "loss": 1.0, "step": 1, "ctx": weft.local()})
    assert main(["report", str(tmp_path)]) == 0
    assert main(["report", str(tmp_path / "none")]) == 1
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_writes_where_it_is_told(tmp_path):
    _log_a_run(tmp_path, range(1, 3), monitoring.jsonl(tmp_path / "log.jsonl"))
    out = tmp_path / "pages" / "run.html"
    done = subprocess.run(
        [sys.executable, "-m", "weft", "report", str(tmp_path), "--out", str(out)],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.stdout.startswith(f"{out}: ") and "series" in done.stdout and done.stderr == ""
    assert Path(out).read_text(encoding="utf-8").startswith("<!doctype html>")


def test_numbers_are_told_with_their_unit():
    assert with_unit("mfu", 0.4123) == "41.23 %" and with_unit("loss", 1.23456) == "1.235"
    assert with_unit("memory_bytes/max", 5 * 2**20) == "5 MiB" and with_unit("step_s/data", 2e-5) == "20 us"
