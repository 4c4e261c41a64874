"""Checkpoints, data, memory, failures and commands on the device."""

import gc
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.gpu.device import DEVICE, DRY, REPLICATED, SHARDED, backend, needs, on_ranks
from weft import monitoring
from weft.engines.torch.device.devices import TorchDevices
from weft.testing import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # torch warns of devices in its own ways


def here():
    return weft.local(device=DEVICE)


def build():
    return nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 4))


# -- checkpoints ---------------------------------------------------------------------------------------------------


def _job(ctx):
    torch.manual_seed(0)
    model = build().to(ctx.device)
    if ctx.world_size > 1:
        model, ctx = weft.fully_shard(model, ctx, units=nn.Linear)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randint(4, (64,))), batch_size=8 // ctx.world_size)
    loader, ctx = weft.shard_data(loader, ctx)
    state, ctx = weft.checkpointable({"model": model, "optimizer": optimizer, "loader": loader}, ctx)
    return model, optimizer, loader, state, ctx


def _losses(model, optimizer, batches, count, ctx):
    losses = []
    for _ in range(count):
        x, y = next(batches)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(weft.reduce(loss.detach(), ctx, "mean")))
    return losses


def _saved(ctx, folder, how):
    model, optimizer, loader, state, ctx = _job(ctx)
    batches = iter(loader)
    _losses(model, optimizer, batches, 3, ctx)
    running = getattr(weft, how)(state, folder, 3, ctx)
    after = _losses(model, optimizer, batches, 3, ctx)
    if how == "save_async":
        running.wait()
    return after


def _restored(ctx, folder):
    model, optimizer, loader, state, ctx = _job(ctx)
    torch.manual_seed(99)
    weft.restore(state, folder, ctx)
    return _losses(model, optimizer, iter(loader), 3, ctx)


@pytest.mark.parametrize("how", ["save", "save_async"])
def test_a_restored_job_goes_on_bitwise_with_the_random_numbers_of_the_device(tmp_path, how):
    assert _restored_after(tmp_path, how, lambda fn, *args: fn(here(), *args))


def _restored_after(folder, how, call):
    after = call(_saved, str(folder), how)
    return call(_restored, str(folder)) == after


def test_shards_of_two_ranks_are_restored_bitwise_and_at_one_rank(tmp_path):
    needs(*SHARDED)
    assert _restored_after(tmp_path, "save", lambda fn, *args: on_ranks(fn, 2, *args))
    assert len(_restored(here(), str(tmp_path))) == 3


# -- data ----------------------------------------------------------------------------------------------------------


def test_batches_come_ahead_from_pinned_memory_on_a_stream_of_their_own():
    data = torch.arange(12 * 2**20 if not DRY else 12, dtype=torch.float32).view(12, -1)
    loader, ctx = weft.shard_data(DataLoader(TensorDataset(data), batch_size=2), here())
    edge = 8 if DRY else 4096  # work for longer than the host takes to put a batch together
    matrix = torch.randn(edge, edge, device=DEVICE)
    kinds = [ProfilerActivity.CPU] if DRY else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    sums = []
    with profile(activities=kinds) as traced:
        for (batch,) in loader:
            assert batch.device == ctx.device
            for _ in range(1 if DRY else 20):
                matrix = torch.nn.functional.normalize(matrix @ matrix)
            sums.append(batch.double().sum())
    assert float(sum(sums)) == float(data.double().sum())
    if DRY:
        return
    events = [e for e in traced.profiler.kineto_results.events() if e.device_type().name == "CUDA"]
    copies = [e for e in events if "HtoD" in e.name() and "Pinned" in e.name()]
    kernels = [e for e in events if "Mem" not in e.name()]
    assert len(copies) >= 6, [e.name() for e in events][:20]
    assert not {e.device_resource_id() for e in copies} & {e.device_resource_id() for e in kernels}
    overlapping = [c for c in copies if any(k.start_ns() < c.end_ns() and c.start_ns() < k.end_ns() for k in kernels)]
    assert len(overlapping) >= 3


# -- memory --------------------------------------------------------------------------------------------------------


def test_snapshot_and_peaks_by_kind(tmp_path):
    model = nn.Linear(64, 64).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    with weft.monitoring.peak_memory([model, optimizer], here()) as peak:
        model(torch.ones(8, 64, device=DEVICE)).sum().backward()
        optimizer.step()
    held = 4 * (64 * 64 + 64)
    assert peak.parameters == held and peak.gradients == held and peak.optimizer >= 2 * held and peak.total >= 4 * held
    path = monitoring.save_memory_snapshot(tmp_path, here(), names={"model": model})
    content = json.loads(path.read_text())
    assert any(row["name"] == "model.weight" and row["device"] == DEVICE for row in content["tensors"])
    assert DRY or content["segments"]


