"""The page about a run: what is on it is what was logged, it is well-formed, and it loads nothing."""

import base64
import hashlib
import html.parser
import json
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch

import weft
from weft import monitoring
from weft.cli import main
from weft.monitoring import HParams
from weft.monitoring.report import read, render, write_report
from weft.monitoring.report.charts import chart, with_unit


class _Page(html.parser.HTMLParser):
    """A page taken apart; raises where elements do not fit into each other."""

    VOID = frozenset({"meta", "link"})

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
        return [json.loads(text) for text in self.parts.get("script", []) if text.startswith("{")]

    def series(self):
        return {line["name"]: line["points"] for each in self.charts() for line in each["lines"]}


def _pictures(text):
    """The SVG of a page, parsed as XML."""
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL)]


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
    assert page.series()["loss"] == [[step, 1.0 / step] for step in range(1, 21)]
    assert page.series()["held_out_loss"] == [[20, 0.01]]
    together = [sorted(line["name"] for line in each["lines"]) for each in page.charts()]
    assert ["held_out_loss", "loss"] in together and ["memory_bytes/rank_0", "memory_bytes/rank_1"] in together
    assert ["step_s/data", "step_s/rest"] in together and ["tokens_per_s"] in together
    assert page.parts["h2"] == [
        "Loss", "Throughput", "Time and memory", "More", "Settings", "Checkpoints and restarts",
    ]  # fmt: skip
    assert len(_pictures(text)) == len(together)
    cells = page.parts["td"]
    assert "seed" in cells and "timeout_s" in cells and "checkpoints/step-00000010" in cells and "lr" in cells
    assert "2 GiB" in page.parts["dd"] and "1 on cpu" in page.parts["dd"]


