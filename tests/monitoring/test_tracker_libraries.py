"""What other libraries hold after a run is what was logged: read back from the files they leave, without a network.

Each test is skipped where its library is missing; docs/tracking.md says how to run them all.
"""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

LOGGING = """
import json, sys
from pathlib import Path
import torch, weft
from weft.monitoring import Artifact, HParams, Table, closing, in_background
folder = Path(sys.argv[1])
FAIL = "fail" in sys.argv

def log_all(tracker, close=True):
    # In the background, to the end; what was logged is complete once the tracker is closed.
    (folder / "kept.txt").write_text("of the run")
    ctx = weft.local()
    with closing(in_background(tracker) if close else [tracker.__call__]) as trackers:
        weft.log({"hparams": HParams({"lr": 0.1, "name": "small"})}, 0, ctx, trackers)
        for step in range(1, 4):
            weft.log({"train/loss": torch.tensor(1.0 / step), "n": step}, step, ctx, trackers, weight=8)
        weft.log({"word": "a text", "rows": Table(["a", "b"], [(1, "x"), (2, "y")])}, 3, ctx, trackers)
        weft.log({"kept": Artifact(folder / "kept.txt")}, 3, ctx, trackers)
        if FAIL:
            raise ValueError("of the training")

def tell(losses, **more):
    print("FOUND " + json.dumps({"losses": losses, **more}))
"""

MLFLOW = """
import mlflow
mlflow.set_tracking_uri(f"file://{folder}/mlruns")
run = mlflow.start_run()
try:
    log_all(weft.monitoring.trackers.libraries.mlflow(mlflow))
except ValueError:
    assert FAIL
client = mlflow.MlflowClient()
status = client.get_run(run.info.run_id).info.status
table = [json.loads(path.read_text()) for path in folder.rglob("rows/3.json")]
kept = [path.read_text() for path in folder.rglob("artifacts/kept/kept.txt")]
metrics = client.get_metric_history(run.info.run_id, "train/loss")
params = client.get_run(run.info.run_id).data.params
texts = [path.read_text() for path in folder.rglob("word/3.txt")]
tell([[m.step, m.value] for m in metrics], params=params, texts=texts, status=status, table=table, kept=kept)
"""

WANDB = """
import time, wandb
from wandb.proto import wandb_internal_pb2
run = wandb.init(project="test", mode="offline", dir=folder, settings=wandb.Settings(console="off"))
try:
    log_all(weft.monitoring.trackers.libraries.wandb(run, table=wandb.Table))
except ValueError:
    assert FAIL
(path,) = folder.rglob("*.wandb")
losses, params, texts, status, kept = [], {}, [], None, []
table = [json.loads(path.read_text()) for path in folder.rglob("media/table/rows*.json")]

def records(data):
    # A header of 7 bytes, then blocks of 32 KiB of pieces: checksum, length, and whole, first, middle or last.
    place, begun = 7, b""
    while place + 7 <= len(data):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        begun += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield begun
            begun = b""

def ended(data):
    found = [wandb_internal_pb2.Record.FromString(each) for each in records(data)]
    return any(each.HasField("exit") for each in found)

until = time.monotonic() + 30
while not ended(path.read_bytes()) and time.monotonic() < until:
    time.sleep(0.1)  # the last records are written after `finish` has returned

for data in records(path.read_bytes()):
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    for item in record.config.update:
        params[item.key or ".".join(item.nested_key)] = json.loads(item.value_json)
    row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
    if "train/loss" in row:
        losses.append([row["_step"], row["train/loss"]])
    if "word" in row:
        texts.append(row["word"])
    if record.HasField("exit"):
        status = record.exit.exit_code
    if record.request.HasField("log_artifact") or record.HasField("artifact"):
        kept.append((record.artifact if record.HasField("artifact") else record.request.log_artifact.artifact).name)
tell(losses, params=params, texts=texts, status=status, table=table, kept=kept)
"""

