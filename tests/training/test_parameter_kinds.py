"""Unusual parameters under every strategy: complex ones, without elements or dimensions, one row for several ranks."""

import pytest
import torch
from torch import nn

import weft
from tests.variants import variant_cases
from weft.tensors.blocks import full_tensor
from weft.testing import largest_difference, run_ranks

STRATEGIES = ("replicate", "unused", "flat", "fuse_step", "fully_shard", "zero1", "zero2", "zero3")
CLIPS = ("off", "norm", "value")
NUMBER = (*CLIPS, "torch", "one by one")


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.complex128))
        self.bias = nn.Parameter(torch.randn(6, dtype=torch.complex128))
        self.head = nn.Parameter(torch.randn(2, 6, dtype=torch.complex128))

    def forward(self, x):
        return ((x.to(self.weight.dtype) @ self.weight.T + self.bias) @ self.head.T).abs()


class Empty(nn.Module):
    """Parameters without elements before, between and after others."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(0, 3))
        self.first = nn.Linear(4, 3)
        self.columns = nn.Parameter(torch.zeros(3, 0))
        self.second = nn.Linear(3, 3)
        self.nothing = nn.Parameter(torch.zeros(0))
        self.double()

    def forward(self, x):
        return self.second(self.first(x)) + self.rows.sum() + self.columns.sum() + self.nothing.sum()


class OneRow(nn.Module):
    """Linear regression: all rows lie on the first rank."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1).double()

    def forward(self, x):
        return self.linear(x)


class Temperature(nn.Module):
    """A number without dimensions, which is not cut, beside layers that are."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.linear = nn.Linear(4, 3)
        self.double()

    def forward(self, x):
        return self.linear(x) * self.scale.exp()


MODELS = {"complex": Complex, "empty": Empty, "one row": OneRow, "number": Temperature}


def _net(name):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return MODELS[name]()


def _x(ctx=None):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return x if ctx is None else x.chunk(ctx.world_size)[ctx.rank]


def _train(model, optimizer, x, clip):
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        norms.append(clip(model))
        optimizer.step()
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p.detach().clone() for p in model.parameters()]
    return [*(p for p in parameters if p.numel()), *(n for n in norms if n is not None)]


def _in_one_process(name, clip):
    model = _net(name)
    clips = {
        "off": lambda model: None,
        "norm": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1),
        "value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.05),
    }
    return _train(model, torch.optim.AdamW(model.parameters(), 0.05), _x(), clips[clip])


def _on_ranks(ctx, name, strategy, clip):
    model = _net(name)
    if strategy.startswith("zero"):
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        model, optimizer, after = weft.zero_partition(model, optimizer, ctx, stage=int(strategy[-1]))
    elif strategy == "fully_shard":
        model, after = weft.fully_shard(model, ctx)
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    else:
        unused = "zero" if strategy == "unused" else "error"
        model, after = weft.replicate(model, ctx, flat=strategy in ("flat", "fuse_step"), unused=unused)
        optimizer = torch.optim.AdamW(model.parameters(), 0.05)
        if strategy == "fuse_step":
            optimizer, after = weft.fuse_step(optimizer, after)
    clips = {
        "off": lambda model: None,
        "norm": lambda model: weft.clip_grads(model, after, max_norm=0.1),
        "value": lambda model: weft.clip_grads(model, after, max_value=0.05) and None,
        "torch": lambda model: full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)),
        "one by one": lambda model: full_tensor(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)),
    }
    return _train(model, optimizer, _x(ctx), clips[clip])


def _on_ranks_all(ctx, name, clips):
    return {(strategy, clip): _on_ranks(ctx, name, strategy, clip) for strategy in STRATEGIES for clip in clips}


@pytest.mark.parametrize(("name", "n"), [("one row", 2), *variant_cases(("complex", 2), ("empty", 2), ("one row", 4))])
def test_unusual_parameters_are_trained_as_in_one_process(name, n):
    clips = CLIPS[:2] if name == "complex" else CLIPS
    expected = {clip: _in_one_process(name, clip) for clip in clips}
    for found in run_ranks(_on_ranks_all, n, name, clips):
        for (strategy, clip), result in found.items():
            assert largest_difference(result, expected[clip]) < 1e-12, (strategy, clip)


def test_a_number_without_dimensions_is_trained_as_in_one_process():
    expected = {clip: _in_one_process("number", "norm" if clip in ("torch", "one by one") else clip) for clip in NUMBER}
    for found in run_ranks(_on_ranks_all, 2, "number", NUMBER):
        for (strategy, clip), result in found.items():
            assert largest_difference(result, expected[clip]) < 1e-12, (strategy, clip)


def _clipped(ctx):
    model, _ = weft.fully_shard(_net("number"), ctx)

    def step():
        model(_x()[:2]).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        model.zero_grad()

    return step


def test_a_number_without_dimensions_is_clipped_in_a_rehearsal():
    weft.testing.assert_rehearsed(_clipped, 2, only=[0])


def _limited(ctx):
    found = []
    for strategy in (weft.replicate, weft.fully_shard):
        model, after = strategy(_net("complex"), ctx)
        model(_x(ctx)).square().mean().backward()
        before = [p.grad.clone() for p in model.parameters()]
        with pytest.raises(ValueError, match=r"(?s)which have no order.*weight, bias, head.*fix: .*max_norm") as caught:
            weft.clip_grads(model, after, max_value=0.1)
        assert all(bool(full_tensor(p.grad == b).all()) for p, b in zip(model.parameters(), before, strict=True))
        found.append(str(caught.value))
    return found


def test_complex_gradients_cannot_be_limited_by_value():
    first, second = run_ranks(_limited, 2)
    assert first == second


class FiveNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.numbers = nn.Parameter(torch.arange(5.0).double() * (1 + 2j) + 1)

    def forward(self, x):
        return (x[:, :1] * self.numbers).abs()


def _on_five_numbers(ctx, optimizer, gathers):
    model, ctx = weft.fully_shard(FiveNumbers(), ctx)
    optimizer = optimizer(model.parameters(), 0.05)
    if gathers:
        optimizer, ctx = weft.gather_step(optimizer, ctx)
    try:
        return _train(model, optimizer, _x(ctx), lambda model: None)
    except weft.errors.OrderError as error:
        return str(error)


class OwnAdamW(torch.optim.AdamW):
    """Not known to step on single elements."""


@pytest.mark.parametrize(
    ("optimizer", "gathers"),
    [(torch.optim.AdamW, False), (OwnAdamW, False), (OwnAdamW, True), (torch.optim.SGD, False)],
)
def test_steps_on_complex_shards_that_differ_in_size_are_right_or_refused(optimizer, gathers):
    """torch gathers such shards when it looks at their real numbers, and what it writes there is lost."""
    model = FiveNumbers()
    expected = _train(model, optimizer(model.parameters(), 0.05), _x(), lambda model: None)
    for found in run_ranks(_on_five_numbers, 2, optimizer, gathers):
        if optimizer is OwnAdamW and not gathers:
            assert "OwnAdamW cannot step on complex shards" in found and "weft.gather_step(optimizer, ctx)" in found
        else:
            assert largest_difference(found, expected) < 1e-12
