"""What is logged is the value of the whole batch, written once, by the main rank, and not lost."""

import csv
import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import weft
from weft import monitoring
from weft.errors import ContextError
from weft.monitoring import Artifact, Figure, Histogram, HParams, Image, Table
from weft.monitoring.trackers.libraries import aim, clearml, comet, dvclive, mlflow, swanlab, trackio, wandb
from weft.testing import RanksFailed, run_ranks


def _logs(ctx, weights):
    calls = []
    values = {"loss": torch.tensor(float(ctx.rank)), "lr": 0.5, "note": f"rank {ctx.rank}", "n": ctx.rank}
    found = weft.log(values, 4, ctx, lambda v, step: calls.append((step, v)), weight=weights[ctx.rank])
    skipped = weft.log(values, 5, ctx, lambda v, step: calls.append((step, v)), every=2)
    return found, skipped, calls, sorted(values)


@pytest.mark.parametrize(("n", "weights"), [(2, [3, 1]), (4, [1, 0, 2, 1]), (2, [0, 5])])
def test_a_logged_number_is_the_weighted_mean_over_the_ranks_and_written_once(n, weights):
    mean = sum(rank * weight for rank, weight in enumerate(weights)) / sum(weights)
    for rank, (found, skipped, calls, names) in enumerate(run_ranks(_logs, n, weights)):
        assert found == {"loss": mean, "lr": 0.5, "note": f"rank {rank}", "n": mean} and skipped == {}
        assert calls == ([(4, found)] if rank == 0 else []) and names == ["loss", "lr", "n", "note"]


def _logs_on_a_mesh(ctx):
    return weft.log({"loss": ctx.rank}, 0, ctx)["loss"]


def test_ranks_that_see_the_same_data_count_once():
    assert run_ranks(_logs_on_a_mesh, 4, mesh={"data": 2, "tensor": 2}) == [1.0, 2.0, 1.0, 2.0]


def _logs_of_parts(ctx):
    """A model whose ranks have parts of each sequence."""
    model = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True)
    _, after = weft.context_parallel(model, ctx)
    return weft.log({"loss": float(ctx.rank)}, 0, after)["loss"]


def test_ranks_with_parts_of_the_same_samples_count():
    assert run_ranks(_logs_of_parts, 2, mesh={"context": 2}) == [0.5, 0.5]


def _logs_other_names(ctx, many):
    weft.log({f"loss{ctx.rank}": 1.0, **({str(i): 0 for i in range(20)} if many and ctx.rank else {})}, 0, ctx)


@pytest.mark.parametrize("many", [False, True])
def test_other_names_on_another_rank_are_refused_on_all(many):
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_logs_other_names, 2, many)
    assert all(
        isinstance(e, ContextError) and "names of the numbers differ" in str(e) for e in failed.value.errors.values()
    )
    assert len(failed.value.errors) == 2


@pytest.mark.parametrize(
    ("options", "found"),
    [({"weight": -1}, "weight = -1"), ({"weight": float("nan")}, "weight = nan"), ({"every": 0}, "every = 0")],
)
def test_wrong_arguments_are_refused(options, found):
    with pytest.raises(ValueError, match=rf"(?s){found} cannot be used.*fix: "):
        weft.log({}, 0, weft.local(), **options)
    with pytest.raises(ValueError, match="step = -1 cannot be used"):
        weft.log({}, -1, weft.local())


def test_numbers_that_are_not_finite_are_told_and_the_callers_values_are_left_alone():
    values = {"loss": torch.tensor(float("nan")), "big": float("inf"), "yes": True}
    before = dict(values)
    seen = []
    weft.log(values, 0, weft.local(), [lambda v, step: (seen.append(dict(v)), v.clear())] * 2)
    assert values.keys() == before.keys() and len(seen) == 2 and seen[0].keys() == seen[1].keys() == values.keys()
    assert seen[0]["yes"] == 1.0 and seen[0]["big"] == float("inf") and seen[0]["loss"] != seen[0]["loss"]


