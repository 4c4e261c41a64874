"""`Precision(storage=...)`: frozen weights that rest in fewer bits."""

import copy

import pytest
import torch
from torch import nn

import weft
from weft.testing import run_ranks

FLOAT8 = weft.Precision(storage=torch.float8_e4m3fn, compute=torch.float32)


def _net(trained=False):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(16, 32), nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 16))
    net[4].requires_grad_(trained)
    return net.requires_grad_(False) if not trained else _frozen_but_the_last(net)


def _frozen_but_the_last(net):
    for part in net[:4]:
        part.requires_grad_(False)
    return net


def _x(step=0):
    return torch.randint(16, (4, 6), generator=torch.Generator().manual_seed(step))


def _with_rounded_weights(net):
    """What storage means: weights of layers rounded once."""
    for part in net:
        if isinstance(part, (nn.Linear, nn.Embedding)) and not part.weight.requires_grad:
            for p in part.parameters():
                p.data = p.data.to(torch.float8_e4m3fn).float()
    return net


def test_a_forward_is_that_of_rounded_weights_and_undo_gives_the_dtype_back():
    model, ctx = weft.with_precision(_net(), weft.local(), FLOAT8)
    assert {name: p.dtype.itemsize for name, p in model.named_parameters()} == {
        "0.weight": 1, "1.weight": 1, "1.bias": 1, "2.weight": 4, "2.bias": 4, "4.weight": 1, "4.bias": 1,
    }  # fmt: skip
    expected = _with_rounded_weights(_net())(_x())
    assert torch.equal(model(_x()), expected)
    assert torch.equal(copy.deepcopy(model)[1].weight.float(), model[1].weight.float())
    with pytest.raises((RuntimeError, IndexError)):
        model(torch.full((1, 1), 99))
    assert model[0].weight.dtype is torch.float8_e4m3fn  # also after an error
    model, ctx = weft.undo(model, ctx)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model(_x()), expected)


def test_tied_weights_stay_tied():
    net = _net()
    net[4] = nn.Linear(32, 16, bias=False)
    net[4].weight = net[0].weight
    net.requires_grad_(False)
    model, _ = weft.with_precision(net, weft.local(), FLOAT8)
    model(_x())
    assert model[4].weight is model[0].weight
    assert model[0].weight.dtype is torch.float8_e4m3fn


def _train(ctx, strategy):
    model, ctx = weft.with_precision(_net(trained=True), ctx, FLOAT8)
    if strategy == "fully_shard":
        model, ctx = weft.fully_shard(model, ctx, units=nn.Linear)
    elif strategy == "replicate":
        model, ctx = weft.replicate(model, ctx)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    losses = []
    for step in range(3):
        loss = model(_x(step)[ctx.rank :: ctx.world_size]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(weft.reduce(loss.detach(), ctx, "mean")))
    return losses


@pytest.mark.parametrize("strategy", ["replicate", "fully_shard"])
def test_the_rest_is_trained_as_in_one_process(strategy):
    expected = _train(weft.local(), None)
    for losses in run_ranks(_train, 2, strategy):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_keeps_the_bits(tmp_path):
    model, ctx = weft.with_precision(_net(), weft.local(), FLOAT8)
    state, ctx = weft.checkpointable({"model": model}, ctx)
    weft.save(state, tmp_path, 1, ctx)
    expected = model(_x())
    for p in model.parameters():
        p.data.zero_()
    weft.restore(state, tmp_path, ctx)
    assert torch.equal(model(_x()), expected)


@pytest.mark.parametrize("options", [{"storage": torch.int8, "compute": torch.float32}, {"storage": torch.float16}])
def test_other_dtypes_are_refused(options):
    with pytest.raises(ValueError, match="weights cannot be stored in this dtype"):
        weft.Precision(**options)