def test_the_page_loads_nothing_and_is_light_and_dark(tmp_path):
    _log_a_run(tmp_path, range(1, 4), monitoring.jsonl(tmp_path / "log.jsonl"))
    text = render(read(tmp_path))
    page = _Page(text)
    assert "://" not in text and "@import" not in text and "url(" not in text
    links = {value for _, attributes in page.elements for name, value in attributes.items() if name in ("src", "href")}
    assert links == {"data:,"}
    policy = next(a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    for tag in ("style", "script"):
        (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        hashed = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{hashed}'" in policy
    assert not any("style" in attributes for _, attributes in page.elements)  # the policy forbids these
    assert "prefers-color-scheme: dark" in text
    colors = re.findall(r"--c\d: (#\w+)", text)
    assert len(colors) == 16 and len(set(colors)) == 16


def test_lines_are_drawn_where_the_numbers_are():
    (picture,) = _pictures(chart("loss", {"loss": {0: 0.0, 50: 5.0, 100: 10.0}}))
    (line,) = [e for e in picture.iter() if e.get("class", "").startswith("line")]
    places = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x1 == pytest.approx((x0 + x2) / 2) and y1 == pytest.approx((y0 + y2) / 2) and y2 < y0 and x2 > x0
    labels = [e.text for e in picture.iter("text")]
    assert "0" in labels and "10" in labels and "100" in labels


def test_a_spike_is_not_lost_when_points_are_many():
    points = dict.fromkeys(range(100000), 1.0) | {77_777: 50.0}
    page = _Page(chart("loss", {"loss": points}))
    (drawn,) = page.series().values()
    assert len(drawn) < 1000 and [77_777, 50.0] in drawn and drawn[0] == [0, 1.0] and drawn[-1] == [99_999, 1.0]


def test_areas_add_up_and_a_part_that_was_not_measured_took_no_time():
    times = {"step_s/data": {1: 1.0, 2: 1.0}, "step_s/save": {2: 2.0}, "step_s/rest": {1: 3.0, 2: 3.0}}
    text = chart("step_s", times, stacked=True)
    (picture,) = _pictures(text)
    tops = []
    for area in (e for e in picture.iter() if e.get("class", "").startswith("area")):
        places = [tuple(map(float, pair.split(","))) for pair in area.get("points").split()]
        tops.append([y for _, y in places[: len(places) // 2]])
    zero = max(y for area in tops for y in area) + (tops[1][0] - tops[0][0])
    unit = (tops[0][0] - tops[2][0]) / 3  # of a second, downwards
    bottom = tops[0][0] + unit
    heights = [[(bottom - y) / unit for y in area] for area in tops]
    assert heights == [pytest.approx(row, abs=0.05) for row in ([1, 1], [1, 3], [4, 6])], zero
    assert _Page(text).series()["step_s/save"] == [[1, 0.0], [2, 2.0]]


def test_numbers_that_are_not_finite_are_marked(tmp_path):
    weft.log({"loss": 1.0}, 1, weft.local(), monitoring.jsonl(tmp_path / "log.jsonl"))
    weft.log({"loss": float("nan")}, 2, weft.local(), monitoring.jsonl(tmp_path / "log.jsonl"))
    weft.log({"loss": float("-inf"), "other": float("inf")}, 3, weft.local(), monitoring.jsonl(tmp_path / "log.jsonl"))
    text = render(read(tmp_path))
    assert text.count("not finite at step 2") == 1 and text.count("not finite at step 3") == 2
    assert _Page(text).series() == {"loss": [[1, 1.0]]}


def test_a_run_that_went_on_is_one_curve(tmp_path):
    tracker = monitoring.jsonl(tmp_path / "log.jsonl")
    _log_a_run(tmp_path, range(1, 11), tracker)
    _log_a_run(tmp_path, range(8, 16), tracker, first=2.0)  # from the checkpoint after step 7
    run = read(tmp_path)
    assert run.starts == [0, 7] and run.resumes == [7]
    assert run.series["loss"] == {step: (1.0 if step < 8 else 2.0) / step for step in range(1, 16)}
    text = render(run)
    assert text.count("went on after step 7") == len(_pictures(text))
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
def test_every_kind_of_log_gives_the_same_page(tmp_path, kind):
    place = {"jsonl": "log.jsonl", "csv": "log.csv", "tensorboard": "."}[kind]
    tracker = getattr(monitoring, kind)(tmp_path / place)
    _log_a_run(tmp_path, range(1, 6), tracker, explain=kind != "csv")
    if kind == "tensorboard":
        tracker.close()
    run = read(tmp_path)
    assert run.series["loss"] == pytest.approx({step: 1.0 / step for step in range(1, 6)})  # float32 in event files
    assert run.series["memory_bytes/rank_1"] == dict.fromkeys(range(1, 6), 2.0**31)
    assert kind == "csv" or run.texts["explain"].startswith("rank 0 of 1 on cpu")
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
POINTER = """<script>
addEventListener("error", (event) => console.log("FAILED " + event.message));
addEventListener("load", () => {
  for (const svg of document.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect(), x = box.left + box.width / 2, y = box.top + box.height / 2;
    svg.dispatchEvent(new PointerEvent("pointermove", { clientX: x, clientY: y }));
  }
  document.title = [...document.querySelectorAll("output")].map((each) => each.textContent).join("; ");
});
</script></body>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_the_page_without_an_error_and_tells_values(tmp_path, scheme):
    _log_a_run(tmp_path, range(1, 22), monitoring.jsonl(tmp_path / "log.jsonl"))
    write_report(tmp_path)
    page = tmp_path / "report.html"
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", POINTER), encoding="utf-8")
    picture = tmp_path / "page.png"
    options = ["--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    options += [f"--blink-settings=preferredColorScheme={int(scheme == 'light')}", "--window-size=1280,2000"]
    done = [
        subprocess.run(
            [BROWSER, *options, what, page.as_uri()], check=True, capture_output=True, text=True, timeout=60
        )
        for what in ("--dump-dom", f"--screenshot={picture}")
    ]  # fmt: skip
    assert not any("CONSOLE" in each.stderr for each in done), done[0].stderr  # errors, and what the page blocks
    title = re.search(r"<title>(.*?)</title>", done[0].stdout)[1]
    assert "step 11loss  0.090909" in title and "memory_bytes/rank_1  2 GiB" in title
    assert len(picture.read_bytes()) > 20_000


def test_profiles_are_told_by_rank_and_time(tmp_path):
    with weft.monitoring.profile(weft.local(), tmp_path / "profile", active=2) as profile:
        for _ in range(3):
            (torch.ones(64, 64) @ torch.ones(64, 64)).relu()
            profile.step()
    run = write_report(tmp_path)
    (trace,) = run.traces
    names = {name: calls for name, _, calls in trace.host}
    assert trace.rank == 0 and names["aten::mm"] == 2 and len(trace.steps) == 2
    whole = sum(trace.steps)
    assert 0 < sum(time for _, time, _ in trace.host) <= whole
    page = _Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert "aten::mm" in page.parts["td"] and page.parts["h2"] == ["Profile"]


def test_what_cannot_be_read_is_told_and_the_rest_is_shown(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1, "loss": 2.0}\nnot json\n{"step": 2, "lo')
    (tmp_path / "rank0.step3.json").write_text("{")
    (tmp_path / "other.csv").write_text("name,size\na,1\n")
    run = read(tmp_path)
    assert run.series == {"loss": {1: 2.0}} and len(run.problems) == 2
    assert "log.jsonl: 2 lines are not JSON with a step" in render(run)


def test_names_and_texts_cannot_break_the_page(tmp_path):
    bad = '</script><script>alert("x")</script>&<b>'
    weft.log({bad: 1.0, f"{bad}/loss": 2.0, "note": bad}, 1, weft.local(), monitoring.jsonl(tmp_path / "log.jsonl"))
    text = render(read(tmp_path))
    page = _Page(text)
    assert "alert(" not in "".join(page.parts["script"][-1:]) and bad in page.series()
    assert text.count("<script>") == 1 and len(_pictures(text)) == 2


def test_the_command_says_when_there_is_nothing(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "nothing to show in" in capsys.readouterr().err and not list(tmp_path.iterdir())
    assert main(["report", str(tmp_path / "none")]) == 1
    assert "is no folder" in capsys.readouterr().err


def test_the_command_writes_where_it_is_told(tmp_path):
    _log_a_run(tmp_path, range(1, 3), monitoring.jsonl(tmp_path / "log.jsonl"))
    out = tmp_path / "pages" / "run.html"
    done = subprocess.run(
        [sys.executable, "-m", "weft", "report", str(tmp_path), "--out", str(out)],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.startswith(f"{out}: ") and "series" in done.stdout and done.stderr == ""
    assert Path(out).read_text(encoding="utf-8").startswith("<!doctype html>")


def test_numbers_are_told_with_their_unit():
    assert with_unit("mfu", 0.4123) == "41.23 %" and with_unit("loss", 1.23456) == "1.235"
    assert with_unit("memory_bytes/max", 5 * 2**20) == "5 MiB" and with_unit("step_s/data", 2e-5) == "20 us"
