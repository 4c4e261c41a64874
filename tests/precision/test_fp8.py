"""with_precision(..., "fp8"): linear layers that multiply 8-bit numbers, alike at any number of ranks."""

import copy
import math

import pytest
import torch
from torch import nn

import weft
from weft.testing import largest_difference, run_ranks
from weft.transforms.with_precision import fp8_layers

f8, bf16, f32 = torch.float8_e4m3fn, torch.bfloat16, torch.float32


def _net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32, bias=False), nn.GELU(), nn.Linear(32, 16)
        )


def _data(step):
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(32, 32, generator=draw)
    return x, torch.tanh(x @ torch.linspace(-1, 1, 512).view(32, 16))


def _train(ctx, policy, strategy=None, steps=10):
    model, here = weft.with_precision(_net(), ctx, policy)
    if strategy == "replicate":
        model, here = weft.replicate(model, here)
    elif strategy is not None:
        model, here = weft.fully_shard(model, here, units=nn.Linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        x, y = (t.chunk(ctx.world_size)[ctx.rank] for t in _data(step))
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(weft.reduce(loss.detach(), ctx, "mean")))
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for p in model.parameters()], losses


def _both(ctx, policy):
    return [_train(ctx, policy, strategy)[0] for strategy in ("replicate", "fully_shard")]


MIXED = weft.Precision(param=f32, compute=bf16, output=f32, matmul=f8)


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.variant)])
def test_ranks_equal_one_process(n):
    alone, _ = _train(weft.local(), "fp8")
    exact, _ = _train(weft.local(), "fp32")
    assert largest_difference(alone, exact) > 1e-4  # 8 bits show
    for answers in run_ranks(_both, n, "fp8"):
        for found in answers:
            assert largest_difference(found, alone) < 1e-6


@pytest.mark.slow
def test_it_learns_as_in_16_bits():
    losses = {policy: _train(weft.local(), policy, steps=200)[1] for policy in ("fp8", MIXED, "bf16")}
    last = {policy: sum(found[-20:]) for policy, found in losses.items()}
    assert losses["fp8"][-1] < losses["fp8"][0] / 4
    assert all(abs(last[policy] / last["bf16"] - 1) < 0.02 for policy in ("fp8", MIXED))


def _rounded(matrix, dim):
    """The naive way: each row, or column, divided by the power of two that makes its largest number at most 448."""
    largest = matrix.abs().amax(dim, keepdim=True)
    scale = 2.0 ** torch.ceil(torch.log2(largest / 448))
    return (matrix / scale).to(f8).float() * scale


def test_products_are_those_of_rows_rounded_to_8_bits():
    layer = nn.Linear(48, 32)
    x, gradient = torch.randn(5, 7, 48, requires_grad=True), torch.randn(5, 7, 32)
    weight = layer.weight.detach().clone()
    layer, _ = weft.with_precision(layer, weft.local(), "fp8")
    y = layer(x)
    y.backward(gradient)
    rows, flat = x.detach().view(-1, 48), gradient.view(-1, 32)
    torch.testing.assert_close(
        y.detach().view(-1, 32), _rounded(rows, 1) @ _rounded(weight, 1).T + layer.bias.detach(), rtol=1e-5, atol=1e-5
    )
    expected = _rounded(flat, 1) @ _rounded(weight, 0)
    torch.testing.assert_close(x.grad.view(-1, 48), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.weight.grad, flat.T @ rows, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.bias.grad, flat.sum(0), rtol=1e-5, atol=1e-5)


def test_layers_are_listed_and_parts_may_have_another_precision():
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 3), nn.Linear(3, 16), nn.Linear(16, 32))
    _, ctx = weft.with_precision(model[3], weft.local(), "bf16")
    model, ctx = weft.with_precision(model, ctx, "fp8")
    assert fp8_layers(model) == ["0"] and "chosen: 8-bit products of 0" in weft.explain(ctx)
    assert model(torch.zeros(2, 16)).dtype == f32  # rows of zeros have a scale
    twin = copy.deepcopy(model)
    assert "forward" not in vars(twin[0]) or fp8_layers(twin) == []
    model, ctx = weft.undo(model, ctx)
    assert fp8_layers(model) == [] and "forward" not in vars(model[0])


def test_with_recomputation_and_a_frozen_weight():
    model = _net()
    model[0].requires_grad_(False)
    model, ctx = weft.with_precision(model, weft.local(), MIXED)
    model, ctx = weft.recompute(model, ctx, blocks=["3"])
    model(_data(0)[0]).sum().backward()
    assert model[0].weight.grad is None and model[3].weight.grad is not None


class _Block(nn.Module):
    """Rows of both products are divided in one of these layers: of the first in backward, of the second in forward."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _divided(ctx, strategy=None, sequence=False, compiled=False):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(32, 32), nn.Sequential(_Block(), _Block()), nn.Linear(32, 16, bias=False))
    model, ctx = weft.with_precision(model, ctx, "fp8")
    if "tensor" in dict(ctx.axes):
        plan = {"1.*.up": "column", "1.*.down": "row", "1.*.norm": "sequence", "2": "gather"}
        model, ctx = weft.tensor_parallel(model, ctx, plan=plan, sequence=sequence)
    if strategy is not None:
        model, ctx = getattr(weft, strategy)(model, ctx)
    if compiled:
        model, ctx = weft.compile(model, ctx)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        x, y = (t.view(4, 8, -1).chunk(ctx.data_size)[ctx.data_rank] for t in _data(step))
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with weft.full_params(model, ctx):
        return [getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"tensor": 2}, {}),
        *(
            pytest.param(mesh, options, marks=pytest.mark.variant)
            for mesh, options in (
                ({"tensor": 2}, {"sequence": True}),
                ({"tensor": 4}, {}),
                ({"tensor": 2}, {"compiled": True}),
                ({"data": 2, "tensor": 2}, {"strategy": "fully_shard", "sequence": True}),
                ({"data": 2, "tensor": 2}, {"strategy": "replicate"}),
            )
        ),
    ],
)
def test_layers_that_are_divided_have_the_scales_of_one_process(mesh, options):
    alone = _divided(weft.local())
    for found in run_ranks(_divided, math.prod(mesh.values()), mesh=mesh, **options):
        assert largest_difference(found, alone) < 1e-6


def test_what_fp8_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"(?s)found:    linear layers: 3 -> 5.*fix: .*\"bf16\""):
        weft.with_precision(nn.Linear(3, 5), weft.local(), "fp8")
    with pytest.raises(ValueError, match=r"(?s)found:    matmul=torch.float16.*fix: .*float8_e4m3fn"):
        weft.Precision(matmul=torch.float16)
