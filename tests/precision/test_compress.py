"""replicate(compress=...): PowerSGD and functions of the user's."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.testing import largest_difference, run_ranks

POWER = {"rank": 2, "start_step": 3}


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 1))


class Crossed(nn.Module):
    """Layers that run in another order than they were registered in, of several shapes, more than a bucket holds."""

    def __init__(self):
        super().__init__()
        self.last, self.first = nn.Linear(24, 1), nn.Linear(12, 24)
        self.middle = nn.ModuleList(nn.Linear(24, 24, bias=i != 1) for i in range(4))

    def forward(self, x):
        x = self.first(x)
        for i in (2, 0, 3, 1):
            x = x + torch.tanh(self.middle[i](x))
        return self.last(x) / 8


def _crossed():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Crossed()


def _steps(model, ctx, steps, first=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step in range(first, first + steps):
        x = torch.randn(16, 12, generator=torch.Generator().manual_seed(step))
        loss = (
            model(x.chunk(ctx.world_size)[ctx.rank]) - x.sum(1, keepdim=True).chunk(ctx.world_size)[ctx.rank]
        ).square()
        loss.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def _as_torch(ctx, build, bucket_mb, steps):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
    from torch.nn.parallel import DistributedDataParallel

    plain = DistributedDataParallel(build(), process_group=ctx.group, bucket_cap_mb=bucket_mb)
    state = power.PowerSGDState(ctx.group, matrix_approximation_rank=2, start_powerSGD_iter=3)

    def one_at_a_time(state, bucket):  # torch's alone sends messages of several buckets in any order, and gloo crashes
        future = power.powerSGD_hook(state, bucket)
        future.wait()
        return future

    plain.register_comm_hook(state, one_at_a_time if bucket_mb < 1 else power.powerSGD_hook)
    expected = _steps(plain, ctx, steps)
    options = {"compress": weft.precision.PowerSGD(**POWER), "bucket_bytes": int(bucket_mb * 2**20)}
    model, _ = weft.replicate(build(), ctx, **options)
    exact, _ = weft.replicate(build(), ctx)
    found = _steps(model, ctx, steps)
    return largest_difference(found, expected), largest_difference(found, _steps(exact, ctx, steps)), found


@pytest.mark.parametrize(
    ("build", "bucket_mb"), [(_net, 25), (_crossed, 25), (_crossed, 0.003)], ids=["one", "crossed", "many"]
)
def test_power_sgd_is_torchs_own(build, bucket_mb):
    answers = run_ranks(_as_torch, 2, build, bucket_mb, 12)
    for from_torch, from_exact, found in answers:
        assert from_torch == 0 and from_exact > 1e-4
        assert largest_difference(found, answers[0][2]) == 0


class Sometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.sometimes, self.last = nn.Linear(12, 24), nn.Linear(24, 24), nn.Linear(24, 1)
        self.calls = 0

    def forward(self, x):
        x, self.calls = torch.tanh(self.first(x)), self.calls + 1
        return self.last(x + self.sometimes(x) if self.calls % 4 else x) / 8


def _sometimes(ctx):
    torch.manual_seed(1)
    model, ctx = weft.replicate(Sometimes(), ctx, compress=weft.precision.PowerSGD(**POWER), unused="zero")
    return [p.isfinite().all().item() for p in _steps(model, ctx, 12)]


def test_gradients_of_zeros_stay_zero():
    for found in run_ranks(_sometimes, 2):
        assert all(found)


def _many_buckets(ctx):
    model, ctx = weft.replicate(_net(), ctx, compress=weft.precision.PowerSGD(**POWER), bucket_bytes=64)
    return _steps(model, ctx, 8)


@pytest.mark.slow
def test_buckets_keep_their_order_on_4_ranks():
    answers = run_ranks(_many_buckets, 4)
    for found in answers:
        assert largest_difference(found, answers[0]) == 0


def _resumed(ctx, folder, restored):
    options = {"compress": weft.precision.PowerSGD(**POWER), "bucket_bytes": 3000}
    model, here = weft.replicate(_crossed(), ctx, **options)
    state, here = weft.checkpointable({"model": model}, here)
    if restored:
        weft.restore(state, folder, here)
    else:
        _steps(model, ctx, 5)
        weft.save(state, folder, 5, here)
    return _steps(model, ctx, 4, first=5)


def test_errors_and_buckets_are_saved_and_restored(tmp_path):
    expected = run_ranks(_resumed, 2, tmp_path, False)
    found = run_ranks(_resumed, 2, tmp_path, True)
    assert largest_difference(found[0], expected[0]) == largest_difference(found[1], expected[0]) == 0
    (alone,) = run_ranks(_resumed, 1, tmp_path, True)  # nothing is sent, and nothing lost
    assert largest_difference(alone, expected[0]) < 1


class Scaled:
    """Not torch's: sends in float16 and counts, which has to survive."""

    def __init__(self):
        self.calls = 0

    def __call__(self, group, bucket):
        self.calls += 1
        small = (bucket.buffer() / group.size()).half()
        work = dist.all_reduce(small, group=group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0].to(bucket.buffer().dtype))

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


def _own(ctx, folder):
    hook = Scaled()
    model, here = weft.replicate(_net(), ctx, compress=hook)
    found = _steps(model, ctx, 4)
    exact, _ = weft.replicate(_net(), ctx)
    state, here = weft.checkpointable({"model": model}, here)
    weft.save(state, folder, 1, here)
    hook.calls = 0
    weft.restore(state, folder, here)
    return largest_difference(found, _steps(exact, ctx, 4)), hook.calls


def test_a_function_of_the_users(tmp_path):
    for difference, calls in run_ranks(_own, 2, tmp_path):
        assert 0 < difference < 1e-2 and calls == 4


def test_what_cannot_be_compressed_is_refused():
    power = weft.precision.PowerSGD()
    ctx = weft.local()
    with pytest.raises(TypeError, match=r"(?s)found:    str.*fix: .*PowerSGD\(rank=2\)"):
        weft.replicate(_net(), ctx, compress="powersgd")
    with pytest.raises(ValueError, match=r"(?s)found:    flat=True.*fix: .*without compress"):
        weft.replicate(_net(), ctx, compress=power, flat=True)
    model, there = weft.with_precision(_net(), ctx, weft.Precision(reduce=torch.bfloat16))
    with pytest.raises(ValueError, match=r"(?s)found:    Precision\(reduce=torch.bfloat16\).*fix: .*without compress"):
        weft.replicate(model, there, compress=power)
    with pytest.raises(ValueError, match=r"(?s)found:    sparse gradients of weight.*fix: .*without compress"):
        weft.replicate(nn.Embedding(2, 2, sparse=True), ctx, compress=power)
    with pytest.raises(ValueError, match=r"(?s)found:    rank=0, start_step=1.*fix: .*PowerSGD\(rank=2"):
        weft.precision.PowerSGD(rank=0, start_step=1)
