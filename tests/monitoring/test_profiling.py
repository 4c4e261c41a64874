"""Traces by schedule, speed by a clock, memory by kind, and a NaN that all ranks know of in the same step."""

import gc
import json
import math
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft import monitoring
from weft.errors import ContextError
from weft.monitoring.throughput import _memory
from weft.testing import RanksFailed, run_ranks

# -- traces -------------------------------------------------------------------------------------------------


def _traces(ctx, folder, num_steps, options):
    with weft.monitoring.profile(ctx, folder, **options) as profile:
        for step in range(num_steps):
            with torch.profiler.record_function(f"work {step}"):
                torch.ones(4, 4) @ torch.ones(4, 4)
            profile.step()
    return [path.name for path in profile.paths]


SCHEDULES = [
    (7, {"active": 1, "warmup": 1, "repeat": 1}, [2]),
    (8, {"wait": 1, "warmup": 1, "active": 2, "repeat": 0}, [4, 8]),
    (11, {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}, [4, 8]),
    (9, {"skip_first": 2, "warmup": 1, "active": 2, "repeat": 0}, [5, 8]),
    (11, {"skip_first": 1, "wait": 2, "warmup": 1, "active": 2, "repeat": 0}, [6, 11]),
    (10, {"wait": 1, "warmup": 1, "active": 2, "repeat": 0}, [4, 8]),  # ends before an active step is over ...
    (11, {"wait": 1, "warmup": 1, "active": 2, "repeat": 0}, [4, 8, 11]),  # ... and after one
    (1, {"warmup": 1}, []),
]


@pytest.mark.parametrize(("num_steps", "options", "after"), SCHEDULES)
def test_the_number_of_traces_is_that_of_the_schedule(tmp_path, num_steps, options, after):
    names = _traces(weft.local(), tmp_path / "new", num_steps, options)
    assert names == [f"rank0.step{step}.json" for step in after]
    found = {"skip_first": 0, "wait": 0, "warmup": 1, "active": 1, "repeat": 1, **options}
    cycle = found["wait"] + found["warmup"] + found["active"]
    whole = max(num_steps - found["skip_first"], 0) // cycle
    part = (num_steps - found["skip_first"]) % cycle > found["wait"] + found["warmup"]
    most = found["repeat"] or num_steps
    assert len(after) == min(most, whole + part)
    for step, name in zip(after, names, strict=True):
        events = json.loads((tmp_path / "new" / name).read_text())["traceEvents"]
        work = sorted(e["name"] for e in events if str(e.get("name")).startswith("work "))
        last = min(step, num_steps)
        assert f"work {last - 1}" in work and len(work) <= found["active"]
    assert sorted(p.name for p in (tmp_path / "new").glob("*")) == sorted(names)


@pytest.mark.parametrize("form", ["chrome", "tensorboard"])
def test_each_rank_writes_a_valid_trace_of_its_own(tmp_path, form):
    options = {"active": 2, "form": form, "memory": True, "shapes": True, "stack": True, "flops": True}
    names = run_ranks(_traces, 2, str(tmp_path), 4, options)
    for rank, (name,) in enumerate(names):
        if form == "chrome":
            assert name == f"rank{rank}.step3.json"
        else:  # what TensorBoard's plugin looks for: <worker>.<time>.pt.trace.json
            worker, time, *rest = name.split(".")
            assert worker == f"rank{rank}" and time.isdecimal() and rest == ["pt", "trace", "json"]
        content = json.loads((tmp_path / name).read_text())
        products = [e for e in content["traceEvents"] if e.get("name") == "aten::mm"]
        assert len(products) == 2 and all("Input Dims" in e["args"] for e in products)
        assert any(e.get("name") == "[memory]" for e in content["traceEvents"])
        assert content["distributedInfo"]["rank"] == rank


@pytest.mark.parametrize(
    ("options", "found"), [({"active": 0}, "active = 0"), ({"wait": -1}, "wait = -1"), ({"form": "x"}, "form = 'x'")]
)
def test_a_wrong_schedule_is_refused(tmp_path, options, found):
    with pytest.raises(
        ValueError,
        match=rf"(?s)profile: {found} (cannot be used|is unknown).*fix: +weft.monitoring.profile\(",
    ):
        weft.monitoring.profile(weft.local(), tmp_path, **options)


