"""Monitoring: options of meters and logs, values that cannot be logged, and ranks that log different names."""

import pytest
import torch
from torch import nn

import weft
from tests.fix_lines.told import told
from weft import monitoring
from weft.monitoring.report.trace_events import _LARGEST, read_trace
from weft.monitoring.run_ledger.compare import compare_ledgers
from weft.testing import run_ranks


def test_meters(tmp_path):
    with weft.start(device="cpu") as ctx:
        with told("monitoring/flops.py", "is not in the table") as it:
            monitoring.peak_flops(ctx.device, torch.float64)
        it.run(ctx=ctx)
        with told("monitoring/throughput.py", "'peak_flops', peak_flops") as it:
            monitoring.throughput(ctx, peak_flops=0)
        it.run(ctx=ctx)

        speed = monitoring.throughput(ctx)
        with told("monitoring/throughput.py", "the parts of a step differ") as it:
            for number in range(30):
                with speed.part(f"layer {number}"):
                    pass
            speed.step()
            speed.read()
        speed = monitoring.throughput(ctx)
        it.run(speed=speed)
        speed.step()
        assert "step_s/optimizer" in speed.read()

        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        with told("monitoring/peak_memory.py", "is neither module nor optimizer") as it, monitoring.peak_memory(3, ctx):
            pass
        assert it.run(model=model, optimizer=optimizer, ctx=ctx)["peak"].parameters > 0

        with told("monitoring/health.py", "'memory', memory") as it:
            monitoring.watch_health(model, ctx, memory=1)
        it.run(model=model, ctx=ctx)
        with told("monitoring/health.py", "'spike', spike") as it:
            monitoring.watch_health(model, ctx, spike=0)
        it.run(model=model, ctx=ctx)

        with told("monitoring/profiler.py", "check_count") as it:
            monitoring.profile(ctx, tmp_path, active=0)
        it.run(ctx=ctx, folder=tmp_path)
        with told("monitoring/profiler.py", "check_choice") as it:
            monitoring.profile(ctx, tmp_path, form="perfetto")
        it.run(ctx=ctx, folder=tmp_path)

        trace = tmp_path / "rank0.step5.json"
        with trace.open("wb") as file:
            file.truncate(_LARGEST + 1)  # no bytes on the disk
        with told("monitoring/report/trace_events.py", "is too large to be read") as it:
            read_trace(trace)
        with eval(it.fix, {"weft": weft, "ctx": ctx, "folder": tmp_path}) as profile:
            [profile.step() for _ in range(8)]
        assert read_trace(profile.paths[0]).steps


def test_logs(tmp_path):
    with weft.start(device="cpu") as ctx:
        names = {"loss": 0.5, "step": 1, "ctx": ctx, "trackers": [], "num_tokens": 8}
        with told("monitoring/log.py", "'step', step") as it:
            weft.log({"loss": 0.5}, -1, ctx)
        it.run(**names)
        with told("monitoring/log.py", "'every', every") as it:
            weft.log({"loss": 0.5}, 1, ctx, every=0)
        it.run(**names)
        with told("monitoring/log.py", "'weight', weight") as it:
            weft.log({"loss": 0.5}, 1, ctx, weight=-1)
        it.run(**names)
        losses = torch.tensor([0.5, 0.25])
        with told("monitoring/values.py", "values that are neither numbers") as it:
            weft.log({"losses": losses}, 1, ctx)
        it.run(losses=losses, step=1, ctx=ctx, trackers=[])

        for make in (monitoring.jsonl, monitoring.csv, monitoring.tensorboard):
            with told("monitoring/trackers/files.py", "'purge_step'") as it:
                make(tmp_path / make.__name__, purge_step=-1)
            it.run(path=tmp_path / make.__name__, restored=None)
        with told("monitoring/trackers/lifetime.py", "'limit', limit") as it:
            monitoring.in_background(print, limit=0)
        it.run(tracker=print)


def _different_names(ctx):
    with told("monitoring/log.py", "the names of the numbers differ") as it:
        weft.log({"loss": 0.5} if ctx.is_main else {}, 1, ctx)
    seen = {"loss": 0.5 if ctx.is_main else 0.0, "num_tokens": 8 if ctx.is_main else 0}
    logged = []
    it.run(**seen, step=1, ctx=ctx, trackers=lambda values, step: logged.append(values["loss"]))
    assert logged == ([0.5] if ctx.is_main else [])


@pytest.mark.slow
def test_different_names():
    run_ranks(_different_names, 2)


def test_ledgers(tmp_path):
    model, ctx = nn.Linear(2, 2), weft.local()
    names = {"model": model, "folder": tmp_path / "a", "ctx": ctx}
    with told("monitoring/run_ledger/record.py", "name, count") as it:
        monitoring.ledger({"model": model}, tmp_path, ctx, every=0)
    it.run(**names)
    with told("monitoring/run_ledger/record.py", "check_choice") as it:
        monitoring.ledger({"model": model}, tmp_path, ctx, drift="ignore")
    record = eval(it.fix, {"weft": weft, **names})
    with told("monitoring/run_ledger/record.py", "'step', step") as it:
        record(-1, loss=1.0)
    it.run(record=record, step=1, loss=1.0)
    record.close()
    with monitoring.ledger({}, tmp_path / "b", ctx) as record:
        record(2)
    with told("monitoring/run_ledger/compare.py", "no step in common") as it:
        compare_ledgers(tmp_path / "a", tmp_path / "b")
    with monitoring.ledger({}, tmp_path / "b", ctx) as record:
        it.run(record=record, step=1, loss=1.0)
    assert compare_ledgers(tmp_path / "a", tmp_path / "b").first is None


def _drifting(ctx, folder):
    torch.manual_seed(ctx.rank)
    model = nn.Linear(2, 2)
    record = monitoring.ledger({"model": model}, folder, ctx)
    record(1)
    with told("monitoring/run_ledger/record.py", "NotSynchronized") as it:
        record.close()
    it.run(model=model, ctx=ctx)
    with monitoring.ledger({"model": model}, folder, ctx) as record:
        record(1)


def test_replicas_that_differ_in_a_ledger(tmp_path):
    run_ranks(_drifting, 2, str(tmp_path))
