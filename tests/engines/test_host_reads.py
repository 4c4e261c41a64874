"""A training step on weft makes the host wait for the device no more often than the same step in plain torch."""

import functools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import weft
from tests.host_reads import HostReads
from tests.variants import variants
from weft.engines.torch.reducing.strategy import Strategy
from weft.testing import run_ranks


def _on_module(transform, **options):
    def apply(module, optimizer, ctx):
        module, ctx = transform(module, ctx, **options)
        return module, optimizer, ctx

    return apply


# Each takes a module, an optimizer (None where it is made later) and a context.
STRATEGIES = {
    "one rank": None,
    "replicate": _on_module(weft.replicate),
    "replicate[flat]": _on_module(weft.replicate, flat=True),
    "fully_shard": _on_module(weft.fully_shard, units=nn.Linear),
    "zero 1": functools.partial(weft.zero_partition, stage=1),
    "zero 2": functools.partial(weft.zero_partition, stage=2),
    "zero 3": functools.partial(weft.zero_partition, stage=3),
}
CHECKED = [*variants(*list(STRATEGIES)[:3]), "fully_shard", *variants(*list(STRATEGIES)[4:])]
_STEPS, _WARM_UP = 3, 3
_MICRO = 2


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3))


def _batches(micro):
    return [(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(micro * (_STEPS + _WARM_UP))]


def _counted(steps):
    """What happens in the steps after the first ones, in which gradients and buffers are made."""
    for _ in range(_WARM_UP):
        next(steps)
    with HostReads() as reads:
        for _ in range(_STEPS):
            next(steps)
    return dict(reads.counts)


def _plain(ctx, strategy, fp16, windows):
    """The same step by an expert, without weft."""
    model = _model()
    if strategy.startswith("replicate"):
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    elif strategy in ("fully_shard", "zero 2", "zero 3"):
        for part in model:
            if isinstance(part, nn.Linear):
                fully_shard(part)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    average = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", enabled=fp16)

    def steps():
        batches = _batches(windows)
        for start in range(0, len(batches), windows):
            for x, y in batches[start : start + windows]:
                with torch.autocast("cpu", torch.float16, enabled=fp16):
                    loss = nn.functional.cross_entropy(model(x), y) / windows
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            torch._foreach_lerp_(average, [p.detach() for p in model.parameters()], 0.1)
            yield

    return _counted(steps())


def _with_weft(ctx, strategy, policy, windows):
    model = _model()
    x, y = map(torch.cat, zip(*_batches(windows * ctx.world_size), strict=True))
    loader, ctx = weft.shard_data(DataLoader(TensorDataset(x, y), batch_size=4), ctx)
    model, ctx = weft.with_precision(model, ctx, policy)
    optimizer = None
    if strategy.startswith("zero"):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if policy == "fp16":
            optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    if STRATEGIES[strategy] is not None:
        model, optimizer, ctx = STRATEGIES[strategy](model, optimizer, ctx)
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        if policy == "fp16":
            optimizer, ctx = weft.skip_nonfinite(optimizer, ctx)
    for offer in weft.contract.offered(model, Strategy):
        offer.compares_weights = False  # which is done on a CPU only, and this stands for a device
    model, ctx = weft.average_weights(model, ctx, decay=0.9)
    averages = weft.averages(model)
    model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=windows)

    def steps():
        for window in loader:
            for x, y in window:
                loss = nn.functional.cross_entropy(model(x), y) * window.share
                loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            averages.update()
            yield

    return _counted(steps())


def _compare(ctx, strategy, policies):
    found = {}
    for policy in policies:
        for windows in (1, _MICRO):
            plain = _plain(ctx, strategy, policy == "fp16", windows)
            found[policy, windows] = plain, _with_weft(ctx, strategy, policy, windows)
    return found


@pytest.mark.parametrize("strategy", CHECKED)
def test_a_step_reads_nothing_on_the_host(strategy):
    ranks = 1 if strategy == "one rank" else 2
    for found in run_ranks(_compare, ranks, strategy, ["fp32", "bf16"]):
        for case, (plain, ours) in found.items():
            beyond = {name: count for name, count in ours.items() if count > plain.get(name, 0)}
            assert not beyond, (case, beyond)


@pytest.mark.parametrize("strategy", CHECKED)
def test_a_step_in_fp16_reads_once_whether_to_skip(strategy):
    ranks = 1 if strategy == "one rank" else 2
    for found in run_ranks(_compare, ranks, strategy, ["fp16"]):
        for case, (_, ours) in found.items():
            assert ours == {"tolist": _STEPS}, (case, ours)


def test_what_reads_is_seen():
    x = torch.ones(2)
    with HostReads() as reads:
        x.sum().item()
        bool(x.sum() > 1)
        x.tolist()
        x.cpu()
        x.numpy()
        x.nonzero()
        x[x > 0]
        torch.equal(x, x)
        torch.tensor([1.0])
    seen = dict(reads.counts)
    assert seen["_local_scalar_dense"] >= 1 and seen["nonzero"] >= 1 and seen["lift_fresh"] == 1, seen
    assert {"tolist", "cpu", "numpy", "equal"} <= set(seen), seen