# -- speed --------------------------------------------------------------------------------------------------


class _Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def passes(self, seconds):
        self.now += seconds


def _slow(clock, seconds, items):
    for item in items:
        clock.passes(seconds)
        yield item


def test_of_many_ranks_the_highest_and_the_lowest_memory_are_told_with_their_ranks():
    assert _memory([2.0, 1.0]) == {"memory_bytes/rank_0": 2.0, "memory_bytes/rank_1": 1.0}
    assert _memory([*map(float, range(5, 38)), 4.0]) == {
        "memory_bytes/max": 37.0, "memory_bytes/min": 4.0, "memory_rank/max": 32.0, "memory_rank/min": 33.0,
    }  # fmt: skip


def test_speed_is_exact_by_a_clock():
    clock = _Clock()
    speed = weft.monitoring.throughput(weft.local(), peak_flops=1000.0, clock=clock)
    for batch in speed.timed(_slow(clock, 0.25, [4, 4, 2])):
        with speed.part("forward"):
            clock.passes(0.5)
            with speed.part("attention"):
                clock.passes(0.125)
        clock.passes(0.125)
        speed.step(samples=batch, tokens=8 * batch, flops=50)
    found = speed.read()
    memory = found.pop("memory_bytes/rank_0")
    assert memory > 2**20
    assert found == {
        "samples_per_s": 10 / 3, "tokens_per_s": 80 / 3, "flops_per_s": 50.0, "mfu": 0.05,
        "step_s": 1.0, "data_share": 0.25, "step_s/data": 0.25, "step_s/forward": 0.5, "step_s/attention": 0.125,
        "step_s/rest": 0.125,
    }  # fmt: skip
    assert speed.read() == {}, "nothing since"
    clock.passes(2.0)
    speed.count(tokens=4)
    speed.step()
    again = speed.read()
    assert again["tokens_per_s"] == 2.0 and "samples_per_s" not in again and again["step_s/rest"] == 2.0
    assert again["data_share"] == 0.0


def test_a_slow_loader_shows_as_waiting_for_data_also_inside_of_windows():
    clock = _Clock()
    model, ctx = nn.Linear(1, 1), weft.local()
    loader = _slow(clock, 0.75, range(6))
    _, windows, ctx = weft.accumulate_grads(model, loader, ctx, steps=3)
    speed = weft.monitoring.throughput(ctx, clock=clock)
    for window in speed.timed(windows):
        for _ in speed.timed(window):
            clock.passes(0.25)
        speed.step(samples=3)
    found = speed.read()
    assert found["data_share"] == 0.75 > 0.5 and found["step_s"] == 3.0 and found["samples_per_s"] == 1.0


def _job(ctx):
    clock = _Clock()
    speed = weft.monitoring.throughput(ctx, peak_flops=100.0 * (1 + ctx.rank), clock=clock)
    before = _collectives(ctx)
    for _ in speed.timed(_slow(clock, 0.5 * ctx.rank, range(2))):
        clock.passes(1.0)
        speed.step(samples=1 + ctx.rank, tokens=10, flops=30)
    within = _collectives(ctx) - before
    found = speed.read()
    return found, within, _collectives(ctx) - before


def _collectives(ctx):
    return ctx.group._get_sequence_number_for_group()


def test_speed_is_that_of_the_whole_job_and_asked_for_once():
    results = run_ranks(_job, 2)
    for found, within, after in results:
        assert within == 0 and after == 1
        assert found["samples_per_s"] == 6 / 3 and found["tokens_per_s"] == 40 / 3  # the slower rank took 3 s
        assert found["mfu"] == 120 / 3 / 300 and found["step_s"] == 1.5
        assert found["step_s/data"] == 0.25 and found["step_s/rest"] == 1.0 and found["data_share"] == 1 / 5
        assert found["memory_bytes/rank_0"] > 0 and found["memory_bytes/rank_1"] > 0
    assert results[0][0] == results[1][0]


