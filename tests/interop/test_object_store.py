"""Checkpoints in a real object store: the server of moto, by s3fs."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import weft
from weft.checkpoint import latest, verify
from weft.testing import run_ranks

pytest.importorskip("s3fs")
server = pytest.importorskip("moto.server")
boto3 = pytest.importorskip("boto3")

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def store():
    running = server.ThreadedMotoServer(port=0)
    running.start()
    host, port = running.get_host_and_port()
    address = f"http://{host}:{port}"
    settings = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    settings["AWS_ENDPOINT_URL"] = address
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="runs")
        yield settings
    running.stop()


def _work(ctx, url, settings, steps):
    os.environ.update(settings)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4)).double()
    model, ctx = weft.fully_shard(model, ctx) if ctx.world_size > 1 else (model, ctx)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer}, ctx)
    restored = weft.restore(state, url, ctx)
    for step in range(restored.step if restored else 0, steps):
        x = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model(x[ctx.rank :: ctx.world_size]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        weft.save_async(state, url, step + 1, ctx, keep=2).wait()
    with weft.full_params(model, ctx):
        return [p.detach().clone() for p in model.parameters()]


def test_two_ranks_save_and_one_resumes(store):
    expected = _work(weft.local(), "s3://runs/plain", {}, 4)
    run_ranks(_work, 2, "s3://runs/one", store, 2)
    resumed = _work(weft.local(), "s3://runs/one", {}, 4)
    assert max((a - b).abs().max().item() for a, b in zip(resumed, expected, strict=True)) < 1e-12
    assert verify(latest("s3://runs/one")).step == 4


_SAVES = textwrap.dedent("""
    import sys
    import torch, weft

    model = torch.nn.Linear(30_000, 3)
    state, ctx = weft.checkpointable({"model": model}, weft.local())
    restored = weft.restore(state, "s3://runs/kills", ctx)
    print("begins", flush=True)
    for step in range(restored.step + 1 if restored else 0, 10**6):
        weft.save(state, "s3://runs/kills", step, ctx, keep=3)
        print(step, flush=True)
""")
KILLS = int(os.environ.get("KILLS", "10"))


@pytest.mark.slow
@pytest.mark.timeout(60 + 10 * KILLS)
def test_kills_tear_nothing(store, tmp_path):
    script, saved = tmp_path / "saves.py", -1
    script.write_text(_SAVES)
    source = str(Path(weft.__file__).parents[1])
    for kill in range(KILLS):
        with subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": source}
        ) as process:
            assert process.stdout.readline() == "begins\n"
            saved = max(saved, int(process.stdout.readline()))
            time.sleep(0.013 * (kill % 11))
            process.send_signal(signal.SIGKILL)
            saved = max([saved, *(int(line) for line in process.stdout.read().split("\n")[:-1])])
        assert verify(latest("s3://runs/kills")).step >= saved