_KINDS = [float, np.float64, np.float32, np.float16, np.longdouble, int, np.int64, np.uint8, torch.tensor, np.array]
_KINDS += [lambda v: torch.tensor([v]), lambda v: np.array([v]), lambda v: np.array([[v]], dtype=np.int16)]
_TRUTHS = [bool, np.bool_, torch.tensor, np.array]


def _logs_kinds(ctx):
    values = {f"kind{i}": kind(1 + 2 * ctx.rank) for i, kind in enumerate(_KINDS)}
    values |= {f"truth{i}": kind(ctx.rank > 0) for i, kind in enumerate(_TRUTHS)}
    seen = []
    found = weft.log(values, 0, ctx, monitoring.averaged(1, lambda v, step: seen.append(v)), weight=np.int64(2))
    return found, seen[0] if seen else found


def test_numbers_of_any_library_are_averaged_and_truths_are_zero_or_one():
    expected = {**{f"kind{i}": 2.0 for i in range(len(_KINDS))}, **{f"truth{i}": 0.5 for i in range(len(_TRUTHS))}}
    assert run_ranks(_logs_kinds, 2) == [(expected, expected)] * 2
    assert all(type(number) is float for number in _logs_kinds(weft.local())[0].values())


_BAD = [np.ones(2), torch.ones(2), torch.tensor(1j), np.array("x"), np.zeros(0), None, 1j, [1.0], {"a": 1}, b"x"]


@pytest.mark.parametrize("bad", _BAD, ids=lambda bad: type(bad).__name__)
def test_what_cannot_be_averaged_is_refused_before_anything_is_sent(bad):
    calls = []
    with pytest.raises(TypeError, match=r"(?s)log: .*found: +bad: .*expected: .*fix: ") as refused:
        weft.log({"loss": 1.0, "bad": bad}, 0, weft.local(), lambda *v, step: calls.append(step))
    with pytest.raises(TypeError, match=r"averaged: .*"):
        monitoring.averaged(1, lambda v, step: calls.append(step))({"bad": bad}, step=0)
    assert not calls and "loss" not in str(refused.value).split("found:")[1].split("expected:")[0]
    losses = np.arange(3.0)
    weft.log({"loss": losses.mean(), "losses": Histogram(losses)}, 0, weft.local())  # as the fix says


def test_settings_and_tables_of_numpys_numbers_are_written(tmp_path):
    values = {"set": HParams({"lr": np.float32(0.5), "n": torch.tensor(3)}), "rows": Table(["a"], [[np.int64(1)]])}
    monitoring.jsonl(tmp_path / "run.jsonl")(values, step=1)
    monitoring.log_start(2, weft.local(), monitoring.jsonl(tmp_path / "run.jsonl"), settings={"lr": np.float32(0.5)})
    first, second = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert first["set"] == {"lr": 0.5, "n": 3} and first["rows"]["rows"] == [[1]] and second["settings"] == {"lr": 0.5}


def test_detail_to_one_tracker_and_summaries_to_another():
    detail, summary, some = [], [], []
    trackers = [
        lambda v, step: detail.append(step),
        monitoring.averaged(3, lambda v, step: summary.append((step, v))),
        monitoring.every(
            2, monitoring.chosen(lambda name: name.startswith("a/"), lambda v, step: some.append((step, v)))
        ),
    ]
    for step in range(6):
        weft.log({"a/loss": step, "b": 1, "word": str(step)}, step, weft.local(), trackers)
    assert detail == list(range(6))
    assert summary == [(2, {"a/loss": 1.0, "b": 1.0, "word": "2"}), (5, {"a/loss": 4.0, "b": 1.0, "word": "5"})]
    assert some == [(step, {"a/loss": float(step)}) for step in (0, 2, 4)]


# -- files ---------------------------------------------------------------------------------------------


def test_lines_of_json_go_on_where_a_run_stopped(tmp_path):
    path = tmp_path / "a" / "run.jsonl"
    first = monitoring.jsonl(path)
    assert not path.parent.exists()
    first({"loss": torch.tensor(0.5), "x": float("nan"), "word": "ä", "h": HParams({"lr": 1})}, step=1)
    monitoring.jsonl(str(path))({"loss": 0.25, "picture": Image(torch.zeros(1, 2, 2))}, step=2)
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert lines == [{"step": 1, "loss": 0.5, "x": "nan", "word": "ä", "h": {"lr": 1}}, {"step": 2, "loss": 0.25}]