DVCLIVE = """
import csv
from dvclive import Live
with Live(dir=str(folder / "live"), save_dvc_exp=False, dvcyaml=None) as live:
    log_all(weft.monitoring.trackers.libraries.dvclive(live))
with open(folder / "live" / "plots" / "metrics" / "train" / "loss.tsv") as file:
    losses = [[int(row["step"]), float(row["loss"])] for row in csv.DictReader(file, delimiter="\\t")]
params = dict(line.split(": ") for line in (folder / "live" / "params.yaml").read_text().splitlines())
summary = json.loads((folder / "live" / "metrics.json").read_text())
tell(losses, params=params, summary=summary)
"""

TRACKIO = """
import sqlite3
import trackio
run = trackio.init(project="test", name="one", space_id=None)
log_all(weft.monitoring.trackers.libraries.trackio(run, table=trackio.Table))
(path,) = folder.rglob("*.db")
with sqlite3.connect(path) as base:
    rows = [(step, json.loads(text)) for step, text in base.execute("select step, metrics from metrics order by id")]
    (params,) = [json.loads(text) for (text,) in base.execute("select config from configs")]
losses = [[s, v["train/loss"]] for s, v in rows if "train/loss" in v]
table = [v["rows"]["_value"] for _, v in rows if "rows" in v]
kept = [path.read_text() for path in folder.rglob("*") if path != folder / "kept.txt" and path.is_file()
        and path.read_bytes() == b"of the run"]
tell(losses, texts=[v["word"] for _, v in rows if "word" in v], params=params, table=table, kept=kept)
"""

SWANLAB = """
import swanlab
run = swanlab.init(project="test", mode="offline", logdir=str(folder / "log"))
log_all(weft.monitoring.trackers.libraries.swanlab(run, table=swanlab.echarts.Table))
content = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
tell([], names=[name for name in ("train/loss", "word", "lr", "rows", "kept.txt") if name.encode() in content])
"""

COMET = """
import zipfile
import comet_ml
quiet = dict(log_code=False, log_git_metadata=False, log_env_details=False, auto_output_logging=False)
run = comet_ml.OfflineExperiment(project_name="test", workspace="test", offline_directory=str(folder), **quiet)
log_all(weft.monitoring.trackers.libraries.comet(run))
(path,) = folder.rglob("*.zip")
with zipfile.ZipFile(path) as file:
    lines = [json.loads(line)["payload"] for line in file.read("messages.json").decode().splitlines()]
    texts = [file.read(line["file_path"]).decode() for line in lines if "file_path" in line]
metrics = [line["metric"] for line in lines if "metric" in line]
params = {line["param"]["paramName"]: line["param"]["paramValue"] for line in lines if "param" in line}
losses = [[each["step"], each["metricValue"]] for each in metrics if each["metricName"] == "train/loss"]
tell(losses, params=params, texts=texts)
"""

CLEARML = """
import shutil
from clearml import Task
Task.set_offline(True)
off = dict(auto_connect_frameworks=False, auto_resource_monitoring=False, auto_connect_arg_parser=False)
task = Task.init(project_name="test", task_name="one", auto_connect_streams=False, **off)
session = Path(task.get_offline_mode_folder())
log_all(weft.monitoring.trackers.libraries.clearml(task))
rows = [row for line in (session / "metrics.jsonl").read_text().splitlines() for row in json.loads(line)]
losses = [[row["iter"], row["value"]] for row in rows if (row["metric"], row["variant"]) == ("train", "loss")]
params = json.loads((session / "task.json").read_text())["hyperparams"]["General"]
texts = [text for text in ["word: a text"] if text in (session / "log.jsonl").read_text()]
tell(losses, params={name: each["value"] for name, each in params.items()}, texts=texts)
"""

AIM = """
import aim
run = aim.Run(repo=str(folder), system_tracking_interval=None, log_system_params=False, capture_terminal_logs=False)
run.set_artifacts_uri(f"file://{folder}/artifacts")
log_all(weft.monitoring.trackers.libraries.aim(run, text=aim.Text), close=False)
here = aim.sdk.sequence.Context({})
losses = [[step, value] for step, (value, *_) in run.get_metric("train/loss", here).data.items()]
texts = [each.data for step, (each, *_) in run.get_text_sequence("word", here).data.items()]
kept = [path.read_text() for path in (folder / "artifacts").rglob("kept*") if path.is_file()]
tell(losses, params=dict(run["hparams"]), texts=texts, table=run["rows"], kept=kept)
run.close()  # a closed run is read after a server has indexed it
"""