def _same_data(ctx):
    speed = weft.monitoring.throughput(ctx, clock=_Clock())
    speed._clock.passes(1.0)
    speed.step(samples=8)
    return speed.read()["samples_per_s"]


def test_ranks_that_see_the_same_data_count_once():
    assert run_ranks(_same_data, 4, mesh={"data": 2, "tensor": 2}) == [16.0] * 4


def _other_parts(ctx):
    speed = weft.monitoring.throughput(ctx)
    with speed.part(f"part {ctx.rank}"):
        speed.step()
    speed.read()


def test_other_parts_on_another_rank_are_refused_on_all():
    with pytest.raises(RanksFailed) as failed:
        run_ranks(_other_parts, 2)
    assert len(failed.value.errors) == 2
    for error in failed.value.errors.values():
        assert isinstance(error, ContextError) and "parts of a step differ between the ranks" in str(error)


@pytest.mark.parametrize("peak", [0, -1.0, math.inf, "x"])
def test_a_peak_that_is_none_is_refused(peak):
    with pytest.raises(
        ValueError, match=r"(?s)throughput: peak_flops = .* cannot be used.*fix: +weft.monitoring.throughput"
    ):
        weft.monitoring.throughput(weft.local(), peak_flops=peak)


def test_operations_are_counted_backward_included():
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False))
    x = torch.ones(3, 4)
    forward = 2 * 3 * (4 * 8 + 8 * 2)
    assert monitoring.count_flops(lambda: model(x)) == forward
    # Backward: of each weight, and of the input of the second layer.
    assert monitoring.count_flops(lambda: model(x).sum().backward()) == 2 * forward + 2 * 3 * 8 * 2


@pytest.mark.parametrize(
    ("name", "low", "full"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA H100 PCIe", 756e12, 51e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA GH200 480GB", 989e12, 67e12),
        ("NVIDIA L4", 121e12, 30.3e12),
        ("NVIDIA L40S", 362e12, 91.6e12),
        ("NVIDIA RTX A4000", None, None),
        ("Tesla T4", 65e12, 8.1e12),
    ],
)
def test_what_a_device_can_do_is_found_by_its_name(name, low, full):
    from weft.monitoring.flops import _peak_of

    assert (_peak_of(name, torch.bfloat16), _peak_of(name, torch.float32)) == (low, full)


# -- memory -------------------------------------------------------------------------------------------------


def test_peak_memory_by_kind():
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256))
    model.append(nn.Linear(256, 256))
    model[2].weight = model[0].weight  # shared memory counts once
    optimizer = torch.optim.AdamW(model.parameters())
    with weft.monitoring.peak_memory({"model": model, "optimizer": optimizer}, weft.local()) as peak:
        model(torch.ones(4, 256)).sum().backward()
        big = torch.ones(2**24)  # 64 MiB, gone again before the end
        del big
        optimizer.step()
        optimizer.zero_grad()
        assert peak.total == 0
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert peak.parameters == weights + sum(b.numel() * b.element_size() for b in model.buffers())
    assert peak.gradients == weights, "they were there before the step"
    assert 2 * weights <= peak.optimizer <= 2 * weights + 100
    assert peak.rest > 2**26 and peak.total == peak.parameters + peak.gradients + peak.optimizer + peak.rest
    assert not optimizer._optimizer_step_pre_hooks
    with pytest.raises(TypeError, match=r"(?s)peak_memory: int is neither module nor optimizer.*fix:"):
        weft.monitoring.peak_memory([model, 3], weft.local()).__enter__()


