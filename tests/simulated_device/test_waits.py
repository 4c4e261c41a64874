"""A step makes the host wait for the device no more often than torch's own; the table of docs/benchmarks.md."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.laws.table import Stacked
from tests.simulated_device.device import waits
from tests.simulated_device.ranks import needs_compiler, on_ranks
from tests.variants import variants

pytestmark = [needs_compiler, pytest.mark.timeout(400)]
_STEPS, _WARM_UP = 4, 16  # no probe runs in calls 17 to 20, and no weights are compared


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.stacked = nn.Linear(8, 4), Stacked()

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return x + self.stacked(x, chosen, weights)


class _Listed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
        return out


def _model(middle=_Block):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), middle(), middle(), nn.Linear(8, 3))


def _optimizer(model):
    return torch.optim.AdamW([p for p in model.parameters() if not p.is_meta], lr=1e-3, foreach=False)


def _loss(model, x, y):
    return nn.functional.cross_entropy(model(x), y)


def _per_step(ctx, step):
    """How often the host waits in a step after the first ones, by what it does."""
    x, y = torch.randn(8, 6, device=ctx.device), torch.randint(3, (8,), device=ctx.device)
    for number in range(_WARM_UP):
        step(x, y, number)
    found = []
    for number in range(_STEPS):
        before = waits()
        step(x, y, _WARM_UP + number)
        found.append({kind: count - before[kind] for kind, count in waits().items() if count > before[kind]})
    assert all(one == found[0] for one in found), found
    return found[0]


def _trained(ctx, model, optimizer=None, loss=_loss, after=lambda loss, number: None):
    optimizer = optimizer or _optimizer(model)

    def step(x, y, number):
        value = loss(model, x, y)
        value.backward()
        after(value, number)
        optimizer.step()
        optimizer.zero_grad()

    return _per_step(ctx, step)


def _torch_ddp(ctx):
    return _trained(ctx, DistributedDataParallel(_model().to(ctx.device)))


def _torch_fsdp(ctx):
    model = _model().to(ctx.device)
    for part in model:
        fully_shard(part)
    return _trained(ctx, fully_shard(model))


def _plain(ctx):
    return _trained(ctx, _model().to(ctx.device))


def _torch_scaled(ctx):
    model, scaler = DistributedDataParallel(_model().to(ctx.device)), torch.amp.GradScaler("sim")
    optimizer = _optimizer(model)

    def step(x, y, number):
        with torch.autocast("sim", torch.float16):
            value = _loss(model, x, y)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return _per_step(ctx, step)


def _torch_offload(ctx):
    model = _model().to(ctx.device)

    def loss(model, x, y):
        with torch.autograd.graph.save_on_cpu(pin_memory=True, device_type="sim"):
            return _loss(model, x, y)

    return _trained(ctx, model, loss=loss)


def _torch_pipeline(ctx):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    half = nn.Sequential(*list(_model())[2 * ctx.rank : 2 * ctx.rank + 2]).to(ctx.device)
    stage = PipelineStage(half, ctx.rank, 2, ctx.device)
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.cross_entropy)
    optimizer = _optimizer(half)

    def step(x, y, number):
        schedule.step(x) if ctx.rank == 0 else schedule.step(target=y)
        optimizer.step()
        optimizer.zero_grad()

    return _per_step(ctx, step)


def _replicate(ctx, **options):
    model, ctx = weft.replicate(_model(), ctx, **options)
    return _trained(ctx, model)


def _sharded(ctx):
    model, ctx = weft.fully_shard(_model(), ctx, units=_Block)
    return _trained(ctx, model)


def _zero(ctx, stage):
    model = _model().to(ctx.device)
    model, optimizer, ctx = weft.zero_partition(model, _optimizer(model), ctx, stage=stage)
    return _trained(ctx, model, optimizer)


def _precise(ctx, policy):
    model, ctx = weft.with_precision(_model(), ctx, policy)
    model, ctx = weft.replicate(model, ctx)
    optimizer = _optimizer(model)
    if policy == "fp16":
        optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    return _trained(ctx, model, optimizer)


def _recomputed(ctx, **options):
    model, ctx = weft.recompute(_model(), ctx, blocks=_Block, **options)
    model, ctx = weft.replicate(model, ctx)
    return _trained(ctx, model)


def _clipped(ctx):
    model, ctx = weft.fully_shard(_model(), ctx, units=_Block)
    return _trained(ctx, model, after=lambda loss, number: weft.clip_grads(model, ctx, max_norm=1.0))


def _averaged(ctx):
    model, ctx = weft.replicate(_model(), ctx)
    model, ctx = weft.average_weights(model, ctx, decay=0.9)
    averages = weft.averages(model)
    return _trained(ctx, model, after=lambda loss, number: averages.update())


def _healthy(ctx):
    model, ctx = weft.replicate(_model(), ctx)
    with weft.monitoring.watch_health(model, ctx) as health:
        return _trained(ctx, model, after=health)


def _asked(ctx):
    model, ctx = weft.replicate(_model(), ctx)
    return _trained(ctx, model, after=lambda loss, number: weft.collectives.any_rank(False, ctx))


def _measured(ctx):
    model, ctx = weft.replicate(_model(), ctx)
    speed = weft.monitoring.throughput(ctx)

    def after(loss, number):
        speed.step(samples=8)
        speed.read()

    return _trained(ctx, model, after=after)


def _tensor(ctx):
    ctx = weft.adopt(device="sim", mesh={"tensor": 2})
    plan = {f"{block}.{layer}": how for block in (1, 2) for layer, how in (("up", "column"), ("down", "row"))}
    model, ctx = weft.tensor_parallel(_model(), ctx, plan=plan)
    return _trained(ctx, model)


def _pipelined(ctx, schedule="1f1b"):
    ctx = weft.adopt(device="sim", mesh={"pipeline": 2})
    stages = [["0", "1"], ["2", "3"]]
    model, ctx = weft.pipeline(
        _model(), ctx, stages=stages, loss=nn.functional.cross_entropy, micro_batches=2, schedule=schedule
    )
    return _trained(ctx, model, loss=lambda model, x, y: model(x, y))


def _experts(ctx):
    ctx = weft.adopt(device="sim", mesh={"expert": 2})
    model, ctx = weft.expert_parallel(_model(_Experts), ctx, experts=Stacked)
    model, ctx = weft.replicate(model, ctx)
    return _trained(ctx, model)


def _plain_listed(ctx):
    return _trained(ctx, _model(_Listed).to(ctx.device))


def _listed(ctx):
    ctx = weft.adopt(device="sim", mesh={"expert": 2})
    model, ctx = weft.expert_parallel(_model(_Listed), ctx, experts=["1.experts", "2.experts"])
    model, ctx = weft.replicate(model, ctx)
    return _trained(ctx, model)


def _loaded(ctx):
    data = TensorDataset(torch.randn(320, 6), torch.randint(3, (320,)))
    loader, ctx = weft.shard_data(DataLoader(data, batch_size=8), ctx)
    model, ctx = weft.replicate(_model(), ctx)
    batches = iter(loader)
    return _trained(ctx, model, loss=lambda model, x, y: _loss(model, *next(batches)))


# What torch does for the same; weft's; and how often the host waits besides, with the reason.
CASES = {
    "replicate": (_torch_ddp, _replicate, 0),
    "replicate, unused": (_torch_ddp, functools.partial(_replicate, unused="zero"), 0),
    "replicate, flat": (_torch_ddp, functools.partial(_replicate, flat=True), 0),
    "fully_shard": (_torch_fsdp, _sharded, 0),
    "zero 1": (_torch_ddp, functools.partial(_zero, stage=1), 0),
    "zero 2": (_torch_fsdp, functools.partial(_zero, stage=2), 0),
    "zero 3": (_torch_fsdp, functools.partial(_zero, stage=3), 0),
    "bf16": (_torch_ddp, functools.partial(_precise, policy="bf16"), 0),
    "fp16": (_torch_scaled, functools.partial(_precise, policy="fp16"), 0),
    "recompute": (_torch_ddp, _recomputed, 0),
    "recompute, offload": (_torch_offload, functools.partial(_recomputed, offload=True), 0),
    "clip_grads": (_torch_fsdp, _clipped, 0),
    "average_weights": (_torch_ddp, _averaged, 0),
    "tensor_parallel": (_plain, _tensor, 0),
    # The loss of the batch is compared with the mean over the micro-batches on the host.
    "pipeline, gpipe": (_torch_pipeline, functools.partial(_pipelined, schedule="gpipe"), 1),
    "pipeline, 1f1b": (_torch_pipeline, _pipelined, 1),
    # Messages have sizes, in each of two layers: torch's own dispatch reads them, too.
    "experts": (_plain, _experts, 2),
    # The layer's own forward, with its reads, runs once more: to hear what it asks its experts for.
    "experts in a list": (_plain_listed, _listed, 8),
    # What is in the memory that the copy was made from may change when that is over: of a copy a step ago.
    "shard_data": (_torch_ddp, _loaded, 1),
    "watch_health": (_torch_ddp, _healthy, 1),  # the loss is looked at on the host
    "any_rank": (_torch_ddp, _asked, 0),
    "throughput": (_torch_ddp, _measured, 0),
}
QUICK = ("replicate", "fully_shard", "zero 1", "watch_health", "any_rank", "fp16")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *variants(*(name for name in CASES if name not in QUICK))])
def test_a_step_waits_no_more_often_than_torchs_own(name):
    torchs, ours, more = CASES[name]
    for expected, found in zip(on_ranks(torchs, 2), on_ranks(ours, 2, probes="auto"), strict=True):
        assert sum(found.values()) == sum(expected.values()) + more, (found, expected)


def _alone(ctx):
    """On a group without a backend for the CPU, numbers travel through the device."""
    group = dist.new_group(backend="simccl")
    return weft.collectives.any_rank(ctx.rank == 1, weft.adopt(group, device="sim"))


def test_numbers_travel_where_there_is_a_backend():
    assert on_ranks(_alone, 2) == [True, True]