def test_a_table_gets_columns_as_names_come_up(tmp_path):
    path = tmp_path / "run.csv"
    write = monitoring.csv(path)
    write({"loss": 0.5, "word": 'a,"b'}, step=1)
    write({"lr": 0.1}, step=2)
    again = monitoring.csv(path)  # a run that goes on
    again({"lr": 0.2, "new": 3}, step=3)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows == [
        {"step": "1", "loss": "0.5", "word": 'a,"b', "lr": "", "new": ""},
        {"step": "2", "loss": "", "word": "", "lr": "0.1", "new": ""},
        {"step": "3", "loss": "", "word": "", "lr": "0.2", "new": "3.0"},
    ]
    assert [p.name for p in tmp_path.iterdir()] == ["run.csv"]


_OURS = {
    "jsonl": ['{"step": 0, "explain": "x"}', *(f'{{"step": {n}, "loss": {n / 2}}}' for n in (1, 2, 2, 3, 10))],
    "csv": ["step,loss,word", *(f'{n},{n / 2},"a ""b"", c"' for n in (1, 2, 2, 3, 10))],
}
_THEIRS = {
    "jsonl": [
        "# a remark",
        '{"time": 1, "step": 9}',
        "",
        '{"step": "last"}',
        '{"step": true}',
        '{"step":7}',
        "[3]",
        "{",
        "\u00e4\u2028\udcff",
    ],
    "csv": ["# a remark", "", "note,9,9", '"a\nb",3,4', "\udcff"],
}


def _lines(path):
    return path.read_text(encoding="utf-8", errors="surrogateescape").split("\n")


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_resumed_run_removes_the_lines_it_repeats_and_no_others(kind, tmp_path):
    path, link = tmp_path / f"run.{kind}", tmp_path / "link"
    head, *rest = _OURS[kind]
    kept = [head, *_THEIRS[kind][:3], *rest[:1], *_THEIRS[kind][3:]]
    text = "\n".join([*kept, *rest[1:]]) + "\n"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    path.chmod(0o640)
    link.symlink_to(path)
    tracker = getattr(monitoring, kind)(link, purge_step=2)
    assert path.read_bytes() == text.encode("utf-8", "surrogateescape")  # until the first line is written
    for step in (2, 3):
        tracker({"loss": 9.0}, step=step)
    added = {"jsonl": '{"step": %d, "loss": 9.0}', "csv": "%d,9.0,"}[kind]
    assert _lines(path) == [*"\n".join(kept).split("\n"), added % 2, added % 3, ""]
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o640
    assert {p.name for p in tmp_path.iterdir()} == {path.name, "link"}
    getattr(monitoring, kind)(path)({"loss": 9.0}, step=3)  # nothing is asked for
    assert _lines(path)[-3:] == [added % 3, added % 3, ""]


@pytest.mark.parametrize(
    ("kind", "torn", "stays"),
    [
        ("jsonl", '{"st', False),
        ("jsonl", '{"step": 1', False),
        ("jsonl", '{"step": 1, "loss": 0.', False),
        ("jsonl", '{"step": 1, "loss": 0.5}', True),
        ("jsonl", '{"time": 1, "st', True),
        ("csv", "1", False),
        ("csv", "1,0.5", False),
        ("csv", '1,0.5,"a ""b', False),
        ("csv", '1,0.5,"a\n', False),
        ("csv", "1,0.5,a", True),
        ("csv", "a remark", True),
    ],
)
def test_an_unfinished_last_line_is_removed_and_one_of_somebody_else_is_ended(kind, torn, stays, tmp_path):
    head = {"jsonl": '{"step": 1, "loss": 0.5}\n', "csv": "step,loss,word\n"}[kind]
    added = {"jsonl": '{"step": 2, "loss": 9.0}\n', "csv": "2,9.0,\n"}[kind]
    path = tmp_path / "run"
    path.write_text(head + torn)
    getattr(monitoring, kind)(path, purge_step=2)({"loss": 9.0}, step=2)
    assert path.read_text() == head + (f"{torn}\n" if stays else "") + added
    path.write_text(head + "1,0.5")
    getattr(monitoring, kind)(path)({"loss": 9.0}, step=2)
    assert path.read_text() == f"{head}1,0.5\n{added}"