def _shares(ctx):
    model = nn.Linear(64, 64, bias=False)
    model, ctx = weft.fully_shard(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    with weft.monitoring.peak_memory([model, optimizer], ctx) as peak:
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    return peak.parameters, peak.gradients, peak.optimizer


def test_of_a_sharded_model_the_share_of_the_rank_counts():
    whole = 64 * 64 * 4
    for parameters, gradients, optimizer in run_ranks(_shares, 2):
        assert parameters == gradients == whole // 2 and whole <= optimizer <= whole + 8


def test_after_release_nothing_is_left():
    ctx = weft.local()
    data = torch.utils.data.TensorDataset(torch.randn(8, 4))
    loader, ctx = weft.shard_data(torch.utils.data.DataLoader(data, batch_size=2), ctx)
    model, ctx = weft.with_precision(nn.Linear(4, 4), ctx, "bf16")
    model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.AdamW(model.parameters())
    health, speed = weft.monitoring.watch_health(model, ctx), weft.monitoring.throughput(ctx)
    for step, (x,) in enumerate(speed.timed(loader)):
        loss = model(x).float().sum()
        loss.backward()
        assert health(loss, step) is None
        optimizer.step()
        optimizer.zero_grad()
    dead = [weakref.ref(each) for each in (model, model.weight, optimizer, loader, health, speed)]
    del model, optimizer, loader, ctx, health, speed, loss, x
    assert monitoring.release_memory(weft.local()) >= 0
    assert [ref() for ref in dead] == [None] * 6


def _snapshots(ctx, folder):
    model = nn.Linear(300, 200)
    model(torch.ones(1, 300)).sum().backward()
    path = monitoring.save_memory_snapshot(folder, ctx, names={"model": model})
    return path.name


def test_a_snapshot_of_memory_is_written_by_each_rank(tmp_path):
    gc.collect()
    assert run_ranks(_snapshots, 2, str(tmp_path / "new")) == ["memory.rank0.json", "memory.rank1.json"]
    for rank in (0, 1):
        content = json.loads((tmp_path / "new" / f"memory.rank{rank}.json").read_text())
        assert content["rank"] == rank and content["total_bytes"] > 2**20
        named = {row["name"]: row for row in content["tensors"]}
        assert named["model.weight"]["bytes"] == 300 * 200 * 4 and named["model.weight"]["shape"] == [200, 300]
        assert "gradient of model.weight" in named
        sizes = [row["bytes"] for row in content["tensors"]]
        assert sizes == sorted(sizes, reverse=True)


# -- health -------------------------------------------------------------------------------------------------


class _Breaks(torch.autograd.Function):
    """Passes on; its gradient is NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


class _Part(nn.Module):
    """Goes wrong when told to."""

    def __init__(self):
        super().__init__()
        self.how = ""

    def forward(self, x):
        if self.how == "output":
            return x / torch.zeros_like(x)
        return _Breaks.apply(x) if self.how == "gradient of the output" else x.clone()


def _sick(ctx, how, at, strategy):
    """What each rank is told in each step; goes wrong on rank `at` in step 12."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), _Part(), nn.Linear(4, 4), nn.Tanh())
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, units=[nn.Linear])
    elif strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
    told, counts = [], []
    with weft.monitoring.watch_health(model, ctx) as health:
        for step in range(13):
            bad = step == 12 and ctx.rank == at
            model[1].how = how if bad else ""
            loss = (model(torch.ones(2, 4) * (1 + 0.1 * (step % 3))) ** 2).mean()
            loss.backward()
            value = loss.detach() * (1000 if bad and how == "loss" else 1)
            before = _collectives(ctx)
            told.append(health(value, step))
            counts.append(_collectives(ctx) - before)
            model.zero_grad()
        hooks = [len(part._forward_hooks) for part in model]
    assert [len(part._forward_hooks) for part in model] == [count - 1 for count in hooks]
    return told, counts, health.loss


SICK = [
    ("output", "inf", "1"),
    ("gradient of the output", "nan", "0"),  # the gradient that the part gives to what is before it
    ("loss", "spike", ""),
]


@pytest.mark.parametrize("strategy", ["replicate", "fully_shard"])
@pytest.mark.parametrize(("how", "kind", "where"), SICK)
def test_all_ranks_know_in_the_same_step_what_is_wrong_and_where_it_arose(strategy, how, kind, where):
    if strategy == "fully_shard" and how == "loss":
        return  # the loss knows of no strategy
    results = run_ranks(_sick, 2, how, 1, strategy)
    for told, counts, _ in results:
        assert told[:12] == [None] * 12 and counts[:12] == [1] * 12
        finding = told[12]
        assert (finding.step, finding.rank, finding.what, finding.where) == (12, 1, how, where)
        assert finding.kind in ((kind,) if how != "output" else ("nan", "inf"))
        assert str(finding).startswith(f"{finding.kind} at step 12: first in ") and "on rank 1" in str(finding)
    assert str(results[0][0][12]) == str(results[1][0][12])