LIBRARIES = {"comet_ml": COMET, "clearml": CLEARML, "aim": AIM}
LIBRARIES |= {"mlflow": MLFLOW, "wandb": WANDB, "dvclive": DVCLIVE, "trackio": TRACKIO, "swanlab": SWANLAB}


def _found(library, folder, *arguments):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"needs the package {library}")
    env = os.environ | {
        "WANDB_MODE": "offline", "WANDB_SILENT": "true", "TRACKIO_DIR": str(folder), "HF_HUB_OFFLINE": "1",
        "MLFLOW_ENABLE_ASYNC_LOGGING": "false", "MLFLOW_ALLOW_FILE_STORE": "true", "HOME": str(folder),
        "DVC_NO_ANALYTICS": "true", "GIT_PYTHON_REFRESH": "quiet",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", LOGGING + LIBRARIES[library], str(folder), *arguments],
        check=False, capture_output=True, text=True, timeout=300, env=env, cwd=folder,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert done.returncode == 0 and len(lines) == 1, done.stdout + done.stderr
    return json.loads(lines[0].removeprefix("FOUND "))


TABLE = {"columns": ["a", "b"], "data": [[1, "x"], [2, "y"]]}
LOSSES = [[1, 1.0], [2, 0.5], [3, 1.0 / 3]]


def _check_losses(found):
    assert [step for step, _ in found] == [1, 2, 3]
    assert [value for _, value in found] == pytest.approx([value for _, value in LOSSES])


@pytest.mark.slow
def test_the_file_store_of_mlflow(tmp_path):
    found = _found("mlflow", tmp_path)
    _check_losses(found["losses"])
    assert found["params"] == {"lr": "0.1", "name": "small"} and found["texts"] == ["a text"]
    assert found["table"] == [TABLE] and found["kept"] == ["of the run"] and found["status"] == "FINISHED"


@pytest.mark.slow
def test_an_offline_run_of_wandb(tmp_path):
    found = _found("wandb", tmp_path)
    _check_losses(found["losses"])
    assert found["params"]["lr"] == 0.1 and found["params"]["name"] == "small" and found["texts"] == ["a text"]
    assert [{name: each[name] for name in TABLE} for each in found["table"]] == [TABLE]
    assert "kept" in found["kept"] and found["status"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("library", "status"), [("mlflow", "FAILED"), ("wandb", 1)])
def test_a_run_that_fails_is_complete_and_says_so(library, status, tmp_path):
    found = _found(library, tmp_path, "fail")
    _check_losses(found["losses"])
    assert found["status"] == status and found["texts"] == ["a text"]


def test_the_files_of_dvclive(tmp_path):
    found = _found("dvclive", tmp_path)
    _check_losses(found["losses"])
    assert found["params"] == {"lr": "0.1", "name": "small"}
    assert found["summary"]["train"]["loss"] == pytest.approx(1 / 3) and found["summary"]["step"] == 3


def test_the_database_of_trackio(tmp_path):
    found = _found("trackio", tmp_path)
    _check_losses(found["losses"])
    assert found["texts"] == ["a text"] and found["params"]["lr"] == 0.1 and found["params"]["name"] == "small"
    assert found["table"] == [[{"a": 1, "b": "x"}, {"a": 2, "b": "y"}]] and found["kept"] == ["of the run"]


@pytest.mark.parametrize("library", ["comet_ml", "clearml", "aim"])
def test_an_offline_run_of(library, tmp_path):
    found = _found(library, tmp_path)
    _check_losses(found["losses"])
    assert {name: str(value) for name, value in found["params"].items() if name in ("lr", "name")} == {
        "lr": "0.1",
        "name": "small",
    }
    assert found["texts"] == ["a text" if library != "clearml" else "word: a text"]


def test_an_offline_run_of_swanlab(tmp_path):
    assert _found("swanlab", tmp_path)["names"] == ["train/loss", "word", "lr", "rows", "kept.txt"]