def test_a_column_that_comes_up_later_leaves_other_rows_as_they_are(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text('step,loss\n1,0.5\n# a remark\n"2, 3",x\n\n5,0.1\n')
    monitoring.csv(path, purge_step=5)({"loss": 0.2, "lr": 1}, step=5)
    assert path.read_text() == 'step,loss,lr\n1,0.5,\n# a remark\n"2, 3",x\n\n5,0.2,1.0\n'
    theirs = tmp_path / "theirs.csv"
    theirs.write_text("name,size\n7,8\n")
    monitoring.csv(theirs, purge_step=0)({"loss": 0.5}, step=5)
    assert theirs.read_text() == "name,size,step,loss\n7,8,,\n,,5,0.5\n"


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_a_program_that_is_killed_while_it_removes_lines_loses_none(kind, tmp_path, monkeypatch):
    path = tmp_path / "run"
    text = "\n".join(_OURS[kind]) + "\n"
    for name in ("fsync", "replace"):
        path.write_text(text)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            stop = Path if name == "replace" else os
            patch.setattr(stop, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            getattr(monitoring, kind)(path, purge_step=3)({"loss": 9.0}, step=3)
        assert path.read_text() == text
    getattr(monitoring, kind)(path, purge_step=3)({"loss": 9.0}, step=3)
    assert path.read_text().startswith("\n".join(_OURS[kind][:-2]) + "\n") and len(_lines(path)) == len(_OURS[kind])


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tensorboard"])
@pytest.mark.parametrize("wrong", [-1, 1.5, "3", True])
def test_a_wrong_step_to_purge_is_refused(kind, wrong, tmp_path):
    with pytest.raises(ValueError, match=f"(?s){kind}: purge_step = .* cannot be used.*fix: .*restored.step . 1"):
        getattr(monitoring, kind)(tmp_path / "run", purge_step=wrong)


def test_all_trackers_purge_alike_and_libraries_that_cannot_do_not_take_the_argument(tmp_path):
    places = {"jsonl": tmp_path / "run.jsonl", "csv": tmp_path / "run.csv", "tensorboard": tmp_path / "events"}
    for first, last, purge_step in ((1, 4, None), (3, 6, 3)):
        made = {kind: getattr(monitoring, kind)(place, purge_step=purge_step) for kind, place in places.items()}
        for step in range(first, last + 1):
            weft.log({"loss": step + first / 10}, step, weft.local(), made.values())
        made["tensorboard"].close()
    expected = [(1, 1.1), (2, 2.1), (3, 3.3), (4, 4.3), (5, 5.3), (6, 6.3)]
    lines = [json.loads(line) for line in places["jsonl"].read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == expected
    with places["csv"].open(newline="") as file:
        assert [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(file)] == expected
    events = _events(places["tensorboard"]).Scalars("loss")
    assert [(e.step, e.value) for e in events] == [(step, pytest.approx(loss)) for step, loss in expected]
    for library in ("aim", "clearml", "comet", "dvclive", "mlflow", "swanlab", "trackio", "wandb"):
        with pytest.raises(TypeError, match="purge_step"):
            getattr(monitoring, library)(None, purge_step=3)


def _events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder), size_guidance={"images": 0, "tensors": 0, "histograms": 0})
    found.Reload()
    return found


def test_event_files_hold_what_was_logged(tmp_path):
    tracker = monitoring.tensorboard(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for step in (1, 2):
        weft.log({"loss": torch.tensor(step / 2), "n": step}, step, weft.local(), tracker)
    values = {"word": "text", "picture": Image(torch.rand(3, 4, 4)), "weights": Histogram(torch.arange(9.0))}
    values |= {
        "pictures": Image(torch.zeros(2, 1, 4, 4, dtype=torch.uint8)),
        "run": HParams({"lr": 0.1}, {"best": 1.0}),
    }
    weft.log(values, 3, weft.local(), tracker)
    tracker.close()
    tracker.close()
    found = _events(tmp_path / "run")
    assert [(e.step, e.value) for e in found.Scalars("loss")] == [(1, 0.5), (2, 1.0)]
    assert [(e.step, e.value) for e in found.Scalars("n")] == [(1, 1.0), (2, 2.0)]
    assert set(found.Tags()["images"]) >= {"picture"} and found.Tags()["histograms"] == ["weights"]
    assert found.Histograms("weights")[0].histogram_value.num == 9
    assert found.Tensors("word/text_summary")[0].tensor_proto.string_val == [b"text"]
    assert found.Scalars("best")[0].value == 1.0


ENDS = """
import os, signal, sys, time
import torch, weft
from weft import monitoring
import tensorboard, torch.utils.tensorboard.writer

def end(how):
    if how in ("raise", "exit"):
        raise ValueError("over") if how == "raise" else SystemExit(0)
    os._exit(3) if how == "_exit" else os.kill(os.getpid(), getattr(signal, how))

for how in ("raise", "exit", "_exit", "SIGTERM", "SIGKILL"):
    if os.fork() == 0:
        place = f"{sys.argv[1]}/{how}"
        trackers = [monitoring.tensorboard(place, flush_s=10 if how in ("raise", "exit") else 0)]
        trackers += [monitoring.jsonl(f"{place}/run.jsonl"), monitoring.csv(f"{place}/run.csv")]
        if how in ("raise", "exit"):
            late = monitoring.jsonl(f"{place}/late.jsonl")
            slow = lambda values, step: (time.sleep(0.01), late(values, step=step))
            trackers += [monitoring.in_background(each) for each in (slow, monitoring.tensorboard(f"{place}/late"))]
        for step in range(50):
            weft.log({"loss": step}, step, weft.local(), trackers)
        end(how)
    print(how, os.wait()[1])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="ends forks of one program in several ways")
@pytest.mark.slow
def test_nothing_is_lost_when_a_program_ends_or_is_killed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)], check=True, capture_output=True, text=True, timeout=300
    )
    statuses = dict(line.split() for line in done.stdout.splitlines())
    assert statuses == {"raise": "256", "exit": "0", "_exit": str(3 * 256), "SIGTERM": "15", "SIGKILL": "9"}
    for how in statuses:
        folder = tmp_path / how
        lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
        with (folder / "run.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        values = [(e.step, e.value) for e in _events(folder).Scalars("loss")]
        assert values == [(step, float(step)) for step in range(50)], how
        assert [line["loss"] for line in lines] == [float(row["loss"]) for row in rows] == list(range(50)), how
        if how in ("raise", "exit"):  # what is written in the background is complete, too
            late = [json.loads(line)["loss"] for line in (folder / "late.jsonl").read_text().splitlines()]
            assert late == [e.value for e in _events(folder / "late").Scalars("loss")] == list(range(50)), how


# -- other libraries: their documented calls --------------------------------------------------------------


class _Recorder:
    """Records calls, also of its attributes."""

    def __init__(self, calls=None, name=""):
        self.__dict__.update(_calls=[] if calls is None else calls, _name=name)

    def __getattr__(self, name):
        if name == "run_id":
            return "7"
        return _Recorder(self._calls, f"{self._name}.{name}".strip("."))

    def __setattr__(self, name, value):
        self._calls.append((f"{self._name}.{name}=".strip("."), value))

    def __setitem__(self, key, value):
        self._calls.append((f"{self._name}[{key}]=", value))

    def __call__(self, *args, **options):
        self._calls.append((self._name, *args, *options.items()))
        return _Recorder(self._calls, f"{self._name}()")


class _Plot:
    savefig = to_html = None  # as matplotlib has the one, and plotly the other


PLOT = _Plot()
VALUES = {
    "train/loss": 0.5, "word": "x", "hparams": HParams({"lr": 1}), "rows": Table(["a", "b"], [(1, "y")]),
    "plot": Figure(PLOT), "file": Artifact("a.txt"),
}  # fmt: skip
ROWS = {"columns": ["a", "b"], "data": [[1, "y"]]}
CALLS = {
    wandb: [
        ("config.update", {"lr": 1}, ("allow_val_change", True)),
        ("log_artifact", "a.txt", ("name", "file"), ("type", "file")),
        ("log", {"train/loss": 0.5, "word": "x", "plot": PLOT}, ("step", 3)), ("finish", ("exit_code", 0)),
    ],
    swanlab: [
        ("config.update", {"lr": 1}), ("save", "a.txt", ("base_path", ".")),
        ("log", {"train/loss": 0.5, "word": "x"}, ("step", 3)), ("finish",),
    ],
    trackio: [
        ("config.update", {"lr": 1}), ("log_artifact", "a.txt", ("name", "file"), ("type", "file")),
        ("log", {"train/loss": 0.5, "word": "x"}, ("step", 3)), ("finish",),
    ],
    mlflow: [
        ("MlflowClient",), ("active_run",), ("log_params", {"lr": 1}, ("run_id", "7")),
        ("log_metrics", {"train/loss": 0.5}, ("step", 3), ("run_id", "7")),
        ("MlflowClient().log_text", "7", "x", "word/3.txt"), ("MlflowClient().log_dict", "7", ROWS, "rows/3.json"),
        ("MlflowClient().log_figure", "7", PLOT, "plot/3.html"),
        ("MlflowClient().log_artifact", "7", "a.txt", "file"), ("active_run",), ("end_run", "FINISHED"),
    ],
    comet: [
        ("log_parameters", {"lr": 1}), ("log_metrics", {"train/loss": 0.5}, ("step", 3)),
        ("log_text", "x", ("step", 3), ("metadata", {"name": "word"})),
        ("log_table", "rows.csv", ("tabular_data", [[1, "y"]]), ("headers", ["a", "b"]), ("step", 3)),
        ("log_figure", ("figure_name", "plot"), ("figure", PLOT), ("step", 3)),
        ("log_asset", "a.txt", ("file_name", "file"), ("step", 3)), ("end",),
    ],
    aim: [
        ("[hparams]=", {"lr": 1}), ("[rows]=", {"step": 3, "columns": ["a", "b"], "rows": [[1, "y"]]}),
        ("log_artifact", "a.txt", ("name", "file")), ("track", 0.5, ("name", "train/loss"), ("step", 3)), ("close",),
    ],
    clearml: [
        ("connect", {"lr": 1}), ("get_logger",),
        ("get_logger().report_scalar", ("title", "train"), ("series", "loss"), ("value", 0.5), ("iteration", 3)),
        ("get_logger().report_text", "word: x"),
        ("get_logger().report_table", ("title", "rows"), ("series", "rows"), ("iteration", 3),
         ("table_plot", [["a", "b"], [1, "y"]])),
        ("get_logger().report_plotly", ("title", "plot"), ("series", "plot"), ("iteration", 3), ("figure", PLOT)),
        ("upload_artifact", "file", "a.txt"), ("close",),
    ],
    dvclive: [
        ("log_params", {"lr": 1}), ("step=", 3), ("log_metric", "train/loss", 0.5), ("log_image", "plot.png", PLOT),
        ("log_artifact", "a.txt", ("name", "file")), ("make_summary",), ("end",),
    ],
}  # fmt: skip


@pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)
def test_a_library_gets_the_calls_it_documents(make):
    run = _Recorder()
    with monitoring.closing(make(run)) as trackers:
        weft.log(VALUES, 3, weft.local(), trackers)
    trackers[0].close()  # only once
    assert run._calls == CALLS[make]


def test_pictures_texts_tables_and_figures_as_the_library_makes_them():
    run = _Recorder()
    picture = {"p": Image(torch.ones(3, 2, 4))}
    weft.log(picture, 1, weft.local(), wandb(run, image=lambda array: (array.shape, array.max())))
    weft.log(picture, 1, weft.local(), wandb(run))
    weft.log({"word": "x"}, 2, weft.local(), aim(run, text=str.upper))
    weft.log({"rows": VALUES["rows"]}, 3, weft.local(), trackio(run, table=dict))
    weft.log({"plot": VALUES["plot"]}, 4, weft.local(), swanlab(run, image=type))
    assert run._calls == [
        ("log", {"p": ((2, 4, 3), 255)}, ("step", 1)), ("track", "X", ("name", "word"), ("step", 2)),
        ("log", {"rows": ROWS}, ("step", 3)), ("log", {"plot": _Plot}, ("step", 4)),
    ]  # fmt: skip


def test_all_trackers_are_closed_after_an_error_also_if_one_cannot_be():
    runs = [_Recorder(), _Recorder(), _Recorder()]
    means = []

    def fails():
        raise OSError("no connection")

    broken = monitoring.RunTracker(lambda values, step: None, fails)
    mean = monitoring.averaged(2, lambda values, step: means.append((step, values["loss"])))
    trackers = [wandb(runs[0]), broken, mlflow(runs[1]), monitoring.every(1, swanlab(runs[2])), mean]
    with pytest.raises(OSError, match="no connection") as raised, monitoring.closing(trackers) as same:
        for step in range(3):
            weft.log({"loss": step}, step, weft.local(), same)
        raise ValueError("of the training")
    assert "of the training" in str(raised.value.__context__) and means == [(1, 0.5), (2, 2.0)]
    ends = [("finish", ("exit_code", 1)), ("end_run", "FAILED"), ("finish", ("state", "crashed"), ("error", "error"))]
    assert [run._calls[-1] for run in runs] == ends


def test_the_configuration_is_stored_once_in_every_tracker(tmp_path):
    run, settings = _Recorder(), {"lr": 0.1, "layers": [1, 2], "name": None}
    trackers = [wandb(run), monitoring.tensorboard(tmp_path), monitoring.jsonl(tmp_path / "run.jsonl")]
    with monitoring.closing(trackers):
        monitoring.log_start(0, weft.local(), trackers, settings=settings)
        weft.log({"loss": 1.0}, 1, weft.local(), trackers)
    stored = {"lr": 0.1, "layers": "[1, 2]", "name": "None"}
    assert [call[1] for call in run._calls if call[0] == "config.update"] == [stored]
    assert settings == {"lr": 0.1, "layers": [1, 2], "name": None}
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert lines[0]["settings"] == stored and "settings" not in lines[1]
    assert "_hparams_/session_start_info" in _events(tmp_path).summary_metadata


# -- in the background -------------------------------------------------------------------------------------


def test_a_slow_tracker_is_not_waited_for_and_gets_values_as_they_were():
    go, seen = threading.Event(), []

    def slow(values, step):
        go.wait(30)
        seen.append((step, values["weights"].values.tolist()))

    weights = torch.zeros(1)
    background = monitoring.in_background(slow, limit=5)
    for step in range(5):
        weft.log({"weights": Histogram(weights)}, step, weft.local(), background)
        weights += 1
    assert not seen
    go.set()
    background.close()
    assert seen == [(step, [float(step)]) for step in range(5)]


def test_an_error_in_the_background_is_raised_by_the_next_call_or_at_the_end():
    closed = []

    def broken(values, step):
        raise OSError(f"step {step}")

    first = monitoring.in_background(monitoring.RunTracker(broken, lambda: closed.append(1)), limit=1)
    first({}, step=0)
    with pytest.raises(OSError, match="step 0"):
        first({}, step=1)
    second = monitoring.in_background(monitoring.RunTracker(broken, lambda: closed.append(2)))
    second({}, step=7)
    with pytest.raises(OSError, match="step 7"):
        second.close()
    first.close()
    assert closed == [2, 1]
    with pytest.raises(ValueError, match="limit = 0"):
        monitoring.in_background(broken, limit=0)


# -- progress and messages ------------------------------------------------------------------------------


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_yields_what_it_is_given_and_prints_lines_elsewhere():
    out = io.StringIO()
    assert list(weft.progress(range(3), weft.local(), title="epoch", show=lambda: "loss 1", every_s=60, file=out)) == [
        0,
        1,
        2,
    ]
    assert out.getvalue() == "epoch: 1 of 3  loss 1\nepoch: 3 of 3  loss 1\n"
    out = io.StringIO()
    assert list(weft.progress(iter("ab"), weft.local(), every_s=0, file=out)) == ["a", "b"]
    assert out.getvalue() == "step: 1\nstep: 2\n"
    steps = weft.progress(range(10), weft.local(), file=io.StringIO())
    assert next(steps) == 0
    steps.close()


def test_progress_of_a_run_that_goes_on_counts_from_what_is_done():
    out = io.StringIO()
    assert list(weft.progress(range(2), weft.local(), done=3, every_s=0, file=out)) == [0, 1]
    assert out.getvalue() == "step: 4 of 5\nstep: 5 of 5\n"
    out = _Terminal()
    assert list(weft.progress(iter("ab"), weft.local(), total=5, done=3, title="epoch", file=out)) == ["a", "b"]
    assert "5/5" in out.getvalue()


@pytest.mark.parametrize(("seconds", "words"), [(0.5, "2 steps/s, 0:00:02 left"), (2.0, "2 s per step, 0:00:08 left")])
def test_progress_shows_speed_and_time_left(monkeypatch, seconds, words):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    speed = words.partition(",")[0]
    lines, bar, endless = io.StringIO(), _Terminal(), io.StringIO()
    for out in (lines, bar):
        for step in weft.progress(range(10), weft.local(), done=10, every_s=0, file=out):
            now[0] += 7.0 if step == 0 else seconds  # the first step compiles
    found = lines.getvalue().splitlines()
    assert found[0] == "step: 11 of 20" and found[5] == f"step: 16 of 20, {words}"
    assert found[-1] == f"step: 20 of 20, {speed}" and speed in bar.getvalue() and "20/20" in bar.getvalue()
    for _ in weft.progress(iter("abcd"), weft.local(), every_s=0, file=endless):
        now[0] += seconds
    assert endless.getvalue().endswith(f"step: 4, {speed}\n")  # no end is known


def test_what_is_printed_beside_a_bar_goes_where_it_went(capsys):
    for _ in weft.progress(range(2), weft.local(), file=_Terminal()):
        print("a line")
    assert capsys.readouterr().out == "a line\na line\n"


def _in_order(ctx, path):
    base = logging.getLogger("weft-order")
    base.setLevel(logging.INFO)
    base.propagate = False
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(levelname)s %(filename)s %(funcName)s %(message)s"))
    base.addHandler(handler)
    log = weft.monitoring.logger("weft-order", ctx, ranks="in_order")
    for n in range(3):
        log.info("line %d", n)
        log.debug("left out")
    base.removeHandler(handler)
    handler.close()


def test_ranks_talk_one_after_the_other(tmp_path):
    run_ranks(_in_order, 3, str(tmp_path / "log"))
    expected = [f"INFO test_log.py _in_order [rank {rank}] line {n}" for n in range(3) for rank in range(3)]
    assert (tmp_path / "log").read_text().splitlines() == expected


def test_progress_is_a_bar_in_a_terminal():
    out = _Terminal()
    assert list(weft.progress(range(3), weft.local(), title="epoch", file=out)) == [0, 1, 2]
    assert "epoch" in out.getvalue() and "3/3" in out.getvalue()


def _shows(ctx):
    out = io.StringIO()
    list(weft.progress(range(2), ctx, file=out))
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(funcName)s %(rank)d %(message)s"))
    base = logging.getLogger("weft-test")
    base.setLevel(logging.INFO)
    base.propagate = False
    base.addHandler(handler)
    main, every = weft.monitoring.logger("weft-test", ctx), weft.monitoring.logger("weft-test", ctx, ranks="all")
    main.info("begin %d", 1)
    main.warning("slow")
    every.info("here")
    for _ in range(3):
        main.once("only once")
    base.removeHandler(handler)
    return out.getvalue(), stream.getvalue().splitlines()


def test_one_progress_and_one_voice_for_all_ranks():
    (bar, said), (no_bar, said_too) = run_ranks(_shows, 2)
    assert bar.endswith("step: 2 of 2\n") and no_bar == ""
    assert said == [
        "INFO _shows 0 begin 1",
        "WARNING _shows 0 slow",
        "INFO _shows 0 [rank 0] here",
        "WARNING _shows 0 only once",
    ]
    mark = "[rank 1] "
    assert said_too == [
        f"WARNING _shows 1 {mark}slow",
        f"INFO _shows 1 {mark}here",
        f"WARNING _shows 1 {mark}only once",
    ]