def test_the_batch_size_is_found_by_running_out_of_memory():
    layer, tried = nn.Linear(256, 256).to(DEVICE), []
    optimizer = torch.optim.AdamW(layer.parameters())
    limit = 8 * 2**30

    def trial(size):
        tried.append(size)
        if DRY and size * 2**30 > limit:
            raise torch.OutOfMemoryError
        rows = 1 if DRY else size * 2**30 // (4 * 256)
        layer(torch.ones(rows, 256, device=DEVICE)).sum().backward()
        optimizer.step()

    before = [p.detach().clone() for p in layer.parameters()]
    if not DRY:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(0).total_memory)
    try:
        found = weft.data.find_batch_size(trial, here(), start=16, shrink=lambda n: n // 2, objects=[layer, optimizer])
    finally:
        if not DRY:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert 1 <= found < 16 and tried[0] == 16 and len(tried) > 1
    for one, two in zip(layer.parameters(), before, strict=True):
        assert torch.equal(one, two) and one.grad is None
    gc.collect()
    monitoring.release_memory(here())
    assert DRY or torch.cuda.memory_allocated() < 2**30


# -- failures ------------------------------------------------------------------------------------------------------

_FAULT = """
import os, signal, sys
import torch, weft

fault, device, backend = sys.argv[1:]
os.environ["NCCL_HOSTID"] = os.environ["RANK"]  # lets ranks share a device
with weft.start(device=device, backend=backend, timeout_s=6 if fault == "freeze" else 60) as ctx:
    model, ctx = weft.replicate(torch.nn.Linear(4, 4), ctx)
    for step in range(20):
        if step == 5 and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP if fault == "freeze" else signal.SIGKILL)
        model(torch.randn(2, 4, device=ctx.device)).sum().backward()
        model.zero_grad()
"""


@pytest.mark.parametrize("fault", ["kill"] if DRY else ["kill", "freeze"])
def test_a_rank_that_is_gone_or_stands_still_is_named(tmp_path, fault):
    needs(*REPLICATED)
    path = tmp_path / "train.py"
    path.write_text(_FAULT)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    command = [sys.executable, str(path), fault, DEVICE, backend()]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True
        )
        for rank in "01"
    ]
    try:
        said = ranks[0].communicate(timeout=300 if DRY else 90)[1]  # two imports of torch take their time on a busy CPU
    finally:
        for each in ranks:
            each.kill()
        ranks[1].communicate()
    text = "its process is gone" if fault == "kill" else "did not arrive within 6 s"
    assert ranks[0].returncode not in (0, -signal.SIGKILL)
    assert re.search(f"rank 1 failed.*{text}", said, re.DOTALL), said


def test_a_job_that_is_told_to_end_stops_after_the_step():
    model = build().to(DEVICE)
    with weft.on_preemption(here()) as preempted:
        for step in range(5):
            model(torch.randn(2, 8, device=DEVICE)).sum().backward()
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            if preempted(step):
                break
    assert step == 2


# -- commands and other libraries ----------------------------------------------------------------------------------


@pytest.mark.skipif(DRY, reason="tests/cli/test_doctor.py is the same on a CPU")
def test_doctor_finds_the_device():
    command = [sys.executable, "-m", "weft", "doctor", "--limit-s", "45"]  # beside other tests
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.device(DEVICE).type in done.stdout


def test_explain_says_where_we_are():
    assert DEVICE in weft.explain(here())


@pytest.mark.skipif(DEVICE.startswith("sim"), reason="DeepSpeed does not know the simulated device")
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs the extra deepspeed")
def test_deepspeed_cuts_the_optimizer():
    def losses(ctx):
        torch.manual_seed(0)
        model = nn.Linear(8, 4).to(ctx.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=2, engine="deepspeed")
        found = []
        for _ in range(3):
            loss = model(torch.ones(2, 8, device=ctx.device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    def alone(_):
        dist.init_process_group(
            TorchDevices().backend(torch.device(DEVICE)), store=dist.HashStore(), rank=0, world_size=1
        )
        try:
            with weft.adopt(device=DEVICE) as ctx:
                return losses(ctx)
        finally:
            dist.destroy_process_group()

    (found,) = run_ranks(alone, 1, device=DEVICE)  # DeepSpeed computes on the device of the local rank: none to share
    assert found[0] > found[1] > found[2]