def test_a_weight_that_is_lost_is_named():
    model, ctx = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), weft.local()
    health = weft.monitoring.watch_health(model, ctx)
    model[1].bias.data[1] = math.nan
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    assert str(health(loss, 3)) == "nan at step 3: first in weight of 1.bias, on rank 0 (loss nan)"
    health.close()


@pytest.mark.parametrize("again", [False, True])
def test_the_origin_is_found_in_any_micro_batch_and_where_activations_are_computed_again(again):
    model, ctx = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), _Part()), nn.Linear(2, 1)), weft.local()
    if again:
        model, ctx = weft.recompute(model, ctx, blocks=[nn.Sequential])
    with weft.monitoring.watch_health(model, ctx) as health:
        for step in range(3):
            total = torch.zeros(())
            for micro in range(4):
                model[1][1].how = "output" if (step, micro) == (2, 1) else ""
                loss = model(torch.ones(3, 2)).mean()
                loss.backward()
                total += loss.detach()
            finding = health(total, step)
            assert (finding is None) == (step < 2)
            model.zero_grad()
    assert (finding.what, finding.where) == ("output", "1.1")


def test_without_origin_no_hooks_are_made_and_a_gradient_is_named():
    model, ctx = nn.Sequential(nn.Linear(2, 2), _Part(), nn.Linear(2, 2)), weft.local()
    health = weft.monitoring.watch_health(model, ctx, origin=False)
    assert not any(part._forward_hooks for part in model.modules())
    model[1].how = "gradient of the output"
    loss = model(torch.ones(1, 2)).sum()
    loss.backward()
    finding = health(loss, 0)
    assert (finding.kind, finding.what, finding.where) == ("nan", "gradient", "0.weight")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_large_gradients_are_no_finding_and_one_bad_number_among_many_is(dtype):
    model, ctx = nn.Linear(100, 100, dtype=dtype), weft.local()
    health = weft.monitoring.watch_health(model, ctx, origin=False)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 30_000)
    assert health(1.0, 0) is None
    for bad in (math.nan, math.inf, -math.inf):
        model.bias.grad[7] = bad
        finding = health(1.0, 1)
        assert (finding.what, finding.where) == ("gradient", "bias")
        assert finding.kind == ("nan" if math.isnan(bad) else "inf")


@pytest.mark.parametrize("spike", [8.0, math.inf])
def test_a_spike_is_told_from_noise_and_from_a_falling_loss(spike):
    model, ctx = nn.Linear(1, 1), weft.local()
    health = weft.monitoring.watch_health(model, ctx, spike=spike, memory=20)
    draw = torch.Generator().manual_seed(0)
    for step in range(200):
        loss = 5.0 * 0.99**step + 0.1 * torch.randn((), generator=draw).item()
        assert health(loss, step) is None, step
    finding = health(5.0, 200)
    assert (finding is None) == (spike == math.inf)
    if finding is not None:
        assert str(finding) == "spike at step 200: first in the loss, on rank 0 (loss 5)"
        assert health(0.7, 201) is None, "a spike is not remembered"


@pytest.mark.parametrize("options", [{"spike": 0}, {"spike": math.nan}, {"memory": 2}])
def test_wrong_options_of_a_watch_are_refused(options):
    with pytest.raises(ValueError, match=r"(?s)watch_health: .* cannot be used.*expected:.*fix:"):
        weft.monitoring.watch_health(nn.Linear(1, 1), weft.local(), **options)


def _means(ctx):
    health = weft.monitoring.watch_health(nn.Linear(1, 1), ctx)
    finding = health(math.nan if ctx.rank == 1 else float(ctx.rank), 0)
    return health.loss, finding.ranks, finding.rank, dist.get_rank()


def test_the_mean_loss_comes_with_it():
    assert [found[:3] for found in run_ranks(_means, 3)] == [(1.0, (1,), 1)] * 3
