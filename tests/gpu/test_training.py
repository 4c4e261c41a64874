"""What a loop on the device does, beside the same loop in plain torch."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import weft
from tests.gpu.device import COMPILER, DEVICE, DRY, SHARDED, needs, on_ranks
from tests.host_reads import HostReads
from weft.engines.options import ReduceOptions
from weft.engines.torch.reducing.replica_average import ReplicaAverage

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]  # torch warns of devices in its own ways


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


def build(dropout=0.0, width=32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), *(Block(width, dropout) for _ in range(3)), nn.Linear(width, 4))
    return model.to(DEVICE)


def batches(count=6, dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)
    return [
        (torch.randn(16, 8, generator=draw).to(DEVICE, dtype), torch.randint(4, (16,), generator=draw).to(DEVICE))
        for _ in range(count)
    ]


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(model, optimizer, data, after=lambda: None):
    torch.manual_seed(3)
    for x, y in data:
        nn.functional.cross_entropy(model(x).float(), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        after()
    return [p.detach().clone() for p in model.parameters()]


def here():
    return weft.local(device=DEVICE)


def assert_equal(one, two):
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_recompute_keeps_the_random_numbers_of_the_device():
    plain = build(dropout=0.3)
    expected = train(plain, make_optimizer(plain), batches())
    model, _ = weft.recompute(build(dropout=0.3), here(), blocks=Block)
    assert_equal(train(model, make_optimizer(model), batches()), expected)


def test_windows_and_clipping_equal_large_batches_in_float64():
    plain = build().double()
    data = batches(8, torch.float64)
    large = [tuple(torch.cat(part) for part in zip(*data[i : i + 4], strict=True)) for i in (0, 4)]
    expected = train(plain, make_optimizer(plain), large)
    model, loader, _ = weft.accumulate_grads(build().double(), data, here(), steps=4)
    optimizer = make_optimizer(model)
    for window in loader:
        for x, y in window:
            (nn.functional.cross_entropy(model(x).float(), y) / len(window)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(a.detach(), b, rtol=0, atol=1e-6)


def test_bf16_computes_in_bfloat16_and_learns_as_autocast_does():
    plain = build()
    optimizer, kind = make_optimizer(plain), torch.device(DEVICE).type
    seen = []
    for x, y in batches():
        with torch.autocast(kind, torch.bfloat16):
            nn.functional.cross_entropy(plain(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    model, _ = weft.with_precision(build(), here(), "bf16")
    model[1].up.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    other = make_optimizer(model)
    for x, y in batches():
        nn.functional.cross_entropy(model(x), y).backward()
        other.step()
        other.zero_grad()
    assert set(seen) == {torch.bfloat16}
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-2)


def test_fp16_keeps_true_units_skips_and_finds_its_scale_again():
    model, ctx = weft.with_precision(build(), here(), "fp16")
    optimizer, ctx = weft.skip_nonfinite(make_optimizer(model), ctx)
    plain = build()
    (x, y), *more = batches(8)
    nn.functional.cross_entropy(model(x), y).backward()
    nn.functional.cross_entropy(plain(x), y).backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=5e-2, atol=2e-3)
    optimizer.step()
    assert not weft.was_skipped(optimizer)
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    (nn.functional.cross_entropy(model(more[0][0]), more[0][1]) * float("inf")).backward()
    optimizer.step()
    assert weft.was_skipped(optimizer)
    assert_equal([p.detach() for p in model.parameters()], before)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(more[1][0]), more[1][1]).backward()
    optimizer.step()
    assert not weft.was_skipped(optimizer)


def test_averages_are_those_of_torch():
    plain, ours = build(), build()
    theirs = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = make_optimizer(plain)
    train(plain, optimizer, batches(), lambda: theirs.update_parameters(plain))
    ours, _ = weft.average_weights(ours, here(), decay=0.9)
    train(ours, make_optimizer(ours), batches(), weft.averages(ours).update)
    with weft.averages(ours).swapped():
        for a, b in zip(ours.parameters(), theirs.module.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_compiled_blocks_train_as_before():
    plain = build()
    expected = train(plain, make_optimizer(plain), batches())
    model, ctx = weft.with_precision(build(), here(), "fp32")
    model, _ = weft.compile(model, ctx, blocks=Block, backend=COMPILER)
    found = train(model, make_optimizer(model), batches())
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=6e-3)  # AdamW moves by its rate whatever the gradient


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_a_step_never_waits_for_the_device(policy):
    model, ctx = weft.with_precision(build(), here(), policy)
    model, ctx = weft.average_weights(model, ctx, decay=0.9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = [batches(2), batches(2)]
    model, loader, ctx = weft.accumulate_grads(model, [*data[0], *data[1]], ctx, steps=2)

    def step(window):
        for x, y in window:
            (nn.functional.cross_entropy(model(x), y) / len(window)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        weft.averages(model).update()

    windows = iter(loader)
    step(next(windows))
    if DRY:
        with HostReads() as reads:
            step(next(windows))
        assert not reads.counts
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(next(windows))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _sharded(ctx, stage):
    model, data = build(), batches()
    if stage:
        optimizer = make_optimizer(model)
        model, optimizer, ctx = weft.zero_partition(model, optimizer, ctx, stage=stage)
    else:
        model, ctx = weft.fully_shard(model, ctx, units=Block)
        optimizer = make_optimizer(model)
    losses = []
    for x, y in data:
        mine = slice(ctx.rank, None, ctx.world_size)
        loss = nn.functional.cross_entropy(model(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(weft.reduce(loss.detach(), ctx, "mean")))
    return losses


@pytest.mark.parametrize("stage", [0] if DRY else [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2] if DRY else [2, 4])
def test_sharded_losses_are_those_of_one_process(stage, ranks):
    needs(*SHARDED)
    model = build()
    optimizer, expected = make_optimizer(model), []
    for x, y in batches():
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    for found in on_ranks(_sharded, ranks, stage):
        assert found == pytest.approx(expected, rel=1e-5)


class _Twin:
    """Another replica, whose gradients are the same."""

    size, index = 2, 0

    def __init__(self):
        self.pinned = []

    def add_up(self, tensors, *, room):
        for tensor in tensors:
            assert tensor.device.type == "cpu"
            self.pinned.append(tensor.is_pinned())
            tensor.mul_(2)
        return True


def test_gradients_go_to_the_other_replicas_through_one_pinned_piece():
    plain, model, twin = build(), build(), _Twin()
    expected = train(plain, make_optimizer(plain), batches())
    ReplicaAverage(model, twin, ReduceOptions(), alone=True)
    assert_equal(train(model, make_optimizer(model), batches()), expected)
    assert twin.pinned == [DEVICE != "cpu"] * 6
